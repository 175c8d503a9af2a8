"""Tables of `memfit bench peers` for people."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from memfit.cli.screen import Screen, mebibytes
from memfit.report.peers import Comparison, Row
from memfit.report.peers_verdict import MOST_TIME_RATIO, PeerVerdict, verdicts

_HEADER = (
    *("share", "peer", "setting", "activations", "of eager", "whole step"),
    *("time ratio", "quartiles", "auto over it", "exact"),
)
_EXPLANATION = (
    "Each peer is at the fastest of the settings that were tried whose measured activation peak is within that share "
    "of eager's (! where none is). With --sweep first, which is usual, no more settings of one peer are tried than it "
    "takes to find the one within the share that recomputes least. Peaks are of a process each; times are over "
    "eager's, in turn in one process. Where quartiles leave open which of the two is faster, auto is also timed beside "
    "that peer, and that decides. Exact: loss, gradients, buffers and random state, bit for bit, each step from "
    "eager's state. torch.compile hands its gradients over all at once: its activations are what the step takes at "
    "least, without all of them."
)
_YES = {True: "yes", False: "NO", None: "-"}


def print_peers(found: Sequence[Comparison], screen: Screen) -> None:
    """A table for each network, the verdicts, and the smallest budgets."""
    for comparison in found:
        _print_network(comparison, screen)
    _print_verdicts(verdicts([row for comparison in found for row in comparison.rows]), screen)
    _print_smallest(found, screen)
    screen.line()
    for line in textwrap.wrap(_EXPLANATION, width=118):
        screen.line(line)


def in_a_line(comparison: Comparison) -> str:
    """The times of one network, as soon as they are there: '!' where the target was not kept, '~' where inexact."""
    parts = []
    for row in comparison.rows:
        marks = ("" if row.within else "!") + ("~" if row.exact is False else "")
        time_ratio = "failed" if row.time_ratio is None else f"{row.time_ratio:.3f}{marks}"
        parts.append(f"{row.peer} {time_ratio} ({row.share:.0%})")
    return f"{comparison.case.network}: {', '.join(parts)}"


def _print_network(comparison: Comparison, screen: Screen) -> None:
    row = comparison.rows[0]
    sizes = "".join(f", {name} {size}" for name, size in (("batch", row.batch), ("image", row.image)) if size)
    layout = ", channels last" if comparison.case.channels_last else ""
    screen.line(f"{row.network}{sizes}{layout}")
    screen.table(_HEADER, [_cells(row) for row in comparison.rows], right=("share", *_HEADER[3:9]))
    notes = [(row, text) for row in comparison.rows for text in _notes(row)]
    for row, text in notes:
        screen.line(textwrap.fill(f"{row.peer} at {row.share:.0%}: {text}", width=118, subsequent_indent="  "))
    screen.line()


def _cells(row: Row) -> tuple[str, ...]:
    share, trial = row.activation_share, row.trial
    return (
        f"{row.share:.0%}",
        row.peer,
        "-" if row.setting is None else str(row.setting),
        "-" if row.activation_peak_bytes is None else mebibytes(row.activation_peak_bytes),
        "-" if share is None else f"{share:.1%}{'' if row.within else ' !'}",
        "-" if row.peak_bytes is None else mebibytes(row.peak_bytes),
        "-" if trial is None else f"{trial.time_ratio:.3f}",
        "-" if trial is None else f"{trial.time_ratio_low:.3f}-{trial.time_ratio_high:.3f}",
        "-" if row.duel is None else f"{row.duel.time_ratio:.3f}",
        "-" if trial is None else ("yes" if trial.exact else f"NO: {', '.join(trial.different)}"),
    )


def _notes(row: Row) -> list[str]:
    """What the table has no room for."""
    found = [row.note] if row.note else []
    trial = row.trial
    if trial is not None and trial.gradient_error is not None:
        error = trial.gradient_error
        found.append(
            f"gradients are off by {_norm(error['relative_norm'])} of their length, '{error['worst']}' by "
            f"{_norm(error['worst_relative_norm'])}"
        )
    if trial is not None and trial.own_gradient_error is not None:
        same = "of the same bits" if trial.own_loss_is_same else "of other bits"
        found.append(
            f"and from its own without a memory budget, at a loss {same}, by "
            f"{_norm(trial.own_gradient_error['relative_norm'])}: what backward draws again is not what forward drew"
            if _is_wrong(trial.own_gradient_error["relative_norm"])
            else f"from its own without a memory budget by {_norm(trial.own_gradient_error['relative_norm'])} only"
        )
    return found


def _norm(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.1e}"


def _is_wrong(norm: float | str) -> bool:
    """More than rounding in another order makes."""
    return isinstance(norm, str) or norm > 1e-2


def _print_verdicts(found: Sequence[PeerVerdict], screen: Screen) -> None:
    if not found:
        return
    header = ("auto", "share", "exact", "within budget", "time ratio", f"<= {MOST_TIME_RATIO:.2f}", "fastest", "behind")
    rows = [
        (
            verdict.network,
            f"{verdict.share:.0%}",
            _YES[verdict.exact],
            _YES[verdict.within_budget],
            "-" if verdict.time_ratio is None else f"{verdict.time_ratio:.3f}",
            _YES[verdict.fast_enough],
            _YES[verdict.fastest],
            ", ".join(f"{p} (noise)" if p in verdict.within_noise else p for p in verdict.beaten_by),
        )
        for verdict in found
    ]
    screen.table(header, rows, right=("share", "time ratio"))


def _print_smallest(found: Sequence[Comparison], screen: Screen) -> None:
    for comparison in found:
        name, smallest = comparison.case.network, comparison.smallest
        text = comparison.smallest_failure
        if smallest is not None:
            share = smallest["activation_bytes"] / max(smallest["keep_activation_bytes"], 1)
            text = (
                f"{smallest['budget_bytes']:,} bytes in all, of which activations "
                f"{mebibytes(smallest['activation_bytes'])}, {share:.0%} of keeping them ({smallest['reason']}); "
                f"proven: {smallest['proof']}"
            )
        if text:
            screen.line(textwrap.fill(f"{name}, smallest budget of auto: {text}", width=118, subsequent_indent="  "))
