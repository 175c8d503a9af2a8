"""Integers in fewer bytes, in Triton: numbers = (item bytes, bytes of a code, the least number)."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# Triton has no types, and reads those of kernels as code of theirs.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from memfit.codecs.triton.launch import NUM_ELEMENTS, Job, aligned, answer, launch, no_doubts

_CODES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def encode(job: Job) -> int:
    """Returns 1 if a number is out of range."""
    _, width, low = job.numbers
    doubts = no_doubts(job.source.device)
    args = (job.source, job.target.view(_CODES[width]), doubts, low, job.count)
    launch(_encode, job.count, NUM_ELEMENTS, *args, WIDTH=width, ITEMS=NUM_ELEMENTS)
    return answer(doubts)


def decode(job: Job) -> int:
    _, width, low = job.numbers
    args = (aligned(job.source).view(_CODES[width]), job.target, low, job.count)
    launch(_decode, job.count, NUM_ELEMENTS, *args, WIDTH=width, ITEMS=NUM_ELEMENTS)
    return 0


@triton.jit(do_not_specialize=["low"])
def _encode(source, target, doubts, low, count, WIDTH: tl.constexpr, ITEMS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    away = tl.load(source + place, mask=place < count, other=0).to(tl.int64) - low  # wraps around, as torch's does
    is_out = (place < count) & ((away < 0) | (away >= 1 << 8 * WIDTH))
    tl.store(doubts, 1, mask=tl.sum(is_out.to(tl.int32)) > 0)  # all that write write the same
    tl.store(target + place, away.to(target.dtype.element_ty), mask=place < count)


@triton.jit(do_not_specialize=["low"])
def _decode(source, target, low, count, WIDTH: tl.constexpr, ITEMS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    away = tl.load(source + place, mask=place < count, other=0).to(tl.int64) & ((1 << 8 * WIDTH) - 1)
    tl.store(target + place, (away + low).to(target.dtype.element_ty), mask=place < count)
