"""The disk as a place to put tensors: what serves training on a CPU.

    tier = DiskTier(DiskSettings(directory="/mnt/nvme/me", limit_bytes=20 * 2**30))

Making a tier costs nothing: file, folder and threads come with the first `reserve` or `send`. All tensors of a process
share one file without a name (spill_file.py), which is written past the page cache straight from the tensors' own pages
and read into fresh ones (pages.py), by one or two threads (io_thread.py).

The tier has no buffers of its own. What it needs in memory is the padding of what it brings back: `buffer_bytes`.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass

import torch

from memfit.errors import BadOption
from memfit.tiers.disk_parcel import DiskParcel, Traffic
from memfit.tiers.pages import padding_bytes
from memfit.tiers.spill import Spill
from memfit.tiers.tier import Parcel, TierRefused, describe, flat_bytes

# For the edges of what is rounded outward to whole blocks; a plan of many more tensors lets the file grow.
_EDGES_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class DiskSettings:
    """How the disk tier works.

    Attributes:
        directory: where the file is; None: $MEMFIT_SPILL_DIR, else a folder in memfit's cache.
        limit_bytes: the most that tensors may take there at once, less than 8 KiB of padding for each not counted.
        num_threads: one is enough for large tensors; two help where they are small.
        direct: past the page cache; None: where the file system can.
        checksums: verify on the way back that bytes are those that were put away.
    """

    directory: str | None = None
    limit_bytes: int | None = None
    num_threads: int = 1
    direct: bool | None = None
    checksums: bool = False

    def __post_init__(self) -> None:
        if self.num_threads < 1:
            raise BadOption(f"num_threads={self.num_threads}: the disk tier needs at least one thread")
        if self.limit_bytes is not None and self.limit_bytes < 0:
            raise BadOption(f"limit_bytes={self.limit_bytes}: a limit is not negative; None is no limit")


class DiskTier:
    """Puts storages of CPU tensors into a file.

    Attributes:
        traffic: bytes out and in, and seconds waited, since the tier was made.
    """

    def __init__(self, settings: DiskSettings | None = None) -> None:
        self._settings = settings or DiskSettings()
        self._begin_anew()
        _TIERS.add(self)

    def _begin_anew(self) -> None:
        self._lock = threading.Lock()
        self._spill: Spill | None = None
        self.traffic = Traffic()

    @property
    def settings(self) -> DiskSettings:
        return self._settings

    def configure(self, settings: DiskSettings) -> None:
        """Use other settings from now on; another file only while nothing is away."""
        old = self._settings
        same_file = (settings.directory, settings.direct, settings.num_threads) == (
            old.directory,
            old.direct,
            old.num_threads,
        )
        if not same_file:
            if self.away_bytes:
                raise BadOption(
                    f"the disk tier cannot move to another file now: {self.away_bytes:,} bytes are away in this one. "
                    "Configure it between steps"
                )
            self.close()
        self._settings = settings

    @property
    def away_bytes(self) -> int:
        """The tensors that have room in the file now."""
        return self._spill.away_bytes if self._spill is not None and self._spill.is_ours else 0

    @property
    def file_bytes(self) -> int:
        """How large the file is; 0 if there is none."""
        return self._spill.file.num_bytes if self._spill is not None and self._spill.is_ours else 0

    @property
    def is_direct(self) -> bool | None:
        """Whether the file goes past the page cache; None if there is none yet."""
        return self._spill.file.is_direct if self._spill is not None and self._spill.is_ours else None

    @staticmethod
    def buffer_bytes(num_bytes: int) -> int:
        """The most memory that a storage which was brought back takes beyond its own bytes."""
        return padding_bytes(num_bytes)

    def reserve(self, num_bytes: int) -> None:
        limit = self._settings.limit_bytes
        if limit is not None and num_bytes > limit:
            raise TierRefused(
                f"the plan puts {num_bytes:,} bytes on disk at once, and the disk tier may take {limit:,}. "
                "Raise limit_bytes (tiers.registry.TIERS['disk'].configure), or plan with a larger memory budget"
            )
        if num_bytes == 0:
            return
        spill = self._open()
        try:
            spill.reserve(num_bytes + _EDGES_BYTES)
        except OSError as error:
            raise TierRefused(
                f"the plan puts {num_bytes:,} bytes on disk at once, and {spill.file.directory} has no room for them: "
                f"{error.strerror}. Free some space, name another folder in MEMFIT_SPILL_DIR, or plan with a larger "
                "memory budget"
            ) from error

    def send(self, tensor: torch.Tensor, name: str = "") -> Parcel:
        whole = flat_bytes(tensor)
        what = describe(name, whole.numel())
        if tensor.device.type != "cpu":
            raise TierRefused(f"{what}: the disk tier takes tensors from the CPU's memory, not from {tensor.device}")
        settings, spill = self._settings, self._open()
        try:
            lot = spill.take(
                whole.numel(),
                whole.data_ptr(),
                limit_bytes=settings.limit_bytes,
                checksums=settings.checksums,
            )
        except OSError as error:
            raise TierRefused(
                f"no room for {what}, in {spill.file.directory}: {error.strerror}. Free some space, name another "
                "folder in MEMFIT_SPILL_DIR, or plan with a larger memory budget"
            ) from error
        if lot is None:
            raise TierRefused(
                f"no room for {what}: the disk tier may take {settings.limit_bytes:,} bytes, of which "
                f"{spill.away_bytes:,} are taken. Raise limit_bytes, or plan with a larger memory budget"
            )
        return DiskParcel(spill, lot, whole, name, self.traffic)

    def close(self) -> None:
        """Give back the file and the threads; what is away is lost. The tier opens again when it is used again."""
        with self._lock:
            spill, self._spill = self._spill, None
        if spill is not None:
            spill.close()

    def _open(self) -> Spill:
        with self._lock:
            if self._spill is None or not self._spill.is_ours:
                if self._spill is not None:
                    self._spill.close()
                settings = self._settings
                self._spill = Spill(settings.directory, direct=settings.direct, num_threads=settings.num_threads)
            return self._spill


_TIERS: weakref.WeakSet[DiskTier] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """A child lets go of its parent's file, and opens its own if it needs one."""
    for tier in list(_TIERS):
        spill = tier._spill
        tier._begin_anew()
        if spill is not None:
            spill.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
