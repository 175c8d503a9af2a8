"""Several forwards, several backwards, in any order, also those that eager refuses: as eager, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equivalence import Apply, bits, seeded, weighted_sum
from torch import nn
from training_models import both_ways, each_model

import memfit


@each_model
def test_two_forwards_before_one_backward_match(build: Any, inputs: Any) -> None:
    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        (weighted_sum(model(*inputs(3))) + weighted_sum(model(*inputs(3))).square()).backward()

    both_ways(build(), script)


@each_model
def test_three_forwards_before_one_backward_match(build: Any, inputs: Any) -> None:
    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        sum(weighted_sum(model(*inputs(n))) for n in (3, 2, 3)).backward()

    both_ways(build(), script)


@each_model
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_backwards_in_any_order_match(build: Any, inputs: Any, order: tuple[int, ...]) -> None:
    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        losses = [weighted_sum(model(*inputs(3))) for _ in range(3)]
        for index in order:
            losses[index].backward()
            for name, parameter in model.named_parameters():
                trace[f"after {index}: {name}"] = bits(parameter.grad)

    both_ways(build(), script)


def test_a_model_fed_its_own_output_matches() -> None:
    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        y = torch.randn(3, 6)
        for _ in range(3):
            y = model(y)
        y.square().sum().backward()

    both_ways(seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))), script)


def test_backward_of_each_output_in_turn_matches_where_eager_allows_it() -> None:
    """Two outputs behind separate graphs: eager can go back through each once."""

    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        a, b = model(torch.randn(3, 6))
        (a.sum() + b.square().sum()).backward()

    both_ways(seeded(lambda: Apply(lambda m, x: (m.l(x), m.k(x)), l=nn.Linear(6, 6), k=nn.Linear(6, 6))), script)


# --- what eager refuses, and how -------------------------------------------------------------------------------------


def error_of(action: Callable[[], Any]) -> str:
    with pytest.raises(RuntimeError) as caught:
        action()
    return str(caught.value)


@each_model
def test_backward_twice_raises_eagers_own_error(build: Any, inputs: Any) -> None:
    texts = []
    for fit in (False, True):
        model = build().train()
        if fit:
            memfit.fit(model)
        loss = weighted_sum(model(*inputs(3)))
        loss.backward()
        before = [bits(p.grad) for p in model.parameters()]
        texts.append(error_of(loss.backward))
        assert [bits(p.grad) for p in model.parameters()] == before
    assert texts[0] == texts[1]


def test_backward_through_two_outputs_one_after_the_other_raises_eagers_own_error() -> None:
    texts = []
    for fit in (False, True):
        model = seeded(lambda: Apply(lambda m, x: (lambda y: (y.sum(), y.exp().sum()))(m.l(x)), l=nn.Linear(6, 6)))
        if fit:
            memfit.fit(model)
        a, b = model(torch.randn(3, 6))
        a.backward()
        texts.append(error_of(b.backward))
    assert "second time" in texts[0] and "second time" in texts[1]


WRITES = {
    "a parameter": lambda model, x, y: model[0].weight.add_(1),
    "another parameter": lambda model, x, y: model[3].weight.mul_(2),
    "the input": lambda model, x, y: x.add_(1),
    "the output": lambda model, x, y: y.mul_(2),
}


@pytest.mark.parametrize("write", list(WRITES.values()), ids=list(WRITES))
def test_writing_between_forward_and_backward_is_judged_as_eager_judges_it(write: Any) -> None:
    results = []
    for fit in (False, True):
        model = seeded(
            lambda: nn.Sequential(nn.Linear(6, 8), nn.Sigmoid(), nn.Dropout(0.2), nn.Linear(8, 4), nn.Tanh())
        )
        if fit:
            memfit.fit(model)
        torch.manual_seed(3)
        x = torch.randn(3, 6)
        y = model(x)
        loss = weighted_sum(y)
        with torch.no_grad():
            write(model, x, y)
        try:
            loss.backward()
            results.append([bits(p.grad) for p in model.parameters()])
        except RuntimeError as error:
            results.append("modified by an inplace operation" in str(error))
    assert results[0] == results[1]
