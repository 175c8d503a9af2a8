"""offload-dp on a chain: stages are sent whole or kept, decided from first to last for both halves at once.

A label says what has been decided up to a stage, and what follows from that: bytes kept, and for each half how long it
waited and what is still on its way. Each stage extends every label twice, by keeping and by sending. Since backward is
a forward half in reversed time, one walk decides both.

Two programs, which differ in when bytes are released:

- relaxed, the paper's as our notes reconstruct it: byte by byte, as in the fluid relaxation. A label has three numbers,
  bytes kept and the two backlogs; its optimum is a bound on every schedule, at least the fluid one.
- whole, ours: when the transfer ends, as in `evaluate`. The optimum over all choices sent in order.

The relaxed choice always fits, but evaluated exactly it may wait longer than the greedy's, and even than vDNN's (the
tests have chains of either kind). So what is returned is the best of three, the greedy's, the relaxed and the whole
one, less what need not be sent. Schedules with transfers in another order can still be faster, on few chains.

[Note: labels] A label goes if another is no worse in everything that matters later; if it must wait as long as a known
schedule; and, where more than `width` are left, to make room. Only the last can lose anything, and how much is known:
no choice that went waits less than the least outlook among the labels that went.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

from memfit.errors import BadOption
from memfit.plan.offloading.chain import PS_PER_S, Chain, Half, Schedule, evaluate
from memfit.plan.offloading.fluid import fluid
from memfit.plan.offloading.greedy import solve_greedy

_COMPARISONS = 200_000
State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class Solution:
    """A schedule, and the least that any schedule of the chain waits; equal if it is optimal.

    Attributes:
        num_labels: how many labels the programs made; what they take grows with it.
    """

    schedule: Schedule
    bound_ps: int
    num_labels: int


@dataclass(frozen=True, slots=True)
class Choice:
    """What a program decided.

    Attributes:
        away: the stages to send; None if no label was better than the known schedule.
        idle_ps: what the program believes compute waits; exact.
        bound_ps: no choice waits less, by the program's rules.
        num_labels: how many labels were made on the way.
    """

    away: frozenset[int] | None
    idle_ps: Fraction
    bound_ps: Fraction
    num_labels: int


def solve_dp(chain: Chain, *, width: int | None = None) -> Solution | None:
    """The best of the greedy, the relaxed and the whole program; None below `chain.floor_bytes`."""
    best, bottom = solve_greedy(chain), fluid(chain)
    if best is None or bottom is None:
        return None
    bound_ps = bottom.bound_ps
    num_labels = 0
    if best.idle_ps > bound_ps:
        relaxed = solve_relaxed(chain, width=width, known_ps=best.idle_ps)
        bound_ps = max(bound_ps, math.ceil(relaxed.bound_ps))
        best = _better(chain, best, relaxed)
        num_labels += relaxed.num_labels
    if best.idle_ps > bound_ps:
        whole = solve_whole(chain, width=width, known_ps=best.idle_ps)
        best = _better(chain, best, whole)
        num_labels += whole.num_labels
    return Solution(_pared(chain, best, bottom.sent_bytes), bound_ps, num_labels)


def _better(chain: Chain, known: Schedule, choice: Choice) -> Schedule:
    schedule = None if choice.away is None else evaluate(chain, choice.away)
    return known if schedule is None or schedule.idle_ps >= known.idle_ps else schedule


def _pared(chain: Chain, schedule: Schedule, least_bytes: int) -> Schedule:
    """The same without stages that need not be sent, the largest first; least_bytes must be sent in any case."""
    spare_bytes = sum(chain.stages[stage].saved_bytes for stage in schedule.away) - least_bytes
    for stage in sorted(schedule.away, key=lambda stage: -chain.stages[stage].saved_bytes):
        if chain.stages[stage].saved_bytes <= spare_bytes:
            fewer = evaluate(chain, frozenset(schedule.away) - {stage})
            if fewer is not None and fewer.idle_ps <= schedule.idle_ps:
                schedule = fewer
                spare_bytes -= chain.stages[stage].saved_bytes
    return schedule


def solve_relaxed(chain: Chain, *, width: int | None = None, known_ps: int | None = None) -> Choice:
    """The optimum if a stage is sent whole but leaves byte by byte; only choices better than `known_ps` are sought."""
    forward, backward = chain.halves
    # Idle time counts in what moves in it: ticks of 1 / (both speeds) make it whole on either side.
    sides = (_FluidSide(forward, backward.bytes_per_s), _FluidSide(backward, forward.bytes_per_s))
    return _walk(chain, sides, width, known_ps)


def solve_whole(chain: Chain, *, width: int | None = None, known_ps: int | None = None) -> Choice:
    """The optimum of `evaluate` over all choices, unless labels had to go; `bound_ps` says what that may have lost."""
    speeds = math.prod(half.bytes_per_s for half in chain.halves)
    return _walk(chain, tuple(_WholeSide(half, speeds) for half in chain.halves), width, known_ps)


class _Side(ABC, Generic[State]):
    """How one half of a chain fares under decisions: a state after each stage, and ticks it has cost."""

    def __init__(self, half: Half) -> None:
        self.half = half
        self.until_ps = tuple(accumulate(half.durations_ps, initial=0))
        # What must have left before each stage from here on, less what the link can move by then without waiting.
        demands = [
            excess * PS_PER_S - until_ps * half.bytes_per_s
            for excess, until_ps in zip(half.excess_bytes, self.until_ps[:-1], strict=True)
        ]
        self.end_moves = self.until_ps[-1] * half.bytes_per_s
        demands.append(max(0, *half.excess_bytes) * PS_PER_S - self.end_moves)
        self.demands = tuple(accumulate(reversed(demands), max))[::-1]

    def shortfall(self, stage: int, sent_bytes: int, backlog: int) -> int:
        """What the link must still move while compute waits, whatever is sent from this stage on.

        Counted like the backlog in parts of a byte, PS_PER_S to one.
        """
        ahead = sent_bytes * PS_PER_S - backlog - self.until_ps[stage] * self.half.bytes_per_s
        return max(0, self.demands[stage] - ahead, sent_bytes * PS_PER_S - self.end_moves - ahead)

    @abstractmethod
    def start(self) -> State: ...

    @abstractmethod
    def after(self, state: State, stage: int, kept_bytes: int) -> State:
        """Run a stage, waiting until it fits."""

    @abstractmethod
    def sending(self, state: State, stage: int) -> State:
        """The same, and what the stage saved joins the queue."""

    @abstractmethod
    def cost(self, state: State, stage: int) -> int:
        """Ticks waited before this stage."""

    @abstractmethod
    def outlook(self, state: State, stage: int, sent_bytes: int) -> int:
        """Ticks waited, and the least that is still to come."""

    @abstractmethod
    def no_worse(self, one: State, other: State, spared_bytes: int) -> bool:
        """Whether the first, with so many bytes fewer kept, never has fewer bytes free nor a later link."""


class _Backlog(NamedTuple):
    """Bytes still to go, and bytes that compute has waited for; both in parts, PS_PER_S to a byte."""

    backlog: int
    waited: int


class _FluidSide(_Side[_Backlog]):
    """Bytes are released one by one."""

    def __init__(self, half: Half, other_bytes_per_s: int) -> None:
        super().__init__(half)
        self.ticks = other_bytes_per_s

    def start(self) -> _Backlog:
        return _Backlog(0, 0)

    def after(self, state: _Backlog, stage: int, kept_bytes: int) -> _Backlog:
        half = self.half
        room = half.limit_bytes - kept_bytes - half.saved_bytes[stage] - half.transient_bytes[stage]
        backlog = min(state.backlog, room * PS_PER_S)
        waited = state.waited + state.backlog - backlog
        return _Backlog(max(0, backlog - half.durations_ps[stage] * half.bytes_per_s), waited)

    def sending(self, state: _Backlog, stage: int) -> _Backlog:
        return _Backlog(state.backlog + self.half.saved_bytes[stage] * PS_PER_S, state.waited)

    def cost(self, state: _Backlog, stage: int) -> int:
        return state.waited * self.ticks

    def outlook(self, state: _Backlog, stage: int, sent_bytes: int) -> int:
        return (state.waited + self.shortfall(stage, sent_bytes, state.backlog)) * self.ticks

    def no_worse(self, one: _Backlog, other: _Backlog, spared_bytes: int) -> bool:
        return one.backlog <= other.backlog


class _Queue(NamedTuple):
    """The clock of compute, when each send still on its way ends, with its bytes, and their sum."""

    now_ps: int
    ends: tuple[tuple[int, int], ...]
    held_bytes: int


class _WholeSide(_Side[_Queue]):
    """Bytes are released when their transfer ends: `Half.run`, a stage at a time."""

    def __init__(self, half: Half, ticks: int) -> None:
        super().__init__(half)
        self.ticks = ticks

    def start(self) -> _Queue:
        return _Queue(0, (), 0)

    def after(self, state: _Queue, stage: int, kept_bytes: int) -> _Queue:
        half = self.half
        now_ps, ends, held_bytes = state
        room = half.limit_bytes - kept_bytes - half.saved_bytes[stage] - half.transient_bytes[stage]
        num_released = 0
        while held_bytes > room:
            now_ps, size = ends[num_released]
            held_bytes -= size
            num_released += 1
        now_ps += half.durations_ps[stage]
        while num_released < len(ends) and ends[num_released][0] <= now_ps:
            held_bytes -= ends[num_released][1]
            num_released += 1
        return _Queue(now_ps, ends[num_released:], held_bytes)

    def sending(self, state: _Queue, stage: int) -> _Queue:
        now_ps, ends, held_bytes = state
        end_ps = (ends[-1][0] if ends else now_ps) + self.half.transfer_ps[stage]
        size = self.half.saved_bytes[stage]
        return _Queue(now_ps, (*ends, (end_ps, size)), held_bytes + size)

    def cost(self, state: _Queue, stage: int) -> int:
        return (state.now_ps - self.until_ps[stage]) * self.ticks

    def outlook(self, state: _Queue, stage: int, sent_bytes: int) -> int:
        half = self.half
        now_ps, ends, _ = state
        lag_ps = ends[-1][0] - now_ps if ends else 0
        # Whole picoseconds and latencies make transfers longer than their bytes; the bytes that are left are fewer.
        backlog = max(0, lag_ps - len(ends) * (half.latency_ps + 1)) * half.bytes_per_s
        short_ps = -(-self.shortfall(stage, sent_bytes, backlog) // half.bytes_per_s)
        late_ps = lag_ps - (self.until_ps[-1] - self.until_ps[stage])
        return (now_ps - self.until_ps[stage] + max(short_ps, late_ps)) * self.ticks

    def no_worse(self, one: _Queue, other: _Queue, spared_bytes: int) -> bool:
        if one.held_bytes > other.held_bytes + spared_bytes:
            return False
        mine = one.ends
        if not mine:
            return True
        lead_ps = other.now_ps - one.now_ps
        if not other.ends or mine[-1][0] + lead_ps > other.ends[-1][0]:
            return False
        # The other gains on this one only where it releases: by then this one must have released enough.
        my_bytes, their_bytes = one.held_bytes, other.held_bytes + spared_bytes
        num_released = 0
        for end_ps, size in other.ends:
            their_bytes -= size
            while num_released < len(mine) and mine[num_released][0] + lead_ps <= end_ps:
                my_bytes -= mine[num_released][1]
                num_released += 1
            if my_bytes > their_bytes:
                return False
        return True


class _Label(NamedTuple, Generic[State]):
    """Decisions up to a stage; the order of its fields is the order in which labels are preferred."""

    outlook: int  # ticks waited, and the least still to come, in both halves
    cost: int
    kept_bytes: int
    away: int  # a bit for each stage
    forward: State
    backward: State


def _walk(chain: Chain, sides: tuple[_Side[State], ...], width: int | None, known_ps: int | None) -> Choice:
    """Extend labels stage by stage, and take the best at the end."""
    if width is None:
        # Labels are compared with each other: fewer in a long chain, so that all take about as long.
        width = max(4, math.isqrt(_COMPARISONS // len(chain.stages)))
    if width < 1:
        raise BadOption(f"width={width}: a search keeps at least one label")
    forward, backward = sides
    ticks_per_ps = math.prod(half.bytes_per_s for half in chain.halves)
    known = None if known_ps is None else known_ps * ticks_per_ps
    lost: int | None = known
    # Kept bytes stay: whatever comes later must fit beside them.
    needs = [s.saved_bytes + max(s.forward_transient_bytes, s.backward_transient_bytes) for s in chain.stages]
    most_kept = [chain.limit_bytes - need for need in accumulate(reversed(needs), max)][::-1]
    labels = [_Label(0, 0, 0, 0, forward.start(), backward.start())] if most_kept[0] >= 0 else []
    total_bytes = 0
    num_labels = 0
    last = len(chain.stages) - 1
    for index, stage in enumerate(chain.stages):
        total_bytes += stage.saved_bytes
        grown = []
        for label in labels:
            forth = forward.after(label.forward, index, label.kept_bytes)
            back = backward.after(label.backward, index, label.kept_bytes)
            cost = forward.cost(forth, index + 1) + backward.cost(back, index + 1)
            options = [(forth, back, label.kept_bytes + stage.saved_bytes, label.away)]
            if index < last and stage.saved_bytes:
                sent = forward.sending(forth, index), backward.sending(back, index)
                options.append((*sent, label.kept_bytes, label.away | 1 << index))
            for forth, back, kept_bytes, away in options:
                if index < last and kept_bytes > most_kept[index + 1]:
                    continue
                sent_bytes = total_bytes - kept_bytes
                outlook = forward.outlook(forth, index + 1, sent_bytes) + backward.outlook(back, index + 1, sent_bytes)
                if known is None or outlook < known:
                    grown.append(_Label(outlook, cost, kept_bytes, away, forth, back))
        num_labels += len(grown)
        labels = _undominated(grown, sides)
        if len(labels) > width:
            labels, gone = _thinned(labels, width)
            lost = gone if lost is None else min(lost, gone)
    best = min(labels, default=None)
    promises = [ticks for ticks in (lost, None if best is None else best.outlook) if ticks is not None]
    if not promises:
        raise BadOption(
            f"limit_bytes={chain.limit_bytes} is too small for any choice: this chain needs {chain.floor_bytes}"
        )
    bound_ps = Fraction(min(promises), ticks_per_ps)
    if best is None:
        return Choice(None, Fraction(known_ps or 0), bound_ps, num_labels)
    chosen = frozenset(index for index in range(last) if best.away >> index & 1)
    return Choice(chosen, Fraction(best.outlook, ticks_per_ps), bound_ps, num_labels)


def _undominated(labels: list[_Label[State]], sides: tuple[_Side[State], ...]) -> list[_Label[State]]:
    """Those that no other is at least as good as in everything, best first."""
    forward, backward = sides
    found: list[_Label[State]] = []
    for label in sorted(labels):
        for other in found:
            spared_bytes = label.kept_bytes - other.kept_bytes
            if (
                spared_bytes >= 0
                and other.cost <= label.cost
                and forward.no_worse(other.forward, label.forward, spared_bytes)
                and backward.no_worse(other.backward, label.backward, spared_bytes)
            ):
                break
        else:
            found.append(label)
    return found


def _thinned(labels: list[_Label[State]], width: int) -> tuple[list[_Label[State]], int]:
    """So many of them, and the best outlook that went.

    Outlooks are often equal, and what tells good labels from bad ones shows only later. So labels that keep much and
    labels that keep little are both held: the best of each band of kept bytes, then the best of the rest.
    """
    least = min(label.kept_bytes for label in labels)
    span = max(label.kept_bytes for label in labels) - least + 1
    bands: dict[int, _Label[State]] = {}
    rest = []
    for label in labels:
        band = (label.kept_bytes - least) * width // span
        if bands.setdefault(band, label) is not label:
            rest.append(label)
    num_more = width - len(bands)
    return [*bands.values(), *rest[:num_more]], rest[num_more].outlook
