"""Whole numbers of 8 bits with a step for each block of 256."""

from __future__ import annotations

import torch

from memfit.codecs.blocks import fill, in_blocks, num_blocks, steps_of
from memfit.codecs.codec import Settings
from memfit.codecs.kernels import Kernel
from memfit.codecs.quantised import QuantisedCodec, quantise


class Int8(QuantisedCodec):
    """The `int8` codec, or `int8:SEED`: 8.125 bits for 32."""

    name = "int8"
    encode_kernel = Kernel.INT8_ENCODE
    decode_kernel = Kernel.INT8_DECODE

    def packed_bytes(self, count: int, item_bytes: int, settings: Settings) -> int:
        return 4 * num_blocks(count) + count

    def pack_twin(self, tensor: torch.Tensor, code: torch.Tensor, settings: Settings) -> bool:
        found = quantise(tensor, settings, top_signed=127, top_unsigned=255)
        if found is None:
            return False
        codes, steps = found
        code[: 4 * steps.numel()] = steps.view(-1).view(torch.uint8)
        code[4 * steps.numel() :] = (codes & 0xFF).to(torch.uint8).view(-1)[: tensor.numel()]
        return True

    def unpack_twin(self, code: torch.Tensor, like: torch.Tensor, settings: Settings) -> None:
        steps = steps_of(code, like.numel())
        codes = in_blocks(code[4 * num_blocks(like.numel()) :])
        numbers = torch.where(steps < 0, codes.view(torch.int8).to(torch.float32), codes.to(torch.float32))
        fill(like, numbers * steps.abs())
