"""Threads that move bytes while compute goes on, and the transfers they work on.

[Note: what threads may hold]
A transfer holds the memory it works on, and lets go of it before it says that it is over: who has waited for a transfer
may count on it that nothing else keeps that memory. Parcels can be collected in any thread at any moment, even inside
these functions, so what they do then (`cancel`) takes no lock.

[Note: fork]
A direct read into memory that is being forked may land in the wrong copy of a page (open(2) warns of it), so no request
is in flight while Python forks. The child has no threads; it must not use what it inherits.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable

from memfit.tiers.tier import TierRefused


class Transfer:
    """One storage on its way: so many requests, each done once by some thread.

    Attributes:
        error: what the first failing request raised; the requests after it are left out.
    """

    def __init__(self, request: Callable[[int], None], num_requests: int, held: object) -> None:
        """Prepare it.

        Args:
            request: does the request of that number; may raise.
            held: what must live until the last request has ended.
        """
        self.num_requests = num_requests
        self.error: BaseException | None = None
        self._request: Callable[[int], None] | None = request
        self._held = held
        self._next = 0
        self._left = num_requests
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._is_cancelled = False
        self._left_out = False
        if num_requests == 0:
            self._finish()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    @property
    def is_complete(self) -> bool:
        """True if every request was done, and none failed."""
        return self.is_over and self.error is None and not self._left_out

    def cancel(self) -> None:
        """Begin no more requests; the one in flight ends as it would."""
        self._is_cancelled = True

    def abandon(self) -> None:
        """Cancel it, and see to it that it ends although no thread may know of it."""
        self.cancel()
        while (number := self.take()) is not None:
            self.do(number)

    def wait(self) -> None:
        """Return when the last request has ended; whoever interrupts this may wait again."""
        self._over.wait()

    def take(self) -> int | None:
        """The number of a request that nobody has taken yet."""
        with self._lock:
            if self._next == self.num_requests:
                return None
            self._next += 1
            return self._next - 1

    def do(self, number: int) -> None:
        """Do a request that was taken."""
        assert self._request is not None
        if self._is_cancelled:
            self._left_out = True
        elif self.error is None:
            try:
                self._request(number)
            except BaseException as error:  # it belongs to who waits, not to this thread
                self.error = error.with_traceback(None)  # whose frames hold this transfer, and so the file
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._finish()

    def _finish(self) -> None:
        self._held = self._request = None
        self._over.set()


class IoThreads:
    """One or more threads that do transfers in order; they start with the first one."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._queue: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._gate = _Gate()
        self._threads: list[threading.Thread] = []
        self._pid = os.getpid()
        _LIVE.add(self)

    def __del__(self) -> None:
        self._dismiss()

    def submit(self, transfer: Transfer) -> None:
        """Have a transfer done."""
        while len(self._threads) < self._num_threads:
            thread = threading.Thread(
                target=_work, args=(self._queue, self._gate), name=f"memfit-disk-{len(self._threads)}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                if self._threads:
                    break
                raise TierRefused(
                    f"the disk tier cannot start its thread: {error}. End some, or raise the limit"
                ) from error
            self._threads.append(thread)
        # One that is put once is done whole: the other threads only help.
        for _ in range(min(self._num_threads, transfer.num_requests)):
            self._queue.put(transfer)

    def pause(self) -> None:
        """Return when no request is in flight; none begins until `resume`."""
        self._gate.shut()

    def resume(self) -> None:
        self._gate.open()

    def close(self) -> None:
        """End the threads; transfers that nobody has begun are left out."""
        waiting: list[Transfer] = []
        with contextlib.suppress(queue.Empty):
            while transfer := self._queue.get_nowait():
                transfer.cancel()
                waiting.append(transfer)
        for transfer in waiting:  # they must still be over for those who wait
            self._queue.put(transfer)
        self._dismiss()
        threads, self._threads = self._threads, []
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _dismiss(self) -> None:
        if os.getpid() == self._pid:
            for _ in self._threads:
                self._queue.put(None)


class _Gate:
    """Lets requests through, or keeps them back until those inside have left."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._num_inside = 0
        self._num_shut = 0

    def __enter__(self) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._num_shut == 0)
            self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._condition:
            self._num_inside -= 1
            self._condition.notify_all()

    def shut(self) -> None:
        with self._condition:
            self._num_shut += 1
            try:
                self._condition.wait_for(lambda: self._num_inside == 0)
            except BaseException:
                self._num_shut -= 1
                self._condition.notify_all()
                raise

    def open(self) -> None:
        with self._condition:
            self._num_shut -= 1
            self._condition.notify_all()


def _work(transfers: queue.SimpleQueue[Transfer | None], gate: _Gate) -> None:
    """Do transfers until told to end. Knows only the queue, so that whoever owns it can be collected."""
    while True:
        transfer = transfers.get()
        if transfer is None:
            return
        while (number := transfer.take()) is not None:
            with gate:
                transfer.do(number)
        del transfer


_LIVE: weakref.WeakSet[IoThreads] = weakref.WeakSet()


class _Paused(threading.local):
    """Those that the thread which is forking has paused: others may have come meanwhile."""

    def __init__(self) -> None:
        self.threads: list[IoThreads] = []


_PAUSED = _Paused()


def _before_fork() -> None:
    for threads in list(_LIVE):
        threads.pause()
        _PAUSED.threads.append(threads)


def _after_fork_in_parent() -> None:
    while _PAUSED.threads:
        _PAUSED.threads.pop().resume()


def _after_fork_in_child() -> None:
    _PAUSED.threads.clear()
    _LIVE.clear()


def _close_all() -> None:
    for threads in list(_LIVE):
        threads.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
atexit.register(_close_all)
