"""Small numbers packed into bytes, in torch: the first in the lowest bits."""

from __future__ import annotations

import torch

CHUNK = 1 << 20  # elements at a time: a multiple of 8, so that chunks begin at whole bytes


def pack(small: torch.Tensor, bits: int) -> torch.Tensor:
    """The bytes that hold these numbers of 1, 2, 4 or 8 bits each."""
    per_byte = 8 // bits
    padded = torch.zeros(-(-small.numel() // per_byte) * per_byte, dtype=torch.uint8, device=small.device)
    padded[: small.numel()] = small
    weights = torch.tensor([1 << (bits * k) for k in range(per_byte)], dtype=torch.uint8, device=small.device)
    return (padded.view(-1, per_byte) * weights).sum(1, dtype=torch.uint8)


def unpack(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The first so many numbers that bytes hold."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(1) >> shifts) & ((1 << bits) - 1)).view(-1)[:count]
