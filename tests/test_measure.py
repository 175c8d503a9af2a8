"""Measured peaks and times: a step whose bytes are known, and what is said where they cannot be measured."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from memfit import resident
from memfit.errors import DoesNotFit
from memfit.plan.budget import Budget
from memfit.plan.ledger import Ledger
from memfit.plan.options import Options
from memfit.report import measure
from memfit.report.arm import Arm
from memfit.report.comparison import compare_network
from memfit.report.measure import Times, in_turn, measure_peak, measure_times
from memfit.report.verify import both_arms, compare
from memfit.resident import CannotMeasure

MIB = 2**20

NETWORK = '''
import torch
from torch import nn

print("a network may print")

class Outer(nn.Module):
    """exp of an outer sum: 64 MiB made, 64 MiB kept, 64 MiB of gradient; its parameters are a few KiB."""

    def __init__(self):
        super().__init__()
        self.row = nn.Parameter(torch.zeros(1, 4096))
        self.column = nn.Parameter(torch.zeros(4096, 1))

    def forward(self, scale):
        return ((self.row + self.column) * scale).exp().sum()

def outer():
    return Outer(), torch.ones(())

class Heavy(nn.Module):
    """One parameter of 64 MiB and next to no activations."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4096, 4096))

    def forward(self, x):
        return (x @ self.weight).sum()

def heavy():
    return Heavy(), torch.ones(1, 4096)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("networks")
    (folder / "measured_networks.py").write_text(NETWORK)
    return folder


linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peaks need Linux")


@linux_only
def test_known_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    found = compare_network("measured_networks:outer", steps=2)
    assert found.exact
    # The product and its exp at once in forward; in backward the kept exp and two gradients in a row.
    assert found.eager_peak_bytes == pytest.approx(128 * MIB, rel=0.05)
    assert found.eager_activation_peak_bytes == pytest.approx(128 * MIB, rel=0.05)
    assert found.peak_bytes == pytest.approx(found.ledger_growth_bytes, rel=0.05)
    assert found.peak_bytes <= found.eager_peak_bytes * 1.02
    assert found.step_s > 0 and found.eager_step_s > 0 and 0.1 < found.time_ratio < 10
    plain = found.to_dict()
    assert plain["peak_ratio"] == found.peak_bytes / found.eager_peak_bytes
    assert plain["activation_peak_ratio"] == found.activation_peak_bytes / found.eager_activation_peak_bytes


@linux_only
def test_gradients_count_in_the_first_micro_batch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    found = measure_peak("measured_networks:heavy", threads=1, repeats=1)
    assert found.peak_bytes == pytest.approx(64 * MIB, rel=0.05)
    # In the second one the gradient being added is there beside the one it is added to.
    assert found.accumulating_peak_bytes == pytest.approx(64 * MIB, rel=0.05)
    # Without gradients next to nothing is left.
    assert found.activation_peak_bytes < 2 * MIB


@linux_only
def test_a_budget_is_held_against_what_the_process_grew_by(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    found = compare_network("measured_networks:outer", steps=2, options=Options(budget=Budget.parse("160MiB")))
    assert found.exact and found.budget_bytes == 160 * MIB and found.within_budget is True
    # Two parameters of 16 KiB and the scale are there before the step; budgets count them.
    assert found.base_bytes == 2 * 4 * 4096 + 4
    assert found.needed_bytes == found.base_bytes + found.peak_bytes > 127 * MIB
    assert replace(found, budget_bytes=found.needed_bytes).within_budget is True
    above = replace(found, budget_bytes=found.needed_bytes - 1)
    assert above.within_budget is False and above.to_dict()["within_budget"] is False
    assert replace(found, budget_bytes=None).within_budget is None


@linux_only
def test_errors_come_back_from_the_other_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(DoesNotFit, match="the budget is 1,000"):
        measure_peak("measured_networks:outer", options=Options(budget=Budget(1000)))


def _ended(monkeypatch: pytest.MonkeyPatch, code: int, stderr: str = "") -> None:
    done = subprocess.CompletedProcess([], code, "", stderr)
    monkeypatch.setattr(measure.subprocess, "run", lambda *args, **options: done)


@linux_only
def test_messages_about_the_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    _ended(monkeypatch, -9)
    with pytest.raises(CannotMeasure, match=r"of eager vgg16 was ended by SIGKILL: most likely the machine ran out of"):
        measure_peak("vgg16")
    _ended(monkeypatch, 1, "Traceback\nKeyError: 'no'\n")
    with pytest.raises(CannotMeasure, match=r"of fitted vgg16 failed: KeyError: 'no'$"):
        measure_peak("vgg16", options=Options())


def test_peaks_need_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident.sys, "platform", "darwin")
    with pytest.raises(CannotMeasure, match=r"^measuring the peak of a step needs Linux with glibc, and this is dar"):
        measure_peak("vgg16")


@linux_only
def test_a_forbidden_reset_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(CannotMeasure, match=r"needs to write /proc/self/clear_refs, and that failed: not here"):
        resident.growth_bytes(lambda: None)


@linux_only
def test_small_blocks_count_even_where_the_heap_has_holes() -> None:
    def blocks() -> list[torch.Tensor]:
        return [torch.ones(4096) for _ in range(2048)]  # 32 MiB in blocks of 16 KiB

    last = blocks()[-1]  # keeps the heap from shrinking
    assert resident.growth_bytes(blocks) == pytest.approx(32 * MIB, rel=0.1)
    assert last[0] == 1


def test_medians_of_pairs() -> None:
    # The machine was three times slower during the last pair: it moves neither ratio nor medians.
    found = Times.of([(1.1, 1.0), (2.2, 2.0), (9.9, 9.0)])
    assert (found.step_s, found.eager_step_s) == (2.2, 2.0)
    assert found.time_ratio == pytest.approx(1.1)


def test_each_arm_goes_first_as_often_as_the_other() -> None:
    pairs = [(float(number), 1.0) for number in range(5)]
    assert in_turn(pairs) == pairs[1:] and in_turn(pairs[:4]) == pairs[:4]
    assert in_turn(pairs[:1]) == pairs[:1] and in_turn([]) == []


def test_where_times_are_taken_no_arm_steps_beside_the_gradients_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    eager, fitted = both_arms(model, (torch.randn(8, 32, requires_grad=True),))
    step, places = Arm.step, []

    def stepping(arm: Arm) -> None:
        other = fitted if arm is eager else eager
        places.append([p.grad.data_ptr() for p in other.model.parameters() if p.grad is not None])
        step(arm)

    monkeypatch.setattr(Arm, "step", stepping)
    verdict = compare(eager, fitted, steps=4, is_timed=True)
    assert verdict.exact, "from where they were put they are compared, and the update reads them"
    second = places[1::2]
    assert second[0] == second[2] != second[1] == second[3], "the first's gradients are where they were, two steps ago"
    assert all(len(found) == 4 for found in second) and not any(places[::2])


def test_gradients_that_change_their_shape_or_form_are_put_aside_too() -> None:
    model = nn.Linear(4, 4, bias=False)
    arm, _ = both_arms(model, (torch.randn(2, 4),))
    (weight,) = arm.model.parameters()
    square, one = torch.randn(4, 4), torch.randn(1)
    for grad in (square, square.t(), one.expand(4, 4), square.to_sparse(), None):
        weight.grad = grad
        arm.put_gradients_aside()
        if grad is None or grad.is_sparse:
            assert weight.grad is grad
        else:
            assert weight.grad is not grad and torch.equal(weight.grad, grad)
            assert weight.grad.stride() == grad.stride() or grad.stride() == (0, 0)


def test_times_of_both_arms() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 32))
    eager, fitted = both_arms(model, (torch.randn(8, 32),))
    told: list[str] = []
    times, verdict, capture_s = measure_times(eager, fitted, steps=3, progress=told.append)
    assert verdict.exact and verdict.steps == 5, "warm-up steps are compared too"
    assert 0 < times.step_s < 10 and 0 < times.eager_step_s < 10 and times.time_ratio > 0
    assert capture_s > times.step_s
    assert told[-1] == "step 5 of 5, both ways"
    assert fitted.fitted is not None and isinstance(fitted.fitted.ledger, Ledger)
