"""The models of the tests of training, and a script of training run on an eager and on a fitted copy."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence import Apply, assert_same_trace, bits, record_state, seeded
from torch import nn

import memfit


def rows(n: int) -> tuple[torch.Tensor]:
    return (torch.randn(n, 6),)


def images(n: int) -> tuple[torch.Tensor]:
    return (torch.randn(n, 3, 8, 8),)


def mlp() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4)))


def convnet() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3),
            nn.GroupNorm(2, 6),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(6, 4),
        )
    )


def transformer() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(
            nn.Embedding(11, 8),
            nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True),
            nn.LayerNorm(8),
            nn.Linear(8, 11),
        )
    )


def tied() -> nn.Module:
    return seeded(
        lambda: Apply(lambda m, x: F.linear(torch.tanh(m.l(torch.tanh(m.l(x)))), m.l.weight), l=nn.Linear(6, 6))
    )


def tokens(n: int) -> tuple[torch.Tensor]:
    return (torch.randint(0, 11, (n, 5)),)


MODELS = {"mlp": (mlp, rows), "convnet": (convnet, images), "transformer": (transformer, tokens), "tied": (tied, rows)}
each_model = pytest.mark.parametrize(("build", "inputs"), list(MODELS.values()), ids=list(MODELS))


def autocast(**options: Any) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    return lambda: torch.autocast("cpu", dtype=torch.bfloat16, **options)


def both_ways(model: nn.Module, script: Callable[[Any, dict[str, Any]], None]) -> None:
    """Run a training script on an eager and on a fitted copy; what it writes into its dict must be the same."""
    traces: list[dict[str, Any]] = []
    for fit in (False, True):
        arm = copy.deepcopy(model).train()
        if fit:
            memfit.fit(arm)
        trace: dict[str, Any] = {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(17)
            script(arm, trace)
            for name, parameter in arm.named_parameters():
                trace[f"gradient of {name}"] = bits(parameter.grad)
            record_state(trace, "end", arm)
        traces.append(trace)
        if fit:
            assert arm.memfit.num_captures >= 1
    assert_same_trace(*traces)
