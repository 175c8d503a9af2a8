"""fp16, bf16, fp10 and fp8 in Triton: numbers = (1 if gates must be kept,) to encode, nothing to decode."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# Triton has no types, and reads those of kernels as code of theirs.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from memfit.codecs.triton.launch import NUM_ELEMENTS, Job, aligned, answer, launch, no_doubts, whole
from memfit.codecs.triton.small_float import shrink, widen, within_float32

BLOCK = 256
_ROWS = NUM_ELEMENTS // BLOCK
_WORDS = 512  # of three numbers each


def fp16_encode(job: Job) -> int:
    args = (whole(job.source), job.target.view(torch.int16), job.count)
    launch(_fp16_encode, job.count, NUM_ELEMENTS, *args, KEEPS_GATE=job.numbers[0], ITEMS=NUM_ELEMENTS)
    return 0


def fp16_decode(job: Job) -> int:
    args = (aligned(job.source).view(torch.int16), whole(job.target), job.count)
    launch(_fp16_decode, job.count, NUM_ELEMENTS, *args, ITEMS=NUM_ELEMENTS)
    return 0


def bf16_encode(job: Job) -> int:
    args = (whole(job.source), job.target.view(torch.int16), job.count)
    launch(_bf16_encode, job.count, NUM_ELEMENTS, *args, KEEPS_GATE=job.numbers[0], ITEMS=NUM_ELEMENTS)
    return 0


def bf16_decode(job: Job) -> int:
    args = (aligned(job.source).view(torch.int16), whole(job.target), job.count)
    launch(_bf16_decode, job.count, NUM_ELEMENTS, *args, ITEMS=NUM_ELEMENTS)
    return 0


def fp10_encode(job: Job) -> int:
    args = (whole(job.source), job.target.view(torch.int32), job.count)
    launch(_fp10_encode, -(-job.count // 3), _WORDS, *args, KEEPS_GATE=job.numbers[0], WORDS=_WORDS)
    return 0


def fp10_decode(job: Job) -> int:
    args = (aligned(job.source).view(torch.int32), whole(job.target), job.count)
    launch(_fp10_decode, -(-job.count // 3), _WORDS, *args, WORDS=_WORDS)
    return 0


def fp8_encode(job: Job) -> int:
    """Returns 1 if a number is not finite."""
    num_blocks, doubts = -(-job.count // BLOCK), no_doubts(job.source.device)
    steps, codes = job.target[: 4 * num_blocks].view(torch.int32), job.target[4 * num_blocks :]
    args = (whole(job.source), steps, codes, doubts, job.count)
    launch(_fp8_encode, num_blocks, _ROWS, *args, KEEPS_GATE=job.numbers[0], ROWS=_ROWS)
    return answer(doubts)


def fp8_decode(job: Job) -> int:
    code, num_blocks = aligned(job.source), -(-job.count // BLOCK)
    steps, codes = code[: 4 * num_blocks].view(torch.float32), code[4 * num_blocks :]
    launch(_fp8_decode, job.count, NUM_ELEMENTS, steps, codes, job.target, job.count, ITEMS=NUM_ELEMENTS)
    return 0


@triton.jit
def _fp16_encode(source, target, count, KEEPS_GATE: tl.constexpr, ITEMS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    bits = tl.load(source + place, mask=place < count, other=0).to(tl.uint32, bitcast=True)
    tl.store(target + place, shrink(bits, KEEPS_GATE, 5, 10, True).to(tl.int16), mask=place < count)


@triton.jit
def _fp16_decode(source, target, count, ITEMS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    code = tl.load(source + place, mask=place < count, other=0).to(tl.uint16, bitcast=True).to(tl.uint32)
    tl.store(target + place, widen(code, 5, 10, True).to(tl.int32, bitcast=True), mask=place < count)


@triton.jit
def _bf16_encode(source, target, count, KEEPS_GATE: tl.constexpr, ITEMS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    bits = tl.load(source + place, mask=place < count, other=0).to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    code = tl.minimum((size + 0x7FFF + ((size >> 16) & 1)) >> 16, 0x7F7F)
    code = tl.where(size == 0x7F800000, 0x7F80, code)
    if KEEPS_GATE:
        code = tl.where((code == 0) & (size != 0), 1, code)
    code = tl.where(size > 0x7F800000, 0x7FC0, code | bits >> 31 << 15)
    tl.store(target + place, code.to(tl.int16), mask=place < count)


@triton.jit
def _bf16_decode(source, target, count, ITEMS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    code = tl.load(source + place, mask=place < count, other=0)
    tl.store(target + place, code.to(tl.int32) << 16, mask=place < count)


@triton.jit
def _fp10_places(word, count):
    """Of each word the place of its first number, and how far apart its numbers are."""
    num_whole = count // 24 * 8
    is_whole = word < num_whole
    first = tl.where(is_whole, word // 8 * 24 + word % 8, count // 24 * 24 + word - num_whole)
    return first, tl.where(is_whole, 8, (count % 24 + 2) // 3)


@triton.jit
def _fp10_encode(source, target, count, KEEPS_GATE: tl.constexpr, WORDS: tl.constexpr):
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    first, apart = _fp10_places(word, count)
    packed = tl.zeros([WORDS], tl.uint32)
    for k in tl.static_range(3):
        place = first + k * apart
        bits = tl.load(source + place, mask=place < count, other=0).to(tl.uint32, bitcast=True)
        packed |= shrink(bits, KEEPS_GATE, 5, 4, True) << (10 * k)
    tl.store(target + word, packed.to(tl.int32, bitcast=True), mask=word * 3 < count)


@triton.jit
def _fp10_decode(source, target, count, WORDS: tl.constexpr):
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    first, apart = _fp10_places(word, count)
    is_word = word * 3 < count
    packed = tl.load(source + word, mask=is_word, other=0).to(tl.uint32, bitcast=True)
    for k in tl.static_range(3):
        place = first + k * apart
        bits = widen((packed >> (10 * k)) & 0x3FF, 5, 4, True)
        tl.store(target + place, bits.to(tl.int32, bitcast=True), mask=is_word & (place < count))


@triton.jit
def _fp8_encode(source, steps, codes, doubts, count, KEEPS_GATE: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = row[:, None] * 256 + tl.arange(0, 256)[None, :]
    bits = tl.load(source + place, mask=place < count, other=0)
    size = bits & 0x7FFFFFFF
    largest = tl.max(size, axis=1)
    tl.store(doubts, 1, mask=tl.max(largest, axis=0) >= 0x7F800000)  # all that write write the same
    # The power that puts the largest number into the format's last binade, up to 1.75 * 2 ** 8.
    power = 135 - (largest >> 23) - ((largest & 0x7FFFFF) > 0x600000).to(tl.int32)
    power = tl.where(largest == 0, 0, tl.minimum(power, 126))
    scale = ((127 + power) << 23).to(tl.float32, bitcast=True)
    scaled = bits.to(tl.float32, bitcast=True) * scale[:, None]
    code = shrink(scaled.to(tl.uint32, bitcast=True), 0, 4, 3, False)
    if KEEPS_GATE:
        code = tl.where(((code & 0x7F) == 0) & (size != 0), code + 1, code)
    tl.store(codes + place, code.to(tl.uint8), mask=place < count)
    tl.store(steps + row, (127 - power) << 23, mask=row * 256 < count)


@triton.jit
def _fp8_decode(steps, codes, target, count, ITEMS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    code = tl.load(codes + place, mask=place < count, other=0).to(tl.uint32)
    step = tl.load(steps + place // 256, mask=place < count, other=0)
    number = widen(code, 4, 3, False).to(tl.float32, bitcast=True) * step
    tl.store(target + place, within_float32(number), mask=place < count)
