"""Timetables of one Step for many limits, each with its true peak and time: what offloading policies choose from.

The limits lie between the least peak that offloading can reach and that of keeping everything. They do not depend on
the budget, so neither do the timetables: a larger budget never gets a slower plan, nor one with a smaller peak.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from memfit.capture.step import Step
from memfit.cost.costs import Costs
from memfit.plan.checkpointing.pool import Entry, Pool
from memfit.plan.decisions import Decisions
from memfit.plan.evaluate import Evaluator
from memfit.plan.lower import lower
from memfit.plan.offloading.dp import solve_dp
from memfit.plan.offloading.greedy import shortest_prefix
from memfit.plan.offloading.step_bound import offload_bound_ps
from memfit.plan.offloading.step_chain import Item, Luggage, grouped
from memfit.plan.offloading.step_timetable import Timetable, timetable
from memfit.plan.problem import Problem
from memfit.plan.simulate import simulate

_NUM_LIMITS = 32
_PATIENCE = 3  # so many longer prefixes in a row that are no better end the search
_MAX_GROUPS = 40
_WIDTH = 16
_OPS_WALKED = 1_500_000  # by all timetables that improving a pool makes: two or three seconds


@dataclass
class StepPool:
    """For each limit the fastest timetable found so far.

    Attributes:
        others: plans that were made elsewhere; what they send gets timetables too.
    """

    luggage: Luggage
    limits: list[int]
    best: dict[int, Timetable] = field(default_factory=dict)
    others: list[Entry] = field(default_factory=list)
    _bounds_ps: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, step: Step, costs: Costs, tier: str) -> StepPool:
        luggage = Luggage.of(Problem.of(step, costs), tier)
        floor, most = luggage.floor_bytes(luggage.worthwhile), luggage.keep_peak_bytes
        limits = [floor + (most - floor) * k // _NUM_LIMITS for k in range(_NUM_LIMITS)]
        return cls(luggage, list(dict.fromkeys(limits)))

    def add_plan(self, decisions: Decisions) -> None:
        """Take in a plan that was made elsewhere, and its peak as one more limit."""
        problem = self.luggage.problem
        timeline = simulate(lower(problem.step, decisions, problem.costs), problem.costs)
        self.others.append(Entry(dict(decisions), timeline.peak_bytes, timeline.step_ps))
        if self.limits[0] <= timeline.peak_bytes < self.luggage.keep_peak_bytes:
            self.limits.append(timeline.peak_bytes)

    def offer(self, away: Collection[Item], limit_bytes: int, *, both: bool = True) -> bool:
        """Make the timetable of these items, or both that there are; whether one is faster than the best so far."""
        is_better = False
        for early in (True, False) if both else (True,):
            best = self.best.get(limit_bytes)
            known_ps = None if best is None else best.step_ps
            found = timetable(self.luggage, away, limit_bytes, early=early, known_ps=known_ps)
            if found is not None:
                self.best[limit_bytes] = found
                is_better = True
        return is_better

    def waits(self, limit_bytes: int) -> bool:
        """Whether the best timetable of that limit waits longer than any must."""
        if limit_bytes not in self._bounds_ps:
            self._bounds_ps[limit_bytes] = offload_bound_ps(self.luggage, limit_bytes) or 0
        best = self.best.get(limit_bytes)
        return best is None or best.step_ps - self.luggage.work_ps > self._bounds_ps[limit_bytes]

    def fill_greedily(self) -> None:
        """Offer prefixes, of all items and of what convolutions read: the shortest that is enough, and longer ones."""
        items = self.luggage.worthwhile
        elsewhere = [[item for item in self.luggage.items if item.storage in plan.decisions] for plan in self.others]
        for limit_bytes in self.limits:
            enough = shortest_prefix(self.luggage.chain([[item] for item in items], limit_bytes))
            first = 0 if enough is None else len(enough)
            for of in (items, [item for item in items if item.feeds_convolution]):
                # Of the convolutions' inputs the prefix that ends at the same place.
                start = first if of is items else sum(item.feeds_convolution for item in items[:first])
                self._offer_longer(of, start, limit_bytes)
            for away in (items, *elsewhere):
                self.offer(away, limit_bytes)

    def _offer_longer(self, items: Sequence[Item], start: int, limit_bytes: int) -> None:
        """Offer prefixes from that length on, in growing steps, until they get no better."""
        since = 0
        for length in _lengths(start, len(items)):
            if not self.waits(limit_bytes):
                return
            since = 0 if self.offer(items[:length], limit_bytes) else since + 1
            if since >= _PATIENCE and limit_bytes in self.best:
                return

    def improve(self) -> None:
        """Offer the dynamic program's choices, those of the next limit, and those that differ from the best by one."""
        groups = grouped(self.luggage.worthwhile, _MAX_GROUPS)
        pressed = sorted(limit_bytes for limit_bytes in self.limits if self.waits(limit_bytes))
        for limit_bytes in pressed:
            solution = solve_dp(self.luggage.chain(groups, limit_bytes), width=_WIDTH)
            if solution is not None:
                self.offer([item for stage in solution.schedule.away for item in groups[stage]], limit_bytes)
        for neighbours in (pairwise(pressed), pairwise(reversed(pressed))):
            for one, other in neighbours:
                if one in self.best:
                    self.offer(self.best[one].away, other)
        num_offers = _OPS_WALKED // (self.luggage.problem.num_ops * max(1, len(pressed)))
        for limit_bytes in pressed:
            self._exchange(limit_bytes, num_offers)

    def _exchange(self, limit_bytes: int, num_offers: int) -> None:
        """Keep an item that the best sends, or send one that it keeps, as long as that is better; large ones first."""
        items = sorted(self.luggage.worthwhile, key=lambda item: -item.num_bytes)
        since = 0
        while limit_bytes in self.best and since < len(items) and self.waits(limit_bytes):
            for item in items:
                if num_offers == 0 or since >= len(items):
                    return
                num_offers -= 1
                away = self.best[limit_bytes].away
                changed = [i for i in away if i != item] if item in away else [*away, item]
                since = 0 if self.offer(changed, limit_bytes, both=False) else since + 1

    def pool(self) -> Pool:
        """The plans that no other beats in peak and time, the keep plan among them."""
        problem = self.luggage.problem
        plans = [Entry({}, self.luggage.keep_peak_bytes, self.luggage.work_ps), *self.others]
        plans += [Entry(found.decisions(), found.peak_bytes, found.step_ps) for found in self.best.values()]
        entries: list[Entry] = []
        for plan in sorted(plans, key=lambda plan: (plan.peak_bytes, plan.step_ps)):
            if not entries or plan.step_ps < entries[-1].step_ps:
                entries.append(plan)
        return Pool(problem, Evaluator.of(problem), entries)


def _lengths(start: int, end: int) -> Iterator[int]:
    """From start to end in steps that grow, as longer prefixes differ less and less."""
    length, stride = start, 1
    while length < end:
        yield length
        length += stride
        stride += 1
    yield end


def without_waiting(pool: Pool) -> Entry:
    """The smallest plan that takes no longer than the fastest: without a budget, sending is free or not done."""
    fastest_ps = min(entry.step_ps for entry in pool.entries)
    return min((e for e in pool.entries if e.step_ps == fastest_ps), key=lambda e: e.peak_bytes)
