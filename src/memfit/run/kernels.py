"""Calls that generated code makes and ATen has no single name for: `memfit.encode`, `memfit.decode`."""

from __future__ import annotations

import torch

from memfit.codecs.registry import codec


def encode(tensor: torch.Tensor, settings: list[float], name: str) -> torch.Tensor:
    """The tensor in the codec's form."""
    return codec(name).encode(tensor, tuple(settings))


def decode(code: torch.Tensor, ghost: torch.Tensor, settings: list[float], name: str) -> torch.Tensor:
    """A fresh tensor of the ghost's layout with what the codec gives back."""
    like = torch.empty_strided(ghost.shape, ghost.stride(), dtype=ghost.dtype, device=ghost.device)
    return codec(name).decode(code, like, tuple(settings))
