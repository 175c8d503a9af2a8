"""Ten bits: sign, 5 bits of exponent, 4 of mantissa, three numbers to a word of 32 bits.

Eight words hold 24 numbers, word j the numbers j, j + 8 and j + 16; the last words hold what is left in the same way.
"""

from __future__ import annotations

import torch

from memfit.codecs.codec import Settings, flat
from memfit.codecs.kernels import Kernel
from memfit.codecs.lossy import LossyCodec
from memfit.codecs.small_float import Format, shrink, widen

FORMAT = Format(exponent_bits=5, mantissa_bits=4)


class Fp10(LossyCodec):
    """The `fp10` codec: 10.67 bits for 32."""

    name = "fp10"
    encode_kernel = Kernel.FP10_ENCODE
    decode_kernel = Kernel.FP10_DECODE

    def packed_bytes(self, count: int, item_bytes: int, settings: Settings) -> int:
        return 4 * -(-count // 3)

    def pack_twin(self, tensor: torch.Tensor, code: torch.Tensor, settings: Settings) -> bool:
        codes = shrink(flat(tensor), FORMAT, keeps_gate=bool(settings[0]))
        whole, num_left = codes.numel() // 24 * 24, codes.numel() % 24
        left = codes.new_zeros(-(-num_left // 3) * 3)
        left[:num_left] = codes[whole:]
        words = torch.cat([_words(codes[:whole].view(-1, 3, 8)), _words(left.view(1, 3, -1))])
        code.copy_(words.view(torch.uint8))
        return True

    def unpack_twin(self, code: torch.Tensor, like: torch.Tensor, settings: Settings) -> None:
        words, whole = code.clone().view(torch.int32), like.numel() // 24 * 24
        codes = torch.cat([_codes(words[: whole // 3].view(-1, 1, 8)), _codes(words[whole // 3 :].view(1, 1, -1))])
        flat(like).copy_(widen(codes[: like.numel()], FORMAT))


def _words(groups: torch.Tensor) -> torch.Tensor:
    """One word of each three, over the middle dimension."""
    return (groups[:, 0] | groups[:, 1] << 10 | groups[:, 2] << 20).reshape(-1)


def _codes(words: torch.Tensor) -> torch.Tensor:
    shifts = torch.tensor([0, 10, 20], dtype=torch.int32, device=words.device).view(1, 3, 1)
    return (words >> shifts & 0x3FF).reshape(-1)
