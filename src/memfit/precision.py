"""Settings that change bits, and which kernels serve: torch's precisions, and what its libraries are told."""

from __future__ import annotations

import os
from typing import Any

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


def cpu_settings() -> tuple[Any, ...]:
    """All that torch can be told while a program runs, by which a kernel on a CPU may give other bits."""
    onednn = _BACKENDS.mkldnn
    is_deterministic = torch.are_deterministic_algorithms_enabled(), onednn.deterministic
    return torch.get_num_threads(), onednn.enabled, *is_deterministic, float32_precisions()


def library_settings() -> tuple[str, ...]:
    """What oneDNN and MKL are told by the environment: it may choose other kernels, with other bits."""
    told = (name for name in os.environ if name.startswith(_PREFIXES))
    return tuple(f"{name}={os.environ[name]}" for name in sorted(told))
