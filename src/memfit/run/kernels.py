"""Calls that generated code makes and ATen has no single name for: codecs, and ops that work on codes."""

from __future__ import annotations

import torch

from memfit.codecs import gating, pooling
from memfit.codecs.registry import codec
from memfit.left_memory import new_empty


def encode(tensor: torch.Tensor, ghost: torch.Tensor, settings: list[float], name: str) -> torch.Tensor:
    """The tensor in the codec's form, in the order that the ghost has in memory."""
    return codec(name).encode(_laid_out(tensor, ghost), tuple(settings))


def decode(code: torch.Tensor, ghost: torch.Tensor, settings: list[float], name: str) -> torch.Tensor:
    """A fresh tensor of the ghost's layout with what the codec gives back."""
    like = _room_for(ghost)
    return codec(name).decode(code, like, tuple(settings))


def _room_for(ghost: torch.Tensor) -> torch.Tensor:
    """A tensor of the ghost's layout, for a kernel to fill."""
    return new_empty(ghost.shape, ghost.stride(), ghost)


def _laid_out(tensor: torch.Tensor, ghost: torch.Tensor) -> torch.Tensor:
    """The tensor with the ghost's strides: a few kernels lay their results out otherwise than fake tensors said."""
    if tensor.stride() == ghost.stride():
        return tensor
    fresh = torch.empty_strided(ghost.shape, ghost.stride(), dtype=tensor.dtype, device=tensor.device)
    return fresh.copy_(tensor)


def view(decoded: torch.Tensor, shape: list[int], stride: list[int], offset: int) -> torch.Tensor:
    """What was decoded in another layout."""
    return decoded.as_strided(shape, stride, offset)


def threshold_backward_(
    gradient: torch.Tensor, code: torch.Tensor, ghost: torch.Tensor, settings: list[float], name: str
) -> torch.Tensor:
    """The gradient behind the gate that the code stands for, in its own place; the ghost is as what was encoded."""
    laid_out = _laid_out(gradient, ghost)
    gated = gating.threshold_backward_(laid_out, code, tuple(settings))
    return gradient if laid_out is gradient else gradient.copy_(gated)


def threshold_backward(
    gradient: torch.Tensor, code: torch.Tensor, ghost: torch.Tensor, settings: list[float], name: str
) -> torch.Tensor:
    """The same in fresh memory."""
    if gradient.stride() == ghost.stride():
        return gating.threshold_backward(gradient, code, tuple(settings))
    # Of two layouts torch makes a third; so that it is the same one, it must see both.
    return torch.ops.aten.threshold_backward.default(gradient, decode(code, ghost, settings, name), settings[1])


def max_pool_backward(
    gradient: torch.Tensor,
    code: torch.Tensor,
    indices: torch.Tensor,
    pooled: torch.Tensor,
    settings: list[float],
    name: str,
) -> torch.Tensor:
    """The gradient of what was pooled, put where each window's slot says; both ghosts are as these tensors were."""
    like = _room_for(pooled)
    return pooling.max_pool_backward(_laid_out(gradient, indices), code, like, tuple(settings))
