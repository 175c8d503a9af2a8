"""Eight bits: sign, 4 bits of exponent, 3 of mantissa, with a power of two for each block of 256.

The power puts a block's largest number into the format's last binade, up to 448. The format is torch's float8_e4m3fn,
which has no infinity: a tensor with infinity or NaN is kept as a dense copy.
"""

from __future__ import annotations

import torch

from memfit.codecs.blocks import fill, in_blocks, num_blocks, steps_of
from memfit.codecs.codec import Settings
from memfit.codecs.kernels import Kernel
from memfit.codecs.lossy import LossyCodec

_LARGEST = 448.0


class Fp8(LossyCodec):
    """The `fp8` codec: 8.125 bits for 32."""

    name = "fp8"
    encode_kernel = Kernel.FP8_ENCODE
    decode_kernel = Kernel.FP8_DECODE

    def packed_bytes(self, count: int, item_bytes: int, settings: Settings) -> int:
        return 4 * num_blocks(count) + count

    def pack_twin(self, tensor: torch.Tensor, code: torch.Tensor, settings: Settings) -> bool:
        rows = in_blocks(tensor)
        if not bool(rows.isfinite().all()):
            return False
        largest = (rows.view(torch.int32) & 0x7FFFFFFF).amax(1, keepdim=True)
        power = 135 - (largest >> 23) - ((largest & 0x7FFFFF) > 0x600000).to(torch.int32)
        power = power.clamp(max=126).masked_fill(largest == 0, 0)
        scaled = rows * ((127 + power) << 23).view(torch.float32)
        codes = scaled.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
        if settings[0]:
            is_zero = rows.view(torch.int32) << 1 == 0
            codes = torch.where((codes & 0x7F == 0) & ~is_zero, codes + 1, codes)
        steps = ((127 - power) << 23).view(-1).view(torch.uint8)
        code[: steps.numel()] = steps
        code[steps.numel() :] = codes.view(-1)[: tensor.numel()]
        return True

    def unpack_twin(self, code: torch.Tensor, like: torch.Tensor, settings: Settings) -> None:
        codes = in_blocks(code[4 * num_blocks(like.numel()) :]).view(torch.float8_e4m3fn)
        fill(like, codes.to(torch.float32) * steps_of(code, like.numel()))
