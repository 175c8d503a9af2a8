"""What the lossy codecs share: float32 only, gates stay as they are, a kernel each way.

A number keeps its side of zero: a positive one never becomes zero or negative, and zero stays zero. Who compares with
another number, which rounding could cross, is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memfit.capture.needs import Gate, Need
from memfit.capture.step import Value
from memfit.codecs import kernels
from memfit.codecs.codec import PackedCodec, Reading, Settings, described
from memfit.codecs.kernels import Kernel


class LossyCodec(PackedCodec):
    """A codec that rounds."""

    is_lossy = True
    encode_kernel: Kernel
    decode_kernel: Kernel

    def why_not(self, value: Value, readings: Sequence[Reading]) -> str:
        if not value.is_dense:
            return "its elements do not fill a gapless range"
        if value.dtype is not torch.float32:
            return f"it is {described(value.dtype)}, and '{self.name}' takes float32"
        for reading in readings:
            if reading.compares or (reading.need is Need.SIGN and not _is_at_zero(reading.gate)):
                return "backward compares it with a number other than zero, which rounding could cross"
        return self.no_gain(value, readings)

    def settings(self, readings: Sequence[Reading]) -> Settings:
        """1: a number keeps its side of zero. With 0, which no plan uses, one too small for the format becomes zero."""
        return (1,)

    def pack(self, tensor: torch.Tensor, code: torch.Tensor, settings: Settings) -> bool:
        numbers = tuple(int(number) for number in settings)
        return kernels.run(self.encode_kernel, tensor, code, count=tensor.numel(), numbers=numbers) == 0

    def decoding(self, like: torch.Tensor, settings: Settings) -> tuple[Kernel, tuple[int, ...]]:
        return self.decode_kernel, ()


def _is_at_zero(gate: Gate | None) -> bool:
    """True if the classes of a gate are negative, zero and positive numbers, or some of these together."""
    return gate is not None and all(abs(bound) in (0, float("inf")) for cell in gate.cells for bound in cell[:2])
