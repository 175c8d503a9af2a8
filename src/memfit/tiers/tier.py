"""What a place to put bytes must offer: take a storage away, bring it back, and say when either is done.

    tier.reserve(most_bytes_away_at_once)     # before the plan is accepted; raises TierRefused
    parcel = tier.send(tensor, name)          # SendStart: the copy out begins, the parcel holds the storage
    parcel.sent()                             # SendWait: the copy is complete, the storage here is let go
    parcel.fetch()                            # FetchStart: memory is allocated, the copy back begins
    parcel.fetched()                          # FetchWait: the bytes are here

Whole storages travel, as flat bytes: views are rebuilt on what comes back.

[Note: who owns the memory of a parcel]
From `send` to `sent` the parcel holds the storage. If `fetch` comes before `sent`, that storage itself is given back
and nothing is copied. After `sent` only the tier has the bytes. From `fetch` to `fetched` the parcel holds the new
storage; after that the caller alone does, and the tier's room is free again.
A parcel that is released, or that nobody holds any more, gives everything back wherever it is on this way. A copy that
is in flight then keeps the memory it works on until it has ended or stopped.
If `sent` or `fetched` raises, the parcel is where it was before: what it held it still holds, and `fetch` may be tried
again.
"""

from __future__ import annotations

from typing import Protocol

import torch

from memfit.errors import MemfitError


class TierRefused(MemfitError, RuntimeError):
    """A tier that cannot take bytes; says how many, where, why, and what to do."""


class TransferFailed(MemfitError, RuntimeError):
    """A tensor that could not be put away or brought back; names the tensor, the place and the cause."""


class Parcel(Protocol):
    """One storage on its way out, away, or on its way back."""

    def sent(self) -> None:
        """Wait until the copy outside is complete, and let go of the storage here."""

    def fetch(self) -> torch.Tensor:
        """Allocate the storage here and begin to fill it; the tensor is flat, of bytes, and not to be read yet."""

    def fetched(self) -> torch.Tensor:
        """Wait until that tensor is filled, and return it."""

    def release(self) -> None:
        """Give back everything the parcel holds, here and outside; never waits, and may be called twice."""


class Tier(Protocol):
    """A place to put bytes."""

    def reserve(self, num_bytes: int) -> None:
        """Make sure that storages of so many bytes together can be away at once, or raise TierRefused."""

    def send(self, tensor: torch.Tensor, name: str = "") -> Parcel:
        """Begin to copy the whole storage behind the tensor, and hold on to it until `sent`.

        Errors call the tensor by the name, and add its size.
        """


def describe(name: str, num_bytes: int) -> str:
    """What errors call a storage."""
    return f"{name or 'a tensor'}, {num_bytes:,} bytes"


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage behind a tensor, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
