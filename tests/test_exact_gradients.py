"""Gradients asked for, given to backward, passed on and kept by others: as eager, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equivalence import Apply, assert_same_as_eager, bits, seeded, weighted_sum
from torch import nn
from training_models import both_ways, convnet, each_model, mlp

import memfit

# --- gradients asked for ---------------------------------------------------------------------------------------------


def test_gradients_from_autograd_grad_for_a_few_parameters_match() -> None:
    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        parameters = list(model.parameters())
        for count, chosen in enumerate([parameters[:1], parameters[-1:], parameters[1::2], parameters]):
            x = torch.randn(3, 3, 8, 8, requires_grad=True)
            found = torch.autograd.grad(weighted_sum(model(x)), [*chosen, x])
            for index, gradient in enumerate(found):
                trace[f"{count}.{index}"] = bits(gradient)
        assert all(p.grad is None for p in parameters)

    both_ways(convnet(), script)


def test_backward_with_inputs_accumulates_into_those_only() -> None:
    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        parameters = list(model.parameters())
        weighted_sum(model(torch.randn(3, 3, 8, 8))).backward(inputs=parameters[2:5])

    both_ways(convnet(), script)


def test_autograd_grad_of_an_unused_parameter_matches() -> None:
    model = seeded(lambda: Apply(lambda m, x: m.l(x), l=nn.Linear(6, 6), unused=(3,)))

    def script(model: Any, trace: dict[str, Any]) -> None:
        loss = weighted_sum(model(torch.randn(3, 6)))
        found = torch.autograd.grad(loss, [model.unused, model.l.weight], allow_unused=True)
        trace["unused"], trace["used"] = (bits(g) for g in found)

    both_ways(model, script)


# --- gradients given to backward -------------------------------------------------------------------------------------

GIVEN = {
    "contiguous": lambda y: torch.randn(y.shape),
    "transposed": lambda y: torch.randn(y.shape[::-1]).t(),
    "expanded": lambda y: torch.randn(1, 1).expand(y.shape),
    "strided": lambda y: torch.randn(y.shape[0], 2 * y.shape[1])[:, ::2],
    "zeros": lambda y: torch.zeros(y.shape),
    "ones": lambda y: torch.ones_like(y),
    "nan": lambda y: torch.full(y.shape, float("nan")),
    "the output itself": lambda y: y.detach(),
    "row": lambda y: torch.randn(y.shape[1]).expand(y.shape),
}


@pytest.mark.parametrize("gradient", list(GIVEN.values()), ids=list(GIVEN))
@each_model
def test_gradients_given_to_backward_in_any_layout_match(build: Any, inputs: Any, gradient: Any) -> None:
    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        for step in range(2):
            y = model(*inputs(3))
            y = y.reshape(-1, y.shape[-1]) if y.dim() > 2 else y
            given = gradient(y)
            before = bits(given)
            y.backward(gradient=given)
            assert bits(given) == before, "backward wrote into the gradient it was given"
            trace[f"given {step}"] = before

    both_ways(build(), script)


@pytest.mark.parametrize("gradient", list(GIVEN.values()), ids=list(GIVEN))
def test_gradients_given_to_the_raw_output_in_any_layout_match(gradient: Any) -> None:
    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        for _ in range(2):
            y = model(torch.randn(3, 6))
            given = gradient(y)
            before = bits(given)
            y.backward(gradient=given)
            assert bits(given) == before, "backward wrote into the gradient it was given"

    both_ways(mlp(), script)
    both_ways(seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU())), script)
    both_ways(seeded(lambda: nn.Linear(6, 6)), script)
    both_ways(seeded(lambda: Apply(lambda m, x: x + m.b, b=(6,))), script)


@pytest.mark.parametrize("reduce", [lambda y: y.sum(), lambda y: y.mean(), lambda y: y.flatten()[0], lambda y: y.max()])
@each_model
def test_reductions_with_expanded_or_sparse_gradients_match(build: Any, inputs: Any, reduce: Any) -> None:
    assert_same_as_eager(build(), inputs, loss=lambda output, model: reduce(output))


# --- gradients passed on ---------------------------------------------------------------------------------------------


def test_the_gradient_flows_on_to_what_made_the_input() -> None:
    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        torch.manual_seed(5)
        before, after = nn.Linear(6, 6), nn.Linear(4, 2)
        after(model(before(torch.randn(3, 6)).relu_())).square().sum().backward()
        for name, parameter in (*before.named_parameters("before"), *after.named_parameters("after")):
            trace[name] = bits(parameter.grad)

    both_ways(mlp(), script)


def test_a_residual_around_a_fitted_block_that_reads_its_input_three_times_matches() -> None:
    def script(model: Any, trace: dict[str, Any]) -> None:
        torch.manual_seed(5)
        before = nn.Linear(8, 8)
        x = before(torch.randn(3, 5, 8))
        (x + model(x, x, x)[0]).square().sum().backward()
        trace["before"] = bits(before.weight.grad)

    both_ways(seeded(lambda: nn.MultiheadAttention(8, 2, batch_first=True)), script)


# --- gradients that others look at too -------------------------------------------------------------------------------


def test_a_gradient_shared_with_another_branch_is_not_overwritten() -> None:
    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        other = seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU()), 3)
        for fit in (False, True):
            if fit:
                memfit.fit(other)
            x = torch.randn(3, 6)
            (model(x) + other(x) + model(x)).backward(torch.randn(3, 6))
            trace[f"other {fit}"] = bits(other[0].weight.grad)

    both_ways(seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU())), script)


def test_a_gradient_kept_by_a_hook_on_the_output_is_not_overwritten() -> None:
    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        kept: list[torch.Tensor] = []
        y = model(torch.randn(3, 6))
        y.retain_grad()
        y.register_hook(lambda gradient: kept.append(gradient))
        y.backward(torch.randn(3, 6))
        trace["retained"], trace["kept"] = bits(y.grad), bits(kept[0])

    both_ways(seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU())), script)


def test_an_output_kept_by_the_caller_is_not_overwritten_by_the_next_step() -> None:
    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        kept = []
        for _ in range(3):
            y = model(torch.randn(3, 6))
            y.square().sum().backward()
            kept.append(y.detach())
        for index, tensor in enumerate(kept):
            trace[f"{index}"] = bits(tensor)

    both_ways(seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True))), script)


def test_a_model_given_its_own_parameter_matches() -> None:
    def script(model: Any, trace: dict[str, Any]) -> None:
        model(model.b[None]).square().sum().backward()
        model(model.b).square().sum().backward()

    both_ways(seeded(lambda: Apply(lambda m, x: m.l(x) * m.b + x, l=nn.Linear(6, 6), b=(6,))), script)


class HoldsLeaves(nn.Module):
    """Trains tensors that are no parameters: a plain attribute and a buffer that require grad."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.plain = torch.ones(6, requires_grad=True)
        self.register_buffer("held", torch.ones(6, requires_grad=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.plain + self.held


def test_leaves_that_are_no_parameters_get_their_gradients() -> None:
    def script(model: Any, trace: dict[str, Any]) -> None:
        for step in range(2):
            model(torch.randn(3, 6)).square().sum().backward()
            trace[f"plain {step}"], trace[f"held {step}"] = bits(model.plain.grad), bits(model.held.grad)

    both_ways(seeded(HoldsLeaves), script)
