"""fit() with a budget: a step that was measured to need more is planned again, a few times at most, or refused.

The resident set is played. A played machine knows what ops really hold, and what a process takes besides; what a step
needs on it follows from the program that runs, so that another plan really helps.
"""

from __future__ import annotations

import functools
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence import assert_same_as_eager, seeded
from torch import nn

import memfit
from memfit.cache import cache_folder
from memfit.capture.rewrites import rewrite
from memfit.capture.rewrites.tight import tight_above_bytes
from memfit.capture.step import Step
from memfit.cost.costs import Costs, OpCost, free_of_charge
from memfit.errors import BudgetExceeded
from memfit.plan.budget import Budget
from memfit.plan.ledger import Ledger
from memfit.plan.planner import plan_step
from memfit.plan.program import Program, Run
from memfit.resident import CannotMeasure, require_linux
from memfit.run import feedback
from memfit.run.compiled import Compiled
from memfit.run.revision import MAX_REVISIONS, corrected

POLICY = "checkpoint-search-peak"
LINEAR = "aten.addmm.default"


def net() -> nn.Module:
    """A chain with everything that must not happen twice: dropout, and batch norm's running statistics."""

    def build() -> nn.Module:
        layers = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())]
        return nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.3), *layers)

    return seeded(build)


def inputs(num: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(64 * num, 32),)


class Machine:
    """Plays the resident set.

    Attributes:
        held_bytes: what ops hold besides operands and results, by target; the prices do not know.
        besides_bytes: what the process takes besides, given the program.
        reserve_bytes: what malloc holds in reserve while nobody asks for it back.
        part: where the process is largest: 0 in forward, 1 between the halves, 2 in backward.
    """

    def __init__(self) -> None:
        self.held_bytes: dict[str, int] = {}
        self.besides_bytes: Callable[[Program], int] = lambda program: 0
        self.reserve_bytes = 0
        self.part = 2
        self.num_observed = 0
        self.program: Program | None = None

    def growth_bytes(self, program: Program | None = None) -> int:
        program = program or self.program
        held = [self.held_bytes.get(op.target, 0) for op in program.step.ops]
        return Ledger.of(program, held).growth_bytes + self.besides_bytes(program)

    def transients(self, program: Program, tell: Callable[[int, int], None]) -> _Transients:
        self.num_observed += 1
        return _Transients(self, program, tell)


class _Transients:
    def __init__(self, machine: Machine, program: Program, tell: Callable[[int, int], None]) -> None:
        self.machine, self.program, self.tell = machine, program, tell
        self.growth_bytes = self.num_parts = 0

    def __call__(self, number: int, made: Any = None) -> None:
        instruction = self.program.instructions[number]
        if isinstance(instruction, Run):
            self.tell(instruction.op, self.machine.held_bytes.get(self.program.step.ops[instruction.op].target, 0))

    def look(self) -> int:
        if self.num_parts == self.machine.part:
            self.growth_bytes = self.machine.growth_bytes(self.program)
        self.num_parts += 1
        return 0

    def go_on(self) -> None: ...


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    played = Machine()
    start = 1 << 30
    call = Compiled.__call__

    def noting(self: Compiled, *args: Any) -> Any:
        played.program = self.program
        return call(self, *args)

    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    monkeypatch.setattr(Compiled, "__call__", noting)
    monkeypatch.setattr("memfit.run.fitted.measure", lambda step, **_: free_of_charge(step))
    monkeypatch.setattr(feedback, "trim", lambda: None)
    monkeypatch.setattr(feedback, "reset_high_water", lambda: None)
    monkeypatch.setattr(feedback, "resident_bytes", lambda: start)
    monkeypatch.setattr(feedback, "high_water_bytes", lambda: start + played.growth_bytes() + played.reserve_bytes)
    monkeypatch.setattr(feedback, "Transients", played.transients)
    monkeypatch.setattr(feedback, "_SLACK_BYTES", 0)
    monkeypatch.setattr(feedback, "_NOISE_BYTES", 0)
    return played


def keep_peak() -> int:
    """What the keep plan of the net needs if ops hold nothing: a budget that is just enough."""
    model = memfit.fit(net())
    model(*inputs(1))
    return model.memfit.planned.peak_bytes


def train(model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(*inputs(1)).square().sum().backward()
        model.zero_grad()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_a_workspace_that_was_too_small_is_corrected_and_the_call_is_planned_again(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    budget = keep_peak()
    machine.held_bytes[LINEAR] = 30_000
    model = memfit.fit(net(), budget=budget, policy=POLICY)
    train(model, 2)
    first = model.memfit.planned
    needed = machine.growth_bytes() + first.simulated.ledger.base_bytes
    assert needed > budget, "else there is nothing to do"
    assert model.memfit.num_revisions == 0 and not model.memfit.is_settled
    train(model, 1)
    assert model.memfit.num_revisions == 1
    second = model.memfit.planned
    (text,) = warnings_of(caplog)
    assert text.startswith(
        f"fitted Sequential: the step needed {needed:,} bytes, the plan said {first.peak_bytes:,} and the budget is "
        f"{budget:,}; the process was largest in the backward half. Workspaces were corrected: {LINEAR} in '"
    )
    assert "to 30,000 bytes" in text and "and 4 more" in text
    assert f"Planned again: peak {second.peak_bytes:,} bytes (was {first.peak_bytes:,}), predicted step " in text
    assert f"{second.step_s:.3f} s (was {first.step_s:.3f})" in text
    assert second.budget_bytes == budget == second.plan.budget_bytes
    assert machine.growth_bytes() + second.simulated.ledger.base_bytes <= second.peak_bytes <= budget
    train(model, 3)
    assert model.memfit.is_settled and model.memfit.num_revisions == 1 and model.memfit.num_captures == 1
    assert model.memfit.measured.growth_bytes == machine.growth_bytes()
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("cause", ["workspace", "loss"])
def test_planning_again_in_the_midst_of_training_changes_no_bit(
    machine: Machine, micro_batches: int, cause: str
) -> None:
    budget = keep_peak()
    if cause == "workspace":
        machine.held_bytes[LINEAR] = 30_000
    else:
        machine.part, machine.besides_bytes = 1, lambda program: 20_000
    fitted = assert_same_as_eager(
        net(), inputs, steps=6, batch=1, other_batch=None, micro_batches=micro_batches, budget=budget, policy=POLICY
    )
    assert fitted.memfit.num_revisions == 1


def test_what_no_workspace_explains_is_taken_off_the_room(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """The caller's loss takes memory between the halves: the plan must leave it room."""
    budget = keep_peak()
    machine.part, machine.besides_bytes = 1, lambda program: 15_000
    model = memfit.fit(net(), budget=budget, policy=POLICY)
    train(model, 6)
    (text,) = warnings_of(caplog)
    assert "the process was largest between the halves, where the caller computes the loss" in text
    assert "No op's workspace explains it, so the plan is given 15,000 bytes less than the budget. Planned" in text
    planned = model.memfit.planned
    assert planned.peak_bytes + 15_000 <= budget == planned.budget_bytes
    assert model.memfit.is_settled and model.memfit.num_revisions == 1 and planned.fits


def test_where_nothing_fits_training_goes_on_and_says_so_once(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    budget = keep_peak()
    machine.besides_bytes = lambda program: 15_000
    model = memfit.fit(net(), budget=budget, policy="keep")
    train(model, 8)
    (text,) = warnings_of(caplog)
    assert "No other plan was found: policy 'keep' needs" in text and "Give a larger budget" in text
    assert model.memfit.num_revisions == 0 and model.memfit.is_settled and machine.num_observed == 1


def test_corrected_so_that_nothing_fits_the_old_prices_serve_in_less_room(
    machine: Machine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An op is blamed for far more than the process grew: by such a price no plan fits, but less room is a remedy."""
    budget = keep_peak()
    machine.besides_bytes = lambda program: 15_000
    call = _Transients.__call__

    def blame(self: _Transients, number: int, made: Any = None) -> None:
        call(self, number, made)
        instruction = self.program.instructions[number]
        if isinstance(instruction, Run) and self.program.step.ops[instruction.op].target == LINEAR:
            self.tell(instruction.op, 10 * budget)

    monkeypatch.setattr(_Transients, "__call__", blame)
    model = memfit.fit(net(), budget=budget, policy=POLICY)
    train(model, 6)
    (text,) = warnings_of(caplog)
    assert "so the plan is given 15,000 bytes less than the budget" in text and "corrected" not in text
    assert model.memfit.planned.peak_bytes + 15_000 <= budget and model.memfit.num_revisions == 1


def test_a_call_is_planned_again_a_few_times_at_most(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the plan, the process takes what it frees: there is no end to it but ours."""
    budget = keep_peak()
    machine.besides_bytes = lambda program: budget - Ledger.of(program).peak_bytes + 1_000
    model = memfit.fit(net(), budget=budget, policy=POLICY)
    train(model, 30)
    found = warnings_of(caplog)
    assert 1 <= model.memfit.num_revisions <= MAX_REVISIONS
    assert len(found) == model.memfit.num_revisions + 1
    assert f"It was planned {1 + MAX_REVISIONS} times" in found[-1] or "No other plan was found" in found[-1]
    assert model.memfit.is_settled


def test_a_little_more_than_the_budget_is_too_much(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slack is for what libraries take in the first steps, where there is room for it."""
    monkeypatch.setattr(feedback, "_SLACK_BYTES", 8 << 20)
    budget = keep_peak()
    machine.besides_bytes = lambda program: 15_000
    model = memfit.fit(net(), budget=budget, policy=POLICY)
    train(model, 6)
    assert machine.num_observed >= 1 and model.memfit.num_revisions == 1
    roomy = memfit.fit(net(), budget=2 * budget, policy=POLICY)
    machine.num_observed = 0
    train(roomy, 6)
    assert machine.num_observed == 0 and roomy.memfit.num_revisions == 0


def test_strict_raises_at_the_next_forward_call_and_names_everything(machine: Machine) -> None:
    budget = keep_peak()
    machine.besides_bytes = lambda program: 15_000
    model = memfit.fit(net(), budget=budget, policy=POLICY, strict=True)
    train(model, 2)
    predicted = model.memfit.planned.peak_bytes
    needed = machine.growth_bytes() + model.memfit.ledger.base_bytes
    state = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(BudgetExceeded) as caught:
            model(torch.zeros(64, 32))
    text = str(caught.value)
    assert f"the step needed {needed:,} bytes, the plan said {predicted:,} and the budget is {budget:,}" in text
    assert "No op held more than was foreseen" in text
    assert f"Give a budget of at least {needed:,} bytes or a smaller batch, or leave out strict=True" in text
    assert torch.equal(torch.get_rng_state(), state) and model.memfit.num_revisions == 0
    train(memfit.fit(model, budget=2 * needed, policy=POLICY, strict=True), 6)
    train(memfit.unfit(model), 1)


def test_strict_names_the_ops_to_blame(machine: Machine) -> None:
    machine.held_bytes[LINEAR] = 30_000
    model = memfit.fit(net(), budget=keep_peak(), policy=POLICY, strict=True)
    train(model, 2)
    with pytest.raises(
        BudgetExceeded, match=f"more than foreseen was held by {LINEAR} in '0' 30,000 bytes, "
    ) as caught:
        model(*inputs(1))
    assert " and 4 more. Give a budget of at least " in str(caught.value)


def test_strict_within_the_budget_raises_nothing(machine: Machine) -> None:
    model = memfit.fit(net(), budget=keep_peak(), policy=POLICY, strict=True)
    train(model, 6)
    assert model.memfit.is_settled and machine.num_observed == 0


def test_strict_where_growth_cannot_be_read_is_an_error(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot() -> None:
        raise CannotMeasure("not on this machine")

    monkeypatch.setattr(feedback, "reset_high_water", cannot)
    with pytest.raises(CannotMeasure, match="not on this machine"):
        train(memfit.fit(net(), budget="1GiB", policy=POLICY, strict=True), 1)
    train(memfit.fit(net(), budget="1GiB", policy=POLICY), 1)


def test_more_than_planned_but_within_the_budget_keeps_its_plan(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.held_bytes[LINEAR] = 30_000
    model = memfit.fit(net(), budget=keep_peak() + 30_000, policy=POLICY)
    train(model, 6)
    assert machine.num_observed == 1, "what the ops hold is learnt all the same"
    assert model.memfit.measured.num_corrected == 7
    assert model.memfit.num_revisions == 0 and model.memfit.is_settled and not warnings_of(caplog)


def test_what_malloc_holds_in_reserve_is_no_excess(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.reserve_bytes = 1 << 26
    with caplog.at_level(logging.INFO, logger="memfit"):
        model = memfit.fit(net(), budget=keep_peak(), policy=POLICY)
        train(model, 6)
    assert machine.num_observed == 1 and model.memfit.num_revisions == 0 and not warnings_of(caplog)
    assert any("besides what malloc holds in reserve" in r.getMessage() for r in caplog.records)
    assert model.memfit.measured.growth_bytes == machine.growth_bytes()


def test_a_share_stays_what_it_was_when_costs_are_corrected(machine: Machine) -> None:
    machine.held_bytes[LINEAR] = 30_000
    model = memfit.fit(net(), budget="100%", policy=POLICY)
    train(model, 2)
    budget = model.memfit.planned.budget_bytes
    machine.besides_bytes = lambda program: max(budget - Ledger.of(program).peak_bytes, 0) + 1
    train(model, 6)
    assert model.memfit.planned.budget_bytes == budget
    assert model.memfit.planned.budget.share == 1.0


def test_backward_passes_that_are_still_to_come_keep_their_plan(machine: Machine) -> None:
    """Calls 2 and 3 are in flight when 2 is seen to need too much; 4 has the new plan before 3 has gone backward."""
    budget = keep_peak()
    machine.besides_bytes = lambda program: 15_000

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(5)
        model(*inputs(1)).square().sum().backward()
        second, third = model(*inputs(1)), model(*inputs(1))
        second.square().sum().backward()
        fourth = model(*inputs(1))
        third.square().sum().backward()
        fourth.square().sum().backward()
        return [*(p.grad for p in model.parameters()), *model.buffers(), torch.get_rng_state()]

    expected = gradients(net())
    model = memfit.fit(net(), budget=budget, policy=POLICY)
    found = gradients(model)
    assert model.memfit.num_revisions == 1
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_the_growth_of_two_calls_at_once_is_not_taken_for_that_of_one(machine: Machine) -> None:
    machine.besides_bytes = lambda program: 10**9
    model = memfit.fit(net(), budget=keep_peak(), policy=POLICY)
    for _ in range(20):
        (model(*inputs(1)) + model(*inputs(1))).square().sum().backward()
        model.zero_grad()
    assert machine.num_observed == 0 and model.memfit.num_revisions == 0 and model.memfit.is_settled


def test_forward_passes_without_backward_do_not_keep_it_from_learning(machine: Machine) -> None:
    machine.besides_bytes = lambda program: 15_000
    model = memfit.fit(net(), budget=keep_peak(), policy=POLICY)
    for _ in range(3):
        model(*inputs(1))
    train(model, 6)
    assert model.memfit.num_revisions == 1


def test_where_the_step_that_is_observed_does_not_end_another_one_is(machine: Machine) -> None:
    machine.besides_bytes = lambda program: 15_000
    model = memfit.fit(net(), budget=keep_peak(), policy=POLICY)
    train(model, 1)
    model(*inputs(1))  # it would have been observed, and has no backward
    train(model, 20)
    assert machine.num_observed > 1 and model.memfit.num_revisions == 1


def test_where_no_observed_step_ends_it_is_said(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.besides_bytes = lambda program: 15_000
    model = memfit.fit(net(), budget=keep_peak(), policy=POLICY)
    train(model, 1)
    for _ in range(100):
        model(*inputs(1))
    (text,) = warnings_of(caplog)
    assert "no step that was looked at closely came to its end: call backward()" in text
    assert machine.num_observed == 3 and model.memfit.num_revisions == 0


def test_debug_observes_both_ways(machine: Machine) -> None:
    machine.held_bytes[LINEAR] = 30_000
    model = memfit.fit(net(), budget=keep_peak(), policy=POLICY, debug=True)
    train(model, 6)
    assert model.memfit.num_revisions == 1 and model.memfit.observed.entries


REAL = """
import logging, sys, torch, memfit
from memfit.cost.costs import Costs, OpCost, free_of_charge
from memfit.run import fitted
fitted.measure = lambda step, **_: free_of_charge(step)
torch.set_num_threads(1)
logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="%(message)s")
MIB = 1 << 20
layers = [layer for _ in range(16) for layer in (torch.nn.Linear(256, 256), torch.nn.Tanh())]
model, x = torch.nn.Sequential(*layers), torch.randn(8192, 256)  # 8 MiB a layer
memfit.fit(model)
model(x).sum().backward()
budget = model.memfit.planned.peak_bytes + 4 * MIB
memfit.fit(model, budget=budget, policy="checkpoint-search-peak")
for step in range(20):  # mostly 5; more where malloc kept a hole the first time
    y = model(x)
    waste = torch.ones(32 * MIB // 4)  # a loss that takes 32 MiB between the halves
    loss = y.square().sum() + waste[0]
    del waste
    loss.backward()
    model.zero_grad()
    del y, loss
    if model.memfit.is_settled:
        break
planned = model.memfit.planned
print("RESULT", model.memfit.num_revisions, planned.peak_bytes / MIB, budget / MIB, model.memfit.is_settled)
"""


@pytest.mark.slow
def test_a_real_loss_that_takes_memory_is_made_room_for(tmp_path: Path) -> None:
    """In a process of its own, by its real resident set: 32 MiB where the plan left 20."""
    try:
        require_linux()
    except CannotMeasure:
        pytest.skip("growth cannot be read here")
    for library in cache_folder().glob("*.so"):  # compiling them anew would take most of the time
        shutil.copy(library, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", REAL],
        capture_output=True,
        text=True,
        check=False,
        env={"MEMFIT_CACHE": str(tmp_path), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    *warned, result = done.stdout.strip().splitlines()
    _, num_revisions, peak, budget, is_settled = result.split()
    assert int(num_revisions) >= 1, done.stdout
    assert "the process was largest between the halves, where the caller computes the loss" in warned[0]
    assert float(peak) < float(budget) - 10
    assert is_settled == "True"


def test_a_correction_reaches_the_way_that_the_price_list_has() -> None:
    whole, chunks = OpCost(10, 100), OpCost(12, 30)
    costs = Costs("here", {"conv": whole}, algorithms={"conv": {"whole": whole, "chunks:2": chunks}})
    found = corrected(costs, (feedback.Correction("conv", "aten.convolution.default", "0", 5000),))
    assert found.by_signature["conv"] == OpCost(10, 5000)
    assert found.algorithms["conv"] == {"whole": OpCost(10, 5000), "chunks:2": chunks}
    assert corrected(costs, (feedback.Correction("conv", "aten.convolution.default", "0", 90),)) is costs


class Wide(nn.Module):
    """Where the backward of batch norm holds most: the gradient, the input, and what it makes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(32, 16384), nn.BatchNorm1d(16384), nn.Linear(16384, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


def test_planned_again_it_may_take_ops_that_hold_less(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They had not been priced, since the first plan fitted without."""

    def prices(step: Step, *, also: Sequence[Step] = (), **_: Any) -> Costs:
        costs = free_of_charge(step)
        return functools.reduce(lambda found, form: found.extended_by(free_of_charge(form)), also, costs)

    monkeypatch.setattr("memfit.run.fitted.measure", prices)
    step = rewrite(memfit.capture(seeded(Wide), inputs(1)))
    smallest = plan_step(step, free_of_charge(step), policy="auto", budget=Budget(1)).peak_bytes
    machine.held_bytes["aten.native_batch_norm_backward.default"] = 20_000
    fitted = assert_same_as_eager(
        seeded(Wide), inputs, steps=6, batch=1, other_batch=None, budget=smallest + 1_000, policy="auto"
    )
    assert fitted.memfit.num_revisions == 1
    assert tight_above_bytes(fitted.memfit.planned.step) is not None
    (text,) = warnings_of(caplog)
    assert "Planned again: peak " in text and fitted.memfit.planned.fits
