"""The forward half as a graph of storages: what recomputation can cut, and where.

Vertices are the floating-point storages on the way from the inputs to the result that can be recomputed, in the order
they are complete. What does not come from the inputs (masks and positions built once and read by every layer) is no
vertex. Storages that are small beside the whole are always kept, such as batch-norm statistics, and so are those that
cannot be recomputed, such as dropout's masks.

[Note: boundaries]
The frontier of a vertex are the vertices up to it that a later one reads: everything later can be made from them and
from what is always there. Where the frontier is the vertex itself, the graph is a chain, and it is cut at all of those.
A stretch without any, such as cells that read the two cells before, a dense block or a net with long skips, is cut at
whole frontiers, if it is heavy: each the lightest far and wide, with more than its own weight up to the next cut.
Two boundaries may then share vertices.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from memfit.capture.step import Origin, Step
from memfit.plan.decisions import Decision, Keep, Recompute
from memfit.plan.rerun import Reruns

_SMALL = 100  # small are the smallest storages that make up a hundredth of all together
_HEAVY = 16  # a stretch of the graph is heavy if sixteen of it are more than all


@dataclass(frozen=True)
class StorageGraph:
    """Vertices are numbered from 1; 0 is the source, what is there before the step, and the last is the result."""

    step: Step
    reruns: Reruns
    storages: tuple[int, ...]  # vertex v is storages[v - 1]
    edges: frozenset[tuple[int, int]]

    @classmethod
    def of(cls, step: Step) -> StorageGraph:
        reruns = Reruns(step)
        between = _leading_to_the_result(step, reruns) & _made_from_inputs(step, reruns) & reruns.recomputable
        vertices = {s for s in between if all(step.values[v].dtype.is_floating_point for v in step.storage[s].values)}
        readers: dict[int, set[int]] = {s: set() for s in vertices}
        for storage in vertices:
            for writer in reruns.writers[storage]:
                for read in reruns.rerun_touches[writer]:
                    if read in vertices and read != storage:
                        readers[read].add(storage)
        order = sorted(vertices, key=lambda s: (reruns.writers[s][-1], s))
        number = {storage: index + 1 for index, storage in enumerate(order)}
        edges = {(number[s], number[r]) for s in order for r in readers[s] if r in number}
        has_operand = {v for _, v in edges}
        is_read = {u for u, _ in edges}
        edges |= {(0, v) for v in number.values() if v not in has_operand}
        edges |= {(v, len(order) + 1) for v in number.values() if v not in is_read}
        return cls(step, reruns, tuple(order), frozenset(edges))

    @property
    def target(self) -> int:
        return len(self.storages) + 1

    def num_bytes(self, vertex: int) -> int:
        return self.step.storage_bytes[self.storages[vertex - 1]]

    def num_elements(self, vertex: int) -> int:
        """Elements of the storage, whatever their type."""
        value = self.step.values[self.step.storage[self.storages[vertex - 1]].values[0]]
        return self.num_bytes(vertex) // value.dtype.itemsize

    @cached_property
    def up_to_bytes(self) -> tuple[int, ...]:
        """For each vertex the bytes of all up to it."""
        return tuple(accumulate((self.num_bytes(v) for v in range(1, self.target)), initial=0))

    @cached_property
    def frontiers(self) -> tuple[tuple[int, ...], ...]:
        """For each vertex those up to it that are read later; see [Note: boundaries]."""
        # The source is always there, and the result is not recomputed: their edges ask for nothing.
        last_read = [0] * (self.target + 1)
        for u, v in self.edges:
            if u > 0 and v < self.target:
                last_read[u] = max(last_read[u], v)
        found: list[tuple[int, ...]] = [()]
        for vertex in range(1, self.target):
            found.append(tuple(u for u in (*found[-1], vertex) if last_read[u] > vertex))
        return tuple(found)

    @cached_property
    def splittable(self) -> tuple[int, ...]:
        """Vertices that are their own frontier: everything after them can be computed from them alone."""
        return tuple(v for v in range(1, self.target) if self.frontiers[v] == (v,))

    @cached_property
    def boundaries(self) -> dict[int, tuple[int, ...]]:
        """Where to cut the graph into stages: by its last vertex, ascending, all that the next stage reads."""
        cuts = list(self.splittable)
        for start, end in pairwise((0, *self.splittable, self.target)):
            if (self.up_to_bytes[end - 1] - self.up_to_bytes[start]) * _HEAVY > self.up_to_bytes[-1]:
                cuts += self._valleys(start, end)
        return {v: self.frontiers[v] for v in sorted(cuts)}

    def _valleys(self, start: int, end: int) -> Iterator[int]:
        """The vertices between those two whose frontier is lighter than any less than its own weight away."""
        weights = {v: self.frontier_bytes(v) for v in range(start + 1, end) if v in self.frontiers[v]}
        for vertex, weight in weights.items():
            low = bisect_left(self.up_to_bytes, self.up_to_bytes[vertex] - weight)
            high = bisect_right(self.up_to_bytes, self.up_to_bytes[vertex] + weight)
            near = range(low, high)
            is_lightest = all((weights[v], v) >= (weight, vertex) for v in near if v in weights)
            if is_lightest and start not in near and end - 1 not in near:
                yield vertex

    def frontier_bytes(self, vertex: int) -> int:
        return sum(map(self.num_bytes, self.frontiers[vertex]))

    def decisions(self, checkpoints: frozenset[int]) -> dict[int, Decision]:
        """Keep these vertices and all that is small; recompute whatever else can be."""
        kept = {self.storages[v - 1] for v in checkpoints} | self._small
        return {s: Keep() if s in kept else Recompute() for s in sorted(self.reruns.recomputable)}

    def decisions_but_the_last(self, checkpoints: frozenset[int]) -> dict[int, Decision]:
        """The same, but what backward reads of all that follows the last checkpoint is kept: it is needed at once."""
        last = max((self.reruns.writers[self.storages[v - 1]][-1] for v in checkpoints), default=-1)
        read = {
            s
            for s in self.reruns.recomputable
            if self.step.storage[s].first_backward is not None and self.reruns.writers[s][0] > last
        }
        return self.decisions(checkpoints) | dict.fromkeys(sorted(read), Keep())

    @cached_property
    def _small(self) -> set[int]:
        size = self.step.storage_bytes
        ascending = sorted(self.reruns.recomputable, key=lambda s: (size[s], s))
        total = sum(size[s] for s in self.reruns.owned)
        return {
            s
            for s, sum_ in zip(ascending, accumulate(size[s] for s in ascending), strict=True)
            if sum_ * _SMALL < total
        }


def _made_from_inputs(step: Step, reruns: Reruns) -> set[int]:
    """The storages whose contents depend on what the caller passed in."""
    reached = {step.values[s.value].storage for s in step.sources if s.origin is Origin.INPUT}
    for index in range(step.num_forward):
        if reached & set(reruns.touches[index]):
            reached |= {*step.ops[index].writes, *reruns.makes[index]}
    return reached


def _leading_to_the_result(step: Step, reruns: Reruns) -> set[int]:
    """The storages that the result is computed from: not those that only backward reads."""
    reached = {step.values[v].storage for v in step.outputs}
    outputs = set(reached)
    for index in reversed(range(step.num_forward)):
        if reached & {*step.ops[index].writes, *reruns.makes[index]}:
            reached |= set(reruns.touches[index]) - set(reruns.makes[index])
    return reached - outputs - reruns.sources
