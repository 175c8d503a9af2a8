"""Half precision: 16 bits for 32."""

from __future__ import annotations

import torch

from memfit.codecs.codec import Settings, flat
from memfit.codecs.kernels import Kernel
from memfit.codecs.lossy import LossyCodec

_LARGEST = 65504.0
_NAN = 0x7E00


class Fp16(LossyCodec):
    """The `fp16` codec: sign, 5 bits of exponent, 10 of mantissa."""

    name = "fp16"
    encode_kernel = Kernel.FP16_ENCODE
    decode_kernel = Kernel.FP16_DECODE

    def packed_bytes(self, count: int, item_bytes: int, settings: Settings) -> int:
        return 2 * count

    def pack_twin(self, tensor: torch.Tensor, code: torch.Tensor, settings: Settings) -> bool:
        numbers = flat(tensor)
        half = numbers.clamp(-_LARGEST, _LARGEST).where(~numbers.isinf(), numbers).to(torch.float16)
        if settings[0]:
            least = torch.copysign(torch.full_like(half, 2.0**-24), half)
            half = half.where((half != 0) | (numbers == 0), least)
        patterns = half.view(torch.int16).masked_fill(numbers.isnan(), _NAN)
        code.copy_(patterns.view(torch.uint8))
        return True

    def unpack_twin(self, code: torch.Tensor, like: torch.Tensor, settings: Settings) -> None:
        numbers = code.clone().view(torch.float16).to(torch.float32)
        flat(like).copy_(numbers.masked_fill(numbers.isnan(), torch.nan))  # torch widens NaN to more than one pattern
