"""What a command says: one JSON object or text on stdout, progress on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO


class Screen:
    """Where a command's results go. With `json`, stdout gets one object and nothing else."""

    def __init__(self, *, json: bool, out: TextIO | None = None) -> None:
        self.json = json
        self.out = out or sys.stdout
        self._shows_progress = sys.stderr.isatty()

    def object(self, found: dict[str, Any]) -> None:
        """Print the one JSON object."""
        # allow_nan=False: what other readers call JSON has no NaN.
        print(json.dumps(found, indent=2, allow_nan=False), file=self.out)

    def line(self, text: str = "") -> None:
        if not self.json:
            print(text, file=self.out)

    def facts(self, facts: Sequence[tuple[str, str]]) -> None:
        """Print names and values in two columns."""
        width = max(len(name) for name, _ in facts)
        for name, value in facts:
            self.line(f"{name:<{width}}  {value}")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
        """Print rows under a header; the columns named in `right` are aligned there."""
        if self.json:
            return
        if self.out.isatty() and _rich_table(header, rows, right):
            return
        widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

        def aligned(row: Sequence[str]) -> str:
            cells = (
                cell.rjust(width) if name in right else cell.ljust(width)
                for cell, name, width in zip(row, header, widths, strict=True)
            )
            return "  ".join(cells).rstrip()

        self.line(aligned(header))
        self.line("  ".join("-" * width for width in widths))
        for row in rows:
            self.line(aligned(row))

    def error(self, text: str) -> None:
        """Say on stderr, in one line, what went wrong."""
        print(f"memfit: error: {' '.join(text.split())}", file=sys.stderr)

    def progress(self, text: str) -> None:
        """Show what is being done, on a terminal only."""
        if self._shows_progress:
            print(f"\r\x1b[Kmemfit: {text} ...", end="", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Say on stderr what has been found so far, for those who would wait hours for the whole."""
        self.done()
        print(f"memfit: {text}", file=sys.stderr, flush=True)

    def done(self) -> None:
        """Take the progress line away."""
        if self._shows_progress:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def mebibytes(size_bytes: int) -> str:
    """'517.3 MiB', or GiB from one up."""
    return f"{size_bytes / 2**30:,.2f} GiB" if abs(size_bytes) >= 2**30 else f"{size_bytes / 2**20:,.1f} MiB"


def seconds(duration_s: float) -> str:
    """'0.613 s', '41.2 s'."""
    return f"{duration_s:.3f} s" if duration_s < 10 else f"{duration_s:.1f} s"


def _rich_table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> bool:
    """Print with rich if it is there: it folds long cells to the width of the terminal."""
    if os.environ.get("TERM") == "dumb":
        return False
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in header:
        table.add_column(name, justify="right" if name in right else "left")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # as Text: rich would read [brackets] as markup
    # rich reads NO_COLOR itself.
    Console(highlight=False).print(table)
    return True
