"""overlap: send activations away beside compute, bring them back one ahead (Hascoet et al. 2019).

    forward:   the copy of a storage begins with its last reader, and goes on past it if it takes longer; the storage is
               dropped at the first op by which both have ended. At most `run_ahead` copies are under way: whoever wants
               to begin one more waits for the oldest.
    backward:  when what was sent begins to be used, the next one needed begins to come back, and is waited for right
               before its own first use.

In the paper a helper thread waits and drops, and nothing bounds how far compute runs ahead of it. Here the program says
at which op a storage is dropped, by the prices it was planned with, and the bound is searched. What is still under way
when the forward half ends is waited for there.

Storages travel if the forward half makes them and backward reads them, whatever layer they belong to; parameters never.
These stay:

- small ones, which cost more than they free: under 1 MiB each, or the smallest that together make 1 % of all;
- those that are needed again before they would have left. A copy that nobody waits for frees nothing, so none is begun.

The paper has no budget: everything travels, with the bound that gives the smallest peak, and of those the fastest. With
a budget only as many travel as it takes, nearest to the input first, since those are away longest: the fastest plan
that fits of twelve shares of all bytes, each by every bound.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from memfit.capture.step import Step
from memfit.cost.costs import Costs, Link
from memfit.plan.checkpointing.pool import Entry, Pool, remembered
from memfit.plan.decisions import Decision, Decisions, Moments, Offload
from memfit.plan.lower import lower_states
from memfit.plan.offloading.way_out import tier_of
from memfit.plan.policies.policy import Policy
from memfit.plan.problem import Problem
from memfit.plan.simulate import simulate

RUN_AHEAD = (1, 2, 4, 8)
"""How many copies out may be under way; of bounds that do as well the tightest is taken."""

SMALL_BYTES = 2**20
_SMALL_SHARE = 100
_NUM_LEVELS = 12


@dataclass(frozen=True)
class Traveller:
    """A storage that may be sent away.

    Attributes:
        ready: the first op at which it is written no more and its last reader begins; its copy may begin there.
        last_forward: the last forward op that uses it.
        first_backward: the first backward op that does.
    """

    storage: int
    num_bytes: int
    ready: int
    last_forward: int
    first_backward: int


def travellers(problem: Problem) -> tuple[Traveller, ...]:
    """What is worth sending away, in the order in which copies may begin."""
    step, reruns = problem.step, problem.reruns
    read = [s for s in reruns.owned if step.storage[s].first_backward is not None]
    ascending = sorted(read, key=lambda s: (step.storage_bytes[s], s))
    sums = accumulate(step.storage_bytes[s] for s in ascending)
    total = sum(step.storage_bytes[s] for s in read)
    small = {s for s, sum_ in zip(ascending, sums, strict=True) if sum_ * _SMALL_SHARE < total}
    found = []
    for storage in read:
        life = step.storage[storage]
        if storage in small or life.bytes < SMALL_BYTES or reruns.why_not_offload(storage):
            continue
        assert life.last_forward is not None and life.first_backward is not None
        ready = max(reruns.writers[storage][-1] + 1, life.last_forward)
        found.append(Traveller(storage, life.bytes, ready, life.last_forward, life.first_backward))
    return tuple(sorted(found, key=lambda t: (t.ready, t.storage)))


def timetable(
    problem: Problem, tier: str, moved: Sequence[Traveller], *, run_ahead: int, ahead: bool = True
) -> dict[int, Moments]:
    """When each of these travels; those missing are needed again before they would have left.

    With `ahead` the next one needed begins to come back when the one before begins to be used, without it only when it
    is needed.
    """
    departures = _departures(problem, problem.costs.link(tier), moved, run_ahead)
    there = [t for t in moved if t.storage in departures]
    needed = sorted({t.first_backward for t in there})
    begins = dict(zip(needed, [problem.num_forward, *needed], strict=False)) if ahead else {op: op for op in needed}
    return {
        t.storage: Moments(
            departures[t.storage].send, departures[t.storage].sent, begins[t.first_backward], t.first_backward
        )
        for t in there
    }


@dataclass
class _Departure:
    """One copy out: the ops in front of which it begins and is waited for, and when it ends."""

    traveller: Traveller
    send: int
    end_ps: int
    sent: int = -1


def _departures(problem: Problem, link: Link, moved: Sequence[Traveller], run_ahead: int) -> dict[int, _Departure]:
    """Walk the forward half until every copy that is begun ends before its storage is needed again."""
    num_forward = problem.num_forward
    until_ps = list(accumulate(problem.op_ps[num_forward:], initial=0))
    while True:
        departures, end_ps = _walk(problem, link, moved, run_ahead)
        late = {
            d.traveller.storage
            for d in departures
            if d.end_ps > end_ps + until_ps[d.traveller.first_backward - num_forward]
        }
        if not late:
            return {d.traveller.storage: d for d in departures}
        moved = [t for t in moved if t.storage not in late]


def _walk(problem: Problem, link: Link, moved: Sequence[Traveller], run_ahead: int) -> tuple[list[_Departure], int]:
    """The forward half with its copies out, and when its last op ends, before what is left is waited for."""
    clock_ps = channel_ps = 0
    departures: list[_Departure] = []
    under_way: list[_Departure] = []
    due: dict[int, list[Traveller]] = {}
    for traveller in moved:
        due.setdefault(traveller.ready, []).append(traveller)

    def drop(gone: list[_Departure], op: int) -> None:
        for departure in gone:
            departure.sent = op
            under_way.remove(departure)

    def begin(traveller: Traveller, op: int) -> None:
        nonlocal channel_ps
        channel_ps = max(clock_ps, channel_ps) + link.send_ps(traveller.num_bytes)
        departures.append(_Departure(traveller, op, channel_ps))
        under_way.append(departures[-1])

    for op in range(problem.num_forward):
        waiting = due.pop(op, [])
        read = [d for d in under_way if d.traveller.last_forward < op]
        drop([d for d in read if d.end_ps <= clock_ps], op)
        for departure in [d for d in read if d.sent < 0]:
            if len(under_way) + len(waiting) <= run_ahead:
                break
            clock_ps = max(clock_ps, departure.end_ps)
            drop([departure], op)
        room = run_ahead - len(under_way)
        for traveller in waiting[:room]:
            begin(traveller, op)
        if waiting[room:]:
            # What the bound keeps from beginning is first in the next queue.
            due[op + 1] = [*waiting[room:], *due.get(op + 1, [])]
        clock_ps += problem.op_ps[op]
    end_ps = clock_ps
    for traveller in chain.from_iterable(due.values()):
        begin(traveller, problem.num_forward)
    drop(list(under_way), problem.num_forward)
    return departures, end_ps


def decide(step: Step, costs: Costs, budget_bytes: int | None) -> Decisions:
    """Everything that is worth it, or with a budget as little as it takes."""
    pool = _everything(step, costs, ahead=True) if budget_bytes is None else _levels_ahead(step, costs)
    return pool.best(budget_bytes).decisions


def decide_on_demand(step: Step, costs: Costs, budget_bytes: int | None) -> Decisions:
    """The same with every storage brought back only when it is needed."""
    pool = _everything(step, costs, ahead=False) if budget_bytes is None else _levels_on_demand(step, costs)
    return pool.best(budget_bytes).decisions


def _everything(step: Step, costs: Costs, *, ahead: bool) -> Pool:
    """One plan for each bound."""
    pool = Pool.of(step, costs)
    _add(pool, travellers(pool.problem), ahead=ahead)
    return pool


@remembered
def _levels_ahead(step: Step, costs: Costs) -> Pool:
    return _levels(step, costs, ahead=True)


@remembered
def _levels_on_demand(step: Step, costs: Costs) -> Pool:
    return _levels(step, costs, ahead=False)


def _levels(step: Step, costs: Costs, *, ahead: bool) -> Pool:
    """The same with more and more storages, from none to all."""
    pool = Pool.of(step, costs)
    moved = travellers(pool.problem)
    sums = list(accumulate((t.num_bytes for t in moved), initial=0))
    bounds = [sums[-1] * level / _NUM_LEVELS for level in range(_NUM_LEVELS + 1)]
    for count in sorted({bisect_right(sums, bound) - 1 for bound in bounds}):
        _add(pool, moved[:count], ahead=ahead)
    return pool


def _add(pool: Pool, moved: Sequence[Traveller], *, ahead: bool) -> None:
    """Evaluate plans in which these travel, one for each bound that makes a difference."""
    problem, tier = pool.problem, tier_of(pool.problem.costs)
    tried: list[dict[int, Moments]] = []
    for run_ahead in RUN_AHEAD:
        moments = timetable(problem, tier, moved, run_ahead=run_ahead, ahead=ahead)
        if moments not in tried:
            tried.append(moments)
            decisions: dict[int, Decision] = {s: Offload(tier, when) for s, when in sorted(moments.items())}
            # Not by the native evaluator: it finds moments of its own.
            program = lower_states(problem, problem.states(decisions), moments=moments)
            timeline = simulate(program, problem.costs)
            pool.entries.append(Entry(decisions, timeline.peak_bytes, timeline.step_ps))


OVERLAP = Policy("overlap", "send activations away beside compute, fetch one ahead (Hascoet et al. 2019)", decide, True)
OVERLAP_ON_DEMAND = Policy(
    "overlap-on-demand", "as overlap, but fetch only what is needed: what prefetching is worth", decide_on_demand, True
)
