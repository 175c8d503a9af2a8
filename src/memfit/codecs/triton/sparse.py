"""Non-zeros packed one after the other, with a bitmap, in Triton: count, sum up, compact."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# Triton has no types, and reads those of kernels as code of theirs.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from memfit.codecs.triton.launch import NUM_ELEMENTS, Job, aligned, launch, whole
from memfit.codecs.triton.mask import pack_bits

BLOCK = 256
_ROWS = NUM_ELEMENTS // BLOCK


def encode(job: Job) -> int:
    """numbers = (item bytes, room); returns how many values there is no room for.

    Beside the code it takes four bytes for each block, while it runs: 0.4 % of float32.
    """
    item_bytes, room = job.numbers
    source, num_blocks = whole(job.source), -(-job.count // BLOCK)
    ends = torch.empty(num_blocks, dtype=torch.int32, device=source.device)
    launch(_count, num_blocks, _ROWS, source, ends, job.count, ROWS=_ROWS)
    if not num_blocks:
        return 0
    ends.cumsum_(0)  # wraps around at 2 ** 32 like the offsets, and there are fewer elements
    values = job.target[: room * item_bytes].view(source.dtype)
    control = job.target[room * item_bytes :]
    args = (source, values, control, ends, job.count, room, num_blocks)
    launch(_encode, num_blocks, _ROWS, *args, ROWS=_ROWS)
    # The host waits here, after both passes: values beyond the room are counted but not written, so it need not look in
    # between. That it must look, see `launch.answer`.
    return max((int(ends[-1].item()) & 0xFFFFFFFF) - room, 0)


def decode(job: Job) -> int:
    """numbers = (item bytes, room)."""
    item_bytes, room = job.numbers
    code, target, num_blocks = aligned(job.source), whole(job.target), -(-job.count // BLOCK)
    values = code[: room * item_bytes].view(target.dtype)
    launch(_decode, num_blocks, _ROWS, values, code[room * item_bytes :], target, job.count, num_blocks, ROWS=_ROWS)
    return 0


@triton.jit
def _count(source, counts, count, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = row[:, None] * 256 + tl.arange(0, 256)[None, :]
    is_value = tl.load(source + place, mask=place < count, other=0) != 0
    tl.store(counts + row, tl.sum(is_value.to(tl.int32), axis=1), mask=row * 256 < count)


@triton.jit
def _encode(source, values, control, ends, count, room, num_blocks, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_blocks
    place = row[:, None] * 256 + tl.arange(0, 256)[None, :]
    value = tl.load(source + place, mask=place < count, other=0)
    is_value = (value != 0).to(tl.int32)
    end = tl.load(ends + row, mask=is_row, other=0).to(tl.int64) & 0xFFFFFFFF
    begin = end - tl.sum(is_value, axis=1)
    at = begin[:, None] + tl.cumsum(is_value, axis=1) - 1
    tl.store(values + at, value, mask=(is_value != 0) & (at < room))
    for k in tl.static_range(4):  # byte by byte: behind values of 16 bits offsets may lie at odd places
        tl.store(control + 4 * row + k, (begin >> (8 * k)).to(tl.uint8), mask=is_row)
    byte = tl.program_id(0).to(tl.int64) * (ROWS * 32) + tl.arange(0, ROWS * 32)
    bitmap = pack_bits(tl.reshape(is_value, [ROWS * 32, 8]), 1)
    tl.store(control + 4 * num_blocks + byte, bitmap.to(tl.uint8), mask=byte * 8 < count)


@triton.jit
def _decode(values, control, target, count, num_blocks, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_blocks
    place = row[:, None] * 256 + tl.arange(0, 256)[None, :]
    begin = tl.zeros([ROWS], tl.int64)
    for k in tl.static_range(4):
        begin |= tl.load(control + 4 * row + k, mask=is_row, other=0).to(tl.int64) << (8 * k)
    byte = tl.load(control + 4 * num_blocks + place // 8, mask=place < count, other=0).to(tl.int32)
    is_value = byte >> (place % 8).to(tl.int32) & 1
    at = begin[:, None] + tl.cumsum(is_value, axis=1) - 1
    value = tl.load(values + at, mask=(place < count) & (is_value != 0), other=0)
    tl.store(target + place, value, mask=place < count)
