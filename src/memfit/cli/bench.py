"""`memfit bench NAME`: published figures beside ours, computed anew."""

from __future__ import annotations

import argparse

from memfit.cli.benchmarks import auto, checkpoint_search, gist, overlap, peers, planning, vdnn
from memfit.cli.screen import Screen
from memfit.errors import BadOption

_BENCHMARKS = {
    "checkpoint-search": checkpoint_search,
    "vdnn": vdnn,
    "overlap": overlap,
    "gist": gist,
    "peers": peers,
    "auto": auto,
    "planning": planning,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Each benchmark has options of its own, and refuses those of others."""
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="NAME")
    for name, benchmark in _BENCHMARKS.items():
        sub = benchmarks.add_parser(name, help=benchmark.SUMMARY, description=f"{benchmark.SUMMARY}.")
        benchmark.add_arguments(sub)
        sub.add_argument("--json", action="store_true", help="print one JSON object; messages go to stderr")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Run the benchmark that was named."""
    if arguments.benchmark is None:
        raise BadOption(f"name a benchmark. Known benchmarks: {', '.join(_BENCHMARKS)}")
    return _BENCHMARKS[arguments.benchmark].run(arguments, screen)
