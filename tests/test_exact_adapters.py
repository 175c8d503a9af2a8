"""Adapters beside frozen layers and reparametrised weights train fitted as they train eagerly, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from equivalence import assert_same_as_eager
from layer_inputs import check, images, rows, tokens
from torch import nn


class LoRA(nn.Module):
    """A frozen linear layer with a low-rank update beside it."""

    def __init__(self, layer: nn.Linear, rank: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + 2.0 * F.linear(F.linear(self.dropout(x), self.down), self.up)


def linear(n_in: int = 6, n_out: int = 6) -> nn.Linear:
    return nn.Linear(n_in, n_out)


REPARAMETRISED = {
    "lora": (lambda: nn.Sequential(LoRA(linear()), nn.ReLU(), LoRA(linear())), rows),
    "lora on frozen embeddings": (
        lambda: nn.Sequential(nn.Embedding(10, 6).requires_grad_(False), LoRA(linear()), nn.GELU(), LoRA(linear())),
        tokens,
    ),
    "weight norm by parametrization": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(linear()), nn.ReLU(), linear()),
        rows,
    ),
    "weight norm by hook": (lambda: nn.Sequential(nn.utils.weight_norm(linear()), nn.ReLU(), linear()), rows),
    "spectral norm by parametrization": (
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(linear()), nn.ReLU(), linear()),
        rows,
    ),
    "spectral norm by hook": (lambda: nn.Sequential(nn.utils.spectral_norm(linear()), nn.ReLU(), linear()), rows),
    "orthogonal": (lambda: nn.Sequential(nn.utils.parametrizations.orthogonal(linear()), linear()), rows),
    "own parametrization": (lambda: nn.Sequential(symmetric(linear()), nn.Tanh(), linear()), rows),
    "pruned by hook": (lambda: nn.Sequential(pruned(linear()), nn.ReLU(), linear()), rows),
    "standardised weight": (lambda: StandardisedConv(), images),
}


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def symmetric(layer: nn.Linear) -> nn.Linear:
    nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def pruned(layer: nn.Linear) -> nn.Module:
    from torch.nn.utils import prune

    return prune.l1_unstructured(layer, "weight", amount=0.4)


class StandardisedConv(nn.Conv2d):
    def __init__(self) -> None:
        super().__init__(4, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight / (weight.std((1, 2, 3), keepdim=True) + 1e-5), self.bias)


@check(REPARAMETRISED)
def test_adapters_and_reparametrised_weights_match(build: Any, inputs: Any) -> None:
    assert_same_as_eager(build, inputs)  # built anew: some of these cannot be deep-copied
