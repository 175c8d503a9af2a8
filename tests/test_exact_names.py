"""Tensors of a model that are named as generated code names things of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equivalence import Apply, assert_same_as_eager
from torch import nn

import memfit
from memfit.capture.recorder import TAKEN_NAMES

NAMES = (
    *("S", "I", "P", "made", "torch", "aten", "ops", "operators", "stand_ins", "alias", "as_captured"),
    *("taking", "tiers", "_0", "_12", "ghost_0", "opaque_0", "back_0", "backward_0", "away_w", "v_I"),
)


def apply(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Reads what is named so first, then others, in a shape that would hide it if they were taken from it."""
    held = getattr(m, m.name)
    hidden = torch.sigmoid((x * m.w + held) * m.scale)
    return torch.where(hidden > 0.5, hidden, float("-inf")).clamp(min=-1) @ held


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_buffer_of_any_name(name: str, debug: bool) -> None:
    held = {name: torch.eye(4), "scale": torch.rand(4), "w": (4, 4), "name": name}
    assert_same_as_eager(Apply(apply, **held), lambda n: (torch.randn(n, 4, 4),), debug=debug)


def test_a_parameter_and_an_attribute_of_such_names() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ m.I + m.S) * m.P

    model = Apply(body, I=(4, 4), P=(4,))
    model.__dict__["S"] = torch.rand(4)
    for policy in ("keep", "sqrt"):
        assert_same_as_eager(model, lambda n: (torch.randn(n, 4),), policy=policy, debug=True)


def test_all_that_generated_code_names_is_taken() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
            self.head = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(8 * 7 * 7, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layers(x))

    for policy in ("keep", "sqrt", "vdnn-all", "gist-lossless"):
        model = memfit.fit(Net(), policy=policy)
        model(torch.randn(2, 3, 16, 16)).sum().backward()
        newest = model.memfit.newest  # type: ignore[union-attr]
        values = {value.name for value in newest.program.step.values}
        for code in (newest.code, newest.observed_code):
            functions = (code.forward, *code.backward)
            local = {name for function in functions for name in function.__code__.co_varnames}
            globals_ = set(code.forward.__globals__) - {"__builtins__"}
            assert {name for name in (local - values) | globals_ if not TAKEN_NAMES.fullmatch(name)} == set()
            assert not any(TAKEN_NAMES.fullmatch(name) for name in values)
