"""The small model of the tests of fit(), and a few steps of training with all that can be seen of them."""

from __future__ import annotations

from typing import Any

import torch
from equivalence import bits, seeded
from torch import nn


class Net(nn.Module):
    """Small, with everything: parameters, buffers, a tied weight, dropout, an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.2)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.scale = 2.0

    def forward(self, x: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        """Double twice."""
        return self.second(self.drop(self.norm(self.first(x)).relu())) * self.scale + shift


def net() -> Net:
    return seeded(Net)  # type: ignore[return-value]


def train(model: nn.Module, steps: int = 3, seed: int = 0, **kwargs: Any) -> list[Any]:
    """Everything that can be seen of a few training steps."""
    seen: list[Any] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dtype = next(model.parameters()).dtype
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for _ in range(steps):
            output = model(torch.randn(4, 6, dtype=dtype), **kwargs)
            output.square().mean().backward()
            seen += [bits(output), *(bits(p.grad) for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
    return seen + [bits(t) for t in model.state_dict().values()]
