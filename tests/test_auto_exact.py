"""auto on this machine: bit for bit eager's, whatever it chooses, and clear words where a choice would not be."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from test_exact_zoo import small
from torch import nn

import memfit
from memfit.capture.rewrites.proof import AssumedProofs
from memfit.capture.rewrites.tight import tighten
from memfit.errors import DoesNotFit, UnsupportedUse
from memfit.plan.auto.search import Effort
from memfit.plan.policies import auto


@pytest.fixture(autouse=True)
def few_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "EFFORT", Effort(num_evaluations=3_000, cap_s=600))


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        pytest.param("gpt2", 8, marks=pytest.mark.slow),
        pytest.param("resnet18", 16, marks=pytest.mark.slow),
        pytest.param("densenet121", 8, marks=pytest.mark.slow),
        pytest.param("unet", 2, marks=pytest.mark.slow),
    ],
)
def test_networks_train_as_in_eager(name: str, batch: int) -> None:
    model, inputs, loss = small(name)
    call = inputs(batch)
    smallest = smallest_budget(copy.deepcopy(model), call)
    for budget in (smallest, int(1.2 * smallest)):
        verdict = memfit.verify(model, call, loss=lambda output: loss(output, model), budget=budget, steps=3)
        assert verdict.exact, str(verdict)


def smallest_budget(model: nn.Module, call: tuple[torch.Tensor, ...]) -> int:
    """What the refusal of a budget that is too small says would do, with room for what workspaces measure next time."""
    memfit.fit(model, budget=1, measure_s=2.0)
    with pytest.raises(DoesNotFit) as refusal:
        model(*call)
    found = re.search(r"Give a budget of at least ([\d,]+) bytes", str(refusal.value))
    assert found is not None
    return int(1.05 * int(found[1].replace(",", "")))


class Transposed(nn.Module):
    """Batch norm of a transposed channels_last tensor, whose result lies otherwise in memory than a fake one's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.second(self.norm(self.first(x).transpose(2, 3)).square())))


def transposed_call() -> tuple[tuple[torch.Tensor], tuple[torch.Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(6, 3, 24, 24).contiguous(memory_format=torch.channels_last)
    return (x,), (torch.randint(5, (6,)),)


def test_a_tensor_that_lies_otherwise_than_foreseen_is_not_sent_away() -> None:
    args, targets = transposed_call()
    verdict = memfit.verify(Transposed(), args, loss=F.cross_entropy, targets=targets, budget="85%", steps=2)
    assert verdict.exact, str(verdict)


def test_a_policy_that_sends_it_all_the_same_is_stopped() -> None:
    args, targets = transposed_call()
    model = memfit.fit(Transposed(), policy="vdnn-all", measure_s=1.0)
    with pytest.raises(UnsupportedUse) as refusal:
        F.cross_entropy(model(*args), *targets).backward()
    said = str(refusal.value)
    assert "made by aten.native_batch_norm.default in module 'norm'" in said
    assert "it could not be rebuilt from its bytes" in said and "'rotor'" in said


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 128), nn.Linear(128, 8000)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.body(x))), labels)


def test_the_loss_is_made_to_hold_less_where_nothing_else_fits() -> None:
    torch.manual_seed(0)
    call = (torch.randn(512, 64), torch.randint(8000, (512,)))
    model = memfit.fit(WithLoss(), budget="60%", measure_s=5.0)
    model(*call).backward()
    planned = model.memfit.planned
    assert planned.fits and "loss-in-place" in planned.note
    assert any(op.target.startswith("memfit_ops.") for op in planned.program.step.ops)
    verdict = memfit.verify(WithLoss(), call, budget="60%", steps=3)
    assert verdict.exact, str(verdict)


class Overwritten(nn.Module):
    """The gradient that the loss's backward reads is overwritten before log-softmax's comes."""

    def __init__(self) -> None:
        super().__init__()
        self.logits, self.scale = nn.Linear(32, 600), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logarithms = F.log_softmax(self.logits(x), 1)
        other = self.scale(x).squeeze(1) * x[:, 0]
        return torch.tanh(F.nll_loss(logarithms, labels, reduction="none") + other).sum()


def test_the_loss_is_left_alone_where_what_it_reads_is_overwritten() -> None:
    torch.manual_seed(0)
    model = memfit.fit(Overwritten())
    model(torch.randn(16, 32), torch.randint(600, (16,))).backward()
    step = model.memfit.step
    targets = [op.target for op in tighten(step, proofs=AssumedProofs()).ops]
    assert not any("loss" in target for target in targets if target.startswith("memfit_ops."))


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = (layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh()))
        self.body, self.head = nn.Sequential(*layers), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x)
        return self.head(hidden), hidden


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_share_holds_for_backward_from_one_of_two_outputs_too(which: int) -> None:
    torch.manual_seed(0)
    model, x = TwoOutputs(), torch.randn(2048, 64)
    eager = copy.deepcopy(model)
    memfit.fit(model, budget="60%", measure_s=1.0)
    for one in (model, eager):
        (one(x)[0].sum() + one(x)[1].sum()).backward()
        one.zero_grad()
        one(x)[which].square().mean().backward()
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad), name
