"""Look at the data: what share of each tensor's elements is not zero when the forward half is done with it.

And look at the layouts. A few kernels lay their results out otherwise than fake tensors say (torch.roll of images in
channels_last); a code gives a tensor back in the layout of the capture, and a sum over it would not round as eager's.

The forward half is run once on the real inputs, everything dropped at its last use, and leaves no trace: what it writes
of the model's and the caller's is put back, and so is the state of the random generators (what another thread draws
meanwhile is drawn again).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfit.capture.step import Step, Value
from memfit.codecs.sparse import whole
from memfit.cost.densities import assumed_densities
from memfit.plan.program import Boundary, Free, Instruction, Program, Run
from memfit.plan.readings import candidate_of
from memfit.run.codegen import generate
from memfit.torch_internals import below_autograd, no_autocast, set_version

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Looked:
    """What was seen of the storages that a codec could store.

    Attributes:
        densities: of those of floating point, the share of non-zeros.
        unforeseen: those whose layout is not that of the capture.
    """

    densities: Mapping[int, float]
    unforeseen: frozenset[int] = frozenset()


def look_at(step: Step, sources: list[Any], *, opaque: tuple[Any, ...] = (), devices: tuple[str, ...] = ()) -> Looked:
    """Run the forward half once and look at what it makes."""
    wanted = {s.id for s in step.storages if not isinstance(candidate_of(step, s.id), str)}
    if not wanted:
        return Looked({})
    if any(not op.target.startswith(("aten.", "prims.")) for op in step.ops[: step.num_forward]):
        return Looked(
            assumed_densities(step)
        )  # an op that is not torch's may do more than it says, and must not do it twice
    program = _forward_only(step)
    counter = _Counter(program, wanted)
    code = generate(program, opaque, observed=True)
    with _undone(step, sources, opaque, devices), below_autograd(), no_autocast(devices):
        code.forward({"P": counter}, sources)
    return Looked(counter.densities, frozenset(counter.unforeseen))


def _forward_only(step: Step) -> Program:
    """The forward half, everything it makes freed after its last use there."""
    instructions: list[Instruction] = []
    for index in range(step.num_forward):
        instructions.append(Run(index))
        instructions += [
            Free(storage.id)
            for storage in step.storages
            if storage.last_forward == index and storage.maker is not None and storage.id not in step.kept
        ]
    return Program(step, (*instructions, Boundary()))


class _Counter:
    """Holds each tensor from its making to its last use in the forward half, and counts it then."""

    def __init__(self, program: Program, wanted: Collection[int]) -> None:
        self._instructions = program.instructions
        self._wanted = wanted
        self._last_use = {s.id: s.last_forward for s in program.step.storages if s.id in wanted}
        self._held: dict[int, torch.Tensor] = {}
        self._planned = {s: program.step.values[program.step.storage[s].values[0]] for s in wanted}
        self.densities: dict[int, float] = {}
        self.unforeseen: set[int] = set()

    def __call__(self, number: int, made: Mapping[int, torch.Tensor] | None = None) -> None:
        for storage, tensor in (made or {}).items():
            if storage in self._wanted:
                if not _is_laid_out(tensor, self._planned[storage]):
                    self.unforeseen.add(storage)
                if tensor.dtype in _FLOATS:
                    self._held[storage] = tensor
        instruction = self._instructions[number]
        if isinstance(instruction, Run):
            for storage in [s for s in self._held if self._last_use[s] == instruction.op]:
                self.densities[storage] = _density(self._held.pop(storage))


def _is_laid_out(tensor: torch.Tensor, planned: Value) -> bool:
    """True if the tensor has the planned dtype and strides, where a dimension has more than one element."""
    if tensor.dtype is not planned.dtype:
        return False
    if tuple(tensor.shape) != planned.shape or 0 in planned.shape:
        return tuple(tensor.shape) == planned.shape
    real = zip(tensor.shape, tensor.stride(), planned.stride, strict=True)
    return all(size == 1 or ours == theirs for size, ours, theirs in real)


def _density(tensor: torch.Tensor) -> float:
    """Of all of the tensor's storage: what was made first may be a view of it."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    patterns = whole(tensor.as_strided((count,), (1,), 0))
    return int(torch.count_nonzero(patterns)) / max(count, 1)


@contextlib.contextmanager
def _undone(step: Step, sources: list[Any], opaque: Sequence[Any], devices: tuple[str, ...]) -> Iterator[None]:
    """Put back what the forward half writes of others' tensors, and the random generators."""
    generators = [torch.default_generator, *(thing for thing in opaque if isinstance(thing, torch.Generator))]
    for device in (d for d in devices if d != "cpu"):
        module = torch.get_device_module(device)
        generators += [module.default_generators[n] for n in range(module.device_count())]
    states = [(generator, generator.get_state()) for generator in generators]
    written = {storage for op in step.ops[: step.num_forward] for storage in op.writes}
    kept = [
        (tensor, tensor.detach().clone())
        for source, tensor in zip(step.sources, sources, strict=True)
        if tensor is not None and step.values[source.value].storage in written
    ]
    versions = [(tensor, tensor._version) for tensor, _ in kept]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
        with torch.no_grad():
            for tensor, before in kept:
                tensor.detach().copy_(before)
        for tensor, version in versions:
            set_version(tensor, version)
