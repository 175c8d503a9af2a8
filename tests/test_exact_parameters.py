"""Optimizers, accumulation, frozen parameters, losses on parameters: as eager, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from equivalence import assert_same_as_eager, assert_same_trace, bits, record_state
from torch import nn
from training_models import convnet, each_model, images, mlp, rows, tied

import memfit


@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop], ids=lambda k: k.__name__
)
def test_optimizers_match(kind: Any) -> None:
    assert_same_as_eager(mlp(), rows, optimizer=lambda ps: kind(ps, lr=0.01))


@each_model
def test_gradient_accumulation_matches(build: Any, inputs: Any) -> None:
    assert_same_as_eager(build(), inputs, micro_batches=3, other_batch=None)


@each_model
def test_frozen_parameters_match(build: Any, inputs: Any) -> None:
    model = build()
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 2 == 0)
    assert_same_as_eager(model, inputs)


@each_model
def test_a_frozen_beginning_matches(build: Any, inputs: Any) -> None:
    model = build()
    parameters = list(model.parameters())
    for parameter in parameters[: len(parameters) // 2]:
        parameter.requires_grad_(False)
    assert_same_as_eager(model, inputs)


def test_all_parameters_frozen_with_an_input_that_requires_grad_match() -> None:
    model = convnet().requires_grad_(False)
    assert_same_as_eager(model, lambda n: (torch.randn(n, 3, 8, 8, requires_grad=True),))


def test_all_parameters_frozen_and_no_gradient_wanted_matches() -> None:
    model = convnet().requires_grad_(False).train()
    eager, fitted = copy.deepcopy(model), memfit.fit(copy.deepcopy(model))
    x = torch.randn(2, 3, 8, 8)
    for _ in range(3):
        torch.manual_seed(1)
        expected = eager(x)
        torch.manual_seed(1)
        found = fitted(x)
        assert bits(expected) == bits(found) and not found.requires_grad
    expected_state: dict[str, Any] = {}
    found_state: dict[str, Any] = {}
    record_state(expected_state, "end", eager)
    record_state(found_state, "end", fitted)
    assert_same_trace(expected_state, found_state)


def test_a_loss_term_on_the_parameters_matches() -> None:
    def loss(output: torch.Tensor, model: nn.Module) -> torch.Tensor:
        return output.square().sum() + 0.01 * sum(p.square().sum() for p in model.parameters())

    assert_same_as_eager(mlp(), rows, loss=loss)
    assert_same_as_eager(convnet(), images, loss=loss)


def test_a_loss_term_on_tied_parameters_matches() -> None:
    def loss(output: torch.Tensor, model: nn.Module) -> torch.Tensor:
        return output.square().sum() + 0.01 * sum(p.square().sum() for p in model.parameters())

    assert_same_as_eager(tied(), rows, loss=loss)
