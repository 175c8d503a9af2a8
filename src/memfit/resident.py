"""The resident set of this process: how far it grows, read from Linux under an allocator that gives memory back.

[Note: pinned malloc]
glibc raises its mmap threshold each time a big block is freed, up to 32 MiB, and then keeps freed blocks. Growth read
that way is meaningless: a step runs in what the one before left behind. Pinned thresholds give every block of 64 KiB
or more straight back. That costs page faults (eager is up to 1.7 times slower), so times are never taken under it.
Pinning comes too late once big blocks have been freed, so it is done before torch is imported, by source code (PIN).
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable

from memfit.errors import MemfitError

THRESHOLD_BYTES = 64 * 1024
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
PIN = (
    f"import ctypes; _pin = getattr(ctypes.CDLL(None), 'mallopt', lambda *_: 0); "
    f"_pin({_M_MMAP_THRESHOLD}, {THRESHOLD_BYTES}); _pin({_M_TRIM_THRESHOLD}, {THRESHOLD_BYTES})"
)
"""Python source that pins malloc. Source, because importing any file of memfit imports torch first."""


class CannotMeasure(MemfitError):
    """A figure this machine does not give: the text says which, and what still works."""


def require_linux() -> None:
    """Raise if the growth of a process cannot be read here."""
    lacks = None
    if not sys.platform.startswith("linux"):
        lacks = f"this is {sys.platform}"
    elif not hasattr(ctypes.CDLL(None), "mallopt"):
        lacks = "this C library has no mallopt"
    if lacks is not None:
        raise CannotMeasure(
            f"measuring the peak of a step needs Linux with glibc, and {lacks}. `memfit verify` and the ledger "
            "(model.memfit.ledger) work everywhere"
        )


def peak_bytes() -> int:
    """The most this process ever had resident (since `growth_bytes` last reset it)."""
    if sys.platform.startswith("linux"):
        # Not ru_maxrss: it also counts the process that started this one.
        return _status_bytes("VmHWM")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def growth_bytes(run: Callable[[], object]) -> int:
    """How far the resident set rises above where it is now while `run` runs."""
    gc.collect()
    trim()
    reset_high_water()
    before = _status_bytes("VmRSS")
    run()
    return _status_bytes("VmHWM") - before


def resident_bytes() -> int:
    """What this process has resident now."""
    return _status_bytes("VmRSS")


def high_water_bytes() -> int:
    """The most it had since `reset_high_water`."""
    return _status_bytes("VmHWM")


def reset_high_water() -> None:
    """Let the high-water mark start again from what is resident now."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # resets the high-water mark; see proc(5)
    except OSError as error:
        raise CannotMeasure(
            f"measuring the peak of a step needs to write /proc/self/clear_refs, and that failed: {error}. "
            "Some sandboxes forbid it; `memfit verify` and the ledger (model.memfit.ledger) work everywhere"
        ) from error


class Stretches:
    """The high-water mark of a step, stretch by stretch, each less the bytes that are known not to count.

    Attributes:
        peak_bytes: the highest, without those that do not count.
        whole_peak_bytes: the highest, with them: as growth_bytes has it.
    """

    def __init__(self) -> None:
        gc.collect()
        trim()
        self._before = _status_bytes("VmRSS")
        self._known_bytes = 0
        self.peak_bytes = 0
        self.whole_peak_bytes = 0
        reset_high_water()

    def end_stretch(self, known_bytes: int) -> None:
        """The stretch that ends here made `known_bytes` more that do not count, and will stay."""
        self._known_bytes += known_bytes
        growth = _status_bytes("VmHWM") - self._before
        self.whole_peak_bytes = max(self.whole_peak_bytes, growth)
        self.peak_bytes = max(self.peak_bytes, growth - self._known_bytes)
        reset_high_water()


def trim() -> None:
    """Give the pages that malloc holds in reserve back to the system, so that using them again is growth."""
    # Blocks below the threshold leave holes in the heap; a step that fills them would seem to need nothing.
    getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: 0)(0)


def _status_bytes(field: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise CannotMeasure(f"/proc/self/status has no {field}; measuring the peak of a step needs it")
