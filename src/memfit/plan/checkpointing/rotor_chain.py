"""A chain of stages as numbers, operations on it, and their replay: what rotor.py solves.

An activation is here by itself or as a part of all that its stage saved for backward. `simulate` keeps that account
alone, and knows nothing of how a schedule was found.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from memfit.errors import BadOption, MemfitError

NEVER_PS = 1 << 60
"""More than any schedule takes; three of them still fit in 64 bits."""
_MOST_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class Stage:
    """One link of a chain.

    Attributes:
        forward_ps, backward_ps: how long one run takes, whatever it keeps.
        output_bytes: the activation that the next stage reads.
        saved_bytes: all that its backward needs but its input; the output is a part of it, less what is carried.
        forward_transient_bytes: what a forward needs beside its input and what it leaves.
        backward_transient_bytes: what backward needs beside its input and what is saved: both gradients and workspace.
        gradient_bytes: the gradient of the output, which waits while earlier stages are recomputed. None: as the
            output. That of the last stage never waits: it is born in its backward, and counted there.
        carried_bytes: the part of the output that is passed on from the input. A stage that kept all has its input too,
            and counts it once. Elsewhere the chain counts it in both, which is too much if both are there.
    """

    forward_ps: int
    backward_ps: int
    output_bytes: int
    saved_bytes: int
    forward_transient_bytes: int = 0
    backward_transient_bytes: int = 0
    gradient_bytes: int | None = None
    carried_bytes: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not 0 <= value < _MOST_BYTES:
                raise BadOption(f"a stage with {field.name}={value} makes no sense")
        if self.saved_bytes < self.output_bytes - self.carried_bytes:
            raise BadOption(f"saved_bytes={self.saved_bytes} counts the output, which has {self.output_bytes} bytes")


@dataclass(frozen=True, slots=True)
class Chain:
    """Stages in forward order; input_bytes is what the first one reads, here from start to end."""

    stages: tuple[Stage, ...]
    input_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.stages:
            raise BadOption("a chain has at least one stage")
        if not 0 <= self.input_bytes < _MOST_BYTES:
            raise BadOption(f"a chain with input_bytes={self.input_bytes} makes no sense")
        # Room for what waits and what passes beside everything that is saved.
        sizes = [max(s.saved_bytes, s.forward_transient_bytes, s.backward_transient_bytes) for s in self.stages]
        if self.input_bytes + sum(sizes) >= _MOST_BYTES:
            raise BadOption(f"{len(self.stages)} stages of {sum(sizes)} bytes in all are more than can be added up")
        # A stage is never run forward more often than there are stages.
        if self.work_ps * len(self.stages) >= NEVER_PS:
            raise BadOption(f"{len(self.stages)} stages of {self.work_ps} ps in all are more than can be added up")

    @property
    def work_ps(self) -> int:
        """Every forward and backward once: no schedule is faster."""
        return sum(stage.forward_ps + stage.backward_ps for stage in self.stages)

    def waiting_gradient_bytes(self, last: int) -> int:
        """The gradient that waits while stages up to `last` run forward, all after it being done."""
        if last == len(self.stages) - 1:
            return 0
        stage = self.stages[last]
        return stage.output_bytes if stage.gradient_bytes is None else stage.gradient_bytes


class Kind(enum.Enum):
    """What an operation leaves behind."""

    FORWARD_EMPTY = "F_empty"
    """Its output; its input goes."""
    FORWARD_CHECKPOINT = "F_ck"
    """Its output; its input stays until its backward."""
    FORWARD_ALL = "F_all"
    """All that is saved for backward; its input stays too."""
    BACKWARD = "B"
    """The gradient of its input; what was saved goes, and so does the input unless an earlier stage saved it."""


class Operation(NamedTuple):
    """A run of one stage."""

    kind: Kind
    stage: int


class IllegalSchedule(MemfitError, ValueError):
    """An operation reads what is not there, or the step is not finished; says which."""


def simulate(chain: Chain, operations: Iterable[Operation]) -> tuple[int, int]:
    """Peak bytes and time of the operations; raises IllegalSchedule where they do not make a step."""
    stages = chain.stages
    alone = {0}  # activations that are here by themselves; activation i is what stage i reads
    saved: set[int] = set()  # stages of which all is here; each holds activation i + 1 too
    held_bytes = peak_bytes = chain.input_bytes
    time_ps = 0
    next_backward = len(stages) - 1
    for position, (kind, index) in enumerate(operations):
        where = f"operation {position}, {kind.value} of stage {index}"
        if not 0 <= index <= next_backward:
            raise IllegalSchedule(f"{where}: the stages still to do are 0 to {next_backward}")
        if index not in alone and index - 1 not in saved:
            raise IllegalSchedule(f"{where}: its input is not here")
        stage = stages[index]
        if kind is Kind.BACKWARD:
            if index != next_backward:
                raise IllegalSchedule(f"{where}: its gradient is not here, the next is that of stage {next_backward}")
            if index not in saved:
                raise IllegalSchedule(f"{where}: what it saved is not here")
            time_ps += stage.backward_ps
            peak_bytes = max(peak_bytes, held_bytes + stage.backward_transient_bytes)
            saved.remove(index)
            held_bytes -= stage.saved_bytes
            next_backward -= 1
        else:
            if index in saved or index + 1 in alone:
                raise IllegalSchedule(f"{where}: its output is still here")
            if kind is Kind.FORWARD_EMPTY and index not in alone:
                raise IllegalSchedule(f"{where}: its input is saved by the stage before and cannot go")
            held_bytes += stage.saved_bytes if kind is Kind.FORWARD_ALL else stage.output_bytes
            time_ps += stage.forward_ps
            waiting_bytes = chain.waiting_gradient_bytes(next_backward)
            peak_bytes = max(peak_bytes, held_bytes + waiting_bytes + stage.forward_transient_bytes)
            if kind is Kind.FORWARD_ALL:
                saved.add(index)
            else:
                alone.add(index + 1)
        if kind in (Kind.FORWARD_EMPTY, Kind.BACKWARD) and index in alone:
            alone.remove(index)
            held_bytes -= stages[index - 1].output_bytes if index else chain.input_bytes
    if next_backward >= 0:
        raise IllegalSchedule(f"the operations end before the backward of stage {next_backward}")
    return peak_bytes, time_ps


@dataclass(frozen=True, slots=True)
class Coarse:
    """A chain some of whose stages are several of another: groups[i] are those that stage i stands for."""

    chain: Chain
    groups: tuple[range, ...]

    def expanded(self, operations: Iterable[Operation]) -> tuple[Operation, ...]:
        """The same operations on the stages that were merged. They take as long and need no more bytes."""
        fine: list[Operation] = []
        for kind, index in operations:
            group = self.groups[index]
            stages = reversed(group) if kind is Kind.BACKWARD else group
            # Inside a group a checkpoint is passed on: only the input of its first stage stays.
            rest = Kind.FORWARD_EMPTY if kind is Kind.FORWARD_CHECKPOINT else kind
            fine += [Operation(kind if number == 0 else rest, stage) for number, stage in enumerate(stages)]
        return tuple(fine)


def coarsened(chain: Chain, max_stages: int) -> Coarse:
    """Merge neighbours, those with the fewest saved bytes and the least forward time first, until few are left.

    Times and saved bytes are sums; transients are the exact peak over a group, less what is counted outside it.
    """
    if max_stages < 1:
        raise BadOption(f"max_stages={max_stages}: a chain has at least one stage")
    groups = [range(index, index + 1) for index in range(len(chain.stages))]
    all_saved_bytes = sum(stage.saved_bytes for stage in chain.stages) or 1
    all_forward_ps = sum(stage.forward_ps for stage in chain.stages) or 1
    weights = [s.saved_bytes / all_saved_bytes + s.forward_ps / all_forward_ps for s in chain.stages]
    while len(groups) > max_stages:
        at = min(range(len(groups) - 1), key=lambda i: weights[i] + weights[i + 1])
        groups[at : at + 2] = [range(groups[at].start, groups[at + 1].stop)]
        weights[at : at + 2] = [weights[at] + weights[at + 1]]
    return Coarse(
        Chain(tuple(_merged(chain.stages[g.start : g.stop]) for g in groups), chain.input_bytes), tuple(groups)
    )


def _merged(stages: Sequence[Stage]) -> Stage:
    """One stage that stands for several: enough bytes for each kind of operation on all of them in turn."""
    if len(stages) == 1:
        return stages[0]
    last = stages[-1]
    saved_bytes = input_bytes = keeping_bytes = passing_bytes = backward_bytes = 0
    for stage in stages:
        saved_bytes += stage.saved_bytes
        keeping_bytes = max(keeping_bytes, saved_bytes + stage.forward_transient_bytes)
        passing_bytes = max(passing_bytes, input_bytes + stage.output_bytes + stage.forward_transient_bytes)
        backward_bytes = max(backward_bytes, saved_bytes + stage.backward_transient_bytes)
        input_bytes = stage.output_bytes
    return Stage(
        forward_ps=sum(stage.forward_ps for stage in stages),
        backward_ps=sum(stage.backward_ps for stage in stages),
        output_bytes=last.output_bytes,
        saved_bytes=saved_bytes,
        forward_transient_bytes=max(keeping_bytes - saved_bytes, passing_bytes - last.output_bytes),
        backward_transient_bytes=backward_bytes - saved_bytes,
        gradient_bytes=last.gradient_bytes,
        carried_bytes=last.carried_bytes,
    )
