"""Settings that change bits, and which kernels serve: torch's precisions, and what its libraries are told."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
from typing import Any, NamedTuple

import torch

FULL = "ieee"
_UNSET = "none"  # by nobody, so that numbers are what they are
_BACKENDS: Any = torch.backends  # which makes some of its parts when it is imported, unseen by type checkers
_PREFIXES = ("ONEDNN_", "DNNL_", "MKL_")
_PRECISE = (FULL, _UNSET)
_CONVOLUTIONS, _PRODUCTS = _BACKENDS.mkldnn.conv, _BACKENDS.mkldnn.matmul


def float32_precisions() -> tuple[str, ...]:
    """One word for each kind of op that can be told otherwise: products, convolutions, recurrent layers, by library.

    Not `torch.get_float32_matmul_precision`: it knows of products only, and raises where libraries differ.
    """
    onednn, cudnn = _BACKENDS.mkldnn, _BACKENDS.cudnn
    kinds = (onednn.matmul, onednn.conv, onednn.rnn, _BACKENDS.cuda.matmul, cudnn.conv, cudnn.rnn)
    found = (str(kind.fp32_precision) for kind in kinds)
    return tuple(FULL if word == _UNSET else word for word in found)


def cpu_is_precise() -> bool:
    """True if products and convolutions on a CPU are computed in full."""
    # Asked for each convolution: a loop would take longer than all else.
    return _CONVOLUTIONS.fp32_precision in _PRECISE and _PRODUCTS.fp32_precision in _PRECISE


class CpuSettings(NamedTuple):
    """All that torch can be told while a program runs, by which a kernel on a CPU may give other bits."""

    num_threads: int
    has_onednn: bool
    is_deterministic: bool
    onednn_is_deterministic: bool
    float32: tuple[str, ...]

    def difference(self, later: CpuSettings) -> str:
        """What was told otherwise later, in words; empty if nothing was."""
        pairs = zip(_IN_WORDS, self, later, strict=True)
        return ", ".join(f"{name} was {before}, is {now}" for name, before, now in pairs if before != now)


_IN_WORDS = (
    "torch.get_num_threads()",
    "torch.backends.mkldnn.enabled",
    "torch.are_deterministic_algorithms_enabled()",
    "torch.backends.mkldnn.deterministic",
    "the precision of float32 products, convolutions and recurrent layers",
)


def cpu_settings() -> CpuSettings:
    """What torch is told now."""
    onednn = _BACKENDS.mkldnn
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    return CpuSettings(
        torch.get_num_threads(), onednn.enabled, is_deterministic, onednn.deterministic, float32_precisions()
    )


@functools.cache
def cpu_name() -> str:
    """The model of the CPU: libraries choose kernels by vendor, too."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def library_settings() -> tuple[str, ...]:
    """What oneDNN and MKL are told by the environment: it may choose other kernels, with other bits."""
    told = (name for name in os.environ if name.startswith(_PREFIXES))
    return tuple(f"{name}={os.environ[name]}" for name in sorted(told))
