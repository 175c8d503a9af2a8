"""Checkpoint search: the optimum against every choice there is, and the published graphs to the element."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations

import pytest
from planning import planned_network

from memfit.plan.checkpointing import BadGraph, Graph, divide, paper_graph, search, splittable
from memfit.plan.checkpointing.division import Division, Kind

Edges = tuple[tuple[int, int], ...]

# Patterns that are neither chains nor branches, from vertex 0 to the last; a DARTS cell is much like the fourth.
N_SHAPE: Edges = ((0, 1), (0, 2), (1, 3), (1, 4), (2, 4), (3, 5), (4, 5))
BRIDGE: Edges = ((0, 1), (0, 2), (1, 2), (1, 3), (2, 3))
LADDER: Edges = ((0, 1), (0, 2), (1, 3), (2, 4), (1, 4), (2, 3), (3, 5), (4, 5))
CELL: Edges = ((0, 1), (0, 2), (1, 3), (2, 3), (1, 4), (2, 4), (3, 5), (1, 5), (3, 6), (4, 6), (5, 6))


def least_total(graph: Graph) -> int:
    """Try every set of checkpoints, and take those that leave only pieces with one entry and one exit.

    Shares nothing with the search: a piece is what hangs together once the checkpoints are taken away. It can be run
    again alone if all its edges from outside come from one vertex, and all its edges to outside go to one.
    """
    inside = range(1, graph.target)
    return min(
        total
        for size in range(len(inside) + 1)
        for kept in combinations(inside, size)
        if (total := _total(graph, frozenset(kept))) is not None
    )


def _total(graph: Graph, kept: frozenset[int]) -> int | None:
    heaviest = 0
    for piece in _pieces(graph, kept):
        entries = {a for a, b in graph.edges if b in piece and a not in piece}
        exits = {b for a, b in graph.edges if a in piece and b not in piece}
        if len(entries) != 1 or len(exits) != 1:
            return None
        heaviest = max(heaviest, sum(graph.weights[vertex] for vertex in piece))
    return sum(graph.weights[vertex] for vertex in kept) + heaviest


def _pieces(graph: Graph, kept: frozenset[int]) -> Iterator[set[int]]:
    left = set(range(1, graph.target)) - kept
    while left:
        piece = {left.pop()}
        while grown := {v for a, b in graph.edges if a in piece or b in piece for v in (a, b)} & left:
            piece |= grown
            left -= grown
        yield piece


def random_graph(draw: random.Random, num_vertices: int, density: float) -> Graph:
    """Any graph of so many vertices; those that hang in the air are tied to a neighbour."""
    pairs = list(combinations(range(num_vertices), 2))
    edges = {pair for pair in pairs if draw.random() < density}
    last = num_vertices - 1
    for vertex in range(1, num_vertices):
        if not any(b == vertex for _, b in edges):
            edges.add((draw.randrange(vertex), vertex))
    for vertex in range(last - 1, -1, -1):
        if not any(a == vertex for a, _ in edges):
            edges.add((vertex, draw.randrange(vertex + 1, num_vertices)))
    return Graph(_weights(draw, num_vertices), tuple(sorted(edges)))


def composed_graph(draw: random.Random, max_vertices: int) -> Graph:
    """Start with one edge and replace edges by chains, branches and complicate cores: every kind, nested."""
    edges: list[tuple[object, object]] = [("s", "t")]
    order: list[object] = ["s", "t"]
    while True:
        index = draw.randrange(len(edges))
        start, end = edges[index]
        core = draw.choice([((0, 1), (1, 2)), ((0, 1), (1, 2), (0, 2)), BRIDGE, N_SHAPE, LADDER, CELL])
        num_new = max(map(max, core)) - 1
        if len(order) + num_new > max_vertices:
            return _numbered(draw, edges, order)
        new = [start, *(object() for _ in range(num_new)), end]
        edges[index : index + 1] = [(new[a], new[b]) for a, b in core]
        if num_new > 1 and draw.random() < 0.5:
            edges.append((start, end))  # a direct edge beside the core: a branch
        place = order.index(start) + 1
        order[place:place] = new[1:-1]


def _numbered(draw: random.Random, edges: list[tuple[object, object]], order: list[object]) -> Graph:
    number = {vertex: index for index, vertex in enumerate(order)}
    # New vertices stand right behind the start of the edge they replace, so before its end.
    return Graph(_weights(draw, len(order)), tuple((number[a], number[b]) for a, b in edges))


def _weights(draw: random.Random, num: int) -> tuple[int, ...]:
    heaviest = draw.choice([1, 3, 20, 1000])
    return tuple(draw.randint(0, heaviest) for _ in range(num))


def check(graph: Graph) -> None:
    """The total is the least there is, and the parts of the solution are what it says they are."""
    solution = search(graph)
    assert solution.total == least_total(graph), graph
    assert solution.total == _total(graph, solution.checkpoints) == solution.stored + solution.largest_segment
    assert solution.stored == sum(graph.weights[v] for v in solution.checkpoints)
    inside = [vertex for segment in solution.segments for vertex in segment.inside]
    assert sorted([*inside, *solution.checkpoints]) == list(range(1, graph.target))
    ends = {0, graph.target, *solution.checkpoints}
    for segment in solution.segments:
        around = {v for a, b in graph.edges for v in (a, b) if a in segment.inside or b in segment.inside}
        assert around == {segment.start, segment.end, *segment.inside}
        assert {segment.start, segment.end} <= ends
    assert search(graph) == solution


@pytest.mark.parametrize("seed", range(8))
def test_equals_brute_force_on_any_graph(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(250):
        check(random_graph(draw, draw.randint(2, 9), draw.choice([0.05, 0.15, 0.25, 0.4, 0.7])))
    for _ in range(30):
        check(random_graph(draw, draw.randint(10, 12), draw.choice([0.05, 0.15, 0.25])))


@pytest.mark.parametrize("seed", range(8))
def test_equals_brute_force_on_nested_cores(seed: int) -> None:
    draw = random.Random(100 + seed)
    kinds = set[Kind]()
    for _ in range(250):
        graph = composed_graph(draw, draw.randint(4, 10))
        kinds |= {division.kind for division in _all(divide(graph))}
        check(graph)
    for _ in range(30):
        check(composed_graph(draw, 12))
    assert kinds == set(Kind)


def _all(division: Division) -> Iterator[Division]:
    yield division
    for child in division.children:
        yield from _all(child)


@pytest.mark.parametrize("edges", [BRIDGE, LADDER, CELL], ids=["bridge", "ladder", "cell"])
def test_cores_are_complicate_and_store_their_joints(edges: Edges) -> None:
    last = max(map(max, edges))
    graph = Graph((0, *range(1, last), 0), edges)
    root = divide(graph)
    assert (root.kind, root.between) == (Kind.COMPLICATE, tuple(range(1, last)))
    assert {(child.start, child.end) for child in root.children} == set(edges)
    assert search(graph).checkpoints == frozenset(range(1, last))
    check(graph)


def test_n_shape_is_a_bridge_of_chains() -> None:
    graph = Graph((0, 1, 2, 3, 4, 0), N_SHAPE)
    root = divide(graph)
    assert (root.kind, root.between) == (Kind.COMPLICATE, (1, 4))
    assert {(c.start, c.end, c.inside) for c in root.children if c.inside} == {(0, 4, (2,)), (1, 5, (3,))}
    assert search(graph).total == 1 + 4 + 3
    check(graph)


def test_largest_segments_of_a_core_are_its_parts() -> None:
    # A bridge whose edges are: a chain, a branch, a plain edge, another bridge, a plain edge.
    edges = ((0, 1), (1, 2), (0, 4), (0, 3), (3, 4), (2, 4), (2, 5), (2, 6), (5, 6), (5, 7), (6, 7), (4, 7))
    graph = Graph((0, 5, 1, 6, 2, 7, 8, 0), edges)
    root = divide(graph)
    assert root.kind is Kind.COMPLICATE and root.between == (2, 4)
    parts = {(child.start, child.end): (child.kind, child.inside) for child in root.children}
    assert parts == {
        (0, 2): (Kind.LINEAR, (1,)),
        (0, 4): (Kind.BRANCH, (3,)),
        (2, 4): (Kind.LEAF, ()),
        (2, 7): (Kind.COMPLICATE, (5, 6)),
        (4, 7): (Kind.LEAF, ()),
    }
    solution = search(graph)
    assert (solution.stored, solution.largest_segment) == (3, 15)
    assert [(s.start, s.end, s.inside) for s in solution.segments] == [(0, 2, (1,)), (0, 4, (3,)), (2, 7, (5, 6))]
    check(graph)


def test_chain_by_hand() -> None:
    chain = Graph((9, 4, 1, 4, 1, 4, 9), tuple((i, i + 1) for i in range(6)))
    solution = search(chain)
    assert (solution.total, solution.stored, solution.largest_segment) == (6, 2, 4)
    assert solution.checkpoints == {2, 4}
    assert [(s.start, s.end, s.inside) for s in solution.segments] == [(0, 2, (1,)), (2, 4, (3,)), (4, 6, (5,))]
    assert chain.regular == 14


def test_branches_are_run_again_one_by_one() -> None:
    graph = Graph((0, 5, 7, 0), ((0, 1), (1, 3), (0, 2), (2, 3)))
    assert divide(graph).kind is Kind.BRANCH
    assert search(graph).total == 7
    assert search(graph).checkpoints == frozenset()


def test_shortest_graph_has_nothing_to_store() -> None:
    solution = search(Graph((3, 4), ((0, 1), (0, 1))))
    assert (solution.total, solution.segments) == (0, ())


def test_deeply_nested_graphs_are_no_trouble() -> None:
    # Every block reads the input too, as a mask or a time step would be read: one branch inside another.
    num = 700
    edges = [(i, i + 1) for i in range(num)] + [(0, i) for i in range(2, num)]
    graph = Graph((0,) + (1,) * (num - 1) + (0,), tuple(edges))
    solution = search(graph)
    # Only a piece that begins at the source has one entry: the first few are one, the others are kept, all is stored.
    assert solution.total == graph.regular
    assert solution.num_tried <= num + 1


def test_splittable_vertices_are_those_no_edge_jumps_over() -> None:
    edges = ((0, 1), (1, 2), (1, 3), (2, 4), (3, 4), (4, 5), (4, 6), (5, 6), (6, 7))
    assert splittable(Graph((1,) * 8, edges)) == (1, 4, 6)
    assert splittable(Graph((1,) * 8, (*edges, (0, 6)))) == (6,)


@pytest.mark.parametrize(
    ("weights", "edges", "said"),
    [
        ((1,), (), "a source and a target"),
        ((1, -2, 1), ((0, 1), (1, 2)), "vertex 1 weighs -2"),
        ((1, 1, 1), ((0, 2), (2, 1)), r"edge \(2, 1\) .* topological order"),
        ((1, 1, 1), ((0, 1), (1, 3)), r"edge \(1, 3\) .* 0 to 2"),
        ((1, 1, 1), ((0, 2), (1, 2)), "vertex 1 is made from nothing"),
        ((1, 1, 1), ((0, 2), (0, 1)), "vertex 1 leads nowhere"),
    ],
)
def test_bad_graphs_are_refused(weights: tuple[int, ...], edges: Edges, said: str) -> None:
    with pytest.raises(BadGraph, match=said):
        Graph(weights, edges)


# Elements without and with the best checkpoints, from graphs written by hand after the authors' own.
PUBLISHED = {
    "alexnet": (1024, 604_897_280, 279_248_896),
    "vgg11": (64, 573_734_912, 282_591_232),
    "vgg16": (64, 965_509_120, 475_267_072),
    "vgg19": (64, 1_049_001_984, 488_112_128),
    "resnet18": (256, 1_278_214_144, 513_802_240),
    "resnet50": (64, 1_339_228_160, 385_351_680),
    "resnet152": (16, 700_891_136, 122_028_032),
    "densenet121": (32, 1_059_749_888, 193_277_952),
    "densenet201": (16, 823_117_824, 115_806_208),
}

DEEP = ("densenet201",)  # like densenet121, and captured in ten seconds
MOST_TRIED = 1500
"""Weights of the heaviest segment that the search tries in any network: densenet201 has 4,570 of them."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in DEEP else ()) for n in PUBLISHED])
def test_published_networks_to_the_element(name: str) -> None:
    batch, regular, optimal = PUBLISHED[name]
    graph = paper_graph(planned_network(name, batch=batch, rewritten=False))
    solution = search(graph)
    assert (graph.regular, solution.total) == (regular, optimal)
    assert solution.num_tried <= MOST_TRIED


def test_vertices_of_vgg16_are_its_layers() -> None:
    graph = paper_graph(planned_network("vgg16", batch=2, rewritten=False))
    kinds = [name.rsplit(" ", 1)[-1] for name in graph.names]
    pool = "max_pool2d_with_indices"
    groups = [kind for num in (2, 2, 3, 3, 3) for kind in ["convolution"] * num + [pool]]
    assert kinds == ["input", *groups, "addmm", "addmm", "addmm"]
    assert splittable(graph) == tuple(range(1, graph.target))


@pytest.mark.parametrize(
    ("name", "image"),
    [("inception_v3", 299), ("googlenet", 224), ("unet", 64), ("darts", 32), ("gpt2", 32), ("vit_b16", 64)],
)
def test_any_network_becomes_a_graph(name: str, image: int) -> None:
    graph = paper_graph(planned_network(name, batch=2, image=image, rewritten=False))
    solution = search(graph)
    assert solution.num_tried <= MOST_TRIED
    assert 0 < solution.total < graph.regular
    inside = [vertex for segment in solution.segments for vertex in segment.inside]
    assert sorted([*inside, *solution.checkpoints]) == list(range(1, graph.target))
    assert all(graph.weights)
    if name == "darts":  # every cell reads two cells
        assert Kind.COMPLICATE in {division.kind for division in _all(divide(graph))}
