"""Start a Triton kernel on the memory of tensors.

Elements are taken in the order of memory, so a kernel sees no shapes: a pointer, and how many there are. Codes have the
layout of the twins, bit for bit; these are the references here too.

[Note: bits on a GPU]
A compiler may join a product and a sum into one rounding, which torch does not do: every launch forbids that. Division
is written `div_rn`, since `/` is not rounded as IEEE says. Subnormals are numbers: Triton does not flush them unless it
is told to. Whatever else can be is done on the bits of floats.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

NUM_ELEMENTS = 2048  # to a program: enough for four warps to load in wide pieces
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Job:
    """One call, as `kernels.run` got it. `table` is on the device already."""

    source: torch.Tensor
    target: torch.Tensor
    count: int
    numbers: tuple[int, ...]
    reals: Sequence[float] = ()
    table: torch.Tensor | None = None


def launch(kernel: Any, num_items: int, items_each: int, *arguments: Any, **constants: Any) -> None:
    """Start as many programs as it takes to do so many items, on the device and the stream of the tensors."""
    if not num_items:
        return  # CUDA refuses a grid of nothing
    with torch.cuda.device_of(arguments[0]):
        kernel[(-(-num_items // items_each),)](*arguments, **constants, enable_fp_fusion=False)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: loads and stores of these change no bit of a NaN."""
    return tensor.view(_WHOLE[tensor.element_size()])


def aligned(code: torch.Tensor) -> torch.Tensor:
    """A code from which wide numbers may be loaded: a GPU traps on one that straddles its alignment.

    A code is a storage of its own, so it is; only a view that somebody made into one would be copied here.
    """
    return code if code.data_ptr() % 16 == 0 else code.clone()


@functools.lru_cache(maxsize=4096)
def constants(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A few numbers on the device, made once: the copy to a device makes the host wait. Kernels never write to them.

    As a table and not as arguments, of which every new value could mean another compilation.
    """
    return torch.tensor(numbers, dtype=dtype, device=device)


def no_doubts(device: torch.device) -> torch.Tensor:
    """Where a kernel notes that an element does not fit the code."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def answer(doubts: torch.Tensor) -> int:
    """What a kernel noted; the host waits for it.

    That is the price of codes of one size: whether a tensor fits into its code or needs a dense copy depends on its
    data, and the host must know before it goes on, since the copy must be made before the tensor is freed. It costs one
    copy of four bytes, and the launches that the host could have made ahead meanwhile.
    """
    return int(doubts.item())
