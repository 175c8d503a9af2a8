"""The forward half as a graph of storages: what recomputation can cut, and where.

Vertices are the floating-point storages on the way from the inputs to the result that can be recomputed, in the order
they are complete. What does not come from the inputs (masks and positions built once and read by every layer) is no
vertex. Storages that are small beside the whole are always kept, such as batch-norm statistics, and so are those that
cannot be recomputed, such as dropout's masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from memfit.capture.step import Origin, Step
from memfit.plan.decisions import Decision, Keep, Recompute
from memfit.plan.rerun import Reruns

_SMALL = 1000  # a storage is small if a thousand of it are less than all


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
    def splittable(self) -> tuple[int, ...]:
        """Vertices that no edge jumps over: everything after them can be computed from them alone."""
        jumps = [0] * (self.target + 2)
        for u, v in self.edges:
            jumps[u + 1] += 1
            jumps[v] -= 1
        over = list(accumulate(jumps))
        return tuple(v for v in range(1, self.target) if over[v] == 0)

    def decisions(self, checkpoints: frozenset[int]) -> dict[int, Decision]:
        """Keep these vertices and all that is small; recompute whatever else can be."""
        kept = {self.storages[v - 1] for v in checkpoints}
        total = sum(self.step.storage_bytes[s] for s in self.reruns.owned)
        made: dict[int, Decision] = {}
        for storage in sorted(self.reruns.recomputable):
            is_small = self.step.storage_bytes[storage] * _SMALL < total
            made[storage] = Keep() if storage in kept or is_small else Recompute()
        return made


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
