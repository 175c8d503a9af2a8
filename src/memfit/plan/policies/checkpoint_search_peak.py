"""checkpoint-search-peak: recompute once between checkpoints, as checkpoint-search, but for the true peak.

Feng and Huang minimise all checkpoints plus the largest segment. In truth checkpoints go as backward passes them, and
gradients, saved tensors, workspaces and what is not worth recomputing count too. So the candidates are

- cuts of the chain of boundaries that are best when checkpoints are freed on the way, for many bounds;
- the cuts of checkpoint-search and of sqrt, the last segment recomputed or kept;
- each of the best of them with as much kept as does not raise its peak, or raises it to one of several levels.

All are judged by the simulator. With a budget the fastest that fits is taken; without one, the smallest of those that
take no more time than checkpoint-search, and less than one forward pass longer than keeping everything.
"""

from __future__ import annotations

from collections.abc import Iterator

from memfit.capture.step import Step
from memfit.cost.costs import Costs
from memfit.plan.checkpointing.pool import Entry, Pool, remembered
from memfit.plan.checkpointing.storage_graph import StorageGraph
from memfit.plan.decisions import Decision, Decisions, Keep, Recompute
from memfit.plan.policies.checkpoint_search import found_checkpoints
from memfit.plan.policies.policy import Policy
from memfit.plan.policies.sqrt import cuts
from memfit.plan.problem import DROP, KEEP

_NUM_BOUNDS = 40
_NUM_LEVELS = 16
_NUM_REFINED = 5
_LONGEST = 1.33  # times keep: every forward op once more, where backward takes twice as long as forward


def decide(step: Step, costs: Costs, budget_bytes: int | None) -> Decisions:
    """The best of the candidates."""
    pool = _pool(step, costs)
    if budget_bytes is not None:
        return pool.best(budget_bytes).decisions
    search, keep = pool.entries[0], min(pool.entries, key=lambda e: e.step_ps)
    longest_ps = min(search.step_ps, keep.step_ps * _LONGEST)
    quick = [entry for entry in pool.entries if entry.step_ps <= longest_ps]
    return min(quick, key=lambda e: (e.peak_bytes, e.step_ps)).decisions


@remembered
def _pool(step: Step, costs: Costs) -> Pool:
    """All candidates; checkpoint-search's own plan is the first."""
    graph = StorageGraph.of(step)
    pool = Pool.of(step, costs)
    pool.add(graph.decisions(found_checkpoints(graph)))
    for checkpoints in sorted({*_freed_on_the_way(graph), *cuts(graph)}, key=sorted):
        pool.add(graph.decisions(checkpoints))
        pool.add(graph.decisions_but_the_last(checkpoints))
    keep = pool.add(dict.fromkeys(pool.problem.reruns.recomputable, Keep()) | _defaults(pool))
    for entry in sorted(pool.entries, key=lambda e: (e.peak_bytes, e.step_ps))[:_NUM_REFINED]:
        _keep_more(pool, entry, entry.peak_bytes)
    smallest = pool.best(None)
    for level in range(1, _NUM_LEVELS):
        span = keep.peak_bytes - smallest.peak_bytes
        _keep_more(pool, smallest, smallest.peak_bytes + span * level // _NUM_LEVELS)
    return pool


def _defaults(pool: Pool) -> dict[int, Decision]:
    """Nothing recomputed: what backward does not read is dropped."""
    step = pool.problem.step
    return {s: Recompute() for s in pool.problem.reruns.recomputable if step.storage[s].first_backward is None}


def _freed_on_the_way(graph: StorageGraph) -> Iterator[frozenset[int]]:
    """For many bounds the cut with the fewest bytes of checkpoints of which no segment exceeds the bound.

    A segment needs the checkpoints before it, its own tensors and its end: those after it are gone by then.
    """
    chain = [0, *graph.boundaries, graph.target]
    size = [0, *map(graph.frontier_bytes, graph.boundaries), 0]
    up_to = graph.up_to_bytes
    total = up_to[-1]
    for k in range(1, _NUM_BOUNDS + 1):
        bound = total * (k / _NUM_BOUNDS) ** 1.5
        prefix: list[float] = [0.0, *[float("inf")] * (len(chain) - 1)]
        came_from = [0] * len(chain)
        for j in range(1, len(chain)):
            for i in reversed(range(j)):
                interior = up_to[chain[j] - 1] - up_to[chain[i]]
                if interior > bound:
                    break
                need = prefix[i] + interior + size[j]
                if need <= bound and prefix[i] + size[j] < prefix[j]:
                    prefix[j], came_from[j] = prefix[i] + size[j], i
        if prefix[-1] == float("inf"):
            continue
        found, at = list[int](), came_from[-1]
        while at:
            found += graph.boundaries[chain[at]]
            at = came_from[at]
        yield frozenset(found)


def _keep_more(pool: Pool, entry: Entry, limit_bytes: int) -> None:
    """Keep what is dearest to recompute for its bytes as long as the peak stays within the limit; add the result."""
    problem, evaluator = pool.problem, pool.evaluator
    size = problem.step.storage_bytes
    states = evaluator.array(problem.states(entry.decisions))
    dropped = [s for s in problem.reruns.recomputable if states[s] == DROP]

    def worth(storage: int) -> tuple[float, int]:
        seconds = sum(problem.op_ps[w] for w in problem.reruns.writers[storage])
        return (-seconds / max(size[storage], 1), storage)

    step_ps = entry.step_ps
    decisions = dict(entry.decisions)
    for storage in sorted(dropped, key=worth):
        states[storage] = KEEP
        outcome = evaluator.evaluate(states)
        if outcome.peak_bytes <= limit_bytes and outcome.step_ps <= step_ps:
            step_ps = outcome.step_ps
            decisions[storage] = Keep()
        else:
            states[storage] = DROP
    pool.add(decisions)


CHECKPOINT_SEARCH_PEAK = Policy(
    "checkpoint-search-peak",
    "checkpoints for the least true peak, or the least time in a budget",
    decide,
    asks_costs=True,
)
