"""What one half of a step takes longer, at least, if some storages have known fates.

[Note: on the clock]
While an op runs, what is not here of a parcel has left before it, or is fetched after it. So a large workspace means
that parcels have little time, and compute waits; or the op takes a slower way with a smaller one. The ops are gone
through towards the boundary in the forward half, and towards it in the backward half, in reversed time, so that both
are the same: a parcel is at hand at its *mark* (made ready; wanted for its first use), and is away at some op after
that if its transfer fits between. How much longer the half has taken since each mark is what a course of events has
gained for that, and what it has cost in all is what it is judged by. It is never worth waiting before one has to.
What is away at one op is away at all after it, so a course also remembers which parcels have gone.

Time that nobody knows the place of (codes, drag, ops run again somewhere) counts wherever it may be.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memfit.plan.bound.fates import Parcel, Place

_MOST_PARCELS = 5
"""Of several parcels only the largest take up room: one of them or another has to be away, in every combination."""
_MOST_COURSES = 12
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
    """

    op: int
    at: int
    room_bytes: int
    ways: tuple[Way, ...]

    @property
    def is_again(self) -> bool:
        return self.op != self.at

    @property
    def place(self) -> Place:
        return self.at, self.op


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

    mark: Place
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

    def mark(self, parcel: Parcel) -> Place:
        return parcel.wanted if self.is_backward else (parcel.ready, parcel.ready)

    def can_be_away(self, parcel: Parcel, event: Event) -> bool:
        """Whether it may be away while that op runs."""
        return event.place < parcel.wanted if self.is_backward else parcel.last_forward < event.at

    def subsets(self, near: tuple[Parcel, ...], event: Event) -> list[tuple[int, int, tuple[Demand, ...]]]:
        """For all sets of the parcels, the small ones first, their bytes and what they lack if they are away there."""
        key = event.at, event.is_again, near
        if key not in self._subsets:
            found = []
            for subset in sorted(range(1 << len(near)), key=int.bit_count):
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
                start, end = (moment, mark[0]) if self.is_backward else (mark[0] + 1, moment)
                lacking_ps = carried_ps - float(self.elapsed_ps[end] - self.elapsed_ps[start])
                if lacking_ps > 0:
                    own = {p.storage for p in parcels if p.is_code and self.mark(p) == mark}
                    yield Demand(mark, lacking_ps, frozenset(own))


class _Course(NamedTuple):
    """A course of events up to some op.

    Attributes:
        gained_ps: how much longer it has taken since each mark.
        gone: the parcels that are away, a bit for each.
    """

    cost_ps: float
    gained_ps: tuple[float, ...]
    gone: int = 0

    def after(self, wait_ps: float, way: Way, gone: int) -> _Course:
        longer_ps = wait_ps + way.extra_ps
        gained_ps = tuple(gained + longer_ps for gained in self.gained_ps)
        return _Course(self.cost_ps + longer_ps + way.elsewhere_ps, gained_ps, gone)

    def waiting_ps(self, needs: Mapping[int, float]) -> float:
        """How long has to be waited until so much has been gained since these marks."""
        return max((0.0, *(need_ps - self.gained_ps[number] for number, need_ps in needs.items())))


class Half:
    """One half with its parcels and all that passes there besides ops."""

    def __init__(self, clock: Clock, parcels: Iterable[Parcel], loose: Iterable[Loose], limit_ps: float) -> None:
        self._clock, self._loose, self._limit_ps = clock, list(loose), limit_ps
        # Of a parcel that is wanted nobody knows when, nothing is known about its way back.
        known = [p for p in parcels if not clock.is_backward or p.wanted[0] < clock.num_ops]
        self._parcels = sorted(known, key=lambda p: -p.num_bytes)
        self._marks = sorted({clock.mark(p) for p in known}, reverse=clock.is_backward)
        self._number = {mark: number for number, mark in enumerate(self._marks)}
        self._passing: dict[tuple[int, Demand], float] = {}

    def longer_ps(self, events: Iterable[Event]) -> float:
        """What the half takes longer at least, and what is paid elsewhere for that; impossible above the limit."""
        courses, passed = [_Course(0.0, ())], 0
        for event in sorted(events, key=lambda e: e.place, reverse=self._clock.is_backward):
            while passed < len(self._marks) and self._is_passed(self._marks[passed], event):
                courses = [course._replace(gained_ps=(*course.gained_ps, 0.0)) for course in courses]
                passed += 1
            courses = self._after(event, courses)
            if not courses:
                return IMPOSSIBLE
        unpassed = (0.0,) * (len(self._marks) - passed)
        boundary = self._clock.boundary
        needs = self._needs(tuple(self._clock.demands(self._parcels, boundary)), boundary)
        # All of them are away at the boundary.
        ended = (course._replace(gained_ps=(*course.gained_ps, *unpassed)) for course in courses)
        return min(course.cost_ps + course.waiting_ps(needs) for course in ended)

    def _is_passed(self, mark: Place, event: Event) -> bool:
        return event.place < mark if self._clock.is_backward else mark < event.place

    def _after(self, event: Event, courses: list[_Course]) -> list[_Course]:
        """The courses that go on: each way with what has to be waited for, as long as it may be the best."""
        able = (number for number, parcel in enumerate(self._parcels) if self._clock.can_be_away(parcel, event))
        numbers = list(itertools.islice(able, _MOST_PARCELS))
        near = tuple(self._parcels[number] for number in numbers)
        all_bytes = sum(parcel.num_bytes for parcel in near)
        found: list[_Course] = []
        if event.ways and not any(event.ways[0][1:]):
            # Where there is room for all that has not gone, nothing is better than to go on.
            must_bytes = all_bytes + event.ways[0].workspace_bytes - event.room_bytes
            found = [c for c in courses if must_bytes <= self._gone_bytes(c, numbers)] if must_bytes > 0 else courses
            if len(found) == len(courses):
                return courses
            courses = [course for course in courses if must_bytes > self._gone_bytes(course, numbers)]
        for way in event.ways:
            room_bytes = event.room_bytes - way.workspace_bytes
            if room_bytes < 0:
                continue
            choices: dict[int, list[tuple[int, dict[int, float]]]] = {}
            for course in courses:
                if course.gone not in choices:
                    found_now = self._choices(near, numbers, all_bytes - room_bytes, event, course.gone)
                    choices[course.gone] = list(found_now)
                for gone, needs in choices[course.gone]:
                    after = course.after(course.waiting_ps(needs), way, gone)
                    if after.cost_ps <= self._limit_ps:
                        found.append(after)
        return _worth_following(found)

    def _gone_bytes(self, course: _Course, numbers: list[int]) -> int:
        return sum(self._parcels[number].num_bytes for number in numbers if course.gone >> number & 1)

    def _choices(
        self, near: tuple[Parcel, ...], numbers: list[int], must_bytes: int, event: Event, gone: int
    ) -> Iterator[tuple[int, dict[int, float]]]:
        """Each least set of parcels that leaves room by being away, and what must have been gained since which mark.

        Those that are gone are among them; of these that are not near, nothing is known here.
        """
        taken: list[int] = []
        gone_near = sum(1 << place for place, number in enumerate(numbers) if gone >> number & 1)
        start = event.at if event.is_again or not self._clock.is_backward else event.at + 1
        for subset, num_bytes, demands in self._clock.subsets(near, event):
            if subset & gone_near != gone_near or num_bytes < must_bytes:
                continue
            if any(subset & smaller == smaller for smaller in taken):
                continue
            taken.append(subset)
            if subset == gone_near:
                yield gone, {}  # there was less time for that before
                return
            more = sum(1 << number for place, number in enumerate(numbers) if subset >> place & 1)
            yield gone | more, self._needs(demands, start)

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
            return sum(t.duration_ps for t in self._loose if t.last >= demand.mark[0] and t.first < moment)
        # A code is decoded once it is there: that is no time for itself to come.
        return sum(
            t.duration_ps
            for t in self._loose
            if t.last >= moment
            and t.first <= demand.mark[0]
            and not (t.code_of in demand.codes_of and t.first == demand.mark[0])
        )


def _worth_following(courses: list[_Course]) -> list[_Course]:
    """Those that no other one is better than in all respects; if there are too many, the dearest are made one."""
    found: list[_Course] = []
    for course in sorted(courses):
        if not any(_is_as_good(other, course) for other in found):
            found.append(course)
    if len(found) <= _MOST_COURSES:
        return found
    *kept, first = found[:_MOST_COURSES]
    dear = found[_MOST_COURSES - 1 :]
    gone = first.gone
    for course in dear:
        gone &= course.gone
    gained_ps = tuple(map(max, zip(*(course.gained_ps for course in dear), strict=True)))
    return [*kept, _Course(first.cost_ps, gained_ps, gone)]


def _is_as_good(one: _Course, other: _Course) -> bool:
    """Of one that costs no more: if it has gained as much, and nothing has gone that has not there too."""
    return one.gone & ~other.gone == 0 and all(a >= b for a, b in zip(one.gained_ps, other.gained_ps, strict=True))
