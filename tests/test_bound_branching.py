"""The bound with whole tensors: exact where shares of tensors are loose, and no more than what multipliers prove."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from planning import SECOND, TENSOR, chain, planned_network, priced, tanh_storages
from scipy.sparse import csr_matrix

from memfit.cost.costs import Link
from memfit.cost.devices import device
from memfit.cost.roofline import roofline
from memfit.plan.bound import Bounds
from memfit.plan.bound.linear import Floats, LinearProgram, Solved
from memfit.plan.budget import Budget
from memfit.plan.decisions import Recompute
from memfit.plan.lower import lower
from memfit.plan.planner import plan_step
from memfit.plan.policies.gist import lossless_codes
from memfit.plan.simulate import simulate

SECONDS = {"mul": 1, "tanh": 3, "tanh_backward": 3}
FREELY = sys.maxsize  # a target that nothing reaches


@pytest.fixture
def num_solved(monkeypatch: pytest.MonkeyPatch) -> list[LinearProgram]:
    """Every program that is solved from now on."""
    seen: list[LinearProgram] = []
    solve = LinearProgram.solve

    def counted(self: LinearProgram) -> Solved:
        seen.append(self)
        return solve(self)

    monkeypatch.setattr(LinearProgram, "solve", counted)
    return seen


# --- by hand ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensors", [0.25, 0.5, 1.5])
def test_a_part_of_a_tensor_too_much_costs_a_whole_one(tensors: float) -> None:
    """Of a tanh a quarter cannot run again: the bound says so, and a plan does it."""
    step = chain(7)
    costs = priced(step, SECONDS)
    keep = simulate(lower(step, {}, costs), costs)
    bounds = Bounds(step, costs)
    budget = keep.peak_bytes - int(tensors * TENSOR)
    bound = bounds.at(budget)
    assert bound.over_ps == pytest.approx(tensors * 3 * SECOND, rel=1e-6)
    whole = int(np.ceil(tensors))
    refined = bounds.refined(bound, target_ps=FREELY, num_solves=400)
    assert refined.over_ps == pytest.approx(whole * 3 * SECOND, rel=1e-6)
    assert refined.over_ps <= whole * 3 * SECOND
    again = dict.fromkeys(tanh_storages(step)[1 : 2 * whole : 2], Recompute())
    timeline = simulate(lower(step, again, costs), costs)
    assert timeline.peak_bytes <= budget and timeline.step_ps - keep.step_ps == whole * 3 * SECOND


def test_what_is_said_is_about_the_instant_that_proves_it() -> None:
    step = chain(7)
    costs = priced(step, SECONDS)
    bounds = Bounds(step, costs)
    bound = bounds.at(simulate(lower(step, {}, costs), costs).peak_bytes - TENSOR // 2)
    refined = bounds.refined(bound, target_ps=FREELY, num_solves=60)
    assert refined.cut is not None and refined.cut.over_ps == refined.over_ps
    assert refined.instant == f"{bounds.instant(refined.cut.op)}, with whole tensors"
    assert refined.describe().endswith(refined.instant)
    shares = [share for each in refined.shares.values() for share in each]
    assert shares and all(min(abs(share), abs(1 - share)) < 1e-6 for share in shares)
    assert any(0.1 < share.again < 0.9 for share in bound.shares.values()), "there was nothing to split"


def test_a_tensor_is_sent_whole_or_not() -> None:
    """Half a tensor would pass the link in the time there is; a whole one has to be waited for, or made again."""
    step = chain(4)
    link = Link("host", "out", "back", TENSOR / 12, TENSOR / 12)
    costs = priced(step, SECONDS, links=(link,))
    bounds = Bounds(step, costs)
    bound = bounds.at(simulate(lower(step, {}, costs), costs).peak_bytes - TENSOR // 2)
    refined = bounds.refined(bound, target_ps=FREELY, num_solves=100)
    assert bound.over_ps is not None and refined.over_ps is not None
    assert bound.over_ps < SECOND < refined.over_ps <= 3 * SECOND


# --- how much it does ------------------------------------------------------------------------------------------------


def test_it_stops_at_the_target_and_at_the_number_of_programs(num_solved: list[LinearProgram]) -> None:
    step = chain(6)
    costs = priced(step, SECONDS)
    bounds = Bounds(step, costs)
    bound = bounds.at(simulate(lower(step, {}, costs), costs).peak_bytes - 3 * TENSOR // 2)
    assert bound.over_ps is not None
    proven = []
    for most in (0, 1, 2, 5, 20, 60, 400):
        num_solved.clear()
        found = bounds.refined(bound, target_ps=FREELY, num_solves=most).over_ps
        assert found is not None and found >= bound.over_ps
        assert len(num_solved) <= most
        proven.append(found)
    assert proven == sorted(proven) and proven[0] == bound.over_ps < proven[-1]
    without_target = len(num_solved)
    num_solved.clear()
    assert bounds.refined(bound, target_ps=bound.over_ps, num_solves=400) is bound and not num_solved
    early = bounds.refined(bound, target_ps=bound.over_ps + 1, num_solves=400)
    assert early.over_ps is not None and early.over_ps > bound.over_ps and len(num_solved) < without_target


def test_the_same_is_proven_every_time() -> None:
    step = chain(9)
    costs = priced(step, SECONDS, links=(Link("host", "out", "back", TENSOR / 9, TENSOR / 8),))
    budget = simulate(lower(step, {}, costs), costs).peak_bytes - 7 * TENSOR // 2
    found = []
    for _ in range(2):
        bounds = Bounds(step, costs)
        found.append(bounds.refined(bounds.at(budget), target_ps=FREELY, num_solves=80))
    assert found[0] == found[1] and found[0].shares == found[1].shares


# --- what it trusts --------------------------------------------------------------------------------------------------


def _program(limits: list[float]) -> LinearProgram:
    """x + y <= the first, -x - y <= the second, both in [0, 1]; cost is x."""
    matrix = csr_matrix([[1.0, 1.0], [-1.0, -1.0]])
    return LinearProgram(np.array([1.0, 0.0]), matrix, np.array(limits), np.zeros(2), np.ones(2))


def test_that_nothing_obeys_the_rows_is_proven() -> None:
    assert _program([0.5, -1.5]).solve().is_infeasible
    assert _program([0.5, -1.5]).is_proven_infeasible()
    assert _program([3.0, -2.5]).is_proven_infeasible(), "by the box"
    assert not _program([1.5, -0.5]).is_proven_infeasible()
    assert not _program([1.0, -1.0]).is_proven_infeasible()


def test_a_solver_that_is_wrong_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it says of every program in a smaller box that nothing obeys its rows, the bound stays what it was."""
    step = chain(5)
    costs = priced(step, SECONDS)
    bounds = Bounds(step, costs)
    bound = bounds.at(simulate(lower(step, {}, costs), costs).peak_bytes - TENSOR // 2)
    honest = bounds.refined(bound, target_ps=FREELY, num_solves=60)
    assert honest.over_ps is not None and bound.over_ps is not None and honest.over_ps > 1.5 * bound.over_ps
    solve, within = LinearProgram.solve, LinearProgram.within
    split: list[LinearProgram] = []

    def wrong(self: LinearProgram) -> Solved:
        is_split = any(self is each for each in split)
        return Solved(float("inf"), is_infeasible=True) if is_split else solve(self)

    def remembered(self: LinearProgram, lower: Floats, upper: Floats) -> LinearProgram:
        found = within(self, lower, upper)
        if not (np.array_equal(lower, self.lower) and np.array_equal(upper, self.upper)):
            split.append(found)
        return found

    monkeypatch.setattr(LinearProgram, "solve", wrong)
    monkeypatch.setattr(LinearProgram, "within", remembered)
    refined = bounds.refined(bound, target_ps=FREELY, num_solves=60)
    assert len(split) > 1 and refined.over_ps is not None
    assert bound.over_ps <= refined.over_ps <= 1.01 * bound.over_ps


# --- networks --------------------------------------------------------------------------------------------------------


def test_auto_says_the_refined_bound() -> None:
    """Of nin's few huge tensors the plan's bound is that of whole ones, and still below the plan."""
    step = planned_network("nin", batch=128)
    costs = roofline(step, device("rtx-4090"))
    planned = plan_step(step, costs, policy="auto", budget=Budget.parse("60%"))
    assert planned.fits and planned.lower_bound_overhead is not None and planned.budget_bytes is not None
    bound = Bounds(step, costs, lossless_codes(step, costs)).at(planned.budget_bytes)
    assert bound.overhead is not None
    assert bound.overhead + 0.015 < planned.lower_bound_overhead <= planned.overhead
    assert planned.overhead - planned.lower_bound_overhead < 0.03
