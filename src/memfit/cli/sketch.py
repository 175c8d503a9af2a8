"""A picture of memory over time in characters: two shades, the budget as a line, the peak and the boundary marked.

                      v peak 41.2 MiB
41.2 MiB |         ▁▆█:█▅
  budget |------▂██████:███▃-------
         |    ▅████████:█████▁
         |░░░░░░░░░░░░░░░░░░░░░░░░
       0 +-------------+----------
          forward, 0.2 s backward, 0.4 s
"""

from __future__ import annotations

from memfit.capture.step import Kind
from memfit.cli.screen import mebibytes, seconds
from memfit.cost.costs import PS_PER_S
from memfit.plan.ledger import KINDS
from memfit.plan.simulate import Timeline

WIDTH, HEIGHT = 64, 12
_LABEL = 12  # characters left of the picture; with the axis and the picture, that stays below 80
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_FIXED = "░"
_FIXED_KINDS = tuple(KINDS.index(kind) for kind in (Kind.PARAMETER, Kind.INPUT, Kind.GRADIENT))


def sketch(
    timeline: Timeline,
    *,
    budget_bytes: int | None = None,
    always_bytes: int = 0,
    width: int = WIDTH,
    height: int = HEIGHT,
) -> list[str]:
    """The lines of the picture; `always_bytes` are there throughout, besides what the timeline counts."""
    columns = _columns(timeline, always_bytes, width)
    totals = [total for total, _ in columns]
    peak_bytes = max(totals)
    top_bytes = max(peak_bytes, 1)
    # A budget far above the peak would press the picture flat: it is only said then.
    shows_budget = budget_bytes is not None and budget_bytes <= 2 * peak_bytes
    if shows_budget and budget_bytes is not None:
        top_bytes = max(top_bytes, budget_bytes)
    budget_row = (budget_bytes * height - 1) // top_bytes if shows_budget and budget_bytes else -1
    boundary = _column(timeline, timeline.starts_ps[timeline.program.boundary], width)

    lines = [_margin("") + " " + _beside(totals.index(peak_bytes), f"peak {mebibytes(peak_bytes)}", width)]
    for row in reversed(range(height)):
        label = "budget" if row == budget_row else mebibytes(top_bytes) if row == height - 1 else ""
        cells = []
        for column, (total, fixed) in enumerate(columns):
            empty = "-" if row == budget_row else ":" if column == boundary else " "
            cells.append(_cell(row, -(-total * height * 8 // top_bytes), fixed * height * 8 // top_bytes, empty))
        lines.append(f"{_margin(label)}|{''.join(cells)}".rstrip())
    axis = ["-"] * width
    axis[boundary] = "+"
    lines.append(f"{_margin('0')}+{''.join(axis)}")
    lines.append(f"{_margin('')} {_halves(timeline, boundary, width)}".rstrip())
    lines.append(f"{_margin('')} {_FIXED} what no plan can change   {_EIGHTHS[-1]} what a plan can change")
    if budget_bytes is not None and not shows_budget:
        lines.append(f"{_margin('')} the budget of {mebibytes(budget_bytes)} is far above the picture")
    return lines


def _columns(timeline: Timeline, always_bytes: int, width: int) -> list[tuple[int, int]]:
    """For each column the most bytes in its time, and how many of them no plan can change."""
    columns = [(0, 0)] * width
    last = (0, 0)
    for entry, held, start_ps, end_ps in zip(
        timeline.ledger.entries, timeline.held, timeline.starts_ps, timeline.ends_ps, strict=True
    ):
        fixed_bytes = sum(held.bytes[kind] for kind in _FIXED_KINDS)
        level = (held.total_bytes + always_bytes, fixed_bytes + always_bytes)
        first = _column(timeline, start_ps, width)
        # An end right on the edge of a column is no part of that column.
        for column in range(first, max(_column(timeline, end_ps - 1, width), first) + 1):
            columns[column] = max(columns[column], level)
        last = (entry.total_bytes + always_bytes, fixed_bytes + always_bytes)
    # Transfers may go on after the last instruction.
    return [column if column != (0, 0) else last for column in columns]


def _column(timeline: Timeline, time_ps: int, width: int) -> int:
    return min(max(time_ps, 0) * width // max(timeline.step_ps, 1), width - 1)


def _cell(row: int, total_eighths: int, fixed_eighths: int, empty: str) -> str:
    """One character: what of the row, counted from the bottom, is filled."""
    filled = min(max(total_eighths - 8 * row, 0), 8)
    if filled == 0:
        return empty
    return _FIXED if fixed_eighths >= 8 * row + 4 else _EIGHTHS[filled]


def _beside(column: int, text: str, width: int) -> str:
    """An arrow down at the column, with the text on the side that has room."""
    if column + 2 + len(text) <= width:
        return f"{'':>{column}}v {text}"
    return f"{text} v".rjust(column + 1)


def _halves(timeline: Timeline, boundary: int, width: int) -> str:
    """The names of both halves under the axis, each with its time, where there is room."""
    forward_s = timeline.starts_ps[timeline.program.boundary] / PS_PER_S
    backward_s = timeline.step_s - forward_s
    found = ""
    for name, duration_s, room in (("forward", forward_s, boundary), ("backward", backward_s, width - boundary)):
        text = f"{name}, {seconds(duration_s)}"
        text = text if len(text) < room else name if len(name) < room else ""
        found += text.center(room)
    return found


def _margin(label: str) -> str:
    return f"{label:>{_LABEL}} "
