"""Self-tests of rewrites: run both forms of an op on this machine and compare every bit.

A rewrite is used for an op signature only if its two forms gave the same bits there. Outcomes are kept in memory and on
disk, keyed by the signature and by everything that chooses kernels: torch's build, the CPU's abilities, the threads.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from memfit.cache import cache_folder
from memfit.capture.step import Value
from memfit.errors import is_out_of_memory
from memfit.json_folder import sources_digest
from memfit.precision import cpu_name, cpu_settings, library_settings

log = logging.getLogger("memfit")


class Proofs:
    """Remembers which rewrites held for which signatures."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._known: dict[str, bool | str] = {}
        self._refused_for_now: set[str] = set()
        self._loaded = False

    def holds(self, rewrite: str, signature: Any, experiment: Callable[[], bool]) -> bool:
        """True if the experiment says both forms are bit-equal; run once per signature and machine."""
        return bool(self._outcome(rewrite, signature, experiment))

    def found(self, rewrite: str, signature: Any, search: Callable[[], str]) -> str:
        """Which of many forms is bit-equal, as the search says; nothing if none is."""
        return str(self._outcome(rewrite, signature, search) or "")

    def _outcome(self, rewrite: str, signature: Any, experiment: Callable[[], bool | str]) -> bool | str:
        key = self._key(rewrite, signature)
        with self._lock:
            self._load()
            if key in self._refused_for_now:
                return False
            if key not in self._known:
                try:
                    self._known[key] = self._try(rewrite, signature, experiment)
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                    # That says nothing about the two forms, and the next process may have more memory.
                    log.info("rewrite %s is not tested for %s, for want of memory: %s", rewrite, signature, error)
                    self._refused_for_now.add(key)
                    return False
                self._save()
            return self._known[key]

    def _try(self, rewrite: str, signature: Any, experiment: Callable[[], bool | str]) -> bool | str:
        try:
            with torch.no_grad():
                outcome = experiment()
        except (RuntimeError, TypeError) as error:  # the other form does not take these arguments
            if is_out_of_memory(error):
                raise
            log.info("rewrite %s refused by its self-test for %s: %s", rewrite, signature, error)
            return False
        if not outcome:
            log.info(
                "rewrite %s does not hold for %s: other bits, or no gain; the plain op is used", rewrite, signature
            )
        return outcome

    def _key(self, rewrite: str, signature: Any) -> str:
        machine = (
            torch.__version__,
            torch.backends.cpu.get_cpu_capability(),
            cpu_name(),
            cpu_settings(),
            library_settings(),
            sources_digest("operators.py", "stand_ins", "native", "capture/rewrites"),
        )
        return hashlib.sha256(repr((rewrite, signature, machine)).encode()).hexdigest()[:24]

    def _load(self) -> None:
        if self._loaded or self._file is None:
            return
        self._loaded = True
        try:
            found = json.loads(self._file.read_text())
            self._known.update({key: value if isinstance(value, str) else bool(value) for key, value in found.items()})
        except FileNotFoundError:
            pass
        except (OSError, ValueError, AttributeError) as error:
            log.warning("ignoring the damaged self-test cache %s (%s); it is written anew", self._file, error)

    def _save(self) -> None:
        """Write the cache whole, then move it into place: another process never reads half a file."""
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._file.parent, delete=False) as handle:
                json.dump(self._known, handle)
            os.replace(handle.name, self._file)
        except OSError as error:
            log.info("cannot keep self-test outcomes in %s: %s", self._file, error)
            self._file = None


class AssumedProofs(Proofs):
    """Takes every rewrite to hold, for planning away from the machine: testing would run ops of the network's size."""

    def __init__(self) -> None:
        super().__init__(None)

    def holds(self, rewrite: str, signature: Any, experiment: Callable[[], bool]) -> bool:
        return True

    def found(self, rewrite: str, signature: Any, search: Callable[[], str]) -> str:
        return ""  # which one it would be there, nobody knows


PROOFS = Proofs(cache_folder() / "selftests.json")


def layout(value: Value) -> tuple[Any, ...]:
    """What a kernel can see of a value besides its bits."""
    return (value.shape, value.stride, str(value.dtype), value.device)


def is_testable(*values: Value) -> bool:
    """True if tensors like these can be made here: the device exists and the dtype can be filled at random."""
    return all(v.device == "cpu" and v.dtype.is_floating_point for v in values)


def sample(value: Value, *, seed: int, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """A random tensor of that layout: normal numbers, with a few zeros, from a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.empty_strided(value.shape, value.stride, dtype=value.dtype)
    # Filled through a dense alias so that the draw does not depend on strides.
    flat = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
    flat[torch.rand(flat.shape, generator=generator) < 0.1] = 0.0
    return tensor.copy_(flat)


def same_bits(first: Any, second: Any) -> bool:
    """True if two results have the same layout and the same bits, tensor by tensor."""
    if isinstance(first, (tuple, list)):
        return len(first) == len(second) and all(map(same_bits, first, second))
    if first is None or second is None:
        return first is second
    return (
        first.shape == second.shape
        and first.stride() == second.stride()
        and first.dtype == second.dtype
        and torch.equal(_bits(first), _bits(second))
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
