"""Feng and Huang's table: the optimal checkpoints of every network, in elements of their model."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from memfit import zoo
from memfit.cli.benchmarks.networks import add_arguments, networks_asked_for
from memfit.cli.screen import Screen, mebibytes, seconds
from memfit.cli.target import Target
from memfit.plan.checkpointing import paper_graph, search

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "optimal gradient checkpoints, Feng and Huang, CVPR 2021"
_FLOAT_BYTES = 4
_HEADER = (
    *("network", "batch", "vertices", "regular", "optimal", "cut"),
    *("published cut", "published regular", "published optimal", "captured in", "solved in"),
)


@dataclass(frozen=True)
class _Published:
    """One row of Feng and Huang's table: what they measured on a GPU, without weights."""

    batch: int
    regular_mb: int
    optimal_mb: int
    cut: float
    image: int | None = None  # the zoo's own unless given


# The README of their OptimalGradCheckpointing; megabytes of torch.cuda.max_memory_allocated, cuts as printed there.
_FENG_HUANG = MappingProxyType(
    {
        "alexnet": _Published(1024, 4955, 3287, 0.34),
        "vgg11": _Published(64, 3577, 2781, 0.22),
        "vgg13": _Published(64, 5136, 3565, 0.31),
        "vgg16": _Published(64, 5136, 3565, 0.31),
        "vgg19": _Published(64, 5189, 3565, 0.31),
        "resnet18": _Published(256, 5635, 3677, 0.35),
        "resnet34": _Published(128, 4079, 1838, 0.55),
        "resnet50": _Published(64, 5323, 1973, 0.63),
        "resnet101": _Published(32, 3934, 1024, 0.74),
        "resnet152": _Published(16, 2767, 526, 0.81),
        "densenet121": _Published(32, 4027, 898, 0.78),
        "densenet161": _Published(16, 3751, 666, 0.82),
        "densenet169": _Published(32, 4862, 897, 0.82),
        "densenet201": _Published(16, 3146, 474, 0.85),
        "inception_v3": _Published(32, 3074, 881, 0.71, image=300),
        "nasnet": _Published(64, 5832, 1129, 0.81),
        "amoebanet": _Published(64, 4944, 1058, 0.79),
        "darts": _Published(64, 5627, 1115, 0.80),
    }
)


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Search every network that was asked for, and put the published figures beside."""
    known = zoo.names()
    networks = networks_asked_for(arguments.networks) or [name for name in _FENG_HUANG if name in known]
    rows = []
    for name in networks:
        screen.progress(f"searching {name}")
        rows.append(_row(name, arguments.batch))
    screen.done()
    if screen.json:
        screen.object({"benchmark": "checkpoint-search", "rows": rows})
        return 0
    screen.table(_HEADER, [_cells(row) for row in rows], right=_HEADER[1:])
    screen.line()
    screen.line("regular, optimal and cut are of Feng and Huang's model: 32-bit elements of layers' results, input and")
    screen.line("output not among them. Published are measurements on a GPU, with all that the model leaves out.")
    return 0


def _row(name: str, batch: int | None) -> dict[str, Any]:
    published = _FENG_HUANG.get(name)
    if published is not None and batch not in (None, published.batch):
        published = None
    image = None
    if published is not None:
        batch, image = published.batch, published.image
    target = Target.capture(name, batch=batch, image=image)
    graph = paper_graph(target.step)
    start_s = time.perf_counter()
    solution = search(graph)
    solve_s = time.perf_counter() - start_s
    return {
        "network": name,
        "batch": target.batch,
        "image": target.image,
        "num_vertices": len(graph.weights),
        "num_checkpoints": len(solution.checkpoints),
        "regular_elements": graph.regular,
        "optimal_elements": solution.total,
        "cut": 1 - solution.total / graph.regular if graph.regular else 0.0,
        "published_cut": None if published is None else published.cut,
        "published_regular_mb": None if published is None else published.regular_mb,
        "published_optimal_mb": None if published is None else published.optimal_mb,
        "capture_s": target.capture_s,
        "solve_s": solve_s,
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    published = row["published_cut"] is not None
    return (
        row["network"],
        str(row["batch"]),
        str(row["num_vertices"]),
        mebibytes(row["regular_elements"] * _FLOAT_BYTES),
        mebibytes(row["optimal_elements"] * _FLOAT_BYTES),
        f"{row['cut']:.1%}",
        f"{row['published_cut']:.0%}" if published else "",
        f"{row['published_regular_mb']:,} MB" if published else "",
        f"{row['published_optimal_mb']:,} MB" if published else "",
        seconds(row["capture_s"]),
        seconds(row["solve_s"]),
    )
