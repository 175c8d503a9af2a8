"""What a codec is: a smaller form of a tensor from which everything its backward uses need can be had again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from memfit.capture.needs import Gate, Need
from memfit.capture.step import Value


@dataclass(frozen=True)
class Reading:
    """One backward use of a tensor: what it needs of it, and for SIGN the classes it tells apart."""

    need: Need
    gate: Gate | None = None


class Codec(Protocol):
    """One encoding, for dense tensors."""

    name: str

    def why_not(self, value: Value, readings: Sequence[Reading]) -> str:
        """What stands in the way of encoding a value with these uses, or nothing."""

    def settings(self, readings: Sequence[Reading]) -> tuple[float, ...]:
        """What encoding and decoding must know besides the layout, as plain numbers."""

    def code_bytes(self, value: Value) -> int:
        """The exact size of the code: a flat tensor of that many bytes."""

    def encode(self, tensor: torch.Tensor, settings: tuple[float, ...]) -> torch.Tensor:
        """The code of a tensor."""

    def decode(self, code: torch.Tensor, like: torch.Tensor, settings: tuple[float, ...]) -> torch.Tensor:
        """Fill `like`, which has the layout of what was encoded, and return it."""
