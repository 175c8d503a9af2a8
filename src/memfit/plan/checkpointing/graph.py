"""A weighted graph of tensors: what checkpoint search works on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from memfit.errors import MemfitError


class BadGraph(MemfitError, ValueError):
    """A graph that is not one of tensors between one source and one target."""


@dataclass(frozen=True)
class Graph:
    """Tensors and which are made from which, numbered in topological order.

    Vertex 0 is the source and the last one the target; every other vertex lies on a path between them. Weights are
    whole numbers, in whatever unit the caller counts (elements, bytes). `names` are for reading only.
    """

    weights: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        num = len(self.weights)
        if num < 2:
            raise BadGraph(f"a graph needs a source and a target, but has {num} vertices")
        if self.names and len(self.names) != num:
            raise BadGraph(f"{num} vertices, but {len(self.names)} names")
        for vertex, weight in enumerate(self.weights):
            if weight < 0:
                raise BadGraph(f"vertex {vertex} weighs {weight}; weights are not negative")
        for start, end in self.edges:
            if not 0 <= start < end < num:
                raise BadGraph(
                    f"edge ({start}, {end}) does not lead from a lower to a higher vertex of 0 to {num - 1}; "
                    "number the vertices in topological order"
                )
        self._require_one({end for _, end in self.edges}, range(1, num), "is made from nothing: vertex 0 is the source")
        self._require_one(
            {start for start, _ in self.edges}, range(num - 1), f"leads nowhere: vertex {num - 1} is the target"
        )

    def _require_one(self, found: set[int], wanted: Iterable[int], why: str) -> None:
        """Raise for the first wanted vertex that is not found: it would be a second source or target."""
        for vertex in wanted:
            if vertex not in found:
                raise BadGraph(f"vertex {self.name(vertex)} {why}. Leave it out, or connect it")

    @property
    def target(self) -> int:
        return len(self.weights) - 1

    @property
    def regular(self) -> int:
        """What training without checkpoints stores: everything but source and target, which are always there."""
        return sum(self.weights[1:-1])

    def name(self, vertex: int) -> str:
        return f"{vertex} ({self.names[vertex]})" if self.names else str(vertex)


def splittable(graph: Graph) -> tuple[int, ...]:
    """The vertices, source and target not among them, through which every path from source to target goes."""
    return cut_vertices(range(len(graph.weights)), graph.edges)


def cut_vertices(vertices: Sequence[int], edges: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Those of the sorted `vertices` that no edge jumps over, the first and the last not among them.

    In a topological order an edge that avoids a vertex and has it between its ends is a path around it, since every
    vertex lies on a path from the first to the last. So it is enough to count, for each place, the edges above it.
    """
    place = {vertex: index for index, vertex in enumerate(vertices)}
    change = [0] * (len(vertices) + 1)
    for start, end in edges:
        change[place[start] + 1] += 1
        change[place[end]] -= 1
    above = list(accumulate(change))
    return tuple(vertices[index] for index in range(1, len(vertices) - 1) if above[index] == 0)
