"""Refuse sources that share memory where the step writes to one of them and makes something again from one of them.

A step knows its sources apart by storage. Two tensors that the caller cut out of the same memory look like two: a
write to the one changes the other unseen. As long as every op runs once, in eager's order, that is as in eager. What
runs once more would find what was written since; and what is done at once has no order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from memfit.capture.rerun_form import rerun_form
from memfit.capture.step import Origin, Source
from memfit.errors import UnsupportedUse
from memfit.plan.program import Program, Run
from memfit.stand_ins import STAND_INS

_ADDITION = STAND_INS["aten.add_.Tensor"]


class _Range(NamedTuple):
    """The addresses of a tensor's elements, and which source it is."""

    first: int
    end: int
    place: int


class SharedMemory:
    """Looks at the sources of every call of one program. What hangs in the model seldom moves: that is remembered."""

    def __init__(self, program: Program, path: str) -> None:
        self._step = step = program.step
        self._path = path
        written = {storage for op in step.ops for storage in op.writes}
        touched = written | {step.values[value].storage for op in step.ops for value in op.reads()}
        again = {i.op for i in program.instructions if isinstance(i, Run) and i.again}
        forms = [rerun_form(step.ops[op]) for op in again]
        forms += [op for op in step.ops if op.stand_in == _ADDITION]
        late = {step.values[value].storage for op in forms for value in op.reads()}
        storages = [step.values[source.value].storage for source in step.sources]
        places = [
            place
            for place, source in enumerate(step.sources)
            if source.origin not in (Origin.TANGENT, Origin.CONSTANT) and storages[place] in touched
        ]
        self._is_written = [storage in written for storage in storages]
        self._is_late = [storage in late for storage in storages]
        is_input = [source.origin is Origin.INPUT for source in step.sources]
        self._inputs = [place for place in places if is_input[place]]
        self._state = [place for place in places if not is_input[place]]
        self._asks = any(self._is_written[place] for place in places) and any(self._is_late[p] for p in places)
        self._addresses: list[int] = []
        self._ranges: list[_Range] = []

    def refuse(self, sources: Sequence[Any]) -> None:
        """Raise UnsupportedUse if one that the step writes to shares memory with another, and that may matter."""
        if not self._asks:
            return
        addresses = [sources[place].data_ptr() for place in self._state]
        if addresses != self._addresses:
            ranges = sorted(_ranges(sources, self._state))
            self._refuse_overlaps(ranges)
            self._addresses, self._ranges = addresses, ranges
        inputs = sorted(_ranges(sources, self._inputs))
        if any(self._is_written[each.place] for each in inputs):
            self._refuse_overlaps(sorted((*self._ranges, *inputs)))
            return
        for each in inputs:
            # Few begin before the end of an input and reach into it: mostly none.
            before = bisect_left(self._ranges, each.end, key=lambda other: other.first)
            self._refuse_overlaps((*(other for other in self._ranges[:before] if other.end > each.first), each))

    def _refuse_overlaps(self, ranges: Sequence[_Range]) -> None:
        """Of ranges in order, each with those that reach into it."""
        open_ranges: list[_Range] = []
        for each in ranges:
            open_ranges = [other for other in open_ranges if other.end > each.first]
            for other in open_ranges:
                is_written = self._is_written[each.place] or self._is_written[other.place]
                if is_written and (self._is_late[each.place] or self._is_late[other.place]):
                    self._raise(other, each)
            open_ranges.append(each)

    def _raise(self, one: _Range, other: _Range) -> None:
        written, shared = (one, other) if self._is_written[one.place] else (other, one)
        step = self._step
        storage = step.values[step.sources[written.place].value].storage
        writer = next(op for op in step.ops if storage in op.writes)
        names = [_in_words(step.sources[each.place]) for each in (written, shared)]
        raise UnsupportedUse(
            f"{self._path}: {names[0]} and {names[1]} share memory, and {writer.target} in module "
            f"'{writer.path or '(root)'}' writes to {names[0]}: what the step makes again from {names[1]} could be "
            f"wrong. Give one of them memory of its own (tensor.clone())"
        )


def _ranges(sources: Sequence[torch.Tensor], places: Iterable[int]) -> list[_Range]:
    found = []
    for place in places:
        tensor = sources[place]
        first = tensor.data_ptr()
        if first and tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            found.append(_Range(first, first + (last + 1) * tensor.itemsize, place))
    return found


def _in_words(source: Source) -> str:
    if source.origin is Origin.INPUT:
        return source.name.replace("_", " ")
    return f"{source.origin.value} '{source.name}'"
