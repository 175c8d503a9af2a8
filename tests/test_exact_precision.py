"""Autocast, other types of numbers, other layouts: a fitted model trains as eager does, bit for bit."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from equivalence import assert_same_as_eager, assert_same_trace, bits, seeded
from torch import nn
from training_models import autocast, convnet, each_model, images, mlp, rows, tokens

import memfit

# --- autocast --------------------------------------------------------------------------------------------------------


@each_model
@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
def test_autocast_matches(build: Any, inputs: Any, inside: bool) -> None:
    assert_same_as_eager(build(), inputs, around=autocast(), backward_inside=inside)


@each_model
def test_autocast_without_its_weight_cache_matches(build: Any, inputs: Any) -> None:
    assert_same_as_eager(build(), inputs, around=autocast(cache_enabled=False))


def test_autocast_to_half_matches() -> None:
    assert_same_as_eager(mlp(), rows, around=lambda: torch.autocast("cpu", dtype=torch.float16))


def test_autocast_switched_on_and_off_between_steps_matches() -> None:
    states = iter([True, False, True, True, False, True] * 2)
    model = mlp()
    fitted = assert_same_as_eager(
        model, rows, steps=6, other_batch=None, around=lambda: torch.autocast("cpu", torch.bfloat16, next(states))
    )
    assert fitted.memfit.num_captures == 2


class LocallyOff(nn.Module):
    """Computes a sensitive part in float32 although autocast is on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        with torch.autocast("cpu", enabled=False):
            y = self.second(y.float()).softmax(1)
        return self.first(y)


class LocallyOn(nn.Module):
    """Switches autocast on by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.first(self.first(x))
        return self.second(y.float())


@pytest.mark.parametrize("around", [contextlib.nullcontext, autocast()], ids=["plain", "in autocast"])
@pytest.mark.parametrize("build", [LocallyOff, LocallyOn])
def test_autocast_switched_inside_the_model_matches(build: Any, around: Any) -> None:
    assert_same_as_eager(seeded(build), rows, around=around)


def test_the_first_backward_inside_autocast_and_the_next_outside_match() -> None:
    model = mlp()
    expected, found = (_alternate(copy.deepcopy(model), fit) for fit in (False, True))
    assert_same_trace(expected, found)


def _alternate(model: nn.Module, fit: bool) -> dict[str, Any]:
    trace: dict[str, Any] = {}
    if fit:
        memfit.fit(model)
    torch.manual_seed(3)
    for step in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(3, 6)).square().sum()
            if step % 2 == 0:
                loss.backward()
        if step % 2:
            loss.backward()
        for name, parameter in model.named_parameters():
            trace[f"{step} {name}"] = bits(parameter.grad)
    return trace


# --- types and layouts -----------------------------------------------------------------------------------------------


@each_model
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_parameter_types_match(build: Any, inputs: Any, dtype: torch.dtype) -> None:
    def cast(n: int) -> tuple[torch.Tensor]:
        (x,) = inputs(n)
        return (x.to(dtype) if x.is_floating_point() else x,)

    assert_same_as_eager(build().to(dtype), cast)


@pytest.mark.parametrize("what", ["model", "input", "both"])
def test_channels_last_matches(what: str) -> None:
    model = convnet()
    if what != "input":
        model = model.to(memory_format=torch.channels_last)

    def inputs(n: int) -> tuple[torch.Tensor]:
        (x,) = images(n)
        return (x.to(memory_format=torch.channels_last) if what != "model" else x,)

    assert_same_as_eager(model, inputs)


def test_channels_last_3d_matches() -> None:
    model = seeded(lambda: nn.Sequential(nn.Conv3d(3, 4, 3), nn.BatchNorm3d(4), nn.ReLU(True), nn.MaxPool3d(2)))
    model = model.to(memory_format=torch.channels_last_3d)
    assert_same_as_eager(model, lambda n: (torch.randn(n, 3, 6, 6, 6).to(memory_format=torch.channels_last_3d),))


def test_complex_parameters_match() -> None:
    model = seeded(
        lambda: nn.Sequential(nn.Linear(6, 5, dtype=torch.complex64), nn.Linear(5, 2, dtype=torch.complex64))
    )
    assert_same_as_eager(model, lambda n: (torch.randn(n, 6, dtype=torch.complex64),))


def test_deterministic_algorithms_match() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert_same_as_eager(convnet(), images)
        assert_same_as_eager(seeded(lambda: nn.Embedding(11, 4)), tokens)
    finally:
        torch.use_deterministic_algorithms(False)
