"""A spill file in use: who has which room in it, and the threads that fill it."""

from __future__ import annotations

import os
import threading
import zlib
from collections import deque
from dataclasses import dataclass

import torch

from memfit.tiers.io_thread import IoThreads, Transfer
from memfit.tiers.pages import down, memory_at, up
from memfit.tiers.room import Range, Room
from memfit.tiers.spill_file import BLOCK_BYTES, SpillFile

REQUEST_BYTES = 16 * 2**20
_GROWTH_BYTES = 16 * 2**20  # a file that was not made large enough at first grows by steps of this


class Corrupt(Exception):
    """Bytes that came back are not those that were put away."""


@dataclass(frozen=True, slots=True)
class _Request:
    """One read or write: whole blocks of the file, counted from the block in which the tensor begins."""

    start: int
    place: int
    num_bytes: int


@dataclass(frozen=True)
class Lot:
    """The room of one storage in the file.

    Attributes:
        offset: how far into its first block the storage begins, in the file and in memory.
        checksums: one for each request, of the storage's own bytes; None: nobody asked for them.
    """

    num_bytes: int
    offset: int
    ranges: tuple[Range, ...]
    checksums: list[int] | None

    def requests(self) -> list[_Request]:
        """How it is read and written, the same both times."""
        found = []
        place = 0
        for part in self.ranges:
            for start in range(part.start, part.end, REQUEST_BYTES):
                size = min(REQUEST_BYTES, part.end - start)
                found.append(_Request(start, place, size))
                place += size
        return found

    def checksum(self, request: _Request, memory: memoryview) -> int:
        """Of the storage's own bytes in a request: its neighbours in the edge blocks may change at any time."""
        first = max(self.offset - request.place, 0)
        last = min(self.offset + self.num_bytes - request.place, request.num_bytes)
        with memory[first:last] as own:
            return zlib.crc32(own)


class Spill:
    """The open file of one process."""

    def __init__(self, directory: str | None, *, direct: bool | None, num_threads: int) -> None:
        self.file = SpillFile(directory, direct=direct)
        self.pid = os.getpid()
        self.threads = IoThreads(num_threads)
        self.is_closed = False
        self._room = Room()
        self._lock = threading.Lock()
        self._away_bytes = 0
        # Appending takes no lock, so that parcels may be collected anywhere.
        self._returned: deque[tuple[Lot, Transfer | None]] = deque()

    @property
    def is_ours(self) -> bool:
        """False in a forked child, and once it is closed."""
        return self.pid == os.getpid() and not self.is_closed

    @property
    def away_bytes(self) -> int:
        """The storages that have room in the file now, without padding."""
        with self._lock:
            self._collect()
            return self._away_bytes

    def reserve(self, num_bytes: int) -> None:
        """Let the file hold so much; raises OSError if the disk is full."""
        with self._lock:
            self._grow(up(num_bytes))

    def take(self, num_bytes: int, address: int, *, limit_bytes: int | None, checksums: bool) -> Lot | None:
        """Room for a storage, or None if the limit forbids it; raises OSError if the disk is full."""
        offset = address % BLOCK_BYTES
        size = up(offset + num_bytes) if num_bytes else 0
        with self._lock:
            self._collect()
            allowed_bytes = num_bytes + self._away_bytes if limit_bytes is None else limit_bytes
            if self._away_bytes + num_bytes > allowed_bytes or size > self._room.free_bytes:
                self._collect(wait=True)  # what was cancelled ends with its request
            if self._away_bytes + num_bytes > allowed_bytes:
                return None
            if size > self._room.free_bytes:
                capacity = self._room.capacity_bytes + size - self._room.free_bytes
                try:
                    self._grow(-(-capacity // _GROWTH_BYTES) * _GROWTH_BYTES)
                except OSError:
                    self._grow(capacity)
            ranges = self._room.take(size)
            assert ranges is not None
            self._away_bytes += num_bytes
        return Lot(num_bytes, offset, ranges, [] if checksums else None)

    def give_back(self, lot: Lot, transfer: Transfer | None) -> None:
        """Free a lot as soon as that transfer, the last that may touch it, is over; takes no lock."""
        self._returned.append((lot, transfer))

    def writing(self, lot: Lot, tensor: torch.Tensor) -> Transfer:
        """The transfer of a storage to its lot, to be submitted."""
        # Outward to whole blocks: the edge blocks lie in pages that hold bytes of the tensor, so they can be read.
        first, requests, file = down(tensor.data_ptr()), lot.requests(), self.file
        if lot.checksums is not None:
            lot.checksums.extend([0] * len(requests))

        def write(number: int) -> None:
            request = requests[number]
            with memory_at(first + request.place, request.num_bytes) as memory:
                if lot.checksums is not None:
                    lot.checksums[number] = lot.checksum(request, memory)
                file.write(memory, request.start)

        return Transfer(write, len(requests), tensor)

    def reading(self, lot: Lot, tensor: torch.Tensor) -> Transfer:
        """The transfer of a lot to a tensor that is alone in its pages, to be submitted."""
        first, requests, file = down(tensor.data_ptr()), lot.requests(), self.file

        def read(number: int) -> None:
            request = requests[number]
            with memory_at(first + request.place, request.num_bytes, is_writable=True) as memory:
                file.read(memory, request.start)
                if lot.checksums is not None and lot.checksum(request, memory) != lot.checksums[number]:
                    raise Corrupt(
                        f"bytes {max(request.place - lot.offset, 0):,} to "
                        f"{min(request.place + request.num_bytes - lot.offset, lot.num_bytes):,} "
                        "are not those that were written (checksum)"
                    )

        return Transfer(read, len(requests), tensor)

    def submit(self, transfer: Transfer) -> None:
        """Begin a transfer; if that is interrupted, it is cancelled."""
        try:
            self.threads.submit(transfer)
        except BaseException:
            transfer.abandon()
            raise

    def close(self) -> None:
        """End the threads and the file; what is away is lost."""
        self.is_closed = True
        if self.pid == os.getpid():
            self.threads.close()
        self.file.close()

    def _grow(self, capacity_bytes: int) -> None:
        if capacity_bytes > self._room.capacity_bytes:
            self.file.grow(capacity_bytes)
            self._room.grow(capacity_bytes)

    def _collect(self, *, wait: bool = False) -> None:
        """Free the lots that were given back and that nothing in flight touches any more."""
        for _ in range(len(self._returned)):
            lot, transfer = self._returned.popleft()
            if transfer is not None and wait:
                try:
                    transfer.abandon()  # it was cancelled: what is left is at most a request in flight
                    transfer.wait()
                except BaseException:
                    self._returned.append((lot, transfer))
                    raise
            if transfer is not None and not transfer.is_over:
                self._returned.append((lot, transfer))
            else:
                self._room.give_back(lot.ranges)
                self._away_bytes -= lot.num_bytes
