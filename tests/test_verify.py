"""verify(): it sees every kind of difference, and leaves no trace."""

from __future__ import annotations

import copy
import dataclasses
import json
import random

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import memfit
from memfit.errors import BadOption, DoesNotFit
from memfit.report.bits import difference, same_bits
from memfit.report.step_module import TrainingStep, loss_of


class Small(nn.Module):
    """Batch norm (buffers), dropout (random state) and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(self.first(x)).relu()))


class Planted(nn.Module):
    """Computes something else while it is captured (on fake tensors) than otherwise."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.linear = nn.Linear(4, 4)
        self.unused = nn.Parameter(torch.ones(4))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> object:
        y = self.linear(x)
        self.count.add_(1.0)
        if not isinstance(x, FakeTensor):
            return (y, torch.zeros(2)) if self.where == "structure" else y
        if self.where == "output":
            y = y * 2
        elif self.where == "gradient":  # adds nothing but a gradient of one
            y = y + (self.linear.bias - self.linear.bias.detach())
        elif self.where == "no gradient":
            y = y + (self.unused - self.unused.detach())
        elif self.where == "input gradient":
            y = y + (x - x.detach())
        elif self.where == "buffer":
            self.count.add_(1.0)
        elif self.where == "rng":
            torch.rand(3)
        return y


def test_exact_on_a_small_model() -> None:
    verdict = memfit.verify(Small(), (torch.randn(5, 8),), loss=nn.MSELoss(), targets=(torch.randn(5, 8),))
    assert verdict
    assert verdict.exact and verdict.steps == 3 and verdict.first_difference is None
    # Per step: output, loss, 5 parameters (the tied one once), their gradients, 3 buffers, the random state.
    assert verdict.num_compared == 3 * (1 + 1 + 5 + 5 + 3 + 1)
    assert str(verdict) == "exact: 3 steps, 48 tensors compared bit for bit"
    assert json.loads(json.dumps(verdict.to_dict()))["exact"] is True


@pytest.mark.parametrize(
    ("where", "kind", "name"),
    [
        ("output", "output", "output"),
        ("structure", "output", "output[0]"),
        ("gradient", "gradient", "linear.bias"),
        ("no gradient", "gradient", "unused"),
        ("input gradient", "input gradient", "input 0"),
        ("buffer", "buffer", "count"),
        ("rng", "rng", "cpu"),
    ],
)
def test_sees_a_planted_difference(where: str, kind: str, name: str) -> None:
    verdict = memfit.verify(Planted(where), (torch.randn(3, 4, requires_grad=True),))
    assert not verdict
    assert verdict.steps == 1, "nothing after a difference can agree, so it stops there"
    assert verdict.first_difference is not None
    assert (verdict.first_difference.step, verdict.first_difference.kind) == (1, kind)
    assert verdict.first_difference.name == name
    assert f"step 1, {kind} '{name}': " in str(verdict)
    json.dumps(verdict.to_dict(), allow_nan=False)


def test_says_how_far_apart() -> None:
    found = memfit.verify(Planted("gradient"), (torch.randn(3, 4),), loss=torch.sum).first_difference
    assert found is not None
    # The loss is a sum over 3 rows, so the planted gradient is exactly 3 on top.
    assert (found.num_different, found.num_elements, found.max_abs_difference) == (4, 4, 3.0)
    assert found.reason == "4 of 4 elements differ, by at most 3"
    found = memfit.verify(Planted("no gradient"), (torch.randn(3, 4),)).first_difference
    assert found is not None
    assert found.reason == "eager has none, fitted has a tensor of shape (4,)"
    found = memfit.verify(Planted("structure"), (torch.randn(3, 4),)).first_difference
    assert found is not None
    assert found.reason == "eager has output 'output[0]', fitted has output 'output'"


def test_counts_the_other_differences() -> None:
    verdict = memfit.verify(Planted("output"), (torch.randn(3, 4),))
    # The loss, both gradients of the linear layer and both its updated parameters go with the output.
    assert verdict.num_different == 6
    assert str(verdict).endswith("; 5 other tensors differ in that step")


def test_a_difference_in_a_later_step_is_found() -> None:
    class Drifts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.calls = [0]  # a list: not part of what a capture is keyed by

        def forward(self, x: Tensor) -> Tensor:
            if not isinstance(x, FakeTensor):
                self.calls[0] += 1
            return self.linear(x) * (2.0 if self.calls[0] == 2 else 1.0)

    verdict = memfit.verify(Drifts(), (torch.randn(3, 4),))
    assert verdict.first_difference is not None
    assert verdict.first_difference.step == verdict.steps == 2


def test_leaves_no_trace() -> None:
    model = Small()
    x = torch.randn(5, 8, requires_grad=True)
    model(x).sum().backward()
    before = copy.deepcopy(model.state_dict())
    gradients = {name: p.grad for name, p in model.named_parameters()}
    copies = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    input_gradient = x.grad
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    assert memfit.verify(model, (x,), seed=7)
    assert all(same_bits(before[key], value) for key, value in model.state_dict().items())
    assert all(p.grad is gradients[name] for name, p in model.named_parameters())
    assert all(torch.equal(p.grad, copies[name]) for name, p in model.named_parameters() if p.grad is not None)
    assert x.grad is input_gradient
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert all(numpy.array_equal(a, b) for a, b in zip(numpy.random.get_state(), states[2], strict=True))


def test_leaves_no_trace_after_an_error() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            torch.rand(3)
            raise KeyError("no")

    model, x = Fails(), torch.randn(3, 4)
    state = torch.get_rng_state()
    with pytest.raises(KeyError):
        memfit.verify(model, (x,))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_fitted_model_stays_fitted_and_is_compared_with_plain_eager() -> None:
    model = memfit.fit(Planted("output"))
    assert not memfit.verify(model, (torch.randn(3, 4),))
    assert "memfit" in model.__dict__


def test_a_model_in_eval_mode_is_compared_in_training_mode() -> None:
    model = Planted("output").eval()
    assert not memfit.verify(model, (torch.randn(3, 4),))
    assert not model.training


def test_gradients_are_enabled_even_under_no_grad() -> None:
    with torch.no_grad():
        assert not memfit.verify(Planted("gradient"), (torch.randn(3, 4),))


def test_nan_is_equal_to_itself() -> None:
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(float("nan"))
    assert memfit.verify(model, (torch.randn(3, 4),))


def test_budget_and_options_are_those_of_fit() -> None:
    with pytest.raises(DoesNotFit, match="budget is 10"):
        memfit.verify(Small(), (torch.randn(5, 8),), budget=10)
    with pytest.raises(BadOption, match="policy='magic'"):
        memfit.verify(Small(), (torch.randn(5, 8),), policy="magic")
    with pytest.raises(BadOption, match="no such rewrite"):
        memfit.verify(Small(), (torch.randn(5, 8),), without=["magic"])


def test_messages() -> None:
    x = torch.randn(3, 4)
    with pytest.raises(BadOption, match=r"^verify\(\) takes an nn.Module, not function$"):
        memfit.verify(lambda: 0, (x,))  # type: ignore[arg-type]
    with pytest.raises(BadOption, match=r"^steps=0: must be at least 1$"):
        memfit.verify(nn.Linear(4, 4), (x,), steps=0)
    with pytest.raises(BadOption, match=r"^nothing in the loss of Linear requires grad, so there is no training step"):
        memfit.verify(nn.Linear(4, 4).requires_grad_(False), (x,))
    model = nn.Linear(4, 4)
    model.held = model(x)  # type: ignore[assignment]
    with pytest.raises(BadOption, match=r"Linear or its arguments cannot be copied by copy\.deepcopy: "):
        memfit.verify(model, (x,))
    with pytest.raises(BadOption, match=r"must be a tensor of one element, not \(3, 4\). Reduce it"):
        memfit.verify(nn.Linear(4, 4), (x,), loss=lambda y: y)


NAN = float("nan")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_bits_of_floats(dtype: torch.dtype) -> None:
    def tensor(*numbers: float) -> Tensor:
        return torch.tensor(numbers, dtype=dtype)

    assert same_bits(tensor(NAN, 0.0, 1.0), tensor(NAN, 0.0, 1.0))
    assert not same_bits(tensor(0.0), tensor(-0.0))
    other = tensor(NAN)
    other.view(torch.uint8)[0] ^= 1
    assert other.isnan() and not same_bits(tensor(NAN), other), "another NaN is another NaN"
    found = difference(1, "output", "y", tensor(0.0, NAN, 2.0), tensor(-0.0, NAN, 2.0))
    assert found is not None
    assert (found.num_different, found.num_elements, found.max_abs_difference) == (1, 3, 0.0)
    assert found.reason == "1 of 3 elements differ, in bits that do not change the value (the sign of a zero)"
    found = difference(1, "output", "y", tensor(0.0, 1.0, NAN), tensor(0.5, 1.0, NAN))
    assert found is not None and found.max_abs_difference == 0.5, "where both are NaN does not count"
    found = difference(1, "output", "y", tensor(1.0), tensor(NAN))
    assert found is not None and found.to_dict()["max_abs_difference"] == "nan"


def test_bits_of_other_tensors() -> None:
    x = torch.randn(4, 6)
    assert same_bits(x.t(), x.t().contiguous()), "strides are no part of the value"
    assert same_bits(torch.empty(0), torch.empty(0))
    assert same_bits(torch.tensor(1), torch.tensor(1)) and not same_bits(torch.tensor(1), torch.tensor(2))
    assert not same_bits(torch.tensor([True]), torch.tensor([False]))
    assert not same_bits(torch.zeros(2), torch.zeros(3)) and not same_bits(torch.zeros(2), torch.zeros(2).double())
    z = torch.tensor([1 + 2j, 3j])
    assert same_bits(z, z.clone()) and same_bits(z.conj(), z.conj().resolve_conj())
    found = difference(1, "output", "z", z, z + torch.tensor([0, 4]))
    assert found is not None and (found.num_different, found.num_elements) == (1, 2)
    assert found.max_abs_difference == 4.0
    found = difference(1, "output", "x", x, x[:2])
    assert found is not None and found.reason == "shape (4, 6) in eager, (2, 6) fitted"
    found = difference(1, "output", "x", x, x.double())
    assert found is not None and found.reason == "dtype torch.float32 in eager, torch.float64 fitted"
    assert difference(1, "output", "n", 3, 3) is None and difference(1, "output", "n", NAN, NAN) is None
    assert difference(1, "output", "n", 3, 3.0) is not None


@dataclasses.dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


def test_the_loss_where_none_is_given() -> None:
    y, scalar = torch.tensor([1.0, 2.0, 3.0]), torch.tensor(5.0)
    assert loss_of(scalar) is scalar
    assert loss_of(Output(y, scalar)) is scalar
    assert loss_of({"loss": scalar, "logits": y}) is scalar
    assert loss_of(Output(y)).item() == pytest.approx(14 / 3)
    assert loss_of((y, [2 * y], torch.arange(3), "text")).item() == pytest.approx(5 * 14 / 3)
    assert loss_of(torch.tensor([3 + 4j])).item() == pytest.approx(25)
    assert loss_of(y, torch.dot, (y,)).item() == 14
    with pytest.raises(BadOption, match=r"no floating-point tensor to take a gradient of. Give loss="):
        loss_of(torch.arange(3))


def test_names_in_nested_outputs() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> object:
            y = self.linear(x)
            return {"a": [y, Output(y * (2 if isinstance(x, FakeTensor) else 1))]}

    found = memfit.verify(Nested(), (torch.randn(3, 4),)).first_difference
    assert found is not None and found.name == "output['a'][1].logits"


def test_a_whole_step_is_one_module() -> None:
    step = TrainingStep(Small(), nn.MSELoss())
    call = ((torch.randn(5, 8),), {}, (torch.randn(5, 8),))
    assert memfit.verify(step, call)
    found = memfit.verify(TrainingStep(Planted("buffer")), ((torch.randn(3, 4),), {}, ())).first_difference
    assert found is not None and found.name == "count", "named as in the user's model"
