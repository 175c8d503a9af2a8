"""Blocks of 256 numbers with a step each: [step of each block: float32][codes]."""

from __future__ import annotations

import torch

from memfit.codecs.codec import flat

BLOCK = 256


def num_blocks(count: int) -> int:
    return -(-count // BLOCK)


def in_blocks(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in the order of memory, a row for each block, the last filled up with zeros."""
    rows = torch.zeros(num_blocks(tensor.numel()), BLOCK, dtype=tensor.dtype, device=tensor.device)
    rows.view(-1)[: tensor.numel()] = flat(tensor)
    return rows


def steps_of(code: torch.Tensor, count: int) -> torch.Tensor:
    """The step of each block, as a column."""
    return code[: 4 * num_blocks(count)].clone().view(torch.float32).unsqueeze(1)


def fill(like: torch.Tensor, numbers: torch.Tensor) -> None:
    """Put rows of numbers back; what rounding has pushed over the edge of float32 becomes the largest."""
    most = torch.finfo(torch.float32).max
    flat(like).copy_(numbers.reshape(-1)[: like.numel()].clamp(-most, most))
