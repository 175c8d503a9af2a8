"""The file that tensors are spilled to: it has no name, so nothing is left of it however the process ends."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import tempfile
from functools import cache
from pathlib import Path

from memfit.cache import cache_folder
from memfit.tiers.tier import TierRefused

log = logging.getLogger("memfit")

BLOCK_BYTES = 4096
"""Direct requests begin and end at multiples of this, in memory and in the file; every disk's blocks divide it."""

_NUM_TRIES = 4  # of a request that makes no headway
_IN_MEMORY = ("tmpfs", "ramfs")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def spill_directory(chosen: str | None = None) -> Path:
    """Where tensors are spilled to: as chosen, else $MEMFIT_SPILL_DIR, else a folder in memfit's cache."""
    chosen = chosen or os.environ.get("MEMFIT_SPILL_DIR")
    if chosen:
        return Path(chosen)
    user = f"-{os.getuid()}" if hasattr(os, "getuid") else ""  # a cache may be shared, this folder is not
    return cache_folder() / f"spill{user}"


class SpillFile:
    """An open file without a name, read and written in whole blocks, past the page cache where that can be.

    It is closed when the last transfer that uses it is gone: never under one that is in flight.

    Attributes:
        is_direct: whether it goes past the page cache.
        num_bytes: how far it has been made to reach.
    """

    def __init__(self, directory: str | None = None, *, direct: bool | None = None) -> None:
        """Make it.

        Args:
            directory: made if it is not there.
            direct: past the page cache; None: if the file system can.
        """
        self._file = -1
        self.directory = spill_directory(directory)
        self.num_bytes = 0
        self.is_direct = False
        self._must_be_direct = direct is True
        if not hasattr(os, "preadv"):
            raise TierRefused("the disk tier needs a POSIX system (os.preadv). Leave 'disk' out of the plan")
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._refuse_memory(was_chosen=bool(directory or os.environ.get("MEMFIT_SPILL_DIR")))
            self._file = _open_nameless(self.directory)
        except OSError as error:
            raise TierRefused(
                f"the disk tier cannot make a file in {self.directory}: {_words(error)}. "
                "Name a folder that you may write to in MEMFIT_SPILL_DIR, or leave 'disk' out of the plan"
            ) from error
        if direct is not False:
            self.is_direct = _set_direct(self._file, True)
            if not self.is_direct:
                self._fall_back("when it was opened")

    def __del__(self) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        return self._file >= 0

    def close(self) -> None:
        """Give the file back; only for when nothing is in flight."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def grow(self, num_bytes: int) -> None:
        """Let the file reach so far, and have the disk set that space aside; raises OSError if it is full."""
        added = num_bytes - self.num_bytes
        if added <= 0:
            return
        free_bytes = self.free_bytes()
        if added > free_bytes:
            raise OSError(errno.ENOSPC, f"{added:,} bytes more are needed and {free_bytes:,} are free")
        # By the system's own call: the C library's stand-in for file systems that cannot would write every block.
        allocate = getattr(_libc(), "fallocate", None)
        if allocate is not None and allocate(self._file, 0, self.num_bytes, added):
            number = ctypes.get_errno()
            if number in _FULL:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, self.num_bytes)  # what it did set aside before it was full
                raise OSError(number, os.strerror(number))
        self.num_bytes = num_bytes

    def free_bytes(self) -> int:
        """What the file system has left for this user."""
        status = os.fstatvfs(self._file)
        return status.f_bavail * status.f_frsize

    def write(self, memory: memoryview, start: int) -> None:
        """Write whole blocks from memory that begins at a block's boundary."""
        self._transfer(memory, start, is_write=True)
        if not self.is_direct:
            # Until then the disk may still be full or fail, and nobody would hear of it.
            getattr(os, "fdatasync", os.fsync)(self._file)
        self._forget_cached(start, len(memory))

    def read(self, memory: memoryview, start: int) -> None:
        """Fill memory that begins at a block's boundary with whole blocks."""
        self._transfer(memory, start, is_write=False)
        self._forget_cached(start, len(memory))

    def _transfer(self, memory: memoryview, start: int, *, is_write: bool) -> None:
        """Go on until all is done: the system may do less than it was asked to."""
        done, tries = 0, 0
        while done < len(memory):
            rest, was_direct = memory[done:], self.is_direct
            try:
                if is_write:
                    moved = os.pwrite(self._file, rest, start + done)
                else:
                    moved = os.preadv(self._file, [rest], start + done)
            except InterruptedError:
                continue
            except OSError as error:
                # Some file systems say only now that they take no direct requests.
                if error.errno != errno.EINVAL or not was_direct or self._must_be_direct:
                    raise
                if self.is_direct:
                    self._fall_back("at the first request")
                    self.is_direct = not _set_direct(self._file, False)
                continue
            finally:
                rest.release()
            # A direct request must begin at a block: what is past the last whole one is done again.
            kept = moved - moved % BLOCK_BYTES if was_direct and done + moved < len(memory) else moved
            done += kept
            tries = 0 if kept else tries + 1
            if tries == _NUM_TRIES or (moved == 0 and not is_write):
                verb = "took" if is_write else "gave"
                raise OSError(errno.EIO, f"the file system {verb} {done:,} of {len(memory):,} bytes and no more")

    def _forget_cached(self, start: int, num_bytes: int) -> None:
        """Buffered: keep no second copy in memory."""
        if not self.is_direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, start, num_bytes, os.POSIX_FADV_DONTNEED)

    def _fall_back(self, when: str) -> None:
        if self._must_be_direct:
            raise TierRefused(
                f"{self.directory}: its file system takes no direct requests. Set direct=None or choose another folder"
            )
        log.info("the disk tier goes through the page cache: %s refused direct requests %s", self.directory, when)

    def _refuse_memory(self, *, was_chosen: bool) -> None:
        """A file in memory saves none: refuse such a folder, or warn if somebody asked for it."""
        kind = _file_system(self.directory)
        if kind not in _IN_MEMORY:
            return
        what = f"{self.directory} is {kind}, a file system in memory: what is spilled there stays in RAM"
        advice = "Name a folder on a disk in MEMFIT_SPILL_DIR"
        if not was_chosen:
            raise TierRefused(f"{what}. {advice}, or leave 'disk' out of the plan")
        _warn_once(f"{what}. {advice}")


@cache
def _warn_once(text: str) -> None:
    log.warning(text)


def is_full(error: OSError) -> bool:
    """True if the cause is want of space: on the disk, in a quota, or under a limit on files."""
    return error.errno in _FULL


def _words(error: OSError) -> str:
    return error.strerror or str(error)


def _open_nameless(directory: Path) -> int:
    """Open a new file that only this process can reach."""
    flags = os.O_RDWR | getattr(os, "O_CLOEXEC", 0)
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(directory, flags | os.O_TMPFILE | os.O_EXCL, 0o600)
        except OSError as error:
            # What file systems and kernels without nameless files answer.
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                raise
    # Named for a moment, in a folder that nobody else can look into.
    aside = tempfile.mkdtemp(prefix="spill-", dir=directory)
    try:
        path = os.path.join(aside, "tensors")
        file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        os.unlink(path)
        return file
    finally:
        os.rmdir(aside)


def _set_direct(file: int, on: bool) -> bool:
    """Switch direct requests on or off; False if the file system cannot."""
    direct = getattr(os, "O_DIRECT", 0)
    if not direct:
        return not on
    import fcntl

    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | direct if on else flags & ~direct)
    except OSError:
        return False
    return True


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    if hasattr(library, "fallocate"):
        library.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return library


def _file_system(directory: Path) -> str | None:
    """The kind of file system a folder is on, where Linux says so."""
    number = os.stat(directory).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace")
    except OSError:
        return None
    for line in mounts.splitlines():
        place, _, mounted = line.partition(" - ")
        if place.split()[2:3] == [device] and mounted:
            return mounted.split()[0]
    return None
