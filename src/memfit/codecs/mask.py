"""One bit per element: for bools, and for tensors of which backward asks only on which side of a gate an element lies.

The bits are in the order of memory, eight to a byte, the first in the lowest bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memfit.capture.needs import Need
from memfit.capture.step import Value
from memfit.codecs.codec import Reading

_CHUNK = 1 << 20  # elements unpacked at a time: the bits of one chunk as bytes are all that decoding needs besides


class Mask:
    """The `mask` codec: 32 times smaller than float32, 8 times smaller than bool."""

    name = "mask"

    def why_not(self, value: Value, readings: Sequence[Reading]) -> str:
        if not value.is_dense:
            return "its elements do not fill a gapless range"
        if value.dtype is torch.bool:
            return ""
        gates = [reading.gate for reading in readings]
        if any(reading.need is not Need.SIGN for reading in readings):
            return "backward needs more of it than on which side of a gate each element lies"
        if any(gate is None or gate != gates[0] for gate in gates):
            return "its uses ask for different gates"
        assert gates[0] is not None
        return "" if len(gates[0].stand_ins) == 2 else "its gate has more than two classes"

    def settings(self, readings: Sequence[Reading]) -> tuple[float, ...]:
        """The cells of the gate one after the other, then what stands for the rest; nothing for bools."""
        gate = readings[0].gate if readings else None
        if gate is None:
            return ()
        return (*(number for cell in gate.cells for number in cell), gate.otherwise)

    def code_bytes(self, value: Value) -> int:
        return -(-value.num_elements // 8)

    def encode(self, tensor: torch.Tensor, settings: tuple[float, ...]) -> torch.Tensor:
        flat = _flat(tensor)
        code = torch.empty(-(-flat.numel() // 8), dtype=torch.uint8, device=tensor.device)
        weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=tensor.device)
        for start in range(0, flat.numel(), _CHUNK):
            bits = _side(flat[start : start + _CHUNK], settings)
            padded = torch.zeros(-(-bits.numel() // 8) * 8, dtype=torch.uint8, device=tensor.device)
            padded[: bits.numel()] = bits
            packed = (padded.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
            code[start // 8 : start // 8 + packed.numel()] = packed
        return code

    def decode(self, code: torch.Tensor, like: torch.Tensor, settings: tuple[float, ...]) -> torch.Tensor:
        flat = _flat(like)
        shifts = torch.arange(8, dtype=torch.uint8, device=code.device)
        for start in range(0, flat.numel(), _CHUNK):
            stretch = flat[start : start + _CHUNK]
            packed = code[start // 8 : start // 8 + -(-stretch.numel() // 8)]
            bits = ((packed.unsqueeze(1) >> shifts) & 1).view(-1)[: stretch.numel()].bool()
            if not settings:
                stretch.copy_(bits)
                continue
            otherwise = settings[-1]
            other = next(s for s in settings[2::3] if repr(s) != repr(otherwise))
            stretch.fill_(otherwise)
            stretch.masked_fill_(bits, other)
        return like


def _side(flat: torch.Tensor, settings: tuple[float, ...]) -> torch.Tensor:
    """True for the elements whose stand-in is not that of the rest (NaN is always of the rest)."""
    if not settings:
        return flat
    otherwise = settings[-1]
    side = torch.zeros(flat.shape, dtype=torch.bool, device=flat.device)
    cells = list(zip(settings[0:-1:3], settings[1:-1:3], settings[2:-1:3], strict=True))
    for low, high, stand_in in reversed(cells):  # the first cell that fits wins, so it is written last
        inside = (flat >= low) & (flat <= high)
        side = torch.where(inside, repr(stand_in) != repr(otherwise), side)
    return side


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
