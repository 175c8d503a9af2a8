"""int8 and int4 in Triton: whole multiples of a step per block of 256, rounded at random as `codecs/quantised.py` says.

To encode numbers = (1 if gates must be kept, seed); to decode nothing.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# Triton has no types, and reads those of kernels as code of theirs.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from memfit.codecs.triton.launch import NUM_ELEMENTS, Job, aligned, answer, launch, no_doubts, whole
from memfit.codecs.triton.small_float import within_float32

BLOCK = 256
_ROWS = NUM_ELEMENTS // BLOCK


def int8_encode(job: Job) -> int:
    """Returns 1 if a number is not finite."""
    return _start_encode(_int8_encode, job)


def int8_decode(job: Job) -> int:
    return _start_decode(_int8_decode, job)


def int4_encode(job: Job) -> int:
    """Returns 1 if a number is not finite."""
    return _start_encode(_int4_encode, job)


def int4_decode(job: Job) -> int:
    return _start_decode(_int4_decode, job)


def _start_encode(kernel: Any, job: Job) -> int:
    num_blocks, doubts = -(-job.count // BLOCK), no_doubts(job.source.device)
    steps, codes = job.target[: 4 * num_blocks].view(torch.float32), job.target[4 * num_blocks :]
    keeps_gate, seed = job.numbers
    signed_seed = (seed ^ 1 << 31) - (1 << 31)  # of 32 bits whatever it is, so that kernels compile once
    args = (whole(job.source), steps, codes, doubts, job.count, signed_seed)
    launch(kernel, num_blocks, _ROWS, *args, KEEPS_GATE=keeps_gate, ROWS=_ROWS)
    return answer(doubts)


def _start_decode(kernel: Any, job: Job) -> int:
    code, num_blocks = aligned(job.source), -(-job.count // BLOCK)
    steps, codes = code[: 4 * num_blocks].view(torch.float32), code[4 * num_blocks :]
    launch(kernel, job.count, NUM_ELEMENTS, steps, codes, job.target, job.count, ITEMS=NUM_ELEMENTS)
    return 0


@triton.jit
def _stir(x):
    """Numbers of 32 bits, in which every bit of the input reaches every bit of the result."""
    x = tl.mul(x ^ (x >> 16), 0x7FEB352D, sanitize_overflow=False)
    x = tl.mul(x ^ (x >> 15), 0x846CA68B, sanitize_overflow=False)
    return x ^ (x >> 16)


@triton.jit
def _step(largest, top):
    """What the largest number is `top` times; 2 ** -126 at least, whose inverse is still finite."""
    step = tl.div_rn(largest.to(tl.float32, bitcast=True), top.to(tl.float32))
    return tl.maximum(step, 1.1754943508222875e-38)


@triton.jit
def _total(bits):
    """The sum of the bits of each row; what is beyond 32 of them falls away."""
    return tl.sum(bits.to(tl.int64), axis=1).to(tl.uint32)


@triton.jit
def _codes(bits, total, step, top, row, lane, seed, KEEPS_GATE: tl.constexpr):
    """The signed codes of numbers that stand in rows; `lane` is the place of each in its block."""
    key = _stir(row.to(tl.uint32)) ^ seed.to(tl.uint32, bitcast=True) ^ total
    spread = tl.mul(lane.to(tl.uint32), 0x9E3779B9, sanitize_overflow=False)
    drawn = _stir(tl.add(_stir(key)[:, None], spread, sanitize_overflow=False)) >> 8
    chance = drawn.to(tl.float32) * 5.9604644775390625e-08  # 2 ** -24
    inverse = tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step)
    raised = bits.to(tl.float32, bitcast=True) * inverse[:, None] + chance
    code = raised.to(tl.int32)
    code -= (code.to(tl.float32) > raised).to(tl.int32)  # not `floor`, which takes subnormals for zero on a GPU
    code = tl.minimum(tl.maximum(code, -top[:, None]), top[:, None])
    if KEEPS_GATE:
        is_zero = (bits & 0x7FFFFFFF) == 0
        code = tl.where((code == 0) & (is_zero == 0), tl.where(bits < 0, -1, 1), code)
    return code


@triton.jit(do_not_specialize=["seed"])
def _int8_encode(source, steps, codes, doubts, count, seed, KEEPS_GATE: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, 256)[None, :]
    place = row[:, None] * 256 + lane
    bits = tl.load(source + place, mask=place < count, other=0)
    size = bits & 0x7FFFFFFF
    largest = tl.max(size, axis=1)
    tl.store(doubts, 1, mask=tl.max(largest, axis=0) >= 0x7F800000)  # all that write write the same
    is_signed = tl.max(((bits < 0) & (size != 0)).to(tl.int32), axis=1) != 0
    top = tl.where(is_signed, 127, 255)
    step = _step(largest, top)
    code = _codes(bits, _total(bits), step, top, row, lane, seed, KEEPS_GATE)
    tl.store(codes + place, code.to(tl.uint8), mask=place < count)
    tl.store(steps + row, tl.where(is_signed, -step, step), mask=row * 256 < count)


@triton.jit
def _int8_decode(steps, codes, target, count, ITEMS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    code = tl.load(codes + place, mask=place < count, other=0).to(tl.int32)
    step = tl.load(steps + place // 256, mask=place < count, other=0)
    code = tl.where(step < 0, (code ^ 128) - 128, code)
    tl.store(target + place, within_float32(code.to(tl.float32) * tl.abs(step)), mask=place < count)


@triton.jit(do_not_specialize=["seed"])
def _int4_encode(source, steps, codes, doubts, count, seed, KEEPS_GATE: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    num_here = tl.minimum(count - row * 256, 256)
    half = ((num_here + 1) // 2)[:, None]  # byte j holds the numbers j and j + half
    low = tl.arange(0, 128)[None, :] + row[:, None] * 0
    high = low + half
    is_low, is_high = low < half, (low < half) & (high < num_here[:, None])
    bits_low = tl.load(source + row[:, None] * 256 + low, mask=is_low, other=0)
    bits_high = tl.load(source + row[:, None] * 256 + high, mask=is_high, other=0)
    size_low, size_high = bits_low & 0x7FFFFFFF, bits_high & 0x7FFFFFFF
    largest = tl.max(tl.maximum(size_low, size_high), axis=1)
    tl.store(doubts, 1, mask=tl.max(largest, axis=0) >= 0x7F800000)  # all that write write the same
    is_negative = ((bits_low < 0) & (size_low != 0)) | ((bits_high < 0) & (size_high != 0))
    is_signed = tl.max(is_negative.to(tl.int32), axis=1) != 0
    top = tl.where(is_signed, 7, 15)
    step = _step(largest, top)
    total = tl.add(_total(bits_low), _total(bits_high), sanitize_overflow=False)
    code_low = _codes(bits_low, total, step, top, row, low, seed, KEEPS_GATE) & 15
    code_high = tl.where(is_high, _codes(bits_high, total, step, top, row, high, seed, KEEPS_GATE) & 15, 0)
    tl.store(codes + row[:, None] * 128 + low, (code_low | code_high << 4).to(tl.uint8), mask=is_low)
    tl.store(steps + row, tl.where(is_signed, -step, step), mask=row * 256 < count)


@triton.jit
def _int4_decode(steps, codes, target, count, ITEMS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    lane = place % 256
    half = (tl.minimum(count - (place - lane), 256) + 1) // 2
    is_high = lane >= half
    byte = tl.load(codes + place // 256 * 128 + tl.where(is_high, lane - half, lane), mask=place < count, other=0)
    code = tl.where(is_high, byte >> 4, byte & 15).to(tl.int32)
    step = tl.load(steps + place // 256, mask=place < count, other=0)
    code = tl.where(step < 0, (code ^ 8) - 8, code)
    tl.store(target + place, within_float32(code.to(tl.float32) * tl.abs(step)), mask=place < count)
