"""Whole numbers of 4 bits with a step for each block of 256.

Byte j of a block of m numbers holds the numbers j and j + ceil(m / 2), the first in the lower bits.
"""

from __future__ import annotations

import torch

from memfit.codecs.blocks import BLOCK, fill, num_blocks, steps_of
from memfit.codecs.codec import Settings
from memfit.codecs.kernels import Kernel
from memfit.codecs.quantised import QuantisedCodec, quantise


class Int4(QuantisedCodec):
    """The `int4` codec, or `int4:SEED`: 4.125 bits for 32."""

    name = "int4"
    encode_kernel = Kernel.INT4_ENCODE
    decode_kernel = Kernel.INT4_DECODE

    def packed_bytes(self, count: int, item_bytes: int, settings: Settings) -> int:
        return 4 * num_blocks(count) + -(-count // 2)

    def pack_twin(self, tensor: torch.Tensor, code: torch.Tensor, settings: Settings) -> bool:
        found = quantise(tensor, settings, top_signed=7, top_unsigned=15)
        if found is None:
            return False
        codes, steps = found
        code[: 4 * steps.numel()] = steps.view(-1).view(torch.uint8)
        packed = code[4 * steps.numel() :]
        small, num_full, num_left = (codes & 15).to(torch.uint8), tensor.numel() // BLOCK, tensor.numel() % BLOCK
        packed[: num_full * BLOCK // 2] = _pairs(small[:num_full]).view(-1)
        if num_left:  # the row is filled up with zeros, which have the code zero
            packed[num_full * BLOCK // 2 :] = _pairs(small[num_full:, : num_left + num_left % 2]).view(-1)
        return True

    def unpack_twin(self, code: torch.Tensor, like: torch.Tensor, settings: Settings) -> None:
        steps, count = steps_of(code, like.numel()), like.numel()
        packed, num_full = code[4 * num_blocks(count) :], count // BLOCK
        full = packed[: num_full * BLOCK // 2].view(num_full, BLOCK // 2)
        codes = torch.zeros(num_blocks(count), BLOCK, dtype=torch.int32, device=like.device)
        codes[:num_full] = torch.cat([full & 15, full >> 4], 1)
        left = packed[num_full * BLOCK // 2 :]
        if left.numel():
            codes[num_full, : 2 * left.numel()] = torch.cat([left & 15, left >> 4])
        codes = torch.where(steps < 0, (codes ^ 8) - 8, codes)
        fill(like, codes.to(torch.float32) * steps.abs())


def _pairs(rows: torch.Tensor) -> torch.Tensor:
    half = rows.shape[1] // 2
    return (rows[:, :half] | rows[:, half:] << 4).contiguous()
