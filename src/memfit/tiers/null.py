"""The tier for tests: copies in the same memory, at once."""

from __future__ import annotations

import torch

from memfit.tiers.tier import Parcel, flat_bytes


class NullTier:
    """Keeps what is sent in this process; every transfer is over when it begins."""

    def reserve(self, num_bytes: int) -> None:
        """There is always room."""

    def send(self, tensor: torch.Tensor, name: str = "") -> Parcel:
        return _NullParcel(tensor)


class _NullParcel:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._here: torch.Tensor | None = flat_bytes(tensor)
        self._away: torch.Tensor | None = self._here.clone()
        self._is_coming = False

    def sent(self) -> None:
        assert self._here is not None and not self._is_coming, "sent twice, or released"
        self._here = None

    def fetch(self) -> torch.Tensor:
        assert self._away is not None and not self._is_coming, "fetched twice, or released"
        self._is_coming = True
        if self._here is None:
            self._here = torch.empty_like(self._away)
        else:
            self._away = None  # not sent yet: it is used where it is
        return self._here

    def fetched(self) -> torch.Tensor:
        assert self._here is not None and self._is_coming, "read before it was fetched, or twice"
        here = self._here if self._away is None else self._here.copy_(self._away)
        self.release()
        return here

    def release(self) -> None:
        self._here = self._away = None
