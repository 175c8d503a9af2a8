"""Checkpoint search on weighted graphs: the optimum of Feng and Huang (CVPR 2021), and their view of a step.

from memfit.plan.checkpointing import Graph, paper_graph, search

solution = search(Graph(weights=(0, 4, 1, 4, 0), edges=((0, 1), (1, 2), (2, 3), (3, 4))))
solution.total, solution.checkpoints                  # 5, {2}
search(paper_graph(step)).total                       # elements that a captured step would store at once
"""

from memfit.plan.checkpointing.division import Division, divide
from memfit.plan.checkpointing.graph import BadGraph, Graph, splittable
from memfit.plan.checkpointing.paper_graph import paper_graph
from memfit.plan.checkpointing.search import Segment, Solution, search

__all__ = ["BadGraph", "Division", "Graph", "Segment", "Solution", "divide", "paper_graph", "search", "splittable"]
