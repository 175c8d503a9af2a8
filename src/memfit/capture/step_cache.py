"""Captured steps on disk, for commands that plan networks of the zoo again and again.

[Note: whose captures are kept]
A step may be taken from disk only if nothing that decides it has changed. A network of the zoo is decided by its name,
its sizes, memfit's own sources, torch and a few of torch's settings: all of that is in the key. A model that is given
to fit(), or a user's `package.module:callable`, is decided by Python code that reaches closures, globals, files and
other packages. No hash of it is sound, and a wrong step is wrong gradients: those are captured in every process.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import torch

from memfit.cache import cache_folder
from memfit.capture.step import Step
from memfit.capture.step_json import WrongStep, step_from_lists, step_to_lists
from memfit.json_folder import JsonFolder, sources_digest
from memfit.precision import cpu_name, cpu_settings, library_settings

MAX_FILES, MAX_BYTES = 64, 128 << 20
_SOURCES = ("capture", "zoo", "report/step_module.py", "cli/target.py", "torch_internals.py", "operators.py")


class StepCache:
    """Steps by what decides them."""

    def __init__(self, folder: JsonFolder | None = None) -> None:
        self._folder = folder or JsonFolder(cache_folder() / "steps", max_files=MAX_FILES, max_bytes=MAX_BYTES)

    def step(self, network: str, options: dict[str, Any], make: Callable[[], Step]) -> tuple[Step, bool]:
        """The step of that network, from disk or made now; and whether it was there."""
        key = step_key(network, options)
        content = self._folder.read(key)
        if content is not None:
            try:
                step = step_from_lists(content["step"])
                if step.digest != content["digest"]:
                    raise WrongStep("its digest is another than when it was written")
                return step, True
            except (WrongStep, KeyError, TypeError) as error:
                self._folder.discard(key, error)
        step = make()
        try:
            self._folder.write(key, {"step": step_to_lists(step), "digest": step.digest})
        except WrongStep as error:
            self._folder.discard(key, error)
        return step, False


def step_key(network: str, options: dict[str, Any]) -> dict[str, Any]:
    """All that decides a step of the zoo."""
    return {
        "network": network,
        "options": options,
        "sources": sources_digest(*_SOURCES),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        # What a model's Python or a kernel's choice may look at.
        "settings": [
            str(torch.get_default_dtype()),
            torch.backends.cpu.get_cpu_capability(),
            cpu_name(),
            repr(cpu_settings()),
            list(library_settings()),
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ],
    }
