"""One storage on its way to the disk, there, or on its way back."""

from __future__ import annotations

import enum
import errno
import os
import threading
import time

import torch

from memfit.tiers.io_thread import Transfer
from memfit.tiers.pages import empty_pages
from memfit.tiers.spill import Lot, Spill
from memfit.tiers.spill_file import is_full
from memfit.tiers.tier import TransferFailed, describe


class Traffic:
    """What went to and fro, and how long compute stood still for it.

    Attributes:
        bytes_out, bytes_in: of the tensors, once they are there and back; one used where it is counts as neither.
        waited_s: time spent in `sent` and `fetched`.
    """

    def __init__(self) -> None:
        self.bytes_out = 0
        self.bytes_in = 0
        self.waited_s = 0.0
        self._lock = threading.Lock()

    def add(self, *, bytes_out: int = 0, bytes_in: int = 0, waited_s: float = 0.0) -> None:
        with self._lock:
            self.bytes_out += bytes_out
            self.bytes_in += bytes_in
            self.waited_s += waited_s


class _Stage(enum.Enum):
    """Where the bytes are, and so who holds memory: the parcel wherever it is not in the file or gone."""

    SENDING = "here, and on its way to the file"
    AWAY = "in the file only"
    FETCHING = "on its way to new memory"
    STAYED = "here: it was asked for before it was sent"
    GONE = "handed over, or released"


class DiskParcel:
    """One storage; see [Note: who owns the memory of a parcel]."""

    def __init__(self, spill: Spill, lot: Lot, whole: torch.Tensor, name: str, traffic: Traffic) -> None:
        self._transfer: Transfer | None = None  # first: released half-made, it must be there
        self._spill = spill
        self._lot: Lot | None = lot
        self._name = name
        self._traffic = traffic
        self._stage = _Stage.SENDING
        self._here: torch.Tensor | None = whole
        self._transfer = spill.writing(lot, whole)
        spill.submit(self._transfer)

    def __del__(self) -> None:
        self.release()

    def sent(self) -> None:
        lot, transfer = self._expect(_Stage.SENDING)
        self._wait(transfer, "put away")
        if not transfer.is_complete:
            raise self._failure("put away", transfer.error) from transfer.error
        self._here, self._stage = None, _Stage.AWAY
        self._traffic.add(bytes_out=lot.num_bytes)

    def fetch(self) -> torch.Tensor:
        lot, transfer = self._expect(_Stage.SENDING, _Stage.AWAY)
        if self._here is not None:
            transfer.abandon()  # not only cancelled: in the queue it would wait for all in front of it
            self._stage = _Stage.STAYED
            return self._here
        if not self._spill.is_ours:
            raise self._failure("bring back", None)
        try:
            here = empty_pages(lot.num_bytes, lot.offset) if lot.num_bytes else torch.empty(0, dtype=torch.uint8)
        except OSError as error:
            raise self._failure("bring back", error) from error
        self._transfer = self._spill.reading(lot, here)
        self._spill.submit(self._transfer)
        self._here, self._stage = here, _Stage.FETCHING
        return here

    def fetched(self) -> torch.Tensor:
        lot, transfer = self._expect(_Stage.FETCHING, _Stage.STAYED)
        stayed = self._stage is _Stage.STAYED
        if not stayed or self._spill.pid == os.getpid():
            # One that stayed waits too, for at most a request: then nothing but its reader holds it.
            self._wait(transfer, "bring back")
        if not stayed:
            if not transfer.is_complete:
                self._here, self._stage = None, _Stage.AWAY
                raise self._failure("bring back", transfer.error) from transfer.error
            self._traffic.add(bytes_in=lot.num_bytes)
        here = self._here  # not before: a traceback would keep it
        assert here is not None
        self.release()
        return here

    def release(self) -> None:
        # Takes no lock: it also runs when the parcel is collected, which can be at any moment.
        lot, self._lot = self._lot, None
        if lot is not None:
            if self._transfer is not None:
                self._transfer.cancel()
            self._spill.give_back(lot, self._transfer)
        self._here = self._transfer = None
        self._stage = _Stage.GONE

    def _expect(self, *stages: _Stage) -> tuple[Lot, Transfer]:
        wanted = " or ".join(stage.value for stage in stages)
        assert self._stage in stages, f"{self._name} is {self._stage.value}; it should be {wanted}"
        assert self._lot is not None and self._transfer is not None
        return self._lot, self._transfer

    def _wait(self, transfer: Transfer, verb: str) -> None:
        if transfer.is_over:
            return
        if self._spill.pid != os.getpid():
            raise self._failure(verb, None)  # the threads that would end it are not in this process
        begun = time.perf_counter()
        try:
            transfer.wait()
        finally:
            self._traffic.add(waited_s=time.perf_counter() - begun)

    def _failure(self, verb: str, error: BaseException | None) -> TransferFailed:
        assert self._lot is not None
        file = self._spill.file
        advice = (
            "Run the step again; if it fails again, look after that disk or name another folder in MEMFIT_SPILL_DIR"
        )
        if error is None and self._spill.pid != os.getpid():
            why = f"it was sent by process {self._spill.pid}, and this is a fork of it"
            advice = "Run forward and backward in the same process"
        elif error is None:
            why, advice = "the tier was closed meanwhile", "Close it between steps"
        elif isinstance(error, OSError) and is_full(error):
            why = f"{error.strerror} ({file.free_bytes():,} bytes are free)" if file.is_open else f"{error.strerror}"
            advice = "Free some space, name another folder in MEMFIT_SPILL_DIR, or plan with a larger budget"
        elif isinstance(error, OSError) and error.errno == errno.ENOMEM:
            why, advice = f"there is no memory for it ({error.strerror})", "Plan with a smaller memory budget"
        else:
            why = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        what = describe(self._name, self._lot.num_bytes)
        return TransferFailed(f"the disk tier could not {verb} {what}, in {file.directory}: {why}. {advice}")
