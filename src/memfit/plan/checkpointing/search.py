"""The cheapest checkpoints: exactly the optimum that Feng and Huang's search finds, in a fraction of its time.

Stored are the checkpoints, always, and one segment at a time, run again for its backward pass; to be least is

    sum of the checkpoints' weights + weight of the heaviest segment.

The second term is one of few values: the weight of a part, or of a run of links in a chain. Each is tried, lightest
first, with the cheapest checkpoints whose segments all stay within it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from memfit.plan.checkpointing.division import Division, Kind, divide
from memfit.plan.checkpointing.graph import Graph


@dataclass(frozen=True, order=True)
class Segment:
    """What is run again in one go: from `start`, which is there, through everything `inside`, to `end`."""

    start: int
    end: int
    inside: tuple[int, ...]


@dataclass(frozen=True)
class Solution:
    """The checkpoints, the segments between them that have anything inside, and what they weigh.

    Source and target count in no term. Several sets of checkpoints may be equally good; this is always the same one.
    `num_tried` is how many weights of the heaviest segment were tried: each is one walk over the division tree.
    """

    total: int
    stored: int
    largest_segment: int
    checkpoints: frozenset[int]
    segments: tuple[Segment, ...]
    num_tried: int


def search(graph: Graph) -> Solution:
    """The checkpoints of least total among all that leave only independent segments."""
    searched = _Searched(graph, divide(graph))
    terms = sorted(searched.terms())
    best_term, best_total = terms[-1], terms[-1] + searched.stored(terms[-1])
    floor = best_total - best_term  # with a heavier segment allowed, no more is stored: no term stores less than this
    num_tried = 1
    for term in terms:
        if term + floor >= best_total:
            break
        num_tried += 1
        total = term + searched.stored(term)
        if total < best_total:
            best_term, best_total = term, total
    checkpoints, segments = searched.chosen(best_term)
    stored = sum(graph.weights[vertex] for vertex in checkpoints)
    largest = max((sum(graph.weights[v] for v in segment.inside) for segment in segments), default=0)
    return Solution(stored + largest, stored, largest, frozenset(checkpoints), tuple(sorted(segments)), num_tried)


class _Chain:
    """A linear division with its sums: runs of links are priced by two subtractions."""

    def __init__(self, graph: Graph, division: Division) -> None:
        self.joints = (division.start, *division.between, division.end)
        self.links = division.children
        # Checkpoints at the ends are paid for by whoever divided around this chain.
        self.weights = (0, *(graph.weights[vertex] for vertex in division.between), 0)
        # Up to each joint: everything before it, and with it too.
        spans = (0, *(link.weight for link in self.links))
        self.with_joint = tuple(accumulate(weight + span for weight, span in zip(self.weights, spans, strict=True)))
        self.before_joint = tuple(sum_ - weight for sum_, weight in zip(self.with_joint, self.weights, strict=True))

    def run_weights(self) -> Iterator[int]:
        """The weight inside every run of links."""
        for i, left in enumerate(self.with_joint):
            for right in self.before_joint[i + 1 :]:
                yield right - left


class _Searched:
    """A graph with its division tree, asked for the cheapest checkpoints under one bound after another."""

    def __init__(self, graph: Graph, root: Division) -> None:
        self.graph = graph
        self.root = root
        self._chains: dict[int, _Chain] = {}

    def _chain(self, division: Division) -> _Chain:
        found = self._chains.get(id(division))
        if found is None:
            found = self._chains[id(division)] = _Chain(self.graph, division)
        return found

    @cached_property
    def _divisions(self) -> tuple[Division, ...]:
        """Every division of the tree, parents first."""
        found = [self.root]
        for division in found:  # grows while it is read
            found += division.children
        return tuple(found)

    def terms(self) -> set[int]:
        """What the heaviest segment of a best choice may weigh."""
        found = {0, self.root.weight}
        for division in self._divisions:
            found.add(division.weight)
            if division.kind is Kind.LINEAR:
                found.update(self._chain(division).run_weights())
        return found

    def stored(self, bound: int) -> int:
        """The least that checkpoints weigh if no segment may weigh more than `bound`."""
        return self._opened(bound)[id(self.root)]

    def _opened(self, bound: int) -> dict[int, int]:
        """For each division that is not left whole, by its id, the least weight of checkpoints inside it.

        Those are all that weigh more than the bound, and the root; what they contain is priced before them.
        """
        opened: dict[int, int] = {}
        for division in reversed(self._divisions):
            if division.weight <= bound and division is not self.root:
                continue
            if division.kind is Kind.LINEAR:
                opened[id(division)] = self._walk(division, bound, opened)[0][-1]
            else:
                joints = sum(self.graph.weights[vertex] for vertex in division.between)
                opened[id(division)] = joints + sum(opened.get(id(child), 0) for child in division.children)
        return opened

    def _walk(self, division: Division, bound: int, opened: dict[int, int]) -> tuple[list[int], list[int]]:
        """For each joint of a chain the least stored up to it, and the joint of the checkpoint before it.

        A run that fits is left whole. A link that does not fit even alone is opened, with checkpoints at both ends.
        The left ends of the runs to one joint are a window, which only moves on: its minimum is kept in a queue.
        """
        chain = self._chain(division)
        least, came_from = [0], [0]
        window: deque[int] = deque()
        for j in range(1, len(chain.joints)):
            while window and least[window[-1]] > least[j - 1]:
                window.pop()
            window.append(j - 1)
            reach = chain.before_joint[j] - bound
            while window and chain.with_joint[window[0]] < reach:
                window.popleft()
            if window:
                i, inner = window[0], 0
            else:
                i, inner = j - 1, opened[id(chain.links[j - 1])]
            least.append(least[i] + inner + chain.weights[j])
            came_from.append(i)
        return least, came_from

    def chosen(self, bound: int) -> tuple[set[int], list[Segment]]:
        """The checkpoints that `stored` weighs, and the segments between them."""
        checkpoints: set[int] = set()
        segments: list[Segment] = []
        opened = self._opened(bound)
        waiting = [self.root]
        while waiting:
            division = waiting.pop()
            if division.kind is Kind.LINEAR:
                chain = self._chain(division)
                came_from = self._walk(division, bound, opened)[1]
                j = len(chain.joints) - 1
                while j > 0:
                    i = came_from[j]
                    if i > 0:
                        checkpoints.add(chain.joints[i])
                    if j - i == 1 and chain.links[i].weight > bound:
                        waiting.append(chain.links[i])
                    else:
                        start, end = chain.joints[i], chain.joints[j]
                        inside = tuple(v for v in division.inside if start < v < end)
                        segments.append(Segment(start, end, inside))
                    j = i
                continue
            checkpoints.update(division.between)
            for child in division.children:
                if child.weight > bound:
                    waiting.append(child)
                else:
                    segments.append(Segment(child.start, child.end, child.inside))
        return checkpoints, [segment for segment in segments if segment.inside]
