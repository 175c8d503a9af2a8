"""What the tests of messages share: a model that does one forbidden thing, and the text of its refusal."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from equivalence import bits, seeded, weighted_sum
from torch import nn

import memfit
from memfit.errors import MemfitError


class Inner(nn.Module):
    """Calls `body` on the line that says so."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("mask", torch.tensor([True, False, True, False, True, False]))
        self.register_buffer("count", torch.tensor(3))
        self.calls = 0
        self.log: list[Any] = []
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, self.layer(x))


class Outer(nn.Module):
    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(6, 6), Inner(body))
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.drop(self.norm(x)))


def rows(n: int = 3, **options: Any) -> torch.Tensor:
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(n), **options)


def line_of(body: Callable[..., Any]) -> str:
    """file:line of the line in `body` that ends in the comment `# here`."""
    lines, start = inspect.getsourcelines(body)
    (found,) = [index for index, text in enumerate(lines) if "# here" in text]
    return f"tests/{Path(inspect.getfile(body)).name}:{start + found}"


def refusal(body: Callable[..., Any], **options: Any) -> str:
    """The text of the refusal; also checks that it left nothing behind."""
    model = seeded(lambda: Outer(body), 0).train()
    return refusal_of(model, lambda m: m(rows(**options)))


def refusal_of(model: nn.Module, call: Callable[[nn.Module], Any], trains: bool = True) -> str:
    untouched = copy.deepcopy(model)
    memfit.fit(model)
    before = {name: bits(t) for name, t in model.state_dict().items()}
    attributes = {name: dict(m.__dict__) for name, m in model.named_modules()}
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    generators = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    texts = []
    for _ in range(2):
        with pytest.raises(MemfitError) as caught:
            call(model)
        texts.append(str(caught.value))
    assert texts[0] == texts[1], "a second call says something else"
    assert {name: bits(t) for name, t in model.state_dict().items()} == before, "the refusal changed the model"
    assert {name: dict(m.__dict__) for name, m in model.named_modules()} == attributes
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), generators[0]), "the refusal moved torch's generator"
    assert random.getstate() == generators[1] and numpy.random.get_state()[1].tolist() == generators[2]
    assert model.memfit.num_captures == 0
    memfit.unfit(model)
    if trains:
        for arm in (untouched, model):
            torch.manual_seed(5)
            random.seed(5)
            numpy.random.seed(5)
            weighted_sum(call(arm)).backward()
        assert [bits(p.grad) for p in model.parameters()] == [bits(p.grad) for p in untouched.parameters()]
    return texts[0]
