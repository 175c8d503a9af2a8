"""Tensors that have sizes and strides but no bytes, for operands of which only the shape is read."""

from __future__ import annotations

import torch

from memfit.capture.step import Ghost


def make_ghost(ghost: Ghost) -> torch.Tensor:
    """A tensor of that layout whose storage is empty; a kernel that reads it is out of bounds, so test before use."""
    tensor = torch.empty_strided(ghost.shape, ghost.stride, dtype=ghost.dtype, device=ghost.device)
    tensor.untyped_storage().resize_(0)
    return tensor
