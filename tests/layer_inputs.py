"""Inputs for every kind of layer, and the layers around it: what the tests of layers share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn


def rows(n: int, width: int = 6, **options: Any) -> tuple[torch.Tensor]:
    return (torch.randn(n, width, **options),)


def lines(n: int) -> tuple[torch.Tensor]:
    return (torch.randn(n, 4, 9),)


def images(n: int) -> tuple[torch.Tensor]:
    return (torch.randn(n, 4, 8, 8),)


def volumes(n: int) -> tuple[torch.Tensor]:
    return (torch.randn(n, 4, 6, 6, 6),)


def tokens(n: int) -> tuple[torch.Tensor]:
    return (torch.randint(0, 10, (n, 5)),)


def sequences(n: int) -> tuple[torch.Tensor]:
    return (torch.randn(n, 5, 8),)


def between(layer: nn.Module, width: int = 6) -> nn.Module:
    """The layer with something trainable before and after it."""
    return nn.Sequential(nn.Linear(width, width), layer, nn.Linear(width, 3))


def behind_conv(layer: nn.Module, channels: int = 4) -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, channels, 3, padding=1), layer)


def check(cases: dict[str, tuple[Any, Any]]) -> Any:
    return pytest.mark.parametrize(("build", "inputs"), list(cases.values()), ids=list(cases))
