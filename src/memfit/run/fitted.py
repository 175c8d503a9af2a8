"""A fitted module: capture at the first training call of each signature, then run the Program instead of forward."""

from __future__ import annotations

import functools
import logging
import threading
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memfit.capture.rewrites import rewrite
from memfit.capture.step import Step
from memfit.capture.structure import put_together, take_apart
from memfit.capture.trace import Capture, Incoming, Layout, capture_call, refuse_layout
from memfit.cost.costs import free_of_charge
from memfit.cost.profile import measure
from memfit.errors import MemfitError
from memfit.plan.away import most_bytes_away
from memfit.plan.decisions import Decision, Encode, EncodeThenOffload
from memfit.plan.encode import encode_step
from memfit.plan.ledger import Ledger
from memfit.plan.options import Options
from memfit.plan.planner import Planned, runnable_plan
from memfit.plan.policies.registry import policy_named
from memfit.run.compiled import Compiled
from memfit.run.densities import look_at
from memfit.run.feedback import Feedback, Measured
from memfit.run.observe import LiveBytes
from memfit.run.signature import device_types, signature
from memfit.run.sources import find_sources
from memfit.tiers.disk import DiskTier
from memfit.tiers.registry import TIERS
from memfit.torch_internals import autocast_state, calling_module, fake_mode, is_nested_capture

log = logging.getLogger("memfit")


class Fitted:
    """What `model.memfit` is: the model's forward while it is fitted, and the window on what was captured.

    Attributes:
        code: the generated Python of the newest captured call.
        step: the newest captured Step, rewrites applied.
        ledger: live bytes at every instruction of the newest Program.
        planned: the newest plan, with its timeline.
        observed: with debug, the bytes that were really alive at every instruction of the newest call.
        measured: predicted beside measured, after the first steps of a model fitted with a budget.
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
        self._warned = False
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
        key = signature(self.model, inputs, skeleton)
        for compiled in self._compiled.get(key, ()):
            if all(guard.holds(inputs) for guard in compiled.capture.guards):
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
            return self._compile(captured, step, recapture, devices, like, sources)

        stand_in_args, stand_in_kwargs = _stand_ins(args, kwargs)

        def recapture(incoming: Incoming) -> Compiled:
            return compile_for(compiled.capture.blueprint, stand_in_args, stand_in_kwargs, incoming, like=compiled)

        with self._lock:
            # The inputs as an argument: what `recapture` holds on to, it holds for good.
            compiled = compile_for(self.model, args, kwargs, inputs=inputs)
            self.num_captures += 1
            # Once more: the first forward pass may have decided a setting that was open.
            inputs, skeleton = take_apart((args, kwargs, ()))
            self._remember(signature(self.model, inputs, skeleton), compiled)
        log.info("captured %r; peak %s", compiled.program.step, compiled.ledger.describe_peak())
        return compiled

    def _compile(
        self,
        captured: Capture,
        step: Step,
        recapture: Any,
        devices: tuple[str, ...],
        like: Compiled | None,
        sources: list[Any] | None,
    ) -> Compiled:
        """Plan the step and make the plan's program runnable.

        The backward half of `like` for other tangents must find what the forward half of `like` left: it is decided
        about as there.
        """
        options, path = self.options, f"fitted {type(self.model).__name__}"
        # Where nothing asks for seconds or workspaces, nothing is measured.
        if options.asks_costs:
            log.info(
                "measuring the ops of %s, for at most %g s; what was measured before is on disk",
                path,
                options.measure_s,
            )
            costs = measure(step, cap_s=options.measure_s)
        else:
            costs = free_of_charge(step, tiers=TIERS)
        if policy_named(options.policy).asks_densities and sources is not None:
            looked = look_at(step, sources, opaque=captured.opaque, devices=devices)
            costs = replace(costs, densities=looked.densities, unforeseen=looked.unforeseen)
        decisions = None if like is None else _decisions_as_in(like, step)
        planned = runnable_plan(
            step,
            costs,
            policy=options.policy,
            budget=options.budget,
            decisions=decisions,
            allow_lossy=options.allow_lossy,
        )
        program, timeline = planned.program, planned.simulated
        for tier, away_bytes in most_bytes_away(program).items():
            TIERS[tier].reserve(away_bytes)  # before the plan is accepted: it raises if there is no room
            if options.debug and isinstance(disk := TIERS[tier], DiskTier):
                disk.configure(replace(disk.settings, checksums=True))
        compiled = Compiled(replace(captured, step=program.step), program, recapture, devices, path, tiers=TIERS)
        compiled.planned = planned
        if options.asks_costs:
            feedback = Feedback(timeline, costs, path)
            compiled.feedback, compiled.watch, compiled.observe = feedback, feedback.watch, feedback.observe
        if options.debug:
            compiled.observe = functools.partial(self._observe, compiled)
        return compiled

    def _observe(self, compiled: Compiled, sources: list[Any]) -> LiveBytes:
        self.observed = LiveBytes(compiled.ledger, sources)
        return self.observed

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


def _decisions_as_in(like: Compiled, step: Step) -> dict[int, Decision]:
    """The same decisions for a step whose forward half is the same: storages are known by their first value's name."""
    assert like.planned is not None and like.planned.plan is not None
    plan = like.planned.plan
    codes = encode_step(plan.step, plan.decisions).codes
    made = {
        s: replace(d, as_in=codes[s]) if isinstance(d, Encode | EncodeThenOffload) else d
        for s, d in plan.decisions.items()
    }
    by_name = {plan.step.values[plan.step.storage[s].values[0]].name: d for s, d in made.items()}
    names = {storage.id: step.values[storage.values[0]].name for storage in step.storages}
    return {storage: by_name[name] for storage, name in names.items() if name in by_name}


def _stand_ins(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The call's arguments with floating-point tensors replaced by fakes, so that keeping them keeps no bytes.

    Small integer tensors are copied: the model may branch on their values.
    """
    tensors, skeleton = take_apart((args, kwargs))
    kept: list[torch.Tensor] = []
    for tensor in tensors:
        with torch.no_grad():
            if tensor.is_floating_point() or tensor.is_complex() or tensor.numel() > 1 << 20:
                with fake_mode():
                    fresh = Layout.of(tensor).fake().detach()
            else:
                fresh = tensor.detach().clone()
        kept.append(fresh.requires_grad_(tensor.requires_grad))
    return put_together(skeleton, kept)
