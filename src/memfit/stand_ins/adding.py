"""Additions in place, one by one and many at once; native/kernels/additions.c says why. And counting."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from memfit.stand_ins import compiled
from memfit.stand_ins.compiled import LEAST_SHARED, Addition, has_samples, is_suspended


def count_up(self: torch.Tensor, number: int) -> torch.Tensor:
    """Add a number to a counter, as batch norm does at every call.

    torch takes longer to find its kernel for that, which has long left the cache, than for all else.
    """
    if is_suspended() or not is_counter(self.shape, self.dtype, self.device.type):
        return torch.ops.aten.add_.Tensor(self, number)
    ctypes.c_int64.from_address(self.data_ptr()).value += number
    torch.autograd.graph.increment_version(self)
    return self


def is_counter(shape: Sequence[int], dtype: torch.dtype, device: str) -> bool:
    """True of a single whole number on a CPU."""
    return len(shape) == 0 and dtype is torch.int64 and device == "cpu"


def add_(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Add the other map to this one."""
    add_all((self,), (other,))
    return self


def add_all(into: Sequence[torch.Tensor], what: Sequence[torch.Tensor]) -> None:
    """Add to each map its counterpart; no two may share memory."""
    library = compiled.kernels()
    pairs = [*zip(into, what, strict=True)]
    if library is None or not all(has_samples(one) and has_samples(other) for one, other in pairs):
        for one, other in pairs:
            torch.ops.aten.add_.Tensor(one, other)
        return
    additions = (Addition * len(pairs))()
    for addition, (one, other) in zip(additions, pairs, strict=True):
        addition.into, addition.what = one.data_ptr(), other.data_ptr()
        addition.num_samples, addition.size = len(one), one.numel() // len(one)
        addition.into_stride, addition.what_stride = one.stride(0), other.stride(0)
    num_elements = sum(one.numel() for one in into)
    num_threads = torch.get_num_threads() if num_elements >= LEAST_SHARED else 1
    library.memfit_add_all(additions, len(pairs), num_threads)
    torch.autograd.graph.increment_version(into)
