"""Max-pool indices as slots of their windows, in Triton."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# Triton has no types, and reads those of kernels as code of theirs.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from memfit.codecs.triton.launch import NUM_ELEMENTS, Job, answer, constants, launch, no_doubts
from memfit.codecs.triton.mask import pack_bits


def pack(job: Job) -> int:
    """numbers = (bits, out depth, height, width, inner, distances, starts); the table is the slot of each distance.

    Returns 1 if an index lies in no slot of its window.
    """
    bits, *sizes = job.numbers[:6]
    starts = constants(job.numbers[6:], torch.int64, job.source.device)
    doubts, each = no_doubts(job.source.device), NUM_ELEMENTS * bits // 8
    args = (job.source, job.target, starts, job.table, doubts, job.count, *sizes)
    launch(_pack, job.target.numel(), each, *args, BITS=bits, BYTES=each)
    return answer(doubts)


def unpack(job: Job) -> int:
    """numbers as for `pack`; the table is the distance of each slot."""
    bits, *sizes, _ = job.numbers[:6]
    starts = constants(job.numbers[6:], torch.int64, job.source.device)
    args = (job.source, job.target, starts, job.table, job.count, *sizes)
    launch(_unpack, job.count, NUM_ELEMENTS, *args, BITS=bits, ITEMS=NUM_ELEMENTS)
    return 0


@triton.jit
def _begin(place, is_there, starts, depth, height, width, inner):
    """Where the window of each element begins. Elements are in the order (outer, depth, height, width, inner)."""
    window = place // inner
    row = window // width
    at_depth = tl.load(starts + row // height % depth, mask=is_there, other=0)
    at_row = tl.load(starts + depth + row % height, mask=is_there, other=0)
    return at_depth + at_row + tl.load(starts + depth + height + window % width, mask=is_there, other=0)


@triton.jit
def _pack(
    source,
    target,
    starts,
    slot_of,
    doubts,
    count,
    depth,
    height,
    width,
    inner,
    num_distances,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
):
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    place = byte[:, None] * (8 // BITS) + tl.arange(0, 8 // BITS)[None, :]
    is_there = place < count
    index = tl.load(source + place, mask=is_there, other=0)
    distance = index - _begin(place, is_there, starts, depth, height, width, inner)
    is_near = is_there & (distance >= 0) & (distance < num_distances)
    slot = tl.load(slot_of + distance, mask=is_near, other=-1).to(tl.int32)  # none is -1, as 16 bits
    is_strange = is_there & (slot < 0)
    tl.store(doubts, 1, mask=tl.sum(is_strange.to(tl.int32)) > 0)  # all that write write the same
    slot = tl.where(is_there & (slot >= 0), slot, 0)
    tl.store(target + byte, pack_bits(slot, BITS).to(tl.uint8), mask=byte * (8 // BITS) < count)


@triton.jit
def _unpack(
    source, target, starts, distance_of, count, depth, height, width, inner, BITS: tl.constexpr, ITEMS: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    is_there = place < count
    byte = tl.load(source + place * BITS // 8, mask=is_there, other=0).to(tl.int32)
    slot = byte >> (place * BITS % 8).to(tl.int32) & ((1 << BITS) - 1)
    index = tl.load(distance_of + slot) + _begin(place, is_there, starts, depth, height, width, inner)
    tl.store(target + place, index, mask=is_there)
