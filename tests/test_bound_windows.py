"""The time that transfers have in a cut: what a code excuses and what not, and at how many moments it is asked."""

from __future__ import annotations

import random
import sys
from dataclasses import replace

import pytest
import torch
from every_plan import EveryPlan, drawn_codes, drawn_costs, drawn_step
from planning import planned_network
from torch import nn

import memfit
from memfit.capture.rewrites import rewrite
from memfit.capture.rewrites.proof import AssumedProofs
from memfit.capture.step import Step
from memfit.cost.costs import CodecRate, Link, OpCost, free_of_charge, priced_calls
from memfit.cost.devices import device
from memfit.cost.roofline import roofline
from memfit.cost.signature import signature
from memfit.plan.bound import Bounds
from memfit.plan.bound.cut import Cuts
from memfit.plan.budget import Budget
from memfit.plan.decisions import Encode
from memfit.plan.encode import why_not_encode
from memfit.plan.planner import plan_step
from memfit.plan.policies.gist import lossless_codes

NUM_LAYERS = 8


def _relus() -> Step:
    """Convolutions and ReLUs: backward reads what each ReLU makes twice."""
    layers = [layer for _ in range(NUM_LAYERS) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True))]
    with torch.device("meta"):
        model, x = nn.Sequential(*layers), torch.empty(2, 4, 16, 16)
    return rewrite(memfit.capture(model, (x,), loss=torch.Tensor.sum, device="cpu"), proofs=AssumedProofs())


def _bounds_of_relus(*, code_bytes_per_s: float = 1e18) -> Bounds:
    """Each op takes a microsecond, codes by default hardly any time, and a tensor takes ten to pass the link."""
    step = _relus()
    prices = {signature(step, op): OpCost(10**6) for op in priced_calls(step)}
    size = max(step.storage_bytes[s] for s in step.storage)
    link = Link("host", "out", "back", size / 10e-6, size / 10e-6)
    costs = replace(
        free_of_charge(step),
        by_signature=prices,
        links={"host": link},
        default_codec=CodecRate(code_bytes_per_s, code_bytes_per_s),
    )
    return Bounds(step, costs, drawn_codes(step, random.Random(0), NUM_LAYERS))


def _least_waiting(bounds: Bounds, op: int, *, away: int, coded: list[int]) -> float:
    """What compute waits after the instant if that storage is away, in seconds, and just these are encoded."""
    columns = bounds.columns
    cuts = Cuts(bounds.account, columns, int(bounds.account.keep_bytes.max()))
    program, _ = cuts.program(op)
    lower, upper = program.lower.copy(), program.upper.copy()
    lower[columns.away(columns.item_of[away], 0)] = 1
    for storage, column in columns.column_of_coded.items():
        lower[column] = upper[column] = float(storage in coded)
    upper[columns.again_at : columns.coded_at] = 0  # re-runs are time as well
    solved = program.within(lower, upper).solve()
    assert solved.point is not None
    return float(solved.point[columns.after_at]) * columns.unit_ps / 1e12


def test_the_codes_of_others_are_no_excuse() -> None:
    bounds = _bounds_of_relus()
    columns, account = bounds.columns, bounds.account
    coded = columns.coded
    assert len(coded) >= 3
    storage = coded[-1]  # wanted first
    first_use = account.backward_uses[storage][0]
    op = account.num_forward
    elapsed = sum(account.fastest_ps[op + 1 : first_use]) / 1e12
    fetch = float(columns.fetch[0][columns.item_of[storage]]) * columns.unit_ps / 1e12
    assert elapsed < fetch
    alone = _least_waiting(bounds, op, away=storage, coded=[])
    assert alone == pytest.approx(fetch - elapsed, rel=1e-3)
    assert _least_waiting(bounds, op, away=storage, coded=coded[:-1]) == pytest.approx(alone, rel=1e-3)


def test_what_is_encoded_is_held_by_its_codes_and_of_these_only_the_first_is_sent() -> None:
    """There are no other decisions, and a bound that allowed for them would be lower than need be."""
    step = drawn_step([("norm relu_", 0, 0), ("conv", 0, 0), ("relu", 0, 0), ("conv", 0, 0), ("tanh", 0, 0)])
    link = Link("host", "out", "back", 1e9, 1e9)
    costs = drawn_costs(step, {"host": link}, random.Random(0), with_ways=False)
    codes = {s: Encode("sparse") for s in step.storage if not why_not_encode(step, s, "sparse")}
    bounds = Bounds(step, costs, codes)
    columns = bounds.columns
    beside_gates = [s for s in columns.coded if sum(code.storage == s for code in columns.codes) == 2]
    assert beside_gates
    cuts = Cuts(bounds.account, columns, int(bounds.account.keep_bytes.max()))
    program, _ = cuts.program(bounds.account.num_forward)
    for storage in beside_gates:
        first, gate = (columns.code_item(n) for n, code in enumerate(columns.codes) if code.storage == storage)
        assert columns.size[first] > columns.size[gate]
        assert program.upper[columns.away(first, 0)] == 1 and program.upper[columns.away(gate, 0)] == 0
        lower = program.lower.copy()
        lower[columns.away(columns.item_of[storage], 0)] = 1
        assert not program.within(lower, program.upper).solve().is_infeasible
        lower[columns.column_of_coded[storage]] = 1
        assert program.within(lower, program.upper).is_proven_infeasible()

        lower, upper = program.lower.copy(), program.upper.copy()
        lower[columns.column_of_coded[storage]] = 1
        held = [first, gate, columns.away(first, 0)]
        solved = program.within(lower, upper).solve()
        assert solved.point is not None
        assert solved.point[gate] == pytest.approx(1) and solved.point[held].sum() == pytest.approx(2)
        upper[[first, columns.away(first, 0)]] = 0
        assert program.within(lower, upper).is_proven_infeasible()


def test_reading_a_code_is_time_for_what_is_wanted_later_and_not_for_what_is_wanted_before() -> None:
    bounds = _bounds_of_relus(code_bytes_per_s=1e10)
    columns, op = bounds.columns, bounds.account.num_forward
    read_first, second, read_last = columns.coded[-1], columns.coded[-2], columns.coded[0]
    longer = float(columns.longer[columns.column_of_coded[read_first]]) * columns.unit_ps / 1e12
    alone = _least_waiting(bounds, op, away=second, coded=[])
    assert longer > 1e-7 and alone > longer
    after_reading = _least_waiting(bounds, op, away=second, coded=[read_first])
    assert after_reading == pytest.approx(alone - longer, rel=1e-3)
    assert columns.longer[columns.column_of_coded[read_last]] > 0
    assert _least_waiting(bounds, op, away=second, coded=[read_last]) == pytest.approx(alone, rel=1e-3)


def test_every_moment_is_asked_where_programs_are_small() -> None:
    """Each storage that is away is waited for, whichever it is: between two moments nothing slips through."""
    bounds = _bounds_of_relus()
    columns, account = bounds.columns, bounds.account
    op = account.num_forward
    cuts = Cuts(account, columns, int(account.keep_bytes.max()))
    rows, times = cuts._windows(op)
    moments = {account.backward_uses[s][0] for s in columns.storages if account.backward_uses[s]} - {op}
    elapsed = {round(sum(account.fastest_ps[op + 1 : moment]) / columns.unit_ps, 3) for moment in moments}
    assert len(elapsed) > 5, "there would have been room for them anyway"
    assert elapsed <= {round(time, 3) for time in times} and len(rows) == len(times)


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_is_better_over_a_slow_link(seed: int) -> None:
    """Every plan with every choice of codes, over a link that is nearly too slow: waiting is most of what they cost."""
    rng = random.Random(seed)
    step = drawn_step([("norm relu_", 0, 0), ("conv", 0, 0), ("relu pool", 0, 0), ("conv", 0, 0), ("tanh", 0, 0)])
    slow = Link("host", "out", "back", *(max(step.storage_bytes) / s for s in (3e-6, 9e-6)))
    costs = drawn_costs(step, {"host": slow}, rng, with_ways=False)
    codes: dict[int, Encode] = drawn_codes(step, rng, 2)
    assert codes
    every = EveryPlan.of(step, costs, codes, most=300)
    peaks = every.peaks()
    bounds = Bounds(step, costs, codes)
    for budget in (peaks[0], peaks[len(peaks) // 4], peaks[len(peaks) // 2]):
        best_ps = every.fastest_ps(budget)
        assert best_ps is not None
        bound = bounds.at(budget)
        refined = bounds.refined(bound, target_ps=sys.maxsize, num_solves=200)
        assert bound.over_ps is not None and refined.over_ps is not None
        assert bound.over_ps <= refined.over_ps <= best_ps - bound.keep_ps, refined.describe()


def test_a_network_with_cheap_codes_has_no_free_transfers() -> None:
    """Pooling windows cost vgg16_bn next to nothing: they must not pass for the time of other tensors' transfers."""
    step = planned_network("vgg16_bn", batch=64)
    costs = roofline(step, device("v100-16gb"))
    planned = plan_step(step, costs, policy="keep", budget=Budget.parse("40%"))
    assert planned.budget_bytes is not None
    bounds = Bounds(step, costs, lossless_codes(step, costs))
    bound = bounds.at(planned.budget_bytes)
    refined = bounds.refined(bound, target_ps=sys.maxsize, num_solves=100)
    assert refined.overhead is not None and refined.overhead > 0.064, "6.25 % with them"
