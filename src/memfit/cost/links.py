"""How fast the disk behind a folder takes tensors in and gives them back."""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

from memfit.cost.costs import Link

_REQUEST_BYTES = 16 * 2**20
_NUM_REQUESTS = 4
_PAGE_BYTES = 4096
_NUM_LATENCY_READS = 9


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Of one file, one request at a time, past the page cache where the file system allows it."""

    write_bytes_per_s: float
    read_bytes_per_s: float
    latency_s: float

    def link(self) -> Link:
        # One disk, one channel: reads and writes at once share it.
        return Link("disk", "disk", "disk", self.write_bytes_per_s, self.read_bytes_per_s, self.latency_s)


def measure_disk(folder: str | None = None) -> DiskSpeed:
    """Write and read 64 MiB in a file that has no name; raises OSError if the folder cannot take it."""
    with contextlib.ExitStack() as stack:
        # Private and page-aligned: shared maps are slow to fault in, and O_DIRECT takes whole pages only.
        buffer = stack.enter_context(contextlib.closing(_private_buffer(_REQUEST_BYTES)))
        # No constant byte: a disk that compresses or deduplicates would flatter itself.
        for start in range(0, _REQUEST_BYTES, 2**20):
            buffer[start : start + 2**20] = os.urandom(2**20)
        file, is_direct = stack.enter_context(_nameless_file(folder or tempfile.gettempdir()))
        view = stack.enter_context(memoryview(buffer))

        begun = time.perf_counter()
        for index in range(_NUM_REQUESTS):
            _whole(os.pwrite(file, view, index * _REQUEST_BYTES))
        if not is_direct:
            os.fsync(file)
        write_s = time.perf_counter() - begun

        if not is_direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        begun = time.perf_counter()
        for index in range(_NUM_REQUESTS):
            _whole(os.preadv(file, [view], index * _REQUEST_BYTES))
        read_s = time.perf_counter() - begun

        page = stack.enter_context(view[:_PAGE_BYTES])
        waits = []
        for index in range(_NUM_LATENCY_READS):
            begun = time.perf_counter()
            os.preadv(file, [page], index * 2**20)
            waits.append(time.perf_counter() - begun)
    total = _NUM_REQUESTS * _REQUEST_BYTES
    return DiskSpeed(total / write_s, total / read_s, statistics.median(waits))


@contextlib.contextmanager
def _nameless_file(folder: str) -> Iterator[tuple[int, bool]]:
    """An open file that is gone when it is closed, and whether it goes past the page cache."""
    file, path = tempfile.mkstemp(prefix="memfit-", dir=folder)
    try:
        is_direct = False
        if hasattr(os, "O_DIRECT"):
            try:
                direct = os.open(path, os.O_RDWR | os.O_DIRECT)
            except OSError:  # some file systems (older tmpfs, some network mounts) refuse
                pass
            else:
                os.close(file)
                file, is_direct = direct, True
        os.unlink(path)
        yield file, is_direct
    finally:
        os.close(file)
        with contextlib.suppress(OSError):
            os.unlink(path)


def _private_buffer(num_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _whole(num_bytes: int) -> None:
    if num_bytes != _REQUEST_BYTES:
        raise OSError(f"the disk took {num_bytes} of {_REQUEST_BYTES} bytes")
