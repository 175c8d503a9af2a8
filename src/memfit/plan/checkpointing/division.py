"""How a graph falls apart: Feng and Huang's division tree.

[Note: independent segments]
An independent segment between vertices u and v is a set of vertices all of whose edges stay among themselves, u and v,
with every edge from outside coming from u and every edge to outside going to v: given u alone it can be run again,
and only v comes out. A segment that is divided is one of

  linear      vertices that every path goes through cut it into a chain;
  branch      nothing cuts it, but its inside falls into parts that meet only at u and v;
  complicate  neither: its parts are the largest independent segments inside it, joined in some other pattern;
  leaf        one edge, with nothing inside.

Two independent segments that overlap without one containing the other are runs of the same chain or sets of branches
of the same pair. So elsewhere the largest ones are disjoint, the division is unique, and the checkpoint sets of the
tree are all those that leave only pieces with one entry and one exit (tests/test_checkpoint_search.py tries them all).
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from memfit.plan.checkpointing.graph import Graph, cut_vertices

Edge = tuple[int, int]


class Kind(enum.Enum):
    """How a segment is divided; see [Note: independent segments]."""

    LINEAR = "linear"
    BRANCH = "branch"
    COMPLICATE = "complicate"
    LEAF = "leaf"


@dataclass(frozen=True)
class Division:
    """An independent segment from `start` to `end`, and the segments it is divided into.

    `between` are the vertices that join the children, ascending; `inside` is everything strictly inside, those of the
    children too, and `weight` what that weighs. Children of a linear division stand in the order of the chain.
    """

    kind: Kind
    start: int
    end: int
    between: tuple[int, ...]
    children: tuple[Division, ...]
    inside: tuple[int, ...]
    weight: int


def divide(graph: Graph) -> Division:
    """The division tree of the whole graph."""
    # Two edges between the same vertices are one: nothing lies on either.
    parts = [_Part(0, graph.target, sorted(set(graph.edges)))]
    split: list[tuple[Kind, slice]] = []
    # A list that grows while it is read, not recursion: a mask that every block reads nests as deep as blocks go.
    for part in parts:
        kind, inner = _split(part)
        split.append((kind, slice(len(parts), len(parts) + len(inner))))
        parts += inner
    divisions: list[Division] = [None] * len(parts)  # type: ignore[list-item]
    for index in reversed(range(len(parts))):
        part, (kind, inner_range) = parts[index], split[index]
        children = tuple(divisions[inner_range])
        joints = {vertex for child in children for vertex in (child.start, child.end)} - {part.start, part.end}
        inside = part.inside
        weight = sum(graph.weights[vertex] for vertex in inside)
        divisions[index] = Division(kind, part.start, part.end, tuple(sorted(joints)), children, inside, weight)
    return divisions[0]


@dataclass(frozen=True)
class _Part:
    """The edges of a segment that is yet to be divided; nothing cuts one that is a link of a chain."""

    start: int
    end: int
    edges: list[Edge]
    is_link: bool = False

    @property
    def inside(self) -> tuple[int, ...]:
        return tuple(sorted({vertex for edge in self.edges for vertex in edge} - {self.start, self.end}))


def _split(part: _Part) -> tuple[Kind, list[_Part]]:
    """What kind of segment it is, and its parts."""
    inside = part.inside
    if not inside:
        return Kind.LEAF, []
    if not part.is_link and (links := _links(part, inside)):
        return Kind.LINEAR, links
    if branches := _branches(part, inside):
        return Kind.BRANCH, branches
    return Kind.COMPLICATE, _largest_segments(part, inside)


def _links(part: _Part, inside: tuple[int, ...]) -> list[_Part]:
    """The links of the chain, or nothing if no vertex cuts the segment."""
    cuts = cut_vertices((part.start, *inside, part.end), part.edges)
    if not cuts:
        return []
    joints = (part.start, *cuts, part.end)
    links = [_Part(a, b, [], is_link=True) for a, b in pairwise(joints)]
    for edge in part.edges:
        links[bisect_right(joints, edge[0]) - 1].edges.append(edge)
    return links


def _branches(part: _Part, inside: tuple[int, ...]) -> list[_Part]:
    """The branches, a direct edge among them, or nothing if there is but one."""
    root = {vertex: vertex for vertex in inside}

    def find(vertex: int) -> int:
        while root[vertex] != vertex:
            root[vertex] = vertex = root[root[vertex]]
        return vertex

    for a, b in part.edges:
        if a in root and b in root:
            low, high = sorted((find(a), find(b)))
            root[high] = low
    branches: dict[int, list[Edge]] = defaultdict(list)
    for a, b in part.edges:
        # The start's own number for the direct edge: it is the root of no other branch.
        branches[find(a) if a in root else find(b) if b in root else part.start].append((a, b))
    if len(branches) == 1:
        return []
    return [_Part(part.start, part.end, branches[key]) for key in sorted(branches)]


def _largest_segments(part: _Part, inside: tuple[int, ...]) -> list[_Part]:
    """The largest independent segments inside one that is neither linear nor a branch; sets are bits of an int."""
    vertices = (part.start, *inside, part.end)
    place = {vertex: index for index, vertex in enumerate(vertices)}
    last = len(vertices) - 1
    before: list[list[int]] = [[] for _ in vertices]
    after: list[list[int]] = [[] for _ in vertices]
    for a, b in part.edges:
        before[place[b]].append(place[a])
        after[place[a]].append(place[b])
    near = [sum(1 << v for v in (*before[index], *after[index])) for index in range(last + 1)]

    # Inside a segment from a to b are only vertices that no path reaches but through a, nor leaves but through b.
    behind = _dominated(range(last + 1), before)
    ahead = _dominated(range(last, -1, -1), after)
    # With one edge in and one out, an end could be moved one vertex on, and the segment would be larger.
    hubs = [index for index in range(last + 1) if index in (0, last) or near[index].bit_count() > 2]
    found = []
    for a in (index for index in hubs if behind[index]):
        for b in (index for index in hubs if ahead[index]):
            held = _closed(behind[a] & ahead[b], near, (1 << a) | (1 << b)) if (a, b) != (0, last) else 0
            if held:
                edges = {(u, v) for v in _bits(held) for u in before[v]} | {
                    (v, w) for v in _bits(held) for w in after[v]
                }
                found.append((a, b, sorted(edges | ({(a, b)} if b in after[a] else set()))))

    chosen: list[tuple[int, int, list[Edge]]] = []
    taken: set[Edge] = set()
    for segment in sorted(found, key=lambda segment: (-len(segment[2]), segment[:2])):
        if taken.isdisjoint(segment[2]):
            taken.update(segment[2])
            chosen.append(segment)
    placed = ((place[a], place[b]) for a, b in part.edges)
    chosen += [(*edge, [edge]) for edge in placed if edge not in taken]
    return [
        _Part(vertices[a], vertices[b], [(vertices[u], vertices[v]) for u, v in edges])
        for a, b, edges in sorted(chosen)
    ]


def _dominated(order: Iterable[int], before: list[list[int]]) -> list[int]:
    """For each vertex the others that, coming in this order, no path reaches but through it."""
    through = [0] * len(before)
    found = [0] * len(before)
    for vertex in order:
        if before[vertex]:
            common = -1
            for earlier in before[vertex]:
                common &= through[earlier] | (1 << earlier)
            through[vertex] = common
        for dominator in _bits(through[vertex]):
            found[dominator] |= 1 << vertex
    return found


def _closed(held: int, near: list[int], ends: int) -> int:
    """The largest part of a set whose edges stay inside it or go to the ends."""
    held &= ~ends
    while True:
        leaking = sum(1 << vertex for vertex in _bits(held) if near[vertex] & ~(held | ends))
        if not leaking:
            return held
        held &= ~leaking


def _bits(held: int) -> Iterator[int]:
    while held:
        lowest = held & -held
        yield lowest.bit_length() - 1
        held ^= lowest
