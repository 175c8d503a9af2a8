"""Pinned host memory: made once, cut into ranges, counted against a limit.

Pinning costs milliseconds and stops the device, so it happens when the pool is reserved, and after that only if the
pool was reserved too small. Ranges are handed out by best fit and neighbours that are free grow together; where a range
goes depends only on the order of calls, never on how far the device has come, so a step that is repeated finds its
ranges where it found them before, and nothing is pinned again.

[Note: fences] The host gives a range back when it has queued the last copy that touches it, not when that copy is
done. So a free range has fences: events after which it may be written. Whoever takes it queues its copy behind them.
Events of one stream pass in order; of each stream the last is enough.
"""

from __future__ import annotations

import mmap
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

import torch

from memfit.tiers.streams import Event, PinnedBlock
from memfit.tiers.tier import TierRefused, describe

_ALIGNMENT_BYTES = 64  # a cache line: copies of neighbours never share one
_SLACK_BYTES = 64 * 1024  # what a thousand storages of odd sizes lose to alignment


@dataclass(frozen=True)
class Fence:
    """A copy's end, by its stream and its number among all fences."""

    lane: Hashable
    number: int
    event: Event


Fences = Mapping[Hashable, Fence]  # by lane


@dataclass(frozen=True)
class HostRange:
    """Bytes of the pool that somebody has."""

    block: int
    start: int
    size_bytes: int


@dataclass(frozen=True)
class _Free:
    start: int
    size_bytes: int
    fences: Fences


class PinnedPool:
    """Ranges of pinned memory, within a limit."""

    def __init__(self, pin: Callable[[int], PinnedBlock], *, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._ceiling_bytes = _aligned(limit_bytes)
        self.num_pinned = 0  # how often memory was pinned, or taken where it could not be
        self._pin = pin
        self._is_pageable = False
        self._blocks: dict[int, PinnedBlock] = {}
        self._free: dict[int, list[_Free]] = {}  # by block; by address
        self._returned: deque[tuple[HostRange, tuple[Fence, ...]]] = deque()
        self._last: dict[Hashable, Fence] = {}
        closing = weakref.finalize(self, _unpin_all, self._blocks, self._last)
        closing.atexit = False  # the process gives it all back

    @property
    def total_bytes(self) -> int:
        """What the pool holds, free or not."""
        return sum(block.taken_bytes for block in self._blocks.values())

    @property
    def free_bytes(self) -> int:
        """What nobody has, whether or not copies still touch it."""
        self._take_back()
        return sum(free.size_bytes for pieces in self._free.values() for free in pieces)

    def note(self, fence: Fence) -> None:
        """Remember that a copy touches the pool until this fence: nothing is unpinned before."""
        self._last[fence.lane] = fence

    def reserve(self, num_bytes: int) -> None:
        """See to it that the pool holds so many bytes, in one block if nothing is in it now."""
        capacity_bytes = sum(len(block.memory) for block in self._blocks.values())
        if num_bytes <= capacity_bytes:
            return
        if self.free_bytes == capacity_bytes:
            _unpin_all(self._blocks, self._last)
            self._last.clear()
            self._free.clear()
            capacity_bytes = 0
        # The slack is not worth a refusal.
        wanted = num_bytes - capacity_bytes
        self._grow(max(wanted, min(wanted + _SLACK_BYTES, self._ceiling_bytes - self.total_bytes)), "a whole step")

    def take(self, num_bytes: int, name: str) -> tuple[HostRange, tuple[Fence, ...]]:
        """A range for so many bytes, and the fences behind which it may be written."""
        self._take_back()
        size_bytes = max(_aligned(num_bytes), _ALIGNMENT_BYTES)
        best = min(
            (
                (free.size_bytes, block, index)
                for block, pieces in self._free.items()
                for index, free in enumerate(pieces)
                if free.size_bytes >= size_bytes
            ),
            default=None,
        )
        if best is None:
            self._grow(size_bytes, name)
            return self.take(num_bytes, name)
        _, block, index = best
        free = self._free[block].pop(index)
        if free.size_bytes > size_bytes:
            rest = _Free(free.start + size_bytes, free.size_bytes - size_bytes, free.fences)
            self._free[block].insert(index, rest)
        pending = tuple(fence for fence in free.fences.values() if not fence.event.query())
        return HostRange(block, free.start, size_bytes), pending

    def give_back(self, place: HostRange, fences: Iterable[Fence]) -> None:
        """Let others have the range behind these fences.

        Safe at any moment, also where the garbage collector calls: it only leaves a note for the next who takes.
        """
        self._returned.append((place, tuple(fences)))

    def memory(self, place: HostRange, num_bytes: int) -> torch.Tensor:
        """The bytes of a range."""
        return self._blocks[place.block].memory[place.start : place.start + num_bytes]

    def _take_back(self) -> None:
        while self._returned:
            place, fences = self._returned.popleft()
            pieces = self._free[place.block]
            index = next((i for i, free in enumerate(pieces) if free.start > place.start), len(pieces))
            joined = _Free(place.start, place.size_bytes, {fence.lane: fence for fence in fences})
            if index < len(pieces) and place.start + place.size_bytes == pieces[index].start:
                joined = _join(joined, pieces.pop(index))
            if index and pieces[index - 1].start + pieces[index - 1].size_bytes == place.start:
                joined = _join(pieces.pop(index - 1), joined)
                index -= 1
            pieces.insert(index, joined)

    def _grow(self, size_bytes: int, name: str) -> None:
        size_bytes = _aligned(size_bytes)
        held_bytes = self.total_bytes
        if held_bytes + size_bytes <= self._ceiling_bytes:
            block = self._new_block(size_bytes)
            # Whole pages may pass the limit by a little; a power of two may not.
            if held_bytes + block.taken_bytes <= self._ceiling_bytes + mmap.PAGESIZE:
                number = max(self._blocks, default=-1) + 1
                self._blocks[number] = block
                self._free[number] = [_Free(0, len(block.memory), {})]
                return
            block.unpin()
        raise TierRefused(
            f"the host tier has no room for {describe(name, size_bytes)}: it may hold {self.limit_bytes:,} bytes of "
            f"host memory and has {held_bytes:,}, of which {self.free_bytes:,} are free. Raise its limit_bytes, or "
            "plan with a larger budget so that less is offloaded, or offload to disk"
        )

    def _new_block(self, size_bytes: int) -> PinnedBlock:
        self.num_pinned += 1
        if not self._is_pageable:
            try:
                return self._pin(size_bytes)
            except (RuntimeError, OSError) as error:
                self._is_pageable = True
                warnings.warn(
                    f"memfit could not pin {size_bytes:,} bytes of host memory ({error}); the host tier goes on with "
                    "pageable memory. Results are the same, but copies hold the host up. Lower limit_bytes or free "
                    "host memory to have it pinned",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return PinnedBlock(torch.empty(size_bytes, dtype=torch.uint8), size_bytes, lambda: None)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _join(left: _Free, right: _Free) -> _Free:
    fences = dict(left.fences)
    for lane, fence in right.fences.items():
        if lane not in fences or fences[lane].number < fence.number:
            fences[lane] = fence
    return _Free(left.start, left.size_bytes + right.size_bytes, fences)


def _unpin_all(blocks: dict[int, PinnedBlock], last: Mapping[Hashable, Fence]) -> None:
    """Give the memory back to the machine, once the last copies are done."""
    for fence in last.values():
        fence.event.synchronize()
    for block in blocks.values():
        block.unpin()
    blocks.clear()
