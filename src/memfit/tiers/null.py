"""The tier for tests: copies in the same memory, at once."""

from __future__ import annotations

import torch

from memfit.tiers.tier import Parcel


class NullTier:
    """Keeps what is sent in this process; every transfer is over when it begins."""

    def send(self, tensor: torch.Tensor) -> Parcel:
        return _NullParcel(tensor)


class _NullParcel:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._here: torch.Tensor | None = tensor
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        self._away = whole.clone()

    def sent(self) -> None:
        self._here = None

    def fetch(self) -> torch.Tensor:
        assert self._here is None, "fetched before it was sent"
        self._here = torch.empty_like(self._away)
        return self._here

    def fetched(self) -> torch.Tensor:
        assert self._here is not None, "read before it was fetched"
        here, self._here = self._here, None
        return here.copy_(self._away)
