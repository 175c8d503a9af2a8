"""Floats as whole multiples of a step per block of 256, rounded up or down at random in proportion.

A block without negative numbers counts up from zero with all bits; another has a sign, and its step is stored negative.
So zero is always exact. The random numbers come from no generator's state: that of an element depends on the seed, on
its place, and on the sum of all bits of its block, which changes whenever a number does. The same tensor always has the
same code, and torch's own random numbers are left alone. A tensor with infinity or NaN is kept as a dense copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memfit.codecs.blocks import BLOCK, in_blocks
from memfit.codecs.codec import Reading, Settings
from memfit.codecs.lossy import LossyCodec
from memfit.errors import BadOption

_LEAST_STEP = 2.0**-126  # its inverse is still finite


class QuantisedCodec(LossyCodec):
    """What `int8` and `int4` share: the seed."""

    def __init__(self, seed: int = 0) -> None:
        if not 0 <= seed < 1 << 32:
            raise BadOption(f"codec '{self.name}:{seed}': the seed is a number of 32 bits, not negative")
        self.seed = seed

    def settings(self, readings: Sequence[Reading]) -> Settings:
        """1 if backward compares with zero, else 0; then the seed."""
        return (*super().settings(readings), self.seed)


def quantise(
    tensor: torch.Tensor, settings: Settings, *, top_signed: int, top_unsigned: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The signed codes, a row for each block, and the steps as they are stored; None if a number is not finite."""
    rows = in_blocks(tensor)
    if not bool(rows.isfinite().all()):
        return None
    keeps_gate, seed = settings
    is_signed = (rows.signbit() & (rows.view(torch.int32) << 1 != 0)).any(1, keepdim=True)
    top = torch.where(is_signed, top_signed, top_unsigned)
    step = (rows.abs().amax(1, keepdim=True) / top.to(torch.float32)).clamp(min=_LEAST_STEP)
    chance = _chances(rows, int(seed))
    raised = rows * (1.0 / step) + chance
    codes = raised.floor().to(torch.int32)
    codes = torch.minimum(torch.maximum(codes, -top), top)
    if keeps_gate:
        is_zero = rows.view(torch.int32) << 1 == 0
        codes = torch.where((codes == 0) & ~is_zero, 1 - 2 * rows.signbit().to(torch.int32), codes)
    return codes, torch.where(is_signed, -step, step)


def _chances(rows: torch.Tensor, seed: int) -> torch.Tensor:
    """A number in [0, 1) for each element of each block, of 24 random bits."""
    place = torch.arange(len(rows), device=rows.device).unsqueeze(1)
    key = _stir(_stir(place) ^ seed ^ rows.view(torch.int32).sum(1, keepdim=True) & 0xFFFFFFFF)
    lane = torch.arange(BLOCK, device=rows.device)
    return (_stir(key + lane * 0x9E3779B9) >> 8).to(torch.float32) * 2.0**-24


def _stir(x: torch.Tensor) -> torch.Tensor:
    """Numbers of 32 bits, in which every bit of the input reaches every bit of the result."""
    x = x & 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16
