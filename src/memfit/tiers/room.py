"""Which ranges of a file are free."""

from __future__ import annotations

import bisect
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Range:
    """A stretch of a file."""

    start: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.start + self.num_bytes


class Room:
    """Gives out ranges of [0, capacity) and takes them back.

    What is asked for comes in one piece if some hole is large enough (the smallest such), else in several, largest
    holes first. So only the sum of what is out counts, never how it is scattered, and a file that was once large enough
    stays so.
    """

    def __init__(self) -> None:
        self.capacity_bytes = 0
        self.free_bytes = 0
        self._holes: list[Range] = []  # by start; no two touch

    def grow(self, capacity_bytes: int) -> None:
        """Add what is between the old capacity and a larger one."""
        added = capacity_bytes - self.capacity_bytes
        if added > 0:
            self.capacity_bytes = capacity_bytes
            self._insert(Range(capacity_bytes - added, added))

    def take(self, num_bytes: int) -> tuple[Range, ...] | None:
        """Ranges of so many bytes together, or None if not as many are free."""
        if num_bytes > self.free_bytes:
            return None
        large_enough = [hole for hole in self._holes if hole.num_bytes >= num_bytes]
        if large_enough:
            chosen = [min(large_enough, key=lambda hole: hole.num_bytes)]
        else:
            chosen = sorted(self._holes, key=lambda hole: -hole.num_bytes)
        taken: list[Range] = []
        left = num_bytes
        for hole in chosen:
            if left == 0:
                break
            self._holes.remove(hole)
            part = Range(hole.start, min(left, hole.num_bytes))
            if part.num_bytes < hole.num_bytes:
                bisect.insort(self._holes, Range(part.end, hole.end - part.end), key=lambda h: h.start)
            taken.append(part)
            left -= part.num_bytes
        self.free_bytes -= num_bytes
        return tuple(taken)

    def give_back(self, ranges: tuple[Range, ...]) -> None:
        """Take back what was given out."""
        for given in ranges:
            self._insert(given)

    def _insert(self, given: Range) -> None:
        """Add a hole, and join it to those it touches."""
        index = bisect.bisect(self._holes, given.start, key=lambda hole: hole.start)
        before = self._holes[index - 1] if index else None
        after = self._holes[index] if index < len(self._holes) else None
        assert before is None or before.end <= given.start, "given back twice"
        assert after is None or given.end <= after.start, "given back twice"
        first, last, start, end = index, index, given.start, given.end
        if before is not None and before.end == start:
            first, start = index - 1, before.start
        if after is not None and after.start == end:
            last, end = index + 1, after.end
        self._holes[first:last] = [Range(start, end - start)]
        self.free_bytes += given.num_bytes
