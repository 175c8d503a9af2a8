"""Dense copies in place of codes: for tensors that do not fit into the code that was planned for them, counted.

A code is always smaller than its tensor, and has a storage of its own. So a code whose storage is as large as the
tensor is a dense copy: no header is needed, and it stays true when tiers carry the storage away and back.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

import torch

log = logging.getLogger("memfit")

_lock = threading.Lock()
_counts: dict[str, Fallbacks] = {}


@dataclass(frozen=True)
class Fallbacks:
    """How often a codec has stored a tensor as it is, and how many bytes beyond the plan that took, all in all."""

    num_tensors: int = 0
    extra_bytes: int = 0


def fallbacks() -> dict[str, Fallbacks]:
    """The dense copies since the start, or since `forget_fallbacks`, by codec."""
    with _lock:
        return dict(_counts)


def num_fallbacks() -> int:
    """How many dense copies that were, by all codecs."""
    return sum(found.num_tensors for found in fallbacks().values())


def forget_fallbacks() -> None:
    """Count from zero again."""
    with _lock:
        _counts.clear()


def fall_back(codec: str, tensor: torch.Tensor, planned_bytes: int) -> torch.Tensor:
    """A dense copy, counted; the first of each codec is told of in the log."""
    extra_bytes = tensor.nbytes - planned_bytes
    with _lock:
        known = _counts.get(codec, Fallbacks())
        _counts[codec] = Fallbacks(known.num_tensors + 1, known.extra_bytes + extra_bytes)
    if not known.num_tensors:
        log.warning(
            "a tensor of %s bytes does not fit the %s bytes planned for its '%s' code and is kept as it is: until it "
            "is decoded the step holds %s bytes more than its ledger says. Later ones are only counted, see "
            "memfit.codecs.dense.fallbacks(). Plan with more capacity, or without this codec",
            f"{tensor.nbytes:,}",
            f"{planned_bytes:,}",
            codec,
            f"{extra_bytes:,}",
        )
    return copy_of(tensor)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor in the order of memory."""
    copied = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    copied.copy_(tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()))
    return copied.view(torch.uint8)


def is_dense(code: torch.Tensor, like: torch.Tensor) -> bool:
    """True if the code is a dense copy of a tensor like that. The code may be a view of the planned size."""
    return code.untyped_storage().nbytes() >= like.nbytes


def restore(code: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Fill `like` from its dense copy."""
    like.as_strided((like.numel(),), (1,), like.storage_offset()).copy_(seen(code, like.dtype, (like.numel(),), (1,)))
    return like


def seen(
    code: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...] | torch.Size, stride: tuple[int, ...]
) -> torch.Tensor:
    """The dense copy itself, in the layout of what was copied."""
    return torch.empty(0, dtype=dtype, device=code.device).set_(code.untyped_storage(), 0, tuple(shape), stride)
