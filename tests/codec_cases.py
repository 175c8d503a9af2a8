"""Tensors that codecs find hard, and values that describe them."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator

import torch
from hypothesis import Phase, settings

from memfit.capture.needs import Gate, Need
from memfit.capture.step import Value
from memfit.codecs import kernels
from memfit.codecs.codec import PackedCodec, Reading, Settings

RELU = Reading(Need.SIGN, Gate(((-math.inf, 0.0, 0.0),), 1.0))
VALUE = Reading(Need.VALUE)
ODD = [
    *(math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-45, -1e-45, 1e-40, 3.0, -3.0, 1.0, 2**-14, 2**-15, 2**-24, 2**-25),
    *(1e-8, -1e-8, 448.0, 464.0, 465.0, 63488.0, 65504.0, 65519.9, 65520.0, 7e4, -7e4, 3.4e38, -3.4e38, 3.39e38),
]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SIZES = [0, 1, 2, 3, 7, 8, 9, 23, 24, 25, 31, 33, 47, 255, 256, 257, 511, 767, 768, 769, 1537, 5000]
WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

quick = settings(max_examples=60, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])


def floats(
    seed: int,
    count: int,
    *,
    dtype: torch.dtype = torch.float32,
    zeros: float = 0.0,
    only_finite: bool = False,
    not_negative: bool = False,
) -> torch.Tensor:
    """Numbers of all sizes, some of them odd, some zero."""
    random = torch.Generator().manual_seed(seed)
    made = torch.randn(count, generator=random) * torch.exp(4 * torch.randn(count, generator=random))
    odd = torch.tensor([number for number in ODD if math.isfinite(number) or not only_finite])
    drawn = odd[torch.randint(0, len(odd), (count,), generator=random)]
    made = torch.where(torch.rand(count, generator=random) < 0.2, drawn, made)
    made = made.masked_fill(torch.rand(count, generator=random) < zeros, 0.0)
    return (made.abs() if not_negative else made).to(dtype)


def value_like(tensor: torch.Tensor) -> Value:
    return Value(0, "v", 0, tuple(tensor.shape), tuple(tensor.stride()), 0, tensor.dtype, "cpu")


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if every bit is equal, of NaN too, and the layout."""
    whole = WHOLE[one.element_size()]
    return (
        one.dtype is other.dtype and one.stride() == other.stride() and torch.equal(one.view(whole), other.view(whole))
    )


def misaligned(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """The same elements so many bytes into a buffer, in a storage of just their size."""
    if not tensor.numel():
        return tensor
    buffer = bytearray(tensor.nbytes + 64 + offset)
    skew = -torch.frombuffer(buffer, dtype=torch.uint8).data_ptr() % 64
    made = torch.frombuffer(buffer, dtype=tensor.dtype, count=tensor.numel(), offset=skew + offset)
    made.copy_(tensor.reshape(-1))
    assert made.data_ptr() % 64 == offset
    return made.view(tensor.shape)


@contextlib.contextmanager
def without_avx2() -> Iterator[None]:
    """Only the portable kernels, for the time being."""
    run = kernels.run
    kernels.run = functools.partial(run, use_avx2=False)  # type: ignore[assignment]
    try:
        yield
    finally:
        kernels.run = run


@contextlib.contextmanager
def num_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def packed(
    codec: PackedCodec, tensor: torch.Tensor, settings_: Settings, *, twin: bool, offset: int = 0
) -> tuple[torch.Tensor, bool]:
    """The code in zeroed bytes, from the kernel or from the twin, and whether the tensor has one."""
    size = codec.packed_bytes(tensor.numel(), tensor.element_size(), settings_)
    code = misaligned(torch.zeros(size, dtype=torch.uint8), offset)
    return code, (codec.pack_twin if twin else codec.pack)(tensor, code, settings_)


def unpacked(
    codec: PackedCodec, code: torch.Tensor, tensor: torch.Tensor, settings_: Settings, *, twin: bool
) -> torch.Tensor:
    """What the code gives back, in a tensor of the same layout that held something else."""
    like = torch.full_like(tensor, 7)
    (codec.unpack_twin if twin else codec.unpack)(code, like, settings_)
    return like
