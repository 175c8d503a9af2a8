"""bfloat16: the upper half of a float32, rounded."""

from __future__ import annotations

import torch

from memfit.codecs.codec import Settings, flat
from memfit.codecs.kernels import Kernel
from memfit.codecs.lossy import LossyCodec

_LARGEST = torch.finfo(torch.bfloat16).max
_NAN = 0x7FC0


class Bf16(LossyCodec):
    """The `bf16` codec: sign, 8 bits of exponent, 7 of mantissa."""

    name = "bf16"
    encode_kernel = Kernel.BF16_ENCODE
    decode_kernel = Kernel.BF16_DECODE

    def packed_bytes(self, count: int, item_bytes: int, settings: Settings) -> int:
        return 2 * count

    def pack_twin(self, tensor: torch.Tensor, code: torch.Tensor, settings: Settings) -> bool:
        numbers = flat(tensor)
        brief = numbers.clamp(-_LARGEST, _LARGEST).where(~numbers.isinf(), numbers).to(torch.bfloat16)
        patterns = brief.view(torch.int16)
        if settings[0]:
            # The smallest is a subnormal, which torch may take for zero when it computes: so by patterns.
            is_zero = flat(tensor).view(torch.int32) << 1 == 0
            patterns = torch.where((patterns << 1 == 0) & ~is_zero, patterns + 1, patterns)
        code.copy_(patterns.masked_fill(numbers.isnan(), _NAN).view(torch.uint8))
        return True

    def unpack_twin(self, code: torch.Tensor, like: torch.Tensor, settings: Settings) -> None:
        flat(like).copy_(code.clone().view(torch.bfloat16))
