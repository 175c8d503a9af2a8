"""Values rebuilt on a storage that has come back: by a re-run, which makes the base only, or from a tier."""

from __future__ import annotations

import torch


def alias(
    base: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """A tensor of that layout on the storage behind `base`."""
    empty = torch.empty(0, dtype=dtype, device=base.device)
    return empty.set_(base.untyped_storage(), offset, shape, stride)
