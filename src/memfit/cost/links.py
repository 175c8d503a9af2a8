"""How fast the disk behind a folder takes tensors in and gives them back, and what compute loses to that."""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from memfit.cost.costs import Link

_REQUEST_BYTES = 16 * 2**20
_NUM_REQUESTS = 4
_PAGE_BYTES = 4096
_NUM_LATENCY_READS = 9
_NUM_ROUNDS = 5
_ROUND_S = 0.03
_MATRIX_SIZE, _VECTOR_SIZE = 768, 2**22


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Of one file, one request at a time, past the page cache where the file system allows it.

    The drags are shares of a request's time: see Link.
    """

    write_bytes_per_s: float
    read_bytes_per_s: float
    latency_s: float
    write_drag: float = 0.0
    read_drag: float = 0.0

    def link(self) -> Link:
        # One disk, one channel: reads and writes at once share it.
        return Link(
            "disk",
            "disk",
            "disk",
            self.write_bytes_per_s,
            self.read_bytes_per_s,
            self.latency_s,
            self.write_drag,
            self.read_drag,
        )


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

        def write(index: int) -> None:
            _whole(os.pwrite(file, view, index % _NUM_REQUESTS * _REQUEST_BYTES))

        def read(index: int) -> None:
            _whole(os.preadv(file, [view], index % _NUM_REQUESTS * _REQUEST_BYTES))

        total = _NUM_REQUESTS * _REQUEST_BYTES
        speed = DiskSpeed(total / write_s, total / read_s, statistics.median(waits))
        disk = os.fstat(file).st_dev, torch.get_num_threads()
        if disk not in _LOST:  # it takes longer than all of the above
            _LOST[disk] = tuple(_lost_s_per_byte(request) for request in (write, read))
        lost_by_write, lost_by_read = _LOST[disk]
        return replace(
            speed,
            write_drag=min(max(lost_by_write * speed.write_bytes_per_s, 0.0), 1.0),
            read_drag=min(max(lost_by_read * speed.read_bytes_per_s, 0.0), 1.0),
        )


_LOST: dict[tuple[int, int], tuple[float, ...]] = {}
"""By disk and number of threads, what this process has found: seconds that kernels lose by byte, written and read."""


def _lost_s_per_byte(request: Callable[[int], None]) -> float:
    """What kernels lose that run beside such requests, for each byte of these.

    Half of it by a kernel that waits for the cores and half by one that waits for the memory: a step has both.
    """
    return statistics.fmean(_slowdown(kernel, request) for kernel in _kernels())


def _kernels() -> Iterator[Callable[[], object]]:
    a, b = torch.ones(_MATRIX_SIZE, _MATRIX_SIZE), torch.ones(_VECTOR_SIZE)
    product, total = torch.empty_like(a), torch.empty_like(b)
    yield lambda: torch.mm(a, a, out=product)
    yield lambda: torch.add(b, b, out=total)


def _slowdown(kernel: Callable[[], object], request: Callable[[int], None]) -> float:
    """How much longer a kernel takes for each byte that is moved meanwhile; the two arms take turns."""
    kernel()
    begun = time.perf_counter()
    kernel()
    num_calls = max(1, round(_ROUND_S / max(time.perf_counter() - begun, 1e-6)))

    def timed() -> float:
        begun = time.perf_counter()
        for _ in range(num_calls):
            kernel()
        return time.perf_counter() - begun

    found = []
    for _ in range(_NUM_ROUNDS):
        alone_s = timed()
        with _Requests(request) as requests:
            before = requests.num_done
            beside_s = timed()
            moved_bytes = (requests.num_done - before) * _REQUEST_BYTES
        if moved_bytes:
            found.append((beside_s - alone_s) / moved_bytes)
    return statistics.median(found) if found else 0.0


class _Requests:
    """Makes one request after the other in a thread of its own, for as long as the context lasts."""

    def __init__(self, request: Callable[[int], None]) -> None:
        self.num_done = 0
        self._request = request
        self._is_over = False
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._work, name="memfit-drag", daemon=True)

    def __enter__(self) -> _Requests:
        try:
            self._thread.start()
        except RuntimeError as error:  # a limit on threads: the tier could not start its own either
            raise OSError(f"a thread for its requests cannot be started: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            while not self._is_over:
                self._request(self.num_done)
                self.num_done += 1
        except OSError as error:
            self._error = error


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
