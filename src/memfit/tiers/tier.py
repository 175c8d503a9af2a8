"""What a place to put bytes must offer: take a storage away, bring it back, and say when either is done."""

from __future__ import annotations

from typing import Protocol

import torch


class Parcel(Protocol):
    """One storage on its way out, away, or on its way back."""

    def sent(self) -> None:
        """Wait until the copy outside is complete, and let go of the storage here."""

    def fetch(self) -> torch.Tensor:
        """Allocate the storage here and begin to fill it; the tensor is flat, of bytes, and not to be read yet."""

    def fetched(self) -> torch.Tensor:
        """Wait until that tensor is filled, and return it."""


class Tier(Protocol):
    """A place to put bytes."""

    def send(self, tensor: torch.Tensor) -> Parcel:
        """Begin to copy the whole storage behind the tensor, and hold on to it until `sent`."""
