"""What one half of a step takes longer, at least, if some storages have known fates.

[Note: on the clock]
While an op runs, what is not here of a parcel has left before it, or is fetched after it. So a large workspace means
that parcels have little time, and compute waits; or the op takes a slower way with a smaller one. The ops are gone
through towards the boundary in the forward half, and towards it in the backward half, in reversed time, so that both
are the same: a parcel is at hand at its *mark* (made ready; wanted for its first use), and is away at some op after
that if its transfer fits between. How much longer the half has taken since each mark is what a course of events has
gained for that, and what it has cost in all is what it is judged by. It is never worth waiting before one has to.

Time that nobody knows the place of (codes, drag, ops run again somewhere) counts wherever it may be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memfit.plan.bound.fates import Parcel

_MOST_PARCELS = 5
"""Of several parcels only the largest take up room: one of them or another has to be away, in every combination."""
_MOST_COURSES = 8
IMPOSSIBLE = float("inf")


class Way(NamedTuple):
    """One way of an op: its workspace, what the half takes longer by it, and what is paid for it elsewhere."""

    workspace_bytes: int
    extra_ps: float
    elsewhere_ps: float = 0.0


@dataclass(frozen=True)
class Event:
    """An op that runs, with what is there beside its workspace.

    Attributes:
        at: the op in whose place it runs: itself, or the one that it is run again in front of.
        room_bytes: for its workspace and for parcels.
        here: parcels that it uses.
    """

    op: int
    at: int
    room_bytes: int
    ways: tuple[Way, ...]
    here: frozenset[Parcel] = frozenset()

    @property
    def is_again(self) -> bool:
        return self.op != self.at


class Loose(NamedTuple):
    """Time that passes in front of some op from `first` to `last`; in the forward half, after it.

    `code_of` is the storage whose code it is taken for, if it is.
    """

    duration_ps: float
    first: int
    last: int
    code_of: int | None = None


class Demand(NamedTuple):
    """What transfers take that end at a mark, beyond the time that ops leave them.

    `codes_of` are the storages whose codes are among them.
    """

    mark: int
    lacking_ps: float
    codes_of: frozenset[int]


class Clock:
    """When ops of one half run if nothing takes longer, and what transfers lack."""

    def __init__(self, elapsed_ps: npt.NDArray[np.float64], boundary: int, *, is_backward: bool) -> None:
        self.elapsed_ps, self.boundary, self.is_backward = elapsed_ps, boundary, is_backward
        self._subsets: dict[tuple[object, ...], list[tuple[int, int, tuple[Demand, ...]]]] = {}

    @property
    def num_ops(self) -> int:
        return len(self.elapsed_ps) - 1

    def mark(self, parcel: Parcel) -> int:
        return parcel.first_use if self.is_backward else parcel.ready

    def can_be_away(self, parcel: Parcel, event: Event) -> bool:
        """Whether it may be away while that op runs."""
        if not self.is_backward:
            return parcel.last_forward < event.at
        return parcel.first_use >= event.at if event.is_again else parcel.first_use > event.at

    def subsets(self, near: tuple[Parcel, ...], event: Event) -> list[tuple[int, int, tuple[Demand, ...]]]:
        """For all sets of the parcels, the small ones first, their bytes and what they lack if they are away there."""
        key = event.at, event.is_again, near
        if key not in self._subsets:
            found = []
            for subset in sorted(range(1, 1 << len(near)), key=int.bit_count):
                away = [parcel for number, parcel in enumerate(near) if subset >> number & 1]
                start = event.at if event.is_again or not self.is_backward else event.at + 1
                found.append((subset, sum(p.num_bytes for p in away), tuple(self.demands(away, start))))
            self._subsets[key] = found
        return self._subsets[key]

    def demands(self, away: Sequence[Parcel], moment: int) -> Iterator[Demand]:
        """What these lack if they are away in front of that op."""
        channels: dict[str, list[Parcel]] = {}
        for parcel in away:
            channels.setdefault(parcel.fetch_channel if self.is_backward else parcel.send_channel, []).append(parcel)
        for parcels in channels.values():
            carried_ps = 0.0
            # Those that are wanted first, or were made last, have the least time.
            for parcel in sorted(parcels, key=self.mark, reverse=not self.is_backward):
                carried_ps += parcel.fetch_ps if self.is_backward else parcel.send_ps
                mark = self.mark(parcel)
                start, end = (moment, mark) if self.is_backward else (mark + 1, moment)
                lacking_ps = carried_ps - float(self.elapsed_ps[end] - self.elapsed_ps[start])
                if lacking_ps > 0:
                    own = {p.storage for p in parcels if p.is_code and self.mark(p) == mark}
                    yield Demand(mark, lacking_ps, frozenset(own))


class _Course(NamedTuple):
    """A course of events up to some op: what it has cost, and how much longer it has taken since each mark."""

    cost_ps: float
    gained_ps: tuple[float, ...]


class Half:
    """One half with its parcels and all that passes there besides ops."""

    def __init__(self, clock: Clock, parcels: Iterable[Parcel], loose: Iterable[Loose], limit_ps: float) -> None:
        self._clock, self._loose, self._limit_ps = clock, list(loose), limit_ps
        # Of a parcel that is wanted nobody knows when, nothing is known about its way back.
        known = [p for p in parcels if not clock.is_backward or p.first_use < clock.num_ops]
        self._parcels = sorted(known, key=lambda p: -p.num_bytes)
        self._marks = sorted({clock.mark(p) for p in known}, reverse=clock.is_backward)
        self._number = {mark: number for number, mark in enumerate(self._marks)}
        self._passing: dict[tuple[int, Demand], float] = {}

    def longer_ps(self, events: Iterable[Event]) -> float:
        """What the half takes longer at least, and what is paid elsewhere for that; impossible above the limit."""
        courses, passed = [_Course(0.0, ())], 0
        sign = -1 if self._clock.is_backward else 1
        # In reversed time an op comes before those that run again in front of it, and its mark lies between the two.
        for event in sorted(events, key=lambda e: (sign * e.at, e.is_again, sign * e.op)):
            while passed < len(self._marks) and self._is_passed(self._marks[passed], event):
                courses = [_Course(cost_ps, (*gained_ps, 0.0)) for cost_ps, gained_ps in courses]
                passed += 1
            courses = self._after(event, courses)
            if not courses:
                return IMPOSSIBLE
        unpassed = [0.0] * (len(self._marks) - passed)
        boundary = self._clock.boundary
        needs = self._needs(tuple(self._clock.demands(self._parcels, boundary)), boundary)
        # All of them are away at the boundary.
        return min(
            cost_ps + _waiting_ps(_Course(cost_ps, (*gained_ps, *unpassed)), [needs]) for cost_ps, gained_ps in courses
        )

    def _is_passed(self, mark: int, event: Event) -> bool:
        if self._clock.is_backward:
            return mark > event.at or (mark == event.at and event.is_again)
        return mark < event.at

    def _after(self, event: Event, courses: list[_Course]) -> list[_Course]:
        """The courses that go on: each way with what has to be waited for, as long as it may be the best."""
        near = tuple(p for p in self._parcels if p not in event.here and self._clock.can_be_away(p, event))
        near = near[:_MOST_PARCELS]
        all_bytes = sum(parcel.num_bytes for parcel in near)
        if event.ways and event.room_bytes >= all_bytes + event.ways[0].workspace_bytes and not any(event.ways[0][1:]):
            return courses  # there is room for everything
        found: list[_Course] = []
        for way in event.ways:
            room_bytes = event.room_bytes - way.workspace_bytes
            if room_bytes < 0:
                continue
            choices: list[dict[int, float]] = [{}]
            if all_bytes > room_bytes:
                choices = list(self._choices(near, all_bytes - room_bytes, event))
            for cost_ps, gained_ps in courses:
                longer_ps = _waiting_ps(_Course(cost_ps, gained_ps), choices) + way.extra_ps
                if cost_ps + longer_ps + way.elsewhere_ps <= self._limit_ps:
                    gained = tuple(gained + longer_ps for gained in gained_ps)
                    found.append(_Course(cost_ps + longer_ps + way.elsewhere_ps, gained))
        return _worth_following(found)

    def _choices(self, near: tuple[Parcel, ...], must_bytes: int, event: Event) -> Iterator[dict[int, float]]:
        """What must have been gained since which mark, for each least set of parcels that leaves room by being away."""
        taken: list[int] = []
        start = event.at if event.is_again or not self._clock.is_backward else event.at + 1
        for subset, num_bytes, demands in self._clock.subsets(near, event):
            if num_bytes >= must_bytes and not any(subset & smaller == smaller for smaller in taken):
                taken.append(subset)
                yield self._needs(demands, start)

    def _needs(self, demands: Iterable[Demand], moment: int) -> dict[int, float]:
        """By number of mark what the half must have taken longer since then."""
        found: dict[int, float] = {}
        for demand in demands:
            key = moment, demand
            if key not in self._passing:
                self._passing[key] = self._passing_ps(demand, moment)
            need_ps = demand.lacking_ps - self._passing[key]
            number = self._number[demand.mark]
            if need_ps > found.get(number, 0.0):
                found[number] = need_ps
        return found

    def _passing_ps(self, demand: Demand, moment: int) -> float:
        """What may pass besides ops between an op and a mark."""
        if not self._clock.is_backward:
            return sum(t.duration_ps for t in self._loose if t.last >= demand.mark and t.first < moment)
        # A code is decoded once it is there: that is no time for itself to come.
        return sum(
            t.duration_ps
            for t in self._loose
            if t.last >= moment
            and t.first <= demand.mark
            and not (t.code_of in demand.codes_of and t.first == demand.mark)
        )


def _waiting_ps(course: _Course, choices: Iterable[dict[int, float]]) -> float:
    """How long has to be waited, by the best of the choices."""
    return min(
        max((0.0, *(need_ps - course.gained_ps[number] for number, need_ps in needs.items()))) for needs in choices
    )


def _worth_following(courses: list[_Course]) -> list[_Course]:
    """Those that no other one is better than in all respects; if there are too many, neighbours made one."""
    found: list[_Course] = []
    for course in sorted(courses):
        if not any(all(a >= b for a, b in zip(other.gained_ps, course.gained_ps, strict=True)) for other in found):
            found.append(course)
    if len(found) <= _MOST_COURSES:
        return found
    return [
        _Course(one.cost_ps, tuple(map(max, one.gained_ps, other.gained_ps)))
        for one, other in zip(found[::2], [*found[1::2], found[-1]], strict=False)
    ]
