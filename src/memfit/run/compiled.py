"""One captured call made runnable: forward code, the chain behind its outputs, backward code per kind of tangent."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from memfit.capture.rewrites.chunks import is_in_chunks, whole_target
from memfit.capture.step import Origin, Step
from memfit.capture.structure import put_together
from memfit.capture.trace import Capture, Incoming
from memfit.errors import UnsupportedUse
from memfit.plan.ledger import Ledger
from memfit.plan.planner import Planned
from memfit.plan.program import FetchStart, Program, Run
from memfit.run.codegen import Code, Observer, away_name, generate
from memfit.run.feedback import Feedback
from memfit.run.nodes import Call, Handover, Slice, StepWatch, attach
from memfit.run.shared_memory import SharedMemory
from memfit.run.sources import find_sources
from memfit.tiers.tier import Tier
from memfit.torch_internals import autocast_state, below_autograd, no_autocast


class Compiled:
    """A Program that runs in place of a module's forward."""

    def __init__(
        self,
        capture: Capture,
        program: Program,
        recapture: Any,
        devices: tuple[str, ...],
        path: str,
        *,
        tiers: Mapping[str, Tier] | None = None,
    ) -> None:
        self.capture = capture
        self.program = program
        self.devices = devices
        self.path = path
        self._recapture = recapture
        self._lock = threading.Lock()
        self.code: Code = generate(program, capture.opaque, tiers=tiers)
        self._tiers = tiers
        self.observe: Callable[[list[Any]], Observer | None] = lambda sources: None
        self.watch: Callable[[], StepWatch | None] = lambda: None
        self.planned: Planned | None = None
        self.feedback: Feedback | None = None
        self._variants: dict[Incoming, _Variant | None] = {self._default_incoming: None}
        self._bind()

    @property
    def _default_incoming(self) -> Incoming:
        return Incoming(self.capture.incoming.tangents, self.capture.incoming.autocast)

    def _bind(self) -> None:
        """Work out once, from the step, what each call needs."""
        step = self.program.step
        names = {value.id: value.name for value in step.values}
        index_of = {source.value: index for index, source in enumerate(step.sources)}
        carried = self.code.carried
        self._shared_sources = [
            (names[s.value], index_of[s.value])
            for s in step.sources
            if s.value in carried and s.origin not in (Origin.TANGENT, Origin.CONSTANT)
        ]
        self._constants = [(names[v], tensor) for v, tensor in self.capture.constants.items() if v in carried]
        self._carried_outputs = [(names[v], i) for i, v in enumerate(step.outputs) if v in carried]
        reachable = {step.values[v].storage for v in (*step.outputs, *index_of)}
        self._watched = [
            names[v]
            for v in carried
            if step.values[v].storage in reachable and step.maker_of.get(v, step.num_forward) < step.num_forward
        ]
        # Written by the caller, one output's history would be wrong for the others that look at its memory.
        looks_at = Counter(step.values[v].storage for v in step.outputs)
        self._shared_outputs = [i for i, v in enumerate(step.outputs) if looks_at[step.values[v].storage] > 1]
        self._bind_handovers(index_of)
        self._tangent_names = [None if v is None else names[v] for v in step.tangents]
        self._shared_memory = SharedMemory(self.program, self.path)

    def _bind_handovers(self, index_of: dict[int, int]) -> None:
        """Which link hands over what, and which chains of links stand behind which output."""
        step, reached_from = self.program.step, self.capture.reached_from
        groups: dict[frozenset[int], int] = {}
        self._handovers: list[Handover] = []
        for index, part in enumerate(self.code.slices):
            by_group: dict[int, list[tuple[int, int]]] = {}
            for slot, gradient in enumerate(part.gives):
                source = step.gradients[gradient].of
                group = groups.setdefault(reached_from[source], len(groups))
                by_group.setdefault(group, []).append((slot, index_of[source]))
            for group, pairs in by_group.items():
                slots, receivers = zip(*pairs, strict=True)
                self._handovers.append(Handover(index, slots, receivers, group))
        self._groups_of_output = [
            None if tangent is None else [group for outputs, group in groups.items() if position in outputs]
            for position, tangent in enumerate(step.tangents)
        ]

    @cached_property
    def observed_code(self) -> Code:
        """The same code, telling an observer of every instruction."""
        return generate(self.program, self.capture.opaque, tiers=self._tiers, observed=True)

    @cached_property
    def ledger(self) -> Ledger:
        return Ledger.of(self.program)

    def sources(self, inputs: list[torch.Tensor]) -> list[Any] | None:
        """The tensors behind the step's sources in order, or None if the model's own no longer hang where they did."""
        return find_sources(self.capture, self.program.step, inputs)

    def __call__(self, model: nn.Module, sources: list[Any]) -> Any:
        """Run the forward half; the result carries the chain that runs the backward half."""
        self._shared_memory.refuse(sources)
        values: dict[str, Any] = {}
        code, observer, watch = self.code, self.observe(sources), self.watch()
        if observer is not None:
            code, values["P"] = self.observed_code, observer
        if watch is not None:
            watch.begin()
        with below_autograd(), no_autocast(self.devices):
            outputs = [_plain(output) for output in code.forward(values, sources)]
        if watch is not None:
            watch.pause()
        if any(groups is not None for groups in self._groups_of_output):
            values.update(self._constants)
            # Aliases that share the version counter: the outputs themselves would hold what holds them.
            values.update((name, outputs[i].detach()) for name, i in self._carried_outputs)
            watched = [(name, values[name]) for name in self._watched]
            watched += [(f"output {i}", outputs[i].detach()) for i in self._shared_outputs]
            watched += self._constants  # the other sources are kept by autograd, which watches them itself
            call = Call(values, self._tangent_names, watched, self._begin, self.devices, self.path, watch)
            shared = [(name, sources[i]) for name, i in self._shared_sources]
            attach(call, outputs, self._groups_of_output, self._handovers, sources, shared)
        return self._result(model, outputs, sources)

    def _result(self, model: nn.Module, outputs: list[torch.Tensor], sources: list[Any]) -> Any:
        """Outputs in the model's own structure; attributes the forward pass sets are set."""
        made = iter(outputs)
        index_of = {source.value: index for index, source in enumerate(self.program.step.sources)}
        tensors = [next(made) if t is None else sources[index_of[t]] for t in self.capture.passed_through]
        for assigned in self.capture.assigned:
            owner = model.get_submodule(assigned.path)
            table = owner.__dict__[assigned.table] if assigned.table else owner.__dict__
            table[assigned.key] = put_together(assigned.skeleton, tensors)
        result, _ = put_together(self.capture.output, tensors)
        return result

    def _begin(self, call: Call, tangents: tuple[torch.Tensor | None, ...]) -> Sequence[Slice]:
        """The backward slices for these tangents; captured anew the first time tangents come that way."""
        strides = tuple(
            None if name is None or t is None else tuple(t.stride())
            for name, t in zip(self._tangent_names, tangents, strict=True)
        )
        state = tuple(entry for entry in autocast_state(self.devices) if entry[1])
        incoming = Incoming(strides, state)
        with self._lock:
            if incoming not in self._variants:
                self._variants[incoming] = self._variant(incoming)
            variant = self._variants[incoming]
        if call.told_otherwise:
            (self if variant is None else variant.compiled).require_no_settings(call.told_otherwise)
        if variant is None:
            return self.observed_code.backward if "P" in call.values else self.code.backward
        return variant.slices(call)

    def require_no_settings(self, told_otherwise: str) -> None:
        """Raise if the backward half has its bits only with the settings of the forward half.

        Eager would go on: what it kept is of other settings too. What is made again would be of these.
        """
        step = self.program.step
        runs = [run for run in self.program.instructions[self.program.boundary :] if isinstance(run, Run)]
        tied = next((run for run in runs if run.again or is_in_chunks(step.ops[run.op])), None)
        if tied is not None:
            op = step.ops[tied.op]
            how = "is made again" if tied.again else "is made in chunks"
            raise UnsupportedUse(
                f"backward through {self.path} with other settings of torch than its forward pass: {told_otherwise}. "
                f"By this plan {op.target} of module '{op.path or '(root)'}' {how} in backward, and its bits may be "
                "others that way. Set it as it was and run the step again, or fit with policy='keep'"
            )

    def _variant(self, incoming: Incoming) -> _Variant:
        variant: Compiled = self._recapture(incoming)
        ours, theirs = self.program.step, variant.program.step
        if _forward_targets(ours) != _forward_targets(theirs):
            raise UnsupportedUse(
                f"{self.path} took another path when captured again for tangents {incoming.tangents}; "
                "its forward pass is not deterministic"
            )
        have = {ours.values[v].name for v in self.code.carried} | {ours.values[s.value].name for s in ours.sources}
        missing = [
            theirs.values[v].name
            for v in variant.code.carried
            if theirs.values[v].name not in have
            and (v not in theirs.maker_of or theirs.maker_of[v] < theirs.num_forward)
            and not any(s.value == v for s in theirs.sources)
        ]
        if missing:
            raise UnsupportedUse(
                f"{self.path}: the backward pass for these tangents needs {missing}, which the forward pass freed. "
                "Call memfit.unfit(model) and report this model"
            )
        return _Variant(variant, self)

    @property
    def receiver_names(self) -> list[list[tuple[str, int]]]:
        """For each slice the sources whose gradients it hands over, by name and number of the part."""
        step = self.program.step
        count: Counter[str] = Counter()
        names: list[list[tuple[str, int]]] = []
        for part in self.code.slices:
            names.append([])
            for gradient in part.gives:
                name = step.source_of[step.gradients[gradient].of].name
                names[-1].append((name, count[name]))
                count[name] += 1
        return names

    def arrange(self, base: Compiled) -> list[tuple[list[int], list[tuple[str, int]]]]:
        """For each slice of `base`: which of our slices to run then, and whose gradients to hand over."""
        maker = {name: index for index, names in enumerate(self.receiver_names) for name in names}
        arranged = []
        done = 0
        for wanted in base.receiver_names:
            upto = max([done, *(maker[source] + 1 for source in wanted if source in maker)])
            arranged.append((list(range(done, upto)), wanted))
            done = upto
        return arranged


def _plain(output: torch.Tensor) -> torch.Tensor:
    """The output as a tensor of its own: one that autograd takes for a view could not be written to by the caller."""
    return output.detach() if output._is_view() else output


def _forward_targets(step: Step) -> list[str]:
    """The ops of the forward half but for codecs: of what another backward half does not read, no code is made.

    In how many pieces an op is computed makes no difference to what it makes.
    """
    ops = step.ops[: step.num_forward]
    return [whole_target(op.target) for op in ops if not op.target.startswith("memfit.")]


class _Variant:
    """Backward code for tangents that do not come as the base expected, driven by the base's chain of nodes."""

    def __init__(self, compiled: Compiled, base: Compiled) -> None:
        step = compiled.program.step
        self.compiled = compiled
        self.arranged = compiled.arrange(base)
        self.names = {step.values[value].name for value in compiled.code.carried}
        fetched = [i.storage for i in compiled.program.instructions if isinstance(i, FetchStart)]
        self.names |= {away_name(step, storage) for storage in fetched}
        self.gives = compiled.receiver_names

    def slices(self, call: Call) -> list[Slice]:
        """Slices for one call; gradients that these tangents do not reach are None, as in eager."""
        for name in call.values.keys() - self.names:
            del call.values[name]
        held: dict[tuple[str, int], Any] = {}

        def stretch(indices: list[int], wanted: list[tuple[str, int]]) -> Slice:
            def run(values: dict[str, Any]) -> tuple[Any, ...]:
                for index in indices:
                    held.update(zip(self.gives[index], self.compiled.code.backward[index](values), strict=True))
                return tuple(held.pop(source, None) for source in wanted)

            return run

        return [stretch(indices, wanted) for indices, wanted in self.arranged]
