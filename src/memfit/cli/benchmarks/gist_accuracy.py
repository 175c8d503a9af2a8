"""`memfit bench gist --accuracy`: what each format costs in accuracy, delayed and immediate, as a table with curves."""

from __future__ import annotations

import argparse

from memfit.cli.options import positive
from memfit.cli.screen import Screen, seconds
from memfit.errors import BadOption
from memfit.plan.policies.gist import FORMATS
from memfit.report.accuracy import DEFAULT_SEEDS, DEFAULT_WORKERS, Study, study_accuracy
from memfit.report.accuracy_networks import NETWORKS
from memfit.report.accuracy_rows import NOISE_RULE, Difference, Row, false_alarms, sparkline
from memfit.report.accuracy_training import IMMEDIATE, MODES, Recipe

_HEADER = (
    *("network", "format", "bits", "mode", "accuracy", "sd", "worst", "to fp32", "s.e.", "within noise"),
    *("as trained", "train loss", "by epoch"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those for --accuracy alone; `--networks` is the whole benchmark's, and names these networks then."""
    group = parser.add_argument_group("with --accuracy")
    group.add_argument("--seeds", type=positive, metavar="N", help=f"how many, from 0 (default: {DEFAULT_SEEDS})")
    group.add_argument("--epochs", type=positive, metavar="N", help=f"of each training (default: {Recipe().epochs})")
    group.add_argument("--formats", metavar="A,B,C", help=f"beside fp32 (default: {','.join(FORMATS)})")
    group.add_argument(
        "--workers", type=positive, metavar="N", help=f"processes of one thread each (default: {DEFAULT_WORKERS})"
    )


def run(arguments: argparse.Namespace, screen: Screen | None = None) -> int:
    """Train, compare and print; exit code 0 whatever the accuracies are: they are a finding, not a test."""
    screen = screen or Screen(json=arguments.json)
    screen.progress("starting")
    study = study_accuracy(
        networks=_names("--networks", arguments.networks) or tuple(NETWORKS),
        formats=_names("--formats", arguments.formats) or FORMATS,
        seeds=tuple(range(arguments.seeds or DEFAULT_SEEDS)),
        recipe=Recipe(epochs=arguments.epochs or Recipe().epochs),
        num_workers=arguments.workers or DEFAULT_WORKERS,
        progress=screen.progress,
    )
    screen.done()
    if screen.json:
        screen.object({"benchmark": "gist", "study": "accuracy", **study.to_dict()})
    else:
        _print(study, screen)
    return 0


def _names(option: str, text: str | None) -> tuple[str, ...]:
    """The names in `A,B,C`; none if the option was not given."""
    if text is None:
        return ()
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise BadOption(f"{option} {text!r} names nothing. Separate names by commas")
    return names


def _print(study: Study, screen: Screen) -> None:
    recipe, num_seeds = study.recipe, len(study.rows[0].seeds)
    screen.line(
        f"scikit-learn's digits: {recipe.num_train} to train on, {study.num_test} to test on, {recipe.epochs} epochs "
        f"of batches of {recipe.batch}, {num_seeds} seed{'s' * (num_seeds != 1)}"
    )
    for network in dict.fromkeys(row.network for row in study.rows):
        rows = [row for row in study.rows if row.network == network]
        heights = [height for row in rows for height in row.curve]
        screen.line()
        screen.table(
            _HEADER, [_cells(row, min(heights), max(heights)) for row in rows], right=(*_HEADER[2:3], *_HEADER[4:12])
        )
    if study.duels:
        screen.line()
        screen.line("delayed minus immediate, in points, seed by seed")
        header = ("network", "format", "difference", "s.e.", "at least as good", "as trained", "s.e. as trained")
        screen.table(
            header,
            [
                (
                    duel.network,
                    duel.format,
                    _points(duel.difference),
                    _error(duel.difference),
                    _verdict(duel.difference.not_worse),
                    _points(duel.difference_as_trained),
                    _error(duel.difference_as_trained),
                )
                for duel in study.duels
            ],
            right=(*header[2:4], *header[5:]),
        )
    screen.line()
    for mode, meaning in MODES.items():
        if any(row.mode == mode for row in study.rows):
            screen.line(f"{mode}: {meaning}")
    rates = ", ".join(f"{network} {rate:g}" for network, rate in study.learning_rates.items())
    screen.line(f"learning rates, falling to zero: {rates}. sd is between seeds, worst is the worst seed.")
    screen.line("accuracy is tested in full precision in every mode; `as trained` is the difference to fp32 with the")
    screen.line("test's forward rounded as in training. Differences are in points, of pairs with the same seed.")
    screen.line(f"within noise: {NOISE_RULE}.")
    screen.line("at least as good: above zero, or within noise.")
    share = false_alarms(num_seeds)
    if share is not None:
        screen.line(
            f"where there is no difference, two standard errors are exceeded in {share:.1%} of such comparisons."
        )
    for row in study.rows:
        if row.num_fallbacks:
            screen.line(f"{row.network}, {row.format} {row.mode}: {row.num_fallbacks:,} maps were kept as they are")
    screen.line(f"took {seconds(study.duration_s)}")


def _cells(row: Row, low: float, high: float) -> tuple[str, ...]:
    return (
        row.network,
        row.format,
        f"{row.bits_per_element:.4g}",
        row.mode,
        f"{row.accuracy_mean:.2%}",
        "" if row.accuracy_std is None else f"{row.accuracy_std:.2%}",
        f"{min(row.accuracies):.2%}",
        _points(row.difference),
        _error(row.difference),
        "" if row.difference is None else _verdict(row.difference.within_noise),
        _points(row.difference_as_trained) if row.mode == IMMEDIATE else "",
        "astray" if row.final_loss is None else f"{row.final_loss:.4f}",
        sparkline(row.curve, low=low, high=high),
    )


def _verdict(found: bool | None) -> str:
    return {True: "yes", False: "NO", None: "unknown"}[found]


def _points(difference: Difference | None) -> str:
    return "" if difference is None else f"{100 * difference.mean:+.2f}"


def _error(difference: Difference | None) -> str:
    return "" if difference is None or difference.standard_error is None else f"{100 * difference.standard_error:.2f}"
