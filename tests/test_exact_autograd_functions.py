"""Custom autograd functions, hooks, gradients inside forward, checkpoints: as eager, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equivalence import Apply, assert_same_as_eager, bits, seeded
from torch import nn
from torch.utils.checkpoint import checkpoint
from training_models import both_ways, mlp, rows


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        gate = x.sigmoid()
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, gate = ctx.saved_tensors
        return gradient * (gate + x * gate * (1 - gate))


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -ctx.scale * gradient, None


class TwoOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        top, where = x.max(1)
        ctx.mark_non_differentiable(where)
        ctx.save_for_backward(where)
        ctx.shape = x.shape
        return top, where

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> torch.Tensor:
        (where,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.shape).scatter_(1, where[:, None], gradient[:, None])


class InPlaceDouble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


CUSTOM = {
    "saves": lambda m, x: Swish.apply(m.l(x)),
    "reverses": lambda m, x: m.k(Reverse.apply(m.l(x), 0.3)),
    "two outputs": lambda m, x: TwoOut.apply(m.l(x)),
    "in place": lambda m, x: InPlaceDouble.apply(m.l(x) * 1),
    "of a parameter": lambda m, x: x @ Swish.apply(m.l.weight),
}


@pytest.mark.parametrize("body", list(CUSTOM.values()), ids=list(CUSTOM))
def test_custom_autograd_functions_match(body: Any) -> None:
    assert_same_as_eager(seeded(lambda: Apply(body, l=nn.Linear(6, 6), k=nn.Linear(6, 6))), rows)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.second = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(checkpoint(self.first, x, use_reentrant=False))


def test_a_checkpoint_without_randomness_inside_the_model_matches() -> None:
    assert_same_as_eager(seeded(Checkpointed), lambda n: (torch.randn(n, 6, requires_grad=True),))


def test_gradients_taken_inside_forward_match() -> None:
    """Forces as the gradient of an energy, inside forward; without create_graph they are data."""

    def forces(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(m.l(x).square().sum(), x)
        return m.k(gradient)

    assert_same_as_eager(seeded(lambda: Apply(forces, l=nn.Linear(6, 6), k=nn.Linear(6, 6))), rows)


def test_second_derivatives_taken_inside_forward_match() -> None:
    def penalty(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(torch.tanh(m.l(x)).sum(), x, create_graph=True)
        return gradient.square().sum() + m.l(x).sum()

    assert_same_as_eager(seeded(lambda: Apply(penalty, l=nn.Linear(6, 6))), rows)


def test_a_hook_on_an_activation_that_only_computes_matches() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.l(x)
        y.register_hook(lambda gradient: gradient * 0.5 + 1)
        return m.k(y.relu())

    assert_same_as_eager(seeded(lambda: Apply(body, l=nn.Linear(6, 6), k=nn.Linear(6, 6))), rows)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_fitted_model_inside_a_checkpoint_matches(reentrant: bool) -> None:
    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        for step in range(3):
            x = torch.randn(3, 6, requires_grad=True)
            checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
            trace[f"input {step}"] = bits(x.grad)

    both_ways(mlp(), script)
