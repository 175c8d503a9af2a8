"""The lower bound against every plan there is, and against those that are shipped; what it says where there is none."""

from __future__ import annotations

import itertools
import random
import sys
from dataclasses import replace

import pytest
import torch
from every_plan import LAYERS, LINKS, EveryPlan, all_states, drawn_codes, drawn_costs, drawn_step
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from planning import SECOND, TENSOR, chain, priced, tanh_storages
from random_decisions import random_decisions
from torch import nn

import memfit
from memfit.cost.costs import Costs, Link, OpCost, free_of_charge
from memfit.cost.signature import signature
from memfit.errors import BadOption
from memfit.plan.bound import Bounds, floor
from memfit.plan.bound.cut import Cuts
from memfit.plan.decisions import Encode, EncodeThenOffload, Recompute
from memfit.plan.evaluate import Evaluator
from memfit.plan.lower import lower
from memfit.plan.problem import Problem
from memfit.plan.simulate import simulate


@settings(
    max_examples=16,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(LAYERS, st.sampled_from(sorted(LINKS)), st.sampled_from(["plain", "codes", "ways"]), st.integers(0, 2**32))
def test_no_plan_is_better(layers: list[tuple[str, int, int]], links: str, extra: str, seed: int) -> None:
    rng = random.Random(seed)
    step = drawn_step(layers)
    costs = drawn_costs(step, LINKS[links], rng, with_ways=extra == "ways")
    codes = drawn_codes(step, rng, 2) if extra == "codes" else {}
    every = EveryPlan.of(step, costs, codes, chance=rng)
    peaks = every.peaks()
    bounds = Bounds(step, costs, codes)
    for budget in {peaks[0] - 1, peaks[0], peaks[len(peaks) // 3], peaks[-1] - 1}:
        bound = bounds.at(budget)
        fastest_ps = every.fastest_ps(budget)
        if fastest_ps is not None:
            assert bound.over_ps is not None, bound.describe()
            assert bound.over_ps <= fastest_ps - bound.keep_ps, bound.describe()
            assert bound.smallest_bytes <= budget
            for num_solves in (8, 120):
                refined = bounds.refined(bound, target_ps=sys.maxsize, num_solves=num_solves)
                assert refined.over_ps is not None
                assert bound.over_ps <= refined.over_ps <= fastest_ps - bound.keep_ps, refined.describe()
        else:
            assert bounds.floor().needed_bytes <= peaks[0]


@settings(
    max_examples=12,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(LAYERS, st.sampled_from(sorted(LINKS)), st.integers(0, 2**32))
def test_no_drawn_plan_is_better(layers: list[tuple[str, int, int]], links: str, seed: int) -> None:
    """With all that decisions can be: moments, more than once, codes that are sent."""
    rng = random.Random(seed)
    step = drawn_step(layers)
    costs = drawn_costs(step, LINKS[links], rng, with_ways=False)
    for _ in range(3):
        decisions = dict(random_decisions(step, costs, rng.randrange(2**32)))
        coded = {s: d.codec for s, d in decisions.items() if isinstance(d, (Encode, EncodeThenOffload))}
        decisions = {s: d for s, d in decisions.items() if not (s in coded and rng.random() < 0.3)}
        try:
            timeline = simulate(lower(step, decisions, costs), costs)
        except BadOption as error:
            if "cannot be decided to" not in str(error):
                raise
            continue  # what a code has made superfluous cannot be recomputed
        bounds = Bounds(step, costs, {s: Encode(name) for s, name in coded.items()})
        bound = bounds.at(timeline.peak_bytes)
        assert bound.over_ps is not None, bound.describe()
        assert bound.over_ps <= timeline.step_ps - bound.keep_ps, bound.describe()
        refined = bounds.refined(bound, target_ps=sys.maxsize, num_solves=60)
        assert refined.over_ps is not None
        assert bound.over_ps <= refined.over_ps <= timeline.step_ps - bound.keep_ps, refined.describe()


@pytest.mark.parametrize("seed", [7, *range(100, 105)])
def test_no_plan_is_better_where_codes_are_decoded_for_ops_with_a_workspace(seed: int) -> None:
    """A code is gone before the op that it is decoded for: the two never have to stand beside a workspace."""
    rng = random.Random(seed)
    names = ("conv", "norm relu_", "relu pool", "dropout", "conv")
    step = drawn_step([(rng.choice(names), rng.randrange(2), rng.randrange(2)) for _ in range(rng.randint(3, 5))])
    costs = drawn_costs(step, {}, rng, with_ways=False)
    codes = drawn_codes(step, rng, 2)
    every = EveryPlan.of(step, costs, codes, most=120)
    peaks = every.peaks()
    for budget in {peaks[0], peaks[len(peaks) // 4]}:
        fastest_ps = every.fastest_ps(budget)
        bound = Bounds(step, costs, codes).at(budget)
        assert bound.over_ps is not None and fastest_ps is not None
        assert bound.over_ps <= fastest_ps - bound.keep_ps, bound.describe()


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_a_chain_by_hand() -> None:
    """Five tanhs: to have one tensor less at the boundary one of them must run again, if nothing can be sent."""
    step = chain(5)
    costs = priced(step, {"mul": 1, "tanh": 3, "tanh_backward": 3})
    keep = simulate(lower(step, {}, costs), costs)
    bounds = Bounds(step, costs)
    assert bounds.at(keep.peak_bytes).over_ps == 0
    # A re-run of a tanh is three seconds, and with it goes the smallest part of a tensor that is too much.
    one_less = bounds.at(keep.peak_bytes - TENSOR)
    assert one_less.over_ps == pytest.approx(3 * SECOND, rel=1e-6)
    second = tanh_storages(step)[1]
    timeline = simulate(lower(step, {second: Recompute()}, costs), costs)
    assert timeline.peak_bytes == keep.peak_bytes - TENSOR and timeline.step_ps - keep.step_ps == 3 * SECOND


def test_what_can_be_sent_in_time_costs_nothing() -> None:
    step = chain(5)
    seconds = {"mul": 1, "tanh": 3, "tanh_backward": 3}
    fast, slow = (Link("host", "out", "back", TENSOR / s, TENSOR / s) for s in (1, 100))
    keep = simulate(lower(step, {}, priced(step, seconds)), priced(step, seconds))
    budget = keep.peak_bytes - TENSOR
    with_fast, with_slow = (Bounds(step, priced(step, seconds, links=(link,))).at(budget) for link in (fast, slow))
    assert with_fast.over_ps == 0
    assert with_slow.over_ps is not None and 2.5 * SECOND < with_slow.over_ps <= 3 * SECOND


def test_waiting_is_counted_where_nothing_can_be_made_again() -> None:
    """Dropout draws its mask, so that it can only be kept or sent: the bound is the time its copies need."""
    step = memfit.capture(nn.Dropout(0.5), (torch.zeros(256, 256, requires_grad=True),), loss=torch.Tensor.sum)
    link = Link("host", "out", "back", TENSOR / 1, TENSOR / 2)
    costs = priced(step, {}, links=(link,))
    bounds = Bounds(step, costs)
    needed = bounds.account.needed_bytes
    keep = int(bounds.account.keep_bytes.max())
    assert bounds.floor().needed_bytes == int(needed.max()) <= keep
    evaluator = Evaluator.of(Problem.of(step, costs))
    for budget in range(int(needed.max()), keep + 1, TENSOR // 4):
        outcomes = [evaluator.evaluate(s, budget) for s in all_states(evaluator.problem, 5000)]
        best = min((o.step_ps for o in outcomes if o.peak_bytes <= budget), default=None)
        bound = bounds.at(budget)
        if best is not None:
            assert bound.over_ps is not None and bound.over_ps <= best - bound.keep_ps


def test_slower_ways_are_counted_for_every_op_that_is_forced() -> None:
    """A convolution whose workspace has no room takes the slow way, wherever the cut is."""
    model = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4)))
    step = memfit.capture(model, (torch.zeros(2, 4, 16, 16),), loss=torch.Tensor.sum)
    fast, slow = OpCost(SECOND, 10**9), OpCost(3 * SECOND, 0)
    prices = {signature(step, op): OpCost(SECOND) for op in step.ops}
    convolutions = {signature(step, op) for op in step.ops if op.target == "aten.convolution.default"}
    prices |= dict.fromkeys(convolutions, fast)
    costs = Costs("test", prices, algorithms={key: {"fast": fast, "slow": slow} for key in convolutions})
    assert Bounds(step, costs).at(2 * 10**9).over_ps == 0
    bound = Bounds(step, costs).at(10**9)
    assert bound.over_ps == 4 * 2 * SECOND
    picked = costs.picking(dict.fromkeys(costs.choices(step), "slow"))
    timeline = simulate(lower(step, {}, picked), picked)
    assert timeline.peak_bytes <= 10**9 and timeline.step_ps - bound.keep_ps == bound.over_ps


# --- what it says ----------------------------------------------------------------------------------------------------


def test_the_certificate_names_op_module_and_bytes() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 500))
    step = memfit.capture(model, (torch.zeros(64, 8),), loss=torch.Tensor.sum)
    costs = free_of_charge(step)
    bound = Bounds(step, costs).at(1000)
    assert bound.is_infeasible and bound.over_ps is None and bound.overhead is None
    known = bound.certificate
    assert known is not None and step.ops[known.op].target == known.target and step.ops[known.op].path == known.path
    assert known.needed_bytes == bound.smallest_bytes == floor(step, costs).needed_bytes > 64 * 500 * 4
    text = bound.describe()
    assert text.startswith("no plan fits a budget of 1,000 bytes: while aten.")
    assert f"(op {known.op}, " in text and "of module '" in text and f"at least {known.needed_bytes:,} bytes" in text
    assert text.endswith(f"Give at least {bound.smallest_bytes:,} bytes, or a smaller batch")
    assert floor(step, costs).describe().startswith(f"no plan needs less than {bound.smallest_bytes:,} bytes: while ")
    within = Bounds(step, costs).at(bound.smallest_bytes)
    assert not within.is_infeasible and "takes less than +" in within.describe()


def test_what_cannot_leave_is_in_the_floor() -> None:
    """Without a tier dropout's masks stay, all of them: no op alone would say so."""
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Dropout(0.5))))
    step = memfit.capture(model, (torch.zeros(2048, 64),), loss=torch.Tensor.sum)
    without, with_tier = free_of_charge(step), free_of_charge(step, tiers=["host"])
    assert floor(step, without).needed_bytes > floor(step, with_tier).needed_bytes + 3 * 2048 * 64 * 4


def test_it_stops_at_the_target() -> None:
    step = chain(8)
    costs = priced(step, {"mul": 1, "tanh": 3, "tanh_backward": 3})
    peak = simulate(lower(step, {}, costs), costs).peak_bytes
    whole = Bounds(step, costs).at(peak - 3 * TENSOR)
    assert whole.over_ps is not None and whole.tried
    assert Bounds(step, costs).at(peak - 3 * TENSOR, target_ps=-1).tried == ()
    early = Bounds(step, costs).at(peak - 3 * TENSOR, target_ps=1)
    assert early.over_ps is not None and 1 <= early.over_ps <= whole.over_ps and len(early.tried) == 1


def test_budgets_that_are_none_are_refused() -> None:
    step = chain(2)
    with pytest.raises(BadOption, match="budget_bytes=-1: a bound is for a budget of bytes, not less than none"):
        Bounds(step, free_of_charge(step)).at(-1)
    assert Bounds(step, free_of_charge(step)).at(0).is_infeasible


def test_an_estimate_is_no_more_than_the_cut() -> None:
    """What one proof says about another instant is a bound there, so no more than the best one."""
    rng = random.Random(5)
    step = drawn_step([("conv", 0, 0), ("relu pool", 0, 0), ("norm relu_", 1, 0), ("softmax", 0, 1), ("dropout", 0, 0)])
    costs = replace(free_of_charge(step), links={"disk": Link("disk", "disk", "disk", 1e7, 1e7)})
    bounds = Bounds(step, costs, drawn_codes(step, rng, 3))
    budget = (int(bounds.account.keep_bytes.max()) + bounds.floor().needed_bytes) // 2
    cuts = Cuts(bounds.account, bounds.columns, budget)
    found = {op: cuts.at(op) for op in bounds.account.instants()}
    assert len({cut.over_ps for cut in found.values()}) > 1
    for cut, (op, other) in itertools.product(list(found.values())[::5], found.items()):
        if cut.carried is not None and other.over_ps is not None:
            assert cuts.estimate(op, cut.carried) <= other.over_ps + bounds.account.keep_ps * 1e-7
