"""Activations, and losses inside the model, train fitted as they train eagerly, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence import assert_same_as_eager, seeded
from layer_inputs import rows
from torch import nn

# --- activations -----------------------------------------------------------------------------------------------------

ACTIVATIONS = [
    nn.ReLU(),
    nn.ReLU(inplace=True),
    nn.ReLU6(),
    nn.ReLU6(inplace=True),
    nn.LeakyReLU(0.1),
    nn.LeakyReLU(0.1, inplace=True),
    nn.GELU(),
    nn.GELU("tanh"),
    nn.SiLU(),
    nn.SiLU(inplace=True),
    nn.ELU(),
    nn.ELU(inplace=True),
    nn.CELU(),
    nn.SELU(),
    nn.Hardswish(),
    nn.Hardswish(inplace=True),
    nn.Hardsigmoid(),
    nn.Hardtanh(),
    nn.Mish(),
    nn.PReLU(),
    nn.PReLU(6),
    nn.Softplus(),
    nn.Softsign(),
    nn.Softshrink(),
    nn.Hardshrink(),
    nn.Tanhshrink(),
    nn.Tanh(),
    nn.Sigmoid(),
    nn.LogSigmoid(),
    nn.Softmax(1),
    nn.Softmin(1),
    nn.LogSoftmax(1),
    nn.GLU(),
    nn.Threshold(0.1, -1.0),
]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations_match(activation: nn.Module) -> None:
    after = 3 if isinstance(activation, nn.GLU) else 6
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 6), copy.deepcopy(activation), nn.Linear(after, 3)))
    assert_same_as_eager(model, rows)


# --- losses ----------------------------------------------------------------------------------------------------------


class InModel(nn.Module):
    """A model that computes its own loss from labels."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.loss = loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.layer(x), y)


def classes(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 6), torch.randint(0, 5, (n,))


def reals(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 6), torch.rand(n, 5)


LOSSES = {
    "cross entropy": (nn.CrossEntropyLoss(), classes),
    "cross entropy, summed": (nn.CrossEntropyLoss(reduction="sum"), classes),
    "cross entropy, each": (nn.CrossEntropyLoss(reduction="none"), classes),
    "cross entropy, weighted": (nn.CrossEntropyLoss(weight=torch.arange(1.0, 6.0)), classes),
    "cross entropy, smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), classes),
    "cross entropy, some ignored": (
        nn.CrossEntropyLoss(),
        lambda n: (torch.randn(n, 6), torch.tensor([-100, 3, 1, 2, 0][:n])),
    ),
    "cross entropy, soft targets": (nn.CrossEntropyLoss(), reals),
    "nll": (lambda p, y: F.nll_loss(F.log_softmax(p, 1), y), classes),
    "bce": (lambda p, y: F.binary_cross_entropy(p.sigmoid(), y), reals),
    "bce with logits": (nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0)), reals),
    "mse": (nn.MSELoss(), reals),
    "l1": (nn.L1Loss(), reals),
    "smooth l1": (nn.SmoothL1Loss(), reals),
    "huber": (nn.HuberLoss(), reals),
    "kl": (lambda p, y: F.kl_div(F.log_softmax(p, 1), F.softmax(y, 1), reduction="batchmean"), reals),
    "poisson": (nn.PoissonNLLLoss(), reals),
    "multi margin": (nn.MultiMarginLoss(), classes),
    "soft margin": (nn.SoftMarginLoss(), lambda n: (torch.randn(n, 6), torch.randn(n, 5).sign())),
    "triplet": (lambda p, y: F.triplet_margin_loss(p, y, y.flip(0)), reals),
}


@pytest.mark.parametrize(("loss", "inputs"), list(LOSSES.values()), ids=list(LOSSES))
def test_losses_inside_the_model_match(loss: Any, inputs: Any) -> None:
    assert_same_as_eager(seeded(lambda: InModel(loss)), inputs)
