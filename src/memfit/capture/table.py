"""A Step as a readable table."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memfit.capture.step import Step


def step_table(step: Step, *, max_rows: int | None = None) -> str:
    """One row per op: what it makes, how many bytes, for which module and line, and until when it lives."""
    rows = [("#", "half", "op", "makes", "bytes", "kind", "module", "source")]
    shown: set[int] = set()
    for index, op in enumerate(step.ops):
        if max_rows is not None and index >= max_rows:
            break
        values = [step.values[value] for value in op.made]
        fresh = [v for v in values if v.storage not in shown]
        shown.update(v.storage for v in fresh)
        kinds = dict.fromkeys(step.storage[v.storage].kind.value for v in fresh)
        makes = ", ".join(f"{v.name}:{v.describe()}" for v in values) or "-"
        size = sum(step.storage[s].bytes for s in {v.storage for v in fresh})
        mode = "writes" if op.writes else "view" if values and not fresh else ",".join(kinds)
        rows.append((str(index), op.half.value, op.target, makes, f"{size:,}", mode, op.path or "(root)", op.source))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    if max_rows is not None and len(step.ops) > max_rows:
        lines.append(f"... {len(step.ops) - max_rows} more ops")
    lines.append(repr(step))
    return "\n".join(lines)
