"""Bits in Triton: on which side of a gate an element lies, and bools."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# Triton has no types, and reads those of kernels as code of theirs.

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from memfit.codecs.triton.launch import NUM_ELEMENTS, Job, constants, launch, whole


def pack(job: Job) -> int:
    """numbers = (bits, ...); reals = (low, high, class) of each cell. Any float; the first cell that fits decides."""
    bits, dtype = job.numbers[0], job.source.dtype
    cells = _cells(tuple(job.reals), dtype, job.source.device)
    is_bf16 = dtype is torch.bfloat16
    source = whole(job.source) if is_bf16 else job.source
    each = NUM_ELEMENTS * bits // 8
    num_cells = len(job.reals) // 3
    args = (source, job.target, cells, job.count)
    launch(_pack, job.target.numel(), each, *args, NUM_CELLS=num_cells, IS_BF16=is_bf16, BITS=bits, BYTES=each)
    return 0


def pack_bool(job: Job) -> int:
    """Of bools, a bit each."""
    each = NUM_ELEMENTS // 8
    launch(_pack_bool, job.target.numel(), each, whole(job.source), job.target, job.count, BYTES=each)
    return 0


def unpack(job: Job) -> int:
    """numbers = (bits, item bytes, the pattern of each of four classes)."""
    bits, _, *patterns = job.numbers
    target = whole(job.target)
    table = constants(tuple(patterns), target.dtype, target.device)
    launch(_unpack, job.count, NUM_ELEMENTS, job.source, target, table, job.count, BITS=bits, ITEMS=NUM_ELEMENTS)
    return 0


def gate(job: Job) -> int:
    """Zero where the bit is set, else what the gradient has: the table, or the target itself if there is none."""
    target = whole(job.target)
    if job.table is None:
        launch(_gate_in_place, job.count, NUM_ELEMENTS, job.source, target, job.count, ITEMS=NUM_ELEMENTS)
    else:
        args = (job.source, whole(job.table), target, job.count)
        launch(_gate, job.count, NUM_ELEMENTS, *args, ITEMS=NUM_ELEMENTS)
    return 0


@functools.lru_cache(maxsize=1024)
def _cells(reals: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The cells on the device, their bounds rounded to the elements' dtype first: so torch compares with a number."""
    return constants(reals, dtype, device).to(torch.float64 if dtype is torch.float64 else torch.float32)


@triton.jit
def pack_bits(small, BITS: tl.constexpr):
    """The bytes that hold rows of small numbers, the first of each row in the lowest bits."""
    shifts = tl.arange(0, 8 // BITS) * BITS
    return tl.sum(small << shifts[None, :], axis=1)


@triton.jit
def _pack(
    source,
    target,
    cells,
    count,
    NUM_CELLS: tl.constexpr,
    IS_BF16: tl.constexpr,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
):
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    place = byte[:, None] * (8 // BITS) + tl.arange(0, 8 // BITS)[None, :]
    loaded = tl.load(source + place, mask=place < count, other=0)
    wide = cells.dtype.element_ty
    number = (loaded.to(tl.int32) << 16).to(wide, bitcast=True) if IS_BF16 else loaded.to(wide)
    found = tl.zeros([BYTES, 8 // BITS], tl.int32)
    for turn in tl.static_range(NUM_CELLS):  # the first cell that fits wins, so it is written last
        cell = cells + 3 * (NUM_CELLS - 1 - turn)
        is_inside = (number >= tl.load(cell)) & (number <= tl.load(cell + 1))
        found = tl.where(is_inside, tl.load(cell + 2).to(tl.int32), found)
    found = tl.where(place < count, found, 0)
    tl.store(target + byte, pack_bits(found, BITS).to(tl.uint8), mask=byte * (8 // BITS) < count)


@triton.jit
def _pack_bool(source, target, count, BYTES: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    place = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    found = (tl.load(source + place, mask=place < count, other=0) != 0).to(tl.int32)
    tl.store(target + byte, pack_bits(found, 1).to(tl.uint8), mask=byte * 8 < count)


@triton.jit
def _unpack(source, target, patterns, count, BITS: tl.constexpr, ITEMS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    byte = tl.load(source + place * BITS // 8, mask=place < count, other=0).to(tl.int32)
    found = byte >> (place * BITS % 8).to(tl.int32) & ((1 << BITS) - 1)
    tl.store(target + place, tl.load(patterns + found), mask=place < count)


@triton.jit
def _is_set(code, place, count):
    """The bit of each element; of none beyond the last."""
    byte = tl.load(code + place // 8, mask=place < count, other=0).to(tl.int32)
    return (byte >> (place % 8).to(tl.int32) & 1) != 0


@triton.jit
def _gate_in_place(source, target, count, ITEMS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    # Only zeros are written, and nothing is read of the gradient.
    tl.store(target + place, 0, mask=_is_set(source, place, count))


@triton.jit
def _gate(source, gradient, target, count, ITEMS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    is_open = (place < count) & (_is_set(source, place, count) == 0)
    tl.store(target + place, tl.load(gradient + place, mask=is_open, other=0), mask=place < count)
