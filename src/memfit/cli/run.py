"""`memfit run NET`: train a network both ways and measure exactness, peak and time."""

from __future__ import annotations

import argparse

from memfit.cli.options import add_fitting, add_network, fit_options, num_threads
from memfit.cli.screen import Screen, mebibytes, seconds
from memfit.report.comparison import Comparison, compare_network

_MAX_LOSSY = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_network(parser)
    add_fitting(parser, steps=6)
    parser.add_argument(
        "--predict", action="store_true", help="also measure every op alone, and show what the simulator predicts"
    )


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Exit code 0 if exact (of a lossy policy all but the gradients) and within the budget, 1 if not, 2 if none is."""
    options = fit_options(arguments)
    with num_threads(arguments.threads):
        found = compare_network(
            arguments.network,
            batch=arguments.batch,
            image=arguments.image,
            steps=arguments.steps,
            seed=arguments.seed,
            options=options,
            predict=arguments.predict,
            progress=screen.progress,
        )
    screen.done()
    if screen.json:
        screen.object(found.to_dict())
    else:
        print_comparison(found, screen)
        screen.line()
        screen.line(str(found.verdict))
        print_budget(found, screen)
        print_losses(found, screen)
    return 0 if found.verdict.holds and found.within_budget is not False else 1


def print_comparison(found: Comparison, screen: Screen) -> None:
    """What was run, and a table of both arms."""
    size = "".join(f", {name} {value}" for name, value in (("batch", found.batch), ("image", found.image)) if value)
    threads = f"{found.threads} thread{'s' * (found.threads != 1)}"
    screen.line(f"{found.network}{size}, policy {found.policy}, {found.steps} steps, {threads}, torch {found.torch}")
    screen.line()
    screen.table(
        ("one training step", "eager", "memfit", "ratio"),
        [
            (
                "peak memory",
                mebibytes(found.eager_peak_bytes),
                mebibytes(found.peak_bytes),
                f"{found.peak_ratio:.3f}",
            ),
            (
                "  gradients already there",
                mebibytes(found.eager_accumulating_peak_bytes),
                mebibytes(found.accumulating_peak_bytes),
                f"{found.accumulating_peak_ratio:.3f}",
            ),
            (
                "  without gradients",
                mebibytes(found.eager_activation_peak_bytes),
                mebibytes(found.activation_peak_bytes),
                f"{found.activation_peak_ratio:.3f}",
            ),
            ("  as the ledger has it", "", mebibytes(found.ledger_growth_bytes), ""),
            ("time", seconds(found.eager_step_s), seconds(found.step_s), f"{found.time_ratio:.3f}"),
            ("capture, once", "", seconds(found.capture_s), ""),
            *_predictions(found),
        ],
        right=("eager", "memfit", "ratio"),
    )


def print_budget(found: Comparison, screen: Screen) -> None:
    """Whether the step was within its budget, if it had one."""
    if found.budget_bytes is None:
        return
    needed = f"needed {mebibytes(found.needed_bytes)} of a budget of {mebibytes(found.budget_bytes)}"
    included = f"parameters, gradients and inputs included ({mebibytes(found.base_bytes)} were there before it)"
    what = "within the budget" if found.within_budget else "ABOVE THE BUDGET"
    screen.line(f"{what}: the step {needed}, {included}")


def print_losses(found: Comparison, screen: Screen) -> None:
    """Which tensors a lossy policy stored with loss, and how often a code was too small."""
    if found.num_fallbacks:
        screen.line(f"{found.num_fallbacks:,} tensors did not fit into their codes and were kept as they were")
    if found.lossy:
        hidden = len(found.lossy) - _MAX_LOSSY
        screen.line()
        screen.table(
            ("lossy", "tensor", "codec", "made by", "module"),
            [(mebibytes(t.bytes), t.tensor, t.codec, t.op, t.module or "(root)") for t in found.lossy[:_MAX_LOSSY]],
            right=("lossy",),
        )
        if hidden > 0:
            screen.line(f"and {hidden:,} smaller ones; --json has all")


def _predictions(found: Comparison) -> list[tuple[str, str, str, str]]:
    """Rows for what was predicted, each with its ratio to what was measured."""
    if found.predicted_peak_bytes is None or found.predicted_step_s is None:
        return []
    return [
        ("predicted peak", "", mebibytes(found.predicted_peak_bytes), f"{found.predicted_peak_ratio:.3f}"),
        ("predicted time", "", seconds(found.predicted_step_s), f"{found.predicted_time_ratio:.3f}"),
    ]
