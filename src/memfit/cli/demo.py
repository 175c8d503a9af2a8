"""`memfit demo`: a network that plain PyTorch cannot train within a limit on the process, and memfit can, exactly."""

from __future__ import annotations

import argparse

from memfit.cli.options import num_threads, positive
from memfit.cli.screen import Screen, mebibytes, seconds
from memfit.report.limited import LimitedTraining, Trained, train_limited

_NETWORK, _BATCH, _IMAGE, _STEPS = "resnet50", 32, 128, 5
_SHARE = 0.65
"""Of what eager needs: far enough below that it cannot be a matter of luck."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--network", default=_NETWORK, help="a network of the zoo, or package.module:callable (default: %(default)s)"
    )
    parser.add_argument("--batch", type=positive, help=f"batch size (default: {_BATCH} of the default network)")
    parser.add_argument("--image", type=positive, help=f"image side (default: {_IMAGE} of the default network)")
    parser.add_argument("--steps", type=positive, default=_STEPS, metavar="K", help="how many (default: %(default)s)")
    parser.add_argument("--threads", type=positive, metavar="N", help="threads of torch (default: torch's own choice)")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Exit code 0 if eager runs out of memory and memfit trains with eager's losses and weights; 1 if not."""
    batch, image = arguments.batch, arguments.image
    if arguments.network == _NETWORK:
        batch, image = batch or _BATCH, image or _IMAGE
    screen.line("Training one network three times from the same weights, each time in a process of its own:")
    screen.line("in plain PyTorch, in plain PyTorch within a limit on the process's memory, and within the same limit")
    screen.line("through memfit.fit(model, budget=...). What ops cost here is measured before, in one without a limit.")
    screen.line()
    with num_threads(arguments.threads):
        found = train_limited(
            arguments.network,
            batch=batch,
            image=image,
            steps=arguments.steps,
            share=_SHARE,
            threads=arguments.threads,
            progress=screen.progress,
        )
    screen.done()
    if screen.json:
        screen.object(found.to_dict())
    else:
        _print(found, screen)
    if found.failures:
        screen.error(f"this did not go as it should: {'; '.join(found.failures)}")
        return 1
    return 0


def _print(found: LimitedTraining, screen: Screen) -> None:
    sizes = (("batch", found.batch), ("image", found.image))
    screen.line(found.network + "".join(f", {name} {value}" for name, value in sizes if value))
    share = found.allowance_bytes / found.eager.peak_bytes if found.eager.peak_bytes else 0.0
    screen.line(
        f"limit (RLIMIT_DATA): {mebibytes(found.allowance_bytes)} beyond a process that has imported everything; "
        f"that is {share:.0%} of what eager needs"
    )
    screen.line(
        f"memfit.fit(model, budget={found.budget_bytes}): the limit less {mebibytes(found.margin_bytes)} for "
        "capturing, planning and threads, which are within the limit too"
    )
    screen.line()
    rows = [
        _row("eager, no limit", found.eager),
        _row("eager, limited", found.eager_limited),
        _row("memfit, limited", found.fitted),
    ]
    header = ("", "peak", "time of a step", "losses")
    screen.table(header, rows, right=("peak", "time of a step"))
    screen.line()
    for name, trained in (("eager, limited", found.eager_limited), ("memfit, limited", found.fitted)):
        if trained.error is not None:
            screen.line(f"{name}: {trained.error}")
    _print_plan(found, screen)
    if not found.failures:
        screen.line()
        ratio = "" if found.time_ratio is None else f", at {found.time_ratio:.2f} times eager's time"
        if found.was_busy:
            ratio = ""
            screen.line(
                f"The machine was {found.busy_share:.0%} busy with other things before: these times say little. "
                "`memfit run` measures both ways in turn."
            )
        screen.line(
            f"eager ran out of memory; memfit trained within the same limit{ratio}: all {found.steps} losses and the "
            "weights in the end are eager's, bit for bit"
        )


def _print_plan(found: LimitedTraining, screen: Screen) -> None:
    plan = found.fitted.plan
    if not plan:
        return
    screen.line(
        f"policy {plan['policy']}: planned peak {mebibytes(plan['peak_bytes'])} of everything, where keeping all needs "
        f"{mebibytes(plan['keep_peak_bytes'])}; predicted time {plan['overhead']:+.1%}"
        + ("" if plan["lower_bound_overhead"] is None else f" (no plan is below {plan['lower_bound_overhead']:+.1%})")
    )
    if plan["note"]:
        screen.line(f"  {plan['note']}")
    screen.line()
    screen.table(
        ("decision", "tensors", "bytes"),
        [(name, f"{row['count']:,}", mebibytes(row["bytes"])) for name, row in plan["decisions"].items()],
        right=("tensors", "bytes"),
    )


def _row(name: str, trained: Trained) -> tuple[str, str, str, str]:
    if trained.error is not None and not trained.losses:
        said = "out of memory" if trained.is_out_of_memory else "failed"
        return name, said, "", "none"
    typical = trained.typical_step_s
    losses = " ".join(f"{float.fromhex(loss):.6f}" for loss in trained.losses)
    stopped = "" if trained.error is None else ", then it failed"
    return name, mebibytes(trained.peak_bytes), "" if typical is None else seconds(typical), losses + stopped
