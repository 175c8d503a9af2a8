"""When chosen storages of a Step travel, within a limit: the schedule a program follows, exactly as simulated.

Forward: a storage may be sent once it is written for the last time, and is gone once it has left and nothing in the
forward half reads it any more. The link takes up the next one only when it is about to be free, and of those that are
ready the one whose last use comes first: one that is still read may fill a gap but does not get in the way.
Backward: in reversed time, a fetch is a send after the first use (see chain.py).
Compute waits only where the next op would not fit, and at the end of forward for what is still on its way.

Every transfer begins and is waited for in front of an op. The result is a set of Moments, so the program does not
depend on the budget, and its peak and time are those found here (tests/test_offload_policies.py holds the two against
each other).
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass

from memfit.plan.decisions import Decision, Moments, Offload
from memfit.plan.offloading.step_chain import Item, Luggage


@dataclass(frozen=True, slots=True)
class Timetable:
    """What travels when, and what follows from that.

    Attributes:
        sends, sents, fetches: by storage, the op in front of which it starts to leave, has left, starts to come back.
        step_ps, peak_bytes: of the whole step.
    """

    luggage: Luggage
    away: tuple[Item, ...]
    sends: dict[int, int]
    sents: dict[int, int]
    fetches: dict[int, int]
    step_ps: int
    peak_bytes: int

    def decisions(self) -> dict[int, Decision]:
        """As a policy returns it."""
        return {
            item.storage: Offload(
                self.luggage.tier,
                Moments(
                    self.sends[item.storage],
                    self.sents[item.storage],
                    self.fetches[item.storage],
                    item.first_backward,
                ),
            )
            for item in sorted(self.away, key=lambda item: item.storage)
        }


def timetable(
    luggage: Luggage, away: Collection[Item], limit_bytes: int, *, early: bool, known_ps: int | None = None
) -> Timetable | None:
    """The timetable of these items, or None if an op does not fit even when all that can be gone is.

    With `early` they may leave once they are written; without, when their last reader begins. Only a timetable whose
    step takes less than `known_ps` is sought.
    """
    if known_ps is not None and _least_ps(luggage, away) >= known_ps:
        return None
    departures = _depart(luggage, away, limit_bytes, early)
    if departures is None:
        return None
    if known_ps is not None and departures.end_ps + luggage.until_backward_ps[-1] >= known_ps:
        return None
    returns = _return(luggage, away, limit_bytes)
    if returns is None:
        return None
    step_ps = departures.end_ps + returns.end_ps
    if known_ps is not None and step_ps >= known_ps:
        return None
    between = luggage.boundary_bytes - sum(item.num_bytes for item in away)
    return Timetable(
        luggage,
        tuple(away),
        departures.sends,
        departures.sents,
        returns.fetches,
        step_ps,
        max(departures.peak_bytes, returns.peak_bytes, between),
    )


def _least_ps(luggage: Luggage, away: Collection[Item]) -> int:
    """What the step takes at least: neither half is over before its ops are, nor before its transfers."""
    link, backward_ps = luggage.link, luggage.until_backward_ps[-1]
    return max(luggage.work_ps - backward_ps, sum(link.send_ps(item.num_bytes) for item in away)) + max(
        backward_ps, sum(link.fetch_ps(item.num_bytes) for item in away)
    )


@dataclass(slots=True)
class _Departures:
    sends: dict[int, int]
    sents: dict[int, int]
    end_ps: int
    peak_bytes: int


def _depart(luggage: Luggage, away: Collection[Item], limit_bytes: int, early: bool) -> _Departures | None:
    """Walk the forward half."""
    problem, link = luggage.problem, luggage.link
    op_ps, needs = problem.op_ps, luggage.keep_bytes
    found = _Departures({}, {}, 0, 0)
    ready: dict[int, list[Item]] = defaultdict(list)
    for item in away:
        ready[item.written + 1 if early else max(item.written + 1, item.last_forward)].append(item)
    waiting: list[tuple[int, int, Item]] = []
    under_way: list[tuple[int, Item]] = []
    now_ps = free_ps = gone_bytes = peak_bytes = 0
    for op in range(problem.num_forward):
        if op in ready:
            for item in ready[op]:
                heapq.heappush(waiting, (item.last_forward, item.storage, item))
        if under_way:
            for end_ps, item in [t for t in under_way if t[0] <= now_ps and t[1].last_forward < op]:
                under_way.remove((end_ps, item))
                found.sents[item.storage] = op
                gone_bytes += item.num_bytes
        forced: list[Item] = []
        if (excess := needs[op] - gone_bytes - limit_bytes) > 0:
            for end_ps, item in [t for t in under_way if t[1].last_forward < op]:
                if excess <= 0:
                    break
                now_ps = max(now_ps, end_ps)
                under_way.remove((end_ps, item))
                found.sents[item.storage] = op
                gone_bytes += item.num_bytes
                excess -= item.num_bytes
            while excess > 0 and waiting and waiting[0][0] < op:
                forced.append(heapq.heappop(waiting)[2])
                excess -= forced[-1].num_bytes
            if excess > 0:
                return None
            # In the order that lowering gives to what starts in front of one op.
            for item in sorted(forced, key=lambda item: item.storage):
                free_ps = max(now_ps, free_ps) + link.send_ps(item.num_bytes)
                found.sends[item.storage] = found.sents[item.storage] = op
                gone_bytes += item.num_bytes
            if forced:
                now_ps = free_ps
        end_ps = now_ps + op_ps[op]
        if waiting and free_ps < end_ps:
            last = max((item.storage for item in forced), default=-1)
            begun, busy_ps = [], free_ps
            while waiting and busy_ps < end_ps and waiting[0][1] > last:
                begun.append(heapq.heappop(waiting)[2])
                busy_ps = max(now_ps, busy_ps) + link.send_ps(begun[-1].num_bytes)
            for item in sorted(begun, key=lambda item: item.storage):
                free_ps = max(now_ps, free_ps) + link.send_ps(item.num_bytes)
                found.sends[item.storage] = op
                under_way.append((free_ps, item))
        if needs[op] - gone_bytes > peak_bytes:
            peak_bytes = needs[op] - gone_bytes
        now_ps = end_ps
    last_op = problem.num_forward
    left = [item for _, _, item in waiting] + ready[last_op]
    for item in sorted(left, key=lambda item: item.storage):
        free_ps = max(now_ps, free_ps) + link.send_ps(item.num_bytes)
        found.sends[item.storage] = last_op
        under_way.append((free_ps, item))
    for _, item in under_way:
        found.sents[item.storage] = last_op
    found.end_ps = max(now_ps, free_ps)
    found.peak_bytes = peak_bytes
    return found


@dataclass(slots=True)
class _Returns:
    fetches: dict[int, int]
    end_ps: int
    peak_bytes: int


def _return(luggage: Luggage, away: Collection[Item], limit_bytes: int) -> _Returns | None:
    """Walk the backward half in reversed time to find where fetches start, then forth to find how long it takes."""
    problem, link = luggage.problem, luggage.link
    op_ps, needs = problem.op_ps, luggage.keep_bytes
    fetches: dict[int, int] = {}
    used: dict[int, list[Item]] = defaultdict(list)
    for item in sorted(away, key=lambda item: -item.storage):
        used[item.first_backward].append(item)
    under_way: deque[tuple[int, Item]] = deque()
    now_ps = free_ps = absent_bytes = peak_bytes = 0
    for op in reversed(range(problem.num_forward, problem.num_ops)):
        while under_way and (under_way[0][0] <= now_ps or needs[op] - absent_bytes > limit_bytes):
            end_ps, item = under_way.popleft()
            now_ps = max(now_ps, end_ps)
            fetches[item.storage] = op + 1
            absent_bytes += item.num_bytes
        need_bytes = needs[op] - absent_bytes
        if need_bytes > limit_bytes:
            return None
        if need_bytes > peak_bytes:
            peak_bytes = need_bytes
        now_ps += op_ps[op]
        if op in used:
            for item in used[op]:
                free_ps = max(now_ps, free_ps) + link.fetch_ps(item.num_bytes)
                under_way.append((free_ps, item))
    for _, item in under_way:
        fetches[item.storage] = problem.num_forward
    return _Returns(fetches, _arrive(luggage, away, fetches), peak_bytes)


def _arrive(luggage: Luggage, away: Collection[Item], fetches: dict[int, int]) -> int:
    """How long the backward half takes if fetches start there: no longer than the walk in reversed time thought."""
    problem, link = luggage.problem, luggage.link
    until_ps = luggage.until_backward_ps
    num_forward = problem.num_forward
    order = sorted(away, key=lambda item: (item.first_backward, item.storage))
    events = sorted(
        [(fetches[item.storage], 0, index) for index, item in enumerate(order)]
        + [(item.first_backward, 1, index) for index, item in enumerate(order)]
    )
    ends_ps = [0] * len(order)
    free_ps = waited_ps = 0
    for op, is_use, index in events:
        now_ps = until_ps[op - num_forward] + waited_ps
        if is_use:
            waited_ps += max(0, ends_ps[index] - now_ps)
        else:
            free_ps = max(now_ps, free_ps) + link.fetch_ps(order[index].num_bytes)
            ends_ps[index] = free_ps
    return until_ps[-1] + waited_ps
