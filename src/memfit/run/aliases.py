"""Values rebuilt on a storage that has come back: by a re-run, which makes the base only, or from a tier."""

from __future__ import annotations

import torch

from memfit.errors import UnsupportedUse


def alias(
    base: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """A tensor of that layout on the storage behind `base`."""
    empty = torch.empty(0, dtype=dtype, device=base.device)
    return empty.set_(base.untyped_storage(), offset, shape, stride)


def as_captured(
    tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], name: str
) -> torch.Tensor:
    """The tensor, if it is laid out as capture foresaw: what comes back from a tier is rebuilt in that layout.

    A few kernels lay their results out otherwise than fake tensors say.
    """
    real = zip(tensor.shape, tensor.stride(), stride, strict=True)
    is_so = all(size == 1 or ours == foreseen for size, ours, foreseen in real) or 0 in shape
    if tensor.dtype is not dtype or tuple(tensor.shape) != shape or not is_so:
        raise UnsupportedUse(
            f"{name}: it has strides {tuple(tensor.stride())} and {tensor.dtype}, and fake tensors had {stride} and "
            f"{dtype}, so that it could not be rebuilt from its bytes once it is sent away. Choose a policy that does "
            "not offload ('keep', 'rotor', 'checkpoint-search'), or make this tensor contiguous() in the model"
        )
    return tensor
