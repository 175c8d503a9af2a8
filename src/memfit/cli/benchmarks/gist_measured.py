"""The measured part of `memfit bench gist`: training steps here, at small batch, by each code alone and together."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from memfit.cli.options import positive
from memfit.cli.screen import Screen, mebibytes, seconds
from memfit.errors import BadOption
from memfit.report.codec_overhead import measure_codecs

_BATCH = 2
_STEPS = 3
_HEADER = ("measured here", "batch", "policy", "encoded", "as codes", "step", "of keep's")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """At which batch steps are timed, and how often."""
    parser.add_argument(
        "--measured-batch",
        type=_from_zero,
        metavar="N",
        help=f"batch of the steps that are timed here; 0: time none (default: {_BATCH})",
    )
    parser.add_argument(
        "--measured-steps", type=positive, metavar="K", help=f"how many by each policy (default: {_STEPS})"
    )


def measured(
    arguments: argparse.Namespace, names: Sequence[str], progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """A row for each network and policy; none if nothing is to be timed."""
    batch = _BATCH if arguments.measured_batch is None else arguments.measured_batch
    if batch == 0:
        if arguments.measured_steps is not None:
            raise BadOption("--measured-steps: without effect with --measured-batch 0")
        return []
    rows = []
    for name in names:
        found = measure_codecs(name, batch=batch, steps=arguments.measured_steps or _STEPS, progress=progress)
        common = {"network": name, "batch": batch, "threads": torch.get_num_threads()}
        rows += [common | overhead.to_dict() for overhead in found]
    return rows


def print_measured(rows: Sequence[Mapping[str, Any]], screen: Screen) -> None:
    """A table of the rows, if there are any."""
    if not rows:
        return
    screen.line()
    cells = [
        (
            row["network"],
            str(row["batch"]),
            row["policy"],
            mebibytes(row["encoded_bytes"]),
            mebibytes(row["code_bytes"]),
            seconds(row["step_s"]),
            f"{row['time_ratio']:.3f}",
        )
        for row in rows
    ]
    screen.table(_HEADER, cells, right=("batch", *_HEADER[3:]))
    screen.line(
        "Steps of all policies were taken in turn; ratios are medians of neighbours. Weights are as initialised,"
    )
    screen.line(f"about half of what ReLU leaves is zero. {rows[0]['threads']} thread(s) of torch.")


def _from_zero(text: str) -> int:
    """A whole number from 0 up."""
    return 0 if text == "0" else positive(text)
