"""What was measured on this machine, kept on disk: one file for each build of torch, CPU and number of threads.

Several processes may measure at once. Each reads the file again before it writes, so that nobody's prices are lost, and
moves the new file into place whole, so that nobody reads half of one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from memfit.cache import cache_folder
from memfit.cost.costs import OpCost
from memfit.json_folder import sources_digest
from memfit.precision import cpu_name, cpu_settings, library_settings

log = logging.getLogger("memfit")

_FORMAT = 1  # raised when figures of older versions of memfit no longer mean the same


class PriceCache:
    """Prices by signature, corrections of workspaces, and figures of the machine; `file=None` keeps them in memory."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self._ops: dict[str, tuple[int, int]] = {}
        self._corrections: dict[str, int] = {}
        self._figures: dict[str, float] = {}
        self._read()

    @classmethod
    def here(cls) -> PriceCache:
        """The cache of this machine as it is now: the number of threads may have been set since."""
        key = hashlib.sha256(json.dumps(machine()).encode()).hexdigest()[:12]
        return cls(cache_folder() / f"costs-{key}.json")

    def op(self, signature: str) -> OpCost | None:
        """The measured cost of an op, with its workspace corrected; None if it was not measured."""
        if signature not in self._ops:
            return None
        time_ps, workspace_bytes = self._ops[signature]
        return OpCost(time_ps, self.corrected(signature, workspace_bytes))

    def add(self, signature: str, cost: OpCost) -> None:
        """Remember a measured cost. Estimates are not for keeping."""
        assert not cost.is_estimated, signature
        self._ops[signature] = (cost.time_ps, cost.workspace_bytes)

    def correct(self, signature: str, workspace_bytes: int) -> None:
        """Remember that the op was seen to hold that much. Never lowers what is known."""
        self._corrections[signature] = max(workspace_bytes, self._corrections.get(signature, 0))

    def corrected(self, signature: str, workspace_bytes: int) -> int:
        return max(workspace_bytes, self._corrections.get(signature, 0))

    def figure(self, name: str, measure: Callable[[], float]) -> float:
        """A figure of the machine, measured the first time it is asked for."""
        if name not in self._figures:
            self._figures[name] = measure()
        return self._figures[name]

    def forget_times(self, signatures: Iterable[str]) -> None:
        """Forget how long these ops take and what the machine can do, on disk too. What ops hold stays known."""
        self._read()
        self._figures = {}
        for signature in signatures:
            self._ops.pop(signature, None)
        self._write()

    def save(self) -> None:
        """Write everything to disk, with what other processes have written since."""
        self._read()
        self._write()

    def _write(self) -> None:
        if self.file is None:
            return
        content = {
            "format": _FORMAT,
            "machine": machine(),
            "ops": self._ops,
            "corrections": self._corrections,
            "figures": self._figures,
        }
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.file.parent, delete=False) as handle:
                json.dump(content, handle, indent=0)
            os.replace(handle.name, self.file)
        except OSError as error:
            log.info("cannot keep measured costs in %s: %s", self.file, error)
            self.file = None

    def _read(self) -> None:
        """Take in what the file has and we have not; of two corrections the larger."""
        if self.file is None:
            return
        try:
            found = json.loads(self.file.read_text())
            if found["format"] != _FORMAT:
                return
            ops = {str(name): (int(time), int(workspace)) for name, (time, workspace) in found["ops"].items()}
            corrections = {str(name): int(value) for name, value in found["corrections"].items()}
            figures = {str(name): float(value) for name, value in found["figures"].items()}
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            log.warning("ignoring the damaged cache of costs %s (%s); it is written anew", self.file, error)
            return
        self._ops = ops | self._ops
        self._figures = figures | self._figures
        for name, value in corrections.items():
            self.correct(name, value)


def machine() -> list[Any]:
    """All that decides how long a kernel takes here."""
    return [
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        cpu_name(),
        repr(cpu_settings()),
        list(library_settings()),
        sources_digest("operators.py", "stand_ins", "codecs", "native/codecs", "native/kernels", "native/team"),
    ]
