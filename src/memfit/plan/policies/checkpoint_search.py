"""checkpoint-search: the optimal checkpoints of Feng and Huang (CVPR 2021) on any graph.

They minimise the elements of all checkpoints plus those of the largest segment between them, among segments with one
way in and one way out, each recomputed once. Memory is all they look at: there is no budget, and no time.
"""

from __future__ import annotations

from memfit.capture.step import Step
from memfit.cost.costs import Costs
from memfit.plan.checkpointing.graph import Graph
from memfit.plan.checkpointing.search import search
from memfit.plan.checkpointing.storage_graph import StorageGraph
from memfit.plan.decisions import Decisions
from memfit.plan.policies.policy import Policy


def decide(step: Step, costs: Costs, budget_bytes: int | None) -> Decisions:
    """Keep the optimal checkpoints, whatever the budget."""
    graph = StorageGraph.of(step)
    return graph.decisions(found_checkpoints(graph))


def found_checkpoints(graph: StorageGraph) -> frozenset[int]:
    """The optimal checkpoints of a graph of storages, in elements."""
    weights = (0, *(graph.num_elements(v) for v in range(1, graph.target)), 0)
    return search(Graph(weights, tuple(sorted(graph.edges)))).checkpoints


CHECKPOINT_SEARCH = Policy(
    "checkpoint-search", "recompute between the optimal checkpoints of Feng and Huang (2021)", decide
)
