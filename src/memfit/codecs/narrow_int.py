"""Indices and labels in 1, 2 or 4 bytes instead of 8 or 4: the unsigned distance to the least that is expected."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memfit.capture.step import Value
from memfit.codecs import kernels
from memfit.codecs.codec import PackedCodec, Reading, Settings, described, flat
from memfit.codecs.kernels import Kernel
from memfit.errors import BadOption

_WIDTHS = (1, 2, 4)


class NarrowInt(PackedCodec):
    """The `narrow-int` codec: as many bytes as the uses' bounds ask for, or half of them; or `narrow-int:BYTES`.

    Every tensor is checked when it is encoded; one with a number out of range is kept as a dense copy.
    """

    name = "narrow-int"
    encode_kernel = Kernel.NARROW_ENCODE
    decode_kernel = Kernel.NARROW_DECODE

    def __init__(self, width: int = 0) -> None:
        if width not in (0, *_WIDTHS):
            raise BadOption(f"codec 'narrow-int:{width}': the bytes of a number can be 1, 2 or 4")
        self.width = width

    def why_not(self, value: Value, readings: Sequence[Reading]) -> str:
        if not value.is_dense:
            return "its elements do not fill a gapless range"
        if value.dtype not in (torch.int64, torch.int32):
            return f"it is {described(value.dtype)}, and int64 and int32 can be narrowed"
        return self.no_gain(value, readings)

    def settings(self, readings: Sequence[Reading]) -> Settings:
        """The least number, and the bytes of a code; 0 bytes are half of the tensor's own."""
        bounds = [reading.bounds for reading in readings if reading.bounds is not None]
        # One use that knows is enough: whatever another accepts, this one takes no others.
        low = max((low for low, _ in bounds), default=0)
        high = min((high for _, high in bounds), default=None)
        if self.width or high is None:
            return (low, self.width)
        return (low, next((width for width in _WIDTHS if high - low < 1 << 8 * width), 8))

    def packed_bytes(self, count: int, item_bytes: int, settings: Settings) -> int:
        return count * _width(item_bytes, settings)

    def pack(self, tensor: torch.Tensor, code: torch.Tensor, settings: Settings) -> bool:
        numbers = _numbers(tensor, settings)
        return kernels.run(Kernel.NARROW_ENCODE, tensor, code, count=tensor.numel(), numbers=numbers) == 0

    def decoding(self, like: torch.Tensor, settings: Settings) -> tuple[Kernel, tuple[int, ...]]:
        return Kernel.NARROW_DECODE, _numbers(like, settings)

    def pack_twin(self, tensor: torch.Tensor, code: torch.Tensor, settings: Settings) -> bool:
        _, width, low = _numbers(tensor, settings)
        away = flat(tensor).to(torch.int64) - low  # wraps around, as unsigned numbers do
        code.view(-1, width).copy_(away.view(torch.uint8).view(-1, 8)[:, :width])
        return not bool(((away < 0) | (away >= 1 << 8 * width)).any())

    def unpack_twin(self, code: torch.Tensor, like: torch.Tensor, settings: Settings) -> None:
        _, width, low = _numbers(like, settings)
        away = torch.zeros(like.numel(), 8, dtype=torch.uint8, device=like.device)
        away[:, :width] = code.view(-1, width)
        flat(like).copy_(away.view(-1).view(torch.int64) + low)


def _width(item_bytes: int, settings: Settings) -> int:
    return int(settings[1]) if settings and settings[1] else item_bytes // 2


def _numbers(tensor: torch.Tensor, settings: Settings) -> tuple[int, int, int]:
    """As the kernels take them: the bytes of an element, those of a code, and the least number."""
    return tensor.element_size(), _width(tensor.element_size(), settings), int(settings[0]) if settings else 0
