"""What backward may not do is refused with the way out, and every refusal is one of our errors."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from equivalence import bits, seeded, weighted_sum
from refusals import Outer, refusal_of, rows
from torch import nn

import memfit
from memfit.errors import MemfitError, UnsupportedUse

# --- backward --------------------------------------------------------------------------------------------------------


def test_a_backward_inside_forward_is_refused() -> None:
    def body(m: Any, y: torch.Tensor) -> torch.Tensor:
        y.sum().backward(retain_graph=True)
        return y

    text = refusal_of(seeded(lambda: Outer(body)), lambda m: m(rows()), trains=False)
    assert "backward" in text or "gradient" in text


def fitted_loss() -> tuple[nn.Module, torch.Tensor]:
    model = memfit.fit(seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh())))
    return model, weighted_sum(model(rows()))


BACKWARDS = {
    "retain_graph": lambda model, loss: loss.backward(retain_graph=True),
    "create_graph": lambda model, loss: loss.backward(create_graph=True),
    "grad with create_graph": lambda model, loss: torch.autograd.grad(loss, model[0].weight, create_graph=True),
    "grad with retain_graph": lambda model, loss: torch.autograd.grad(loss, model[0].weight, retain_graph=True),
}


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("backward", list(BACKWARDS.values()), ids=list(BACKWARDS))
def test_keeping_the_graph_is_refused_with_the_way_out(backward: Any) -> None:
    model, loss = fitted_loss()
    with pytest.raises(UnsupportedUse) as caught:
        backward(model, loss)
    text = str(caught.value)
    assert "Sequential" in text and "retain_graph=True" in text and "create_graph=True" in text
    assert "memfit.unfit(model)" in text and "call backward once" in text
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("backward", list(BACKWARDS.values()), ids=list(BACKWARDS))
def test_after_that_refusal_a_plain_step_trains_as_in_eager(backward: Any) -> None:
    model, loss = fitted_loss()
    with pytest.raises(UnsupportedUse):
        backward(model, loss)
    loss.backward()
    eager = seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    weighted_sum(eager(rows())).backward()
    assert [bits(p.grad) for p in model.parameters()] == [bits(p.grad) for p in eager.parameters()]


def test_a_hessian_is_refused() -> None:
    model = memfit.fit(seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh())))
    with pytest.raises(UnsupportedUse, match="create_graph"):
        torch.autograd.functional.hessian(lambda x: model(x).sum(), rows())


class Checkpointed(nn.Module):
    def __init__(self, dropout: float, reentrant: bool) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(6, 6), nn.Dropout(dropout), nn.Linear(6, 6))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self.part, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_dropout_is_refused_with_the_way_out(reentrant: bool) -> None:
    model = seeded(lambda: Checkpointed(0.5, reentrant))
    text = refusal_of(model, lambda m: m(rows(requires_grad=True)))
    assert "checkpoint" in text
    assert "Turn checkpointing off" in text or "use_reentrant=False" in text


def test_what_eager_refuses_in_backward_is_refused_with_eagers_reason() -> None:
    def body(m: Any, y: torch.Tensor) -> torch.Tensor:
        z = torch.sigmoid(y)
        z.mul_(2)
        return z

    eager = seeded(lambda: Outer(body))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        weighted_sum(eager(rows())).backward()
    fitted = memfit.fit(seeded(lambda: Outer(body)))
    with pytest.raises((RuntimeError, MemfitError), match="modified by an inplace operation"):
        weighted_sum(fitted(rows())).backward()


def test_a_backward_that_fails_leaves_the_next_step_whole() -> None:
    eager, model = (seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))) for _ in range(2))
    memfit.fit(model)
    handle = model[2].weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(rows()).sum().backward()
    handle.remove()
    model.zero_grad()
    for each in (eager, model):
        each(rows()).sum().backward()
    assert [bits(p.grad) for p in model.parameters()] == [bits(p.grad) for p in eager.parameters()]


def conv_chain() -> nn.Module:
    def build() -> nn.Module:
        layers = [layer for _ in range(6) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.Tanh())]
        return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers)

    return seeded(build)


def test_other_settings_in_backward_are_refused_where_ops_run_again() -> None:
    """Eager kept what these made in the forward pass; made again they would be of the other settings."""
    x = torch.randn(2, 3, 16, 16)
    model = memfit.fit(conv_chain(), policy="sqrt")
    loss = model(x).square().sum()
    with torch.backends.mkldnn.flags(enabled=False), pytest.raises(UnsupportedUse) as caught:
        loss.backward()
    text = str(caught.value)
    assert "torch.backends.mkldnn.enabled was True, is False" in text
    assert re.search(r"aten\.\w+\.\w+ of module '\d+' is made again in backward", text)
    assert "Set it as it was and run the step again" in text and "policy='keep'" in text
    assert all(p.grad is None for p in model.parameters())
    eager = conv_chain()
    for each in (eager, model):
        each(x).square().sum().backward()
    assert [bits(p.grad) for p in model.parameters()] == [bits(p.grad) for p in eager.parameters()]


# --- everything we raise ---------------------------------------------------------------------------------------------


def test_all_our_errors_are_memfit_errors_and_unsupported_use_is_a_runtime_error() -> None:
    from memfit import errors

    kinds = [thing for thing in vars(errors).values() if isinstance(thing, type) and issubclass(thing, Exception)]
    assert len(kinds) >= 5 and all(issubclass(kind, MemfitError) for kind in kinds)
    assert issubclass(UnsupportedUse, RuntimeError)
    assert all(kind.__doc__ and not re.search(r"\bsimply\b|\bjust\b", kind.__doc__) for kind in kinds)
