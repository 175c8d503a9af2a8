"""A fitted module: capture at the first training call of each signature, then run the Program instead of forward."""

from __future__ import annotations

import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memfit.capture.rewrites import rewrite
from memfit.capture.rewrites.tight import tight_above_bytes, tighten
from memfit.capture.step import Step
from memfit.capture.structure import take_apart
from memfit.capture.trace import Capture, Incoming, capture_call, refuse_layout
from memfit.cost.costs import Costs, free_of_charge
from memfit.cost.profile import measure
from memfit.errors import DoesNotFit, MemfitError
from memfit.plan.away import most_bytes_away
from memfit.plan.budget import Budget
from memfit.plan.ledger import Ledger
from memfit.plan.options import Options
from memfit.plan.plan_cache import cached_plan
from memfit.plan.planner import Planned, runnable_plan
from memfit.plan.policies.registry import policy_named
from memfit.plan.program import Program
from memfit.run.codegen import Observer
from memfit.run.compiled import Compiled
from memfit.run.densities import look_at
from memfit.run.feedback import Excess, Feedback, Measured
from memfit.run.module_state import ModuleState
from memfit.run.observe import LiveBytes
from memfit.run.recapture import decisions_as_in, stand_ins, ways_as_in
from memfit.run.revision import Revision, raise_excess, revise
from memfit.run.signature import device_types, signature
from memfit.run.sources import find_sources
from memfit.tiers.disk import DiskTier
from memfit.tiers.registry import TIERS
from memfit.torch_internals import autocast_state, calling_module, is_nested_capture

log = logging.getLogger("memfit")

Recapture = Callable[[Incoming], Compiled]
RecaptureFor = Callable[[list[Compiled]], Recapture]


class Fitted:
    """What `model.memfit` is: the model's forward while it is fitted, and the window on what was captured.

    Attributes:
        code: the generated Python of the newest captured call.
        step: the newest captured Step, rewrites applied.
        ledger: live bytes at every instruction of the newest Program.
        planned: the newest plan, with its timeline.
        observed: with debug, the bytes that were really alive at every instruction of the newest call.
        measured: predicted beside measured, after the first steps of a model fitted with a budget.
        num_captures, num_revisions: how many calls were captured, and how often one was planned again because its step
            needed more than the budget.
    """

    def __init__(self, model: nn.Module, options: Options) -> None:
        self.model = model
        self.options = options
        self.own_forward = model.__dict__.get("forward")
        self.num_captures = 0
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._compiled: OrderedDict[Any, list[Compiled]] = OrderedDict()
        self._newest: Compiled | None = None
        self._state = ModuleState(self.model)
        self._warned = False
        self.num_revisions = 0
        self.observed: LiveBytes | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "options": self.options,
            "own_forward": self.own_forward,
            "num_captures": 0,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    @property
    def __wrapped__(self) -> Any:
        """The model's own forward, so that inspect.signature sees its arguments."""
        if self.own_forward is not None:
            return self.own_forward
        return type(self.model).forward.__get__(self.model)

    @property
    def code(self) -> str:
        return self.newest.code.text

    @property
    def step(self) -> Step:
        return self.newest.program.step

    @property
    def ledger(self) -> Ledger:
        return self.newest.ledger

    @property
    def planned(self) -> Planned:
        """The newest plan, with what it was predicted to cost."""
        assert self.newest.planned is not None
        return self.newest.planned

    @property
    def measured(self) -> Measured | None:
        """Predicted and measured growth and time of the newest capture's first steps; None before its third step.

        Only models fitted with a budget have predictions to compare with.
        """
        feedback = self.newest.feedback
        return None if feedback is None else feedback.measured

    @property
    def is_settled(self) -> bool:
        """True if the newest call's first steps are over: it is watched no more, and its plan is the one that stays."""
        feedback = self.newest.feedback
        return feedback is None or feedback.is_settled

    @property
    def newest(self) -> Compiled:
        """The call captured or run last."""
        if self._newest is None:
            raise MemfitError(
                "nothing is captured yet: memfit captures at the first training call "
                "(model.train(), gradients enabled). Run one step first"
            )
        return self._newest

    def __repr__(self) -> str:
        return f"Fitted({type(self.model).__name__}, {self.options}, {self.num_captures} captured)"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        caller = calling_module()
        if caller is not None and caller is not self.model:
            # A shallow copy of the model has our forward too, but other tensors: it runs its own.
            return type(caller).forward(caller, *args, **kwargs)
        if not self.model.training or not torch.is_grad_enabled() or is_nested_capture():
            return self.__wrapped__(*args, **kwargs)
        inputs, skeleton = take_apart((args, kwargs, ()))
        for index, tensor in enumerate(inputs):
            refuse_layout(tensor, f"input {index}")
        key = signature(self._state, inputs, skeleton)
        for compiled in self._compiled.get(key, ()):
            if all(guard.holds(inputs) for guard in compiled.capture.guards):
                if compiled.feedback is not None and compiled.feedback.excess is not None:
                    compiled = self._revised(key, compiled)
                sources = compiled.sources(inputs)
                if sources is not None:
                    self._newest = compiled
                    self._compiled.move_to_end(key)
                    return compiled(self.model, sources)
        compiled = self._capture(inputs, args, kwargs)
        sources = compiled.sources(inputs)
        assert sources is not None
        return compiled(self.model, sources)

    def _capture(self, inputs: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compiled:
        devices = device_types([*inputs, *self.model.parameters()])
        state = autocast_state(devices)

        def compile_for(
            model: nn.Module,
            call_args: Any,
            call_kwargs: Any,
            incoming: Incoming | None = None,
            *,
            inputs: list[torch.Tensor] | None = None,
            like: Compiled | None = None,
        ) -> Compiled:
            name = type(self.model).__name__
            captured = capture_call(model, call_args, call_kwargs, autocast=state, incoming=incoming, name=name)
            step = rewrite(captured.step, without=self.options.without)
            sources = None if inputs is None else find_sources(captured, step, inputs)
            return self._compile(captured, step, recapture_for, devices, like, sources)

        stand_in_args, stand_in_kwargs = stand_ins(args, kwargs)

        def recapture_for(base: list[Compiled]) -> Recapture:
            """Captures other backward halves for the call that `base` will hold once it is made."""

            def recapture(incoming: Incoming) -> Compiled:
                blueprint = base[0].capture.blueprint
                return compile_for(blueprint, stand_in_args, stand_in_kwargs, incoming, like=base[0])

            return recapture

        with self._lock:
            # The inputs as an argument: what `recapture` holds on to, it holds for good.
            compiled = compile_for(self.model, args, kwargs, inputs=inputs)
            self.num_captures += 1
            # Once more: the first forward pass may have decided a setting that was open.
            inputs, skeleton = take_apart((args, kwargs, ()))
            self._remember(signature(self._state, inputs, skeleton), compiled)
        log.info("captured %r; peak %s", compiled.program.step, compiled.ledger.describe_peak())
        return compiled

    def _compile(
        self,
        captured: Capture,
        step: Step,
        recapture_for: RecaptureFor,
        devices: tuple[str, ...],
        like: Compiled | None,
        sources: list[Any] | None,
    ) -> Compiled:
        """Plan the step and make the plan's program runnable.

        The backward half of `like` for other tangents must find what the forward half of `like` left: it is decided
        about as there.
        """
        options, chosen = self.options, policy_named(self.options.policy)
        above_bytes = None if like is None else tight_above_bytes(like.program.step)
        if above_bytes is not None:
            step = tighten(step, above_bytes=above_bytes)
        # Where nothing asks for seconds or workspaces, nothing is measured.
        if options.asks_costs:
            log.info(
                "measuring the ops of %s, for at most %g s; what was measured before is on disk",
                self._path,
                options.measure_s,
            )
            costs = measure(step, cap_s=options.measure_s, ways=chosen.asks_ways)
        else:
            costs = free_of_charge(step, tiers=TIERS)
        if chosen.asks_densities and sources is not None:
            looked = look_at(step, sources, opaque=captured.opaque, devices=devices)
            costs = replace(costs, densities=looked.densities, unforeseen=looked.unforeseen)
        if like is None:
            planned, costs = self._plan_or_tighten(step, costs, options.budget)
        else:
            assert like.planned is not None
            planned = runnable_plan(
                step,
                costs.picking(ways_as_in(like, step, costs)),
                policy=options.policy,
                # In bytes: a share would be of what this half needs.
                budget=None if options.budget is None else Budget(num_bytes=like.planned.budget_bytes),
                decisions=decisions_as_in(like, step),
                allow_lossy=options.allow_lossy,
            )
        return self._make(captured, recapture_for, devices, Revision(planned, costs))

    def _plan_or_tighten(self, step: Step, costs: Costs, budget: Budget | None) -> tuple[Planned, Costs]:
        """A plan that fits, and its costs; where there is none, ops that hold less are measured and planned with too.

        They are seldom needed, and measuring them takes time.
        """
        try:
            return self._plan(step, costs, budget), costs
        except DoesNotFit:
            tight = tighten(step) if policy_named(self.options.policy).asks_ways else step
            if tight is step or costs.covers(tight):
                raise
        log.info("nothing fits yet: measuring ops of %s that hold less", self._path)
        costs = costs.extended_by(measure(step, cap_s=self.options.measure_s, ways=True, also=[tight]))
        return self._plan(step, costs, budget), costs

    def _plan(self, step: Step, costs: Costs, budget: Budget | None) -> Planned:
        """A plan that fits the budget, from disk if one is there."""
        options = self.options
        planned = cached_plan(
            step,
            costs,
            policy=options.policy,
            budget=budget,
            allow_lossy=options.allow_lossy,
            progress=functools.partial(log.info, "planning %s: %s", self._path),
        )
        if budget is not None:
            planned.require_fit()
        return planned

    def _make(
        self, captured: Capture, recapture_for: RecaptureFor, devices: tuple[str, ...], revision: Revision
    ) -> Compiled:
        """Make the plan's program runnable, and have its first steps watched."""
        options, planned = self.options, revision.planned
        program = planned.program
        self._reserve(program)
        made: list[Compiled] = []
        compiled = Compiled(
            replace(captured, step=program.step), program, recapture_for(made), devices, self._path, tiers=TIERS
        )
        made.append(compiled)
        compiled.planned = planned
        if options.asks_costs:
            feedback = Feedback(
                planned.simulated,
                planned.costs,
                self._path,
                budget_bytes=None if options.budget is None else planned.budget_bytes,
                reads_growth=devices == ("cpu",),
                strict=options.strict,
            )
            feedback.plan_again = functools.partial(self._plan_again, captured, recapture_for, devices, revision)
            compiled.feedback, compiled.watch = feedback, feedback.watch
        compiled.observe = functools.partial(self._observe, compiled)
        return compiled

    def _reserve(self, program: Program) -> None:
        """Make room on the tiers before a plan is accepted; raises if there is none."""
        for tier, away_bytes in most_bytes_away(program).items():
            TIERS[tier].reserve(away_bytes)
            if self.options.debug and isinstance(disk := TIERS[tier], DiskTier):
                disk.configure(replace(disk.settings, checksums=True))

    def _revised(self, key: Any, compiled: Compiled) -> Compiled:
        """The call planned again after a step that needed more than the budget; the same one if that is no use.

        Backward passes that are still to come hold on to the call they belong to.
        """
        with self._lock:
            kept, feedback = self._compiled.get(key, []), compiled.feedback
            assert feedback is not None and feedback.plan_again is not None
            excess = feedback.excess
            if excess is None:  # another thread was here first
                same = (c for c in kept if c.capture.blueprint is compiled.capture.blueprint)
                return next(same, compiled)
            if self.options.strict:
                raise_excess(excess, self._path)
            feedback.accept()
            revised = feedback.plan_again(excess)
            if revised is None:
                return compiled
            self.num_revisions += 1
            self._compiled[key] = [revised if other is compiled else other for other in kept]
            return revised

    def _plan_again(
        self,
        captured: Capture,
        recapture_for: RecaptureFor,
        devices: tuple[str, ...],
        revision: Revision,
        excess: Excess,
    ) -> Compiled | None:
        """Plan within the budget once more, knowing what the excess tells; None if that gives no other plan."""
        before = revision.planned

        def plan_within(costs: Costs, num_bytes: int) -> tuple[Planned, Costs]:
            # In bytes, also where the budget is a share: of what the keep plan needed by the first costs.
            budget = Budget(num_bytes=num_bytes)
            planned, costs = self._plan_or_tighten(before.keep.program.step, costs, budget)
            self._reserve(planned.program)
            return replace(planned, budget=before.budget, budget_bytes=before.budget_bytes), costs

        revised = revise(revision, excess, self._path, plan_within=plan_within)
        return None if revised is None else self._make(captured, recapture_for, devices, revised)

    @property
    def _path(self) -> str:
        return f"fitted {type(self.model).__name__}"

    def _observe(self, compiled: Compiled, sources: list[Any]) -> Observer | None:
        """Who is to be told of every instruction of this call, if anybody is."""
        told: list[Observer] = []
        if self.options.debug:
            self.observed = LiveBytes(compiled.ledger, sources)
            told.append(self.observed)
        feedback = compiled.feedback
        if feedback is not None and feedback.wants_observation:
            _ = compiled.observed_code  # made now: what it takes would be blamed on the first op
            transients = feedback.observe(sources)
            told += [] if transients is None else [transients]
        return None if not told else told[0] if len(told) == 1 else functools.partial(_tell_all, told)

    def _remember(self, key: Any, compiled: Compiled) -> None:
        kept = self._compiled.pop(key, [])
        self._compiled[key] = [compiled, *kept][: self.options.max_captures]
        if len(self._compiled) > self.options.max_captures:
            self._compiled.popitem(last=False)
            if not self._warned:
                self._warned = True
                log.warning(
                    "%s was called with more than %d kinds of arguments (shapes, dtypes, non-tensor values); each is "
                    "captured anew. Pad to fewer shapes, pass changing numbers as tensors, or raise max_captures",
                    type(self.model).__name__,
                    self.options.max_captures,
                )
        self._newest = compiled


def _tell_all(told: list[Observer], number: int, made: Mapping[int, torch.Tensor] | None = None) -> None:
    for observer in told:
        observer(number, made)
