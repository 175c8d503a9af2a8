"""sqrt: segments of a chain (Chen et al. 2016), about as many as the square root of its length.

The chain is that of the boundaries (storage_graph.py). Two ways to cut it: evenly, into sqrt(n) segments, and
greedily, a new one whenever the tensors of the running segment exceed a threshold, which is searched. The last segment
is kept: it would be run again at once. With a budget the fastest cut that fits is taken, without one the smallest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from memfit.capture.step import Step
from memfit.cost.costs import Costs
from memfit.plan.checkpointing.pool import Pool, remembered
from memfit.plan.checkpointing.storage_graph import StorageGraph
from memfit.plan.decisions import Decisions
from memfit.plan.policies.policy import Policy

_NUM_THRESHOLDS = 48


def decide(step: Step, costs: Costs, budget_bytes: int | None) -> Decisions:
    """The best of all cuts."""
    return _pool(step, costs).best(budget_bytes).decisions


@remembered
def _pool(step: Step, costs: Costs) -> Pool:
    graph = StorageGraph.of(step)
    pool = Pool.of(step, costs)
    for checkpoints in cuts(graph):
        pool.add(graph.decisions_but_the_last(checkpoints))
    return pool


def cuts(graph: StorageGraph) -> list[frozenset[int]]:
    """All the cuts, even and greedy, each once."""
    return list(dict.fromkeys([*_even(graph), *_greedy(graph)]))


def _even(graph: StorageGraph) -> Iterator[frozenset[int]]:
    """sqrt(n) segments of equal length, and one more or less."""
    chain = list(graph.boundaries.values())
    for segments in {max(1, round(math.sqrt(len(chain))) + change) for change in (-1, 0, 1)}:
        yield frozenset().union(*(chain[len(chain) * k // segments] for k in range(1, segments)))


def _greedy(graph: StorageGraph) -> Iterator[frozenset[int]]:
    """Segments that end once their tensors exceed a threshold, for thresholds up to the whole."""
    total = graph.up_to_bytes[-1]
    for k in range(1, _NUM_THRESHOLDS + 1):
        threshold = total * (k / _NUM_THRESHOLDS) ** 2
        running, checkpoints = 0, list[int]()
        for vertex in range(1, graph.target):
            running += graph.num_bytes(vertex)
            if running > threshold and vertex in graph.boundaries:
                checkpoints += graph.boundaries[vertex]
                running = 0
        yield frozenset(checkpoints)


SQRT = Policy("sqrt", "recompute between about sqrt(n) checkpoints (Chen et al. 2016)", decide, asks_costs=True)
