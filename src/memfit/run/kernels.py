"""Calls that generated code makes and ATen has no single name for: codecs, and ops that work on codes."""

from __future__ import annotations

import torch

from memfit.codecs import gating, pooling
from memfit.codecs.registry import codec


def encode(tensor: torch.Tensor, settings: list[float], name: str) -> torch.Tensor:
    """The tensor in the codec's form."""
    return codec(name).encode(tensor, tuple(settings))


def decode(code: torch.Tensor, ghost: torch.Tensor, settings: list[float], name: str) -> torch.Tensor:
    """A fresh tensor of the ghost's layout with what the codec gives back."""
    like = torch.empty_strided(ghost.shape, ghost.stride(), dtype=ghost.dtype, device=ghost.device)
    return codec(name).decode(code, like, tuple(settings))


def view(decoded: torch.Tensor, shape: list[int], stride: list[int], offset: int) -> torch.Tensor:
    """What was decoded in another layout."""
    return decoded.as_strided(shape, stride, offset)


def threshold_backward_(gradient: torch.Tensor, code: torch.Tensor, settings: list[float], name: str) -> torch.Tensor:
    """The gradient behind the gate that the code stands for, in its own place."""
    return gating.threshold_backward_(gradient, code, tuple(settings))


def threshold_backward(gradient: torch.Tensor, code: torch.Tensor, settings: list[float], name: str) -> torch.Tensor:
    """The same in fresh memory."""
    return gating.threshold_backward(gradient, code, tuple(settings))


def max_pool_backward(
    gradient: torch.Tensor, code: torch.Tensor, ghost: torch.Tensor, settings: list[float], name: str
) -> torch.Tensor:
    """The gradient of what was pooled, of the ghost's layout, put where each window's slot says."""
    like = torch.empty_strided(ghost.shape, ghost.stride(), dtype=ghost.dtype, device=ghost.device)
    return pooling.max_pool_backward(gradient, code, like, tuple(settings))
