"""Find the fastest order of forwards and backwards of a chain within a byte budget: rotor's dynamic program.

    schedule = solve(Chain(stages, input_bytes), budget_bytes)  # or solve_each, for many budgets
    peak_bytes, time_ps = simulate(schedule.chain, schedule.operations)

After Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal checkpointing for heterogeneous chains". Least time
of stages s..t, their input here and paid for, m bytes free:

    Opt(s, t, m) = min( forward s keeping all, Opt(s+1, t, m - saved s), backward s,
                        min over j: forward s..j-1 keeping only the input, Opt(j, t, m - output j-1), Opt(s, j-1, m) )

Optimal among persistent schedules: what is kept stays until its backward, and so does the input of a stage that kept
all. Giving up the first gains little (2 of 459 random chains of 4 to 6 stages, by 2 % at most). The second costs more:
if a stage that kept all may lose its input, to be made again just before its backward, 4 in 10 of such chains are
faster, by up to 17 %. That is not in rotor's operations; decisions per storage can express it.

[Note: slots] Opt is tabulated for whole slots of memory, every item rounded up. The schedule is then read off with
exact bytes: at each step the table only ranks the choices that the exact floor of every segment (_Floors) says can be
carried out. So the budget holds whatever the slots are, and any budget from floor_bytes on has a schedule. A schedule
keeps at most one item per stage, so one of L stages that fits M slots exactly has at most L more after rounding: Opt at
M + L is a bound.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from memfit.errors import BadOption
from memfit.plan.checkpointing.rotor_chain import (
    NEVER_PS,
    Chain,
    Coarse,
    IllegalSchedule,
    Kind,
    Operation,
    Stage,
    coarsened,
    simulate,
)

__all__ = [
    "Chain",
    "Coarse",
    "IllegalSchedule",
    "Kept",
    "Kind",
    "Operation",
    "Schedule",
    "Stage",
    "coarsened",
    "floor_bytes",
    "kept",
    "simulate",
    "solve",
    "solve_each",
]

_Numbers: TypeAlias = npt.NDArray[np.int64]
_Segment: TypeAlias = tuple[int, int, int]
"""First stage, last stage, bytes it may use beside its input."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The operations of a whole step.

    Attributes:
        time_ps, peak_bytes: by replay, with exact bytes, input included.
        bound_ps: no persistent schedule of this chain within the budget takes less.
        discretisation_bytes: at least as fast as the optimum of a budget smaller by this; 0 says optimal. Stages that
            were merged are one to both optimum and error; then the bound is only that of every schedule.
    """

    chain: Chain
    operations: tuple[Operation, ...]
    time_ps: int
    peak_bytes: int
    bound_ps: int
    discretisation_bytes: int


@dataclass(frozen=True, slots=True)
class Kept:
    """What is left of each stage when the first backward starts.

    Attributes:
        stored: all that backward needs.
        checkpoints: only the input.
        dropped: nothing.
    """

    stored: tuple[int, ...]
    checkpoints: tuple[int, ...]
    dropped: tuple[int, ...]


def solve(chain: Chain, budget_bytes: int, *, num_slots: int = 500, max_stages: int = 150) -> Schedule | None:
    """The fastest schedule that stays within the budget, or None below `floor_bytes(chain)`.

    Exact where the budget less the input has no more bytes than there are slots and no stages are merged, which they
    are beyond max_stages. Takes O(num_slots * stages^3).
    """
    return solve_each(chain, [budget_bytes], num_slots=num_slots, max_stages=max_stages)[0]


def solve_each(
    chain: Chain, budgets_bytes: Sequence[int], *, num_slots: int = 500, max_stages: int = 150
) -> tuple[Schedule | None, ...]:
    """The same for many budgets. Those within a factor of two share a table: each has half the slots at least."""
    if num_slots < 1:
        raise BadOption(f"num_slots={num_slots}: memory has at least one slot")
    coarse = coarsened(chain, max_stages)
    found: dict[int, Schedule | None] = {}
    table: _Table | None = None
    for budget_bytes in sorted(budgets_bytes, reverse=True):
        if (schedule := _without_table(chain, coarse, budget_bytes)) is not None:
            found[budget_bytes] = schedule
        elif (free_bytes := budget_bytes - chain.input_bytes) >= _floors(coarse.chain).whole_bytes:
            if table is None or 2 * free_bytes < table.free_bytes:
                table = _Table(coarse.chain, free_bytes, num_slots)
            found[budget_bytes] = _read_off(chain, coarse, table, free_bytes)
    return tuple(found.get(budget_bytes) for budget_bytes in budgets_bytes)


def _without_table(chain: Chain, coarse: Coarse, budget_bytes: int) -> Schedule | None:
    """The schedule of a budget for everything, or of one that merged stages need more than."""
    keep_all = _keep_all(len(chain.stages))
    if simulate(chain, keep_all)[0] <= budget_bytes:
        return _replayed(chain, keep_all, chain.work_ps, 0)
    free_bytes = budget_bytes - chain.input_bytes
    if _floors(chain).whole_bytes <= free_bytes < _floors(coarse.chain).whole_bytes:
        # In this narrow strip any legal schedule has to do: halving keeps it from being slow.
        return _replayed(chain, _unrolled(chain, free_bytes, _floors(chain).halve), chain.work_ps, free_bytes)
    return None


def _read_off(chain: Chain, coarse: Coarse, table: _Table, free_bytes: int) -> Schedule:
    """The fastest that the table finds, by several guesses of how much its rounding overstates."""
    num_stages = len(coarse.chain.stages)
    optimisms = {0} if table.slot_bytes == 1 else {0, num_stages, *(1 << n for n in range(num_stages.bit_length()))}
    found = (
        coarse.expanded(_unrolled(coarse.chain, free_bytes, functools.partial(table.choose, optimism)))
        for optimism in sorted(optimisms)
    )
    error_bytes = 0 if table.slot_bytes == 1 else min(free_bytes, (num_stages + 1) * table.slot_bytes)
    bound_ps = chain.work_ps if num_stages < len(chain.stages) else table.bound_ps(free_bytes)
    return min((_replayed(chain, operations, bound_ps, error_bytes) for operations in found), key=lambda s: s.time_ps)


def floor_bytes(chain: Chain) -> int:
    """The smallest budget that any persistent schedule meets, exact whatever the slots."""
    return chain.input_bytes + _floors(chain).whole_bytes


def kept(schedule: Schedule) -> Kept:
    """What the first forward leaves of each stage for backward."""
    left: dict[int, Kind] = {}
    for kind, stage in schedule.operations:
        if kind is Kind.BACKWARD:
            break
        left[stage] = kind
    of_kind = {kind: tuple(stage for stage in sorted(left) if left[stage] is kind) for kind in Kind}
    return Kept(of_kind[Kind.FORWARD_ALL], of_kind[Kind.FORWARD_CHECKPOINT], of_kind[Kind.FORWARD_EMPTY])


def _keep_all(num_stages: int) -> tuple[Operation, ...]:
    """Every forward once, then every backward."""
    forwards = [Operation(Kind.FORWARD_ALL, stage) for stage in range(num_stages)]
    return (*forwards, *(Operation(Kind.BACKWARD, stage) for stage in reversed(range(num_stages))))


def _replayed(chain: Chain, operations: tuple[Operation, ...], bound_ps: int, error_bytes: int) -> Schedule:
    peak_bytes, time_ps = simulate(chain, operations)
    return Schedule(chain, operations, time_ps, peak_bytes, bound_ps, error_bytes)


def _unrolled(chain: Chain, free_bytes: int, choose: Callable[[int, int, int], int]) -> tuple[Operation, ...]:
    """The operations of the whole chain: choose(first, last, free_bytes) says where each segment is split.

    A split at its first stage means that this stage keeps all; one at j > first, that the input of j is kept.
    """
    operations: list[Operation] = []
    pending: list[Operation | _Segment] = [(0, len(chain.stages) - 1, free_bytes)]
    while pending:
        todo = pending.pop()
        if isinstance(todo, Operation):
            operations.append(todo)
            continue
        first, last, free = todo
        split = choose(first, last, free)
        if split == first:
            operations.append(Operation(Kind.FORWARD_ALL, first))
            pending.append(Operation(Kind.BACKWARD, first))
            if first < last:
                pending.append((first + 1, last, free - chain.stages[first].saved_bytes))
        else:
            operations.append(Operation(Kind.FORWARD_CHECKPOINT, first))
            operations += [Operation(Kind.FORWARD_EMPTY, stage) for stage in range(first + 1, split)]
            pending.append((first, split - 1, free))
            pending.append((split, last, free - chain.stages[split - 1].output_bytes))
    return tuple(operations)


class _Floors:
    """The fewest bytes that each segment needs beside its input, and those of the first step of either choice."""

    def __init__(self, chain: Chain) -> None:
        stages = chain.stages
        num_stages = len(stages)
        self.output_bytes = np.array([stage.output_bytes for stage in stages], np.int64)
        self.saved_bytes = np.array([stage.saved_bytes for stage in stages], np.int64)
        shape = (num_stages, num_stages)
        self.now_bytes: _Numbers = np.zeros(shape, np.int64)
        self.later_bytes: _Numbers = np.zeros(shape, np.int64)
        self.floor_bytes: _Numbers = np.zeros(shape, np.int64)
        for s in reversed(range(num_stages)):
            stage = stages[s]
            passing_bytes = stage.output_bytes + stage.forward_transient_bytes
            for t in range(s, num_stages):
                waiting_bytes = chain.waiting_gradient_bytes(t)
                if t > s + 1:
                    passed = stages[t - 1]
                    beside_bytes = stages[t - 2].output_bytes + passed.forward_transient_bytes
                    passing_bytes = max(passing_bytes, beside_bytes + passed.output_bytes)
                self.now_bytes[s, t] = stage.saved_bytes + max(
                    waiting_bytes + stage.forward_transient_bytes, stage.backward_transient_bytes
                )
                # Whatever the split, every stage but the last runs once with its input here before that gradient goes.
                self.later_bytes[s, t] = waiting_bytes + passing_bytes
                self.floor_bytes[s, t] = self._need_bytes(s, t).min()

    @property
    def whole_bytes(self) -> int:
        return int(self.floor_bytes[0, -1])

    def _need_bytes(self, s: int, t: int) -> _Numbers:
        """What each choice, a split at s to t, needs at least."""
        floor = self.floor_bytes
        needs = np.empty(t - s + 1, np.int64)
        needs[0] = self.now_bytes[s, t] if s == t else max(self.now_bytes[s, t], self.saved_bytes[s] + floor[s + 1, t])
        rest = np.maximum(self.output_bytes[s:t] + floor[s + 1 : t + 1, t], floor[s, s:t])
        needs[1:] = np.maximum(rest, self.later_bytes[s, t])
        return needs

    def possible(self, s: int, t: int, free_bytes: int) -> npt.NDArray[np.intp]:
        """The splits after which all can be finished within the bytes."""
        return s + np.flatnonzero(self._need_bytes(s, t) <= free_bytes)

    def halve(self, s: int, t: int, free_bytes: int) -> int:
        """The possible split nearest to the middle."""
        splits = self.possible(s, t, free_bytes)
        return int(splits[np.abs(splits - (s + t + 1) // 2).argmin()])


@functools.lru_cache(maxsize=4)
def _floors(chain: Chain) -> _Floors:
    return _Floors(chain)


class _Table:
    """Opt(s, t, m) for every segment and number of slots, as of [Note: slots]."""

    def __init__(self, chain: Chain, free_bytes: int, num_slots: int) -> None:
        self._floors = floors = _floors(chain)
        self.free_bytes = free_bytes
        self.slot_bytes = slot_bytes = max(1, -(-free_bytes // num_slots))
        num_stages = len(chain.stages)
        self._top = top = free_bytes // slot_bytes + (num_stages if slot_bytes > 1 else 0)
        self._pair_ps = [stage.forward_ps + stage.backward_ps for stage in chain.stages]
        self._start_ps = np.cumsum([0, *(stage.forward_ps for stage in chain.stages)])
        output_slots, saved_slots, now_slots, later_slots = (
            np.minimum(-(-sizes // slot_bytes), top + 1).tolist()
            for sizes in (floors.output_bytes, floors.saved_bytes, floors.now_bytes, floors.later_bytes)
        )
        # Half of each is never touched, and so never made.
        shape = (num_stages, num_stages, top + 1)
        self._opt_ps = opt_ps = np.empty(shape, np.int64)
        # [t, j, m]: forward to j, then j to t, its input kept within m. So all splits of a segment are two flat slices.
        from_split_ps = np.empty(shape, np.int64)
        for s in reversed(range(num_stages)):
            for t in range(s, num_stages):
                best = opt_ps[s, t]
                best[:] = NEVER_PS
                now = now_slots[s][t]
                if s == t:
                    best[now:] = self._pair_ps[s]
                else:
                    later = later_slots[s][t]
                    found = (from_split_ps[t, s + 1 : t + 1, later:] + opt_ps[s, s:t, later:]).min(axis=0)
                    np.minimum(best[later:], found - self._start_ps[s], out=best[later:])
                    after = opt_ps[s + 1, t, now - saved_slots[s] : top + 1 - saved_slots[s]]
                    np.minimum(best[now:], after + self._pair_ps[s], out=best[now:])
                if s > 0:
                    kept_slots = output_slots[s - 1]
                    from_split_ps[t, s, :kept_slots] = NEVER_PS
                    np.add(best[: top + 1 - kept_slots], self._start_ps[s], out=from_split_ps[t, s, kept_slots:])

    def bound_ps(self, free_bytes: int) -> int:
        """No schedule within the bytes takes less."""
        num_stages = len(self._pair_ps)
        return int(self._opt_ps[0, -1, self._slot(free_bytes, num_stages if self.slot_bytes > 1 else 0)])

    def choose(self, optimism: int, s: int, t: int, free_bytes: int) -> int:
        """The split that promises the least time, if rounding up overstates by that many slots.

        With no optimism the schedule is as fast as the table says at least: exact bytes, rounded down, never leave
        fewer slots than the table's own accounts. With some it may be faster, or not.
        """
        splits = self._floors.possible(s, t, free_bytes)
        times_ps: list[_Numbers] = []
        if splits[0] == s:
            if s == t:
                return s
            slot = self._slot(free_bytes - self._floors.saved_bytes[s], optimism)
            times_ps.append(np.atleast_1d(self._pair_ps[s] + self._opt_ps[s + 1, t, slot]))
        at = splits[splits > s]
        slots = self._slot(free_bytes - self._floors.output_bytes[at - 1], optimism)
        before_ps = self._start_ps[at] - self._start_ps[s] + self._opt_ps[s, at - 1, self._slot(free_bytes, optimism)]
        times_ps.append(before_ps + self._opt_ps[at, t, slots])
        # Of equals the last: the fewest checkpoints, and none rather than all that a stage saves.
        return int(splits[::-1][np.concatenate(times_ps)[::-1].argmin()])

    def _slot(self, free_bytes: _Numbers | int, optimism: int) -> _Numbers:
        return np.minimum(np.asarray(free_bytes) // self.slot_bytes + optimism, self._top)
