"""offload-greedy, offload-dp and the fluid bound on real steps: timetables, budgets, other policies, training."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from equivalence import assert_same_as_eager, seeded, weighted_sum
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from planning import SECOND, TENSOR, chain, planned_network, priced, tanh_storages
from test_exact_random import Line, a_line
from test_exact_random import Program as RandomProgram
from test_exact_zoo import ALL, small
from test_ledger_real import WithLoss, assert_plan_is_followed, with_loss
from torch import nn

from memfit import zoo
from memfit.capture.step import Step
from memfit.cost.costs import Costs, Link
from memfit.cost.devices import device
from memfit.cost.roofline import roofline
from memfit.errors import DoesNotFit, MemfitError
from memfit.plan.budget import Budget, with_headroom
from memfit.plan.check import check
from memfit.plan.decisions import Decision, Moments, Offload
from memfit.plan.lower import lower
from memfit.plan.offloading.chain import evaluate
from memfit.plan.offloading.fluid import fluid
from memfit.plan.offloading.step_bound import offload_bound_ps
from memfit.plan.offloading.step_chain import Luggage, grouped
from memfit.plan.offloading.step_timetable import Timetable, timetable
from memfit.plan.planner import plan_step, runnable_plan
from memfit.plan.policies.offload_dp import OFFLOAD_DP
from memfit.plan.policies.offload_greedy import OFFLOAD_GREEDY
from memfit.plan.policies.overlap import OVERLAP
from memfit.plan.policies.policy import Decided, Policy
from memfit.plan.policies.vdnn import VDNN_ALL, VDNN_CONV
from memfit.plan.problem import Problem
from memfit.plan.program import FetchStart, SendStart
from memfit.plan.simulate import Timeline, simulate
from memfit.tiers.null import NullTier
from memfit.tiers.registry import TIERS

OURS = (OFFLOAD_GREEDY, OFFLOAD_DP)
NUM_BUDGETS = 20
SIZES = {"vgg16": 64, "resnet50": 32, "googlenet": 64, "unet": 8, "densenet121": 8, "gpt2": 2}


def titan(step: Step, **_: Any) -> Costs:
    return roofline(step, device("titan-x"), workspace="none")


def luggage_of(step: Step, costs: Costs) -> Luggage:
    return Luggage.of(Problem.of(step, costs), "host")


class Judged:
    """A network at catalogue prices, and what the plans of policies need and take by the simulator."""

    def __init__(self, name: str, batch: int) -> None:
        self.step = planned_network(name, batch=batch)
        self.costs = titan(self.step)
        self.luggage = luggage_of(self.step, self.costs)
        self.keep = self.simulated({})
        self._known: dict[int, tuple[Mapping[int, Decision], Timeline]] = {}

    def simulated(self, decisions: Mapping[int, Decision]) -> Timeline:
        return simulate(lower(self.step, decisions, self.costs), self.costs)

    def decided(self, policy: Policy, budget_bytes: int | None) -> Timeline:
        assert policy.decide is not None
        decided = policy.decide(self.step, self.costs, budget_bytes)
        decisions = decided.decisions if isinstance(decided, Decided) else decided
        assert isinstance(decisions, Mapping)
        # Policies hand out the very mapping they remember, so that each plan is judged once.
        if id(decisions) not in self._known:
            self._known[id(decisions)] = decisions, self.simulated(decisions)
        return self._known[id(decisions)][1]

    def overhead_ps(self, timeline: Timeline) -> int:
        return timeline.step_ps - self.keep.step_ps


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=pytest.mark.slow if n in ("densenet121", "gpt2") else ()) for n in SIZES],
)
def judged(request: pytest.FixtureRequest) -> Judged:
    return Judged(request.param, SIZES[request.param])


# -- Timetables -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    "name", ["vgg11", "resnet18", "googlenet", "unet", pytest.param("resnet50", marks=pytest.mark.slow)]
)
def test_a_timetable_is_what_the_simulator_makes_of_it(name: str, early: bool) -> None:
    step = planned_network(name, batch=2, image=64)
    rng = random.Random(name)
    num_waiting = 0
    for speed in (1e8, 2e10, 1e13):
        links = {"host": Link("host", "out", rng.choice(["in", "out"]), speed, speed * 1.3, rng.choice([0, 1e-6]))}
        costs = replace(roofline(step, device("titan-x")), links=links)
        luggage = luggage_of(step, costs)
        for share in (0.4, 0.9, 1.0):
            away = [item for item in luggage.items if rng.random() < share]
            floor = luggage.floor_bytes(away)
            assert timetable(luggage, away, floor - 1, early=early) is None
            for limit in (floor, rng.randint(floor, luggage.keep_peak_bytes), luggage.keep_peak_bytes):
                found = timetable(luggage, away, limit, early=early)
                assert found is not None, "the floor of what is sent can always be kept, by waiting"
                program = lower(step, found.decisions(), costs)
                timeline = simulate(program, costs)
                assert (found.peak_bytes, found.step_ps) == (timeline.peak_bytes, timeline.step_ps)
                assert found.peak_bytes <= limit
                bound_ps = offload_bound_ps(luggage, found.peak_bytes)
                assert bound_ps is not None and bound_ps <= timeline.step_ps - sum(luggage.problem.op_ps)
                check(program, workspace_bytes=luggage.problem.workspace_bytes, peak_bytes=timeline.peak_bytes)
                num_waiting += timeline.stall_ps > 0
    assert num_waiting >= 6


def test_one_that_is_not_faster_than_what_is_known_is_not_made() -> None:
    step = planned_network("resnet18", batch=2, image=64)
    luggage = luggage_of(step, titan(step))
    rng = random.Random(0)
    for _ in range(20):
        away = [item for item in luggage.items if rng.random() < 0.6]
        limit = rng.randint(luggage.floor_bytes(away), luggage.keep_peak_bytes)
        found = timetable(luggage, away, limit, early=True)
        assert found is not None
        assert timetable(luggage, away, limit, early=True, known_ps=found.step_ps) is None
        assert timetable(luggage, away, limit, early=True, known_ps=found.step_ps + 1) == found


def test_one_that_is_still_read_fills_a_gap_of_the_link_only_if_it_may() -> None:
    """The encoder's maps of a U-Net are read again at the far end: by then the link has little time left."""
    step = planned_network("unet", batch=8)
    luggage = luggage_of(step, titan(step))
    skips = [item for item in luggage.worthwhile if item.last_forward > item.written + 20]
    assert skips
    limit = luggage.floor_bytes(luggage.worthwhile)
    early, late = (timetable(luggage, luggage.worthwhile, limit, early=early) for early in (True, False))
    assert early is not None and late is not None and early.step_ps < late.step_ps
    assert any(early.sends[item.storage] <= item.last_forward - 10 for item in skips)
    assert all(late.sends[item.storage] >= item.last_forward for item in skips)


# -- Chains -----------------------------------------------------------------------------------------------------------


def tanh_chain(length: int, send_s: float, fetch_s: float) -> tuple[Step, Costs, Luggage]:
    """tanh takes a second, its backward two; a tensor travels in so many seconds."""
    step = chain(length)
    link = Link("host", "out", "in", TENSOR / send_s, TENSOR / fetch_s)
    costs = priced(step, {"tanh": 1.0, "tanh_backward": 2.0}, links=(link,))
    return step, costs, luggage_of(step, costs)


def test_a_chain_is_its_own_chain() -> None:
    step, _, luggage = tanh_chain(5, 1.0, 1.0)
    assert [item.storage for item in luggage.items] == tanh_storages(step)
    # x and w, then one result more with each tanh; the product goes when the first has read it.
    at_tanh = [need for need, op in zip(luggage.keep_bytes, step.ops, strict=True) if op.target == "aten.tanh.default"]
    assert at_tanh == [TENSOR * (2 + k) for k in (2, 2, 3, 4, 5)]
    abstract = luggage.chain([[item] for item in luggage.items], luggage.keep_peak_bytes)
    assert [stage.saved_bytes for stage in abstract.stages] == [TENSOR] * 5 + [0]
    # The result of each is last read by the next.
    assert [stage.forward_ps for stage in abstract.stages] == [2 * SECOND, SECOND, SECOND, SECOND, 0, 0]
    assert [stage.backward_ps for stage in abstract.stages] == [2 * SECOND] * 5 + [0]


@pytest.mark.parametrize("seed", range(8))
def test_the_chain_of_a_step_promises_no_more_than_the_step_keeps(seed: int) -> None:
    rng = random.Random(seed)
    _, _, luggage = tanh_chain(rng.randint(4, 10), rng.uniform(0.2, 4), rng.uniform(0.2, 4))
    num_compared = 0
    for _ in range(30):
        limit = rng.randint(luggage.floor_bytes(luggage.items), luggage.keep_peak_bytes)
        away = [index for index in range(len(luggage.items)) if rng.random() < 0.7]
        abstract = luggage.chain([[item] for item in luggage.items], limit)
        schedule = evaluate(abstract, away)
        if schedule is None:
            continue
        for early in (True, False):
            found = timetable(luggage, [luggage.items[index] for index in away], limit, early=early)
            assert found is not None and found.step_ps - luggage.work_ps <= schedule.idle_ps + 2 * len(away)
        bound_ps, relaxed = offload_bound_ps(luggage, limit), fluid(abstract)
        # What the chain takes to begin a stage later, the bound lets go earlier.
        assert bound_ps is not None and relaxed is not None and bound_ps <= relaxed.bound_ps <= schedule.idle_ps
        num_compared += 1
    assert num_compared >= 5


def test_the_bound_by_hand() -> None:
    """Six results of a tensor each beside x, w and the loss's side; a tensor takes 4 s out and 1 s back."""
    _, _, luggage = tanh_chain(6, 4.0, 1.0)
    assert luggage.work_ps == 18 * SECOND
    peak = luggage.keep_peak_bytes
    assert offload_bound_ps(luggage, peak) == 0
    # One tensor must leave. The first is written after 1 s, forward has 5 s more: there is time for it.
    assert offload_bound_ps(luggage, peak - TENSOR) == 0
    # Two: 8 s of sending from 1 s on end 3 s after forward's 6 s.
    assert offload_bound_ps(luggage, peak - 2 * TENSOR) == 3 * SECOND - len(luggage.items)
    assert offload_bound_ps(luggage, 3 * TENSOR) is None, "x, w and the two results of a tanh do not fit"


def test_groups_are_neighbours_of_about_the_same_bytes() -> None:
    step = planned_network("resnet50", batch=2, image=64)
    items = luggage_of(step, titan(step)).items
    for most in (1, 5, 40):
        groups = grouped(items, most)
        assert [item for group in groups for item in group] == list(items)
        assert len(groups) <= most + 1


# -- Budgets ----------------------------------------------------------------------------------------------------------


def budgets_of(judged: Judged) -> Iterator[int]:
    floor = judged.decided(OFFLOAD_GREEDY, 0).peak_bytes
    for k in range(NUM_BUDGETS):
        yield floor + (judged.keep.peak_bytes - floor) * k // (NUM_BUDGETS - 1)


def test_peaks_and_times_are_monotone_and_within_the_budget(judged: Judged) -> None:
    budgets = list(budgets_of(judged))
    for policy in OURS:
        found = [judged.decided(policy, budget) for budget in budgets]
        peaks, times = [plan.peak_bytes for plan in found], [plan.step_ps for plan in found]
        assert all(peak <= budget for peak, budget in zip(peaks, budgets, strict=True)), policy.name
        assert peaks == sorted(peaks), policy.name
        assert times == sorted(times, reverse=True), policy.name
        assert times[-1] == judged.keep.step_ps, policy.name


def test_no_plan_that_offloads_waits_less_than_the_bound(judged: Judged) -> None:
    plans = [judged.decided(policy, budget) for policy in OURS for budget in (*budgets_of(judged), None)]
    plans += [judged.decided(policy, None) for policy in (VDNN_ALL, VDNN_CONV, OVERLAP)]
    for plan in plans:
        bound_ps = offload_bound_ps(judged.luggage, plan.peak_bytes)
        assert bound_ps is not None and bound_ps <= judged.overhead_ps(plan)
    bounds = [offload_bound_ps(judged.luggage, budget) for budget in budgets_of(judged)]
    assert None not in bounds and bounds == sorted(bounds, reverse=True, key=lambda b: b or 0)


def test_the_program_is_as_good_as_the_greedy_and_that_as_vdnn(judged: Judged) -> None:
    vdnn = [judged.decided(policy, None) for policy in (VDNN_ALL, VDNN_CONV)]
    for budget in (*budgets_of(judged), *(plan.peak_bytes for plan in vdnn)):
        greedy, dp = judged.decided(OFFLOAD_GREEDY, budget), judged.decided(OFFLOAD_DP, budget)
        assert greedy.peak_bytes <= budget and dp.peak_bytes <= budget
        assert dp.step_ps <= greedy.step_ps
        assert all(greedy.step_ps <= plan.step_ps for plan in vdnn if plan.peak_bytes <= budget)


def test_the_program_is_close_to_the_bound(judged: Judged) -> None:
    """Nowhere over the middle of the way is more than a tenth of the step lost to what the bound leaves open."""
    for budget in list(budgets_of(judged))[NUM_BUDGETS // 4 :]:
        bound_ps = offload_bound_ps(judged.luggage, budget)
        assert bound_ps is not None
        assert judged.overhead_ps(judged.decided(OFFLOAD_DP, budget)) - bound_ps < 0.1 * judged.keep.step_ps


def test_without_a_budget_nothing_waits(judged: Judged) -> None:
    for policy in OURS:
        free = judged.decided(policy, None)
        assert free.stall_ps == 0 and free.step_ps == judged.keep.step_ps
        assert free.peak_bytes < judged.keep.peak_bytes
        below = judged.decided(policy, free.peak_bytes - 1)
        assert below.stall_ps > 0 or below.peak_bytes > free.peak_bytes - 1


@pytest.mark.parametrize("policy", OURS, ids=lambda policy: policy.name)
def test_a_budget_below_the_floor_names_the_floor_and_its_op(policy: Policy) -> None:
    step = planned_network("resnet18", batch=16, image=64)
    costs = titan(step)
    with pytest.raises(DoesNotFit, match=r"policy 'offload-.*' needs .* bytes.*at aten\..*Give a budget of") as caught:
        runnable_plan(step, costs, policy=policy.name, budget=Budget(share=0.01))
    floor = plan_step(step, costs, policy=policy.name, budget=Budget(share=0.01)).peak_bytes
    assert f"Give a budget of at least {with_headroom(floor):,} bytes" in str(caught.value)
    assert runnable_plan(step, costs, policy=policy.name, budget=Budget(with_headroom(floor))).fits
    assert plan_step(step, costs, policy=policy.name, budget=Budget(floor)).fits
    assert not plan_step(step, costs, policy=policy.name, budget=Budget(floor - 1)).fits


@pytest.mark.parametrize("policy", OURS, ids=lambda policy: policy.name)
def test_plans_are_checked_and_say_when_each_storage_travels(policy: Policy) -> None:
    step = planned_network("resnet18", batch=16, image=64)
    planned = plan_step(step, titan(step), policy=policy.name, budget=Budget(share=0.6), optimizer="sgd")
    assert planned.fits and planned.plan is not None and planned.plan.decisions
    for decision in planned.plan.decisions.values():
        assert isinstance(decision, Offload) and decision.tier == "host" and isinstance(decision.when, Moments)
    sent = [i.storage for i in planned.program.instructions if isinstance(i, SendStart)]
    fetched = [i.storage for i in planned.program.instructions if isinstance(i, FetchStart)]
    assert sorted(sent) == sorted(fetched) == sorted(planned.plan.decisions)


@pytest.mark.parametrize("policy", OURS, ids=lambda policy: policy.name)
def test_the_tier_is_the_host_or_whatever_there_is(policy: Policy) -> None:
    step = planned_network("resnet18", batch=16, image=64)
    costs = titan(step)
    disk = replace(costs.links["host"], tier="disk")
    planned = plan_step(step, replace(costs, links={"disk": disk}), policy=policy.name, budget=Budget(share=0.6))
    assert planned.fits and planned.plan is not None
    assert {d.tier for d in planned.plan.decisions.values() if isinstance(d, Offload)} == {"disk"}
    with pytest.raises(MemfitError, match="'titan-x' has no tier"):
        plan_step(step, replace(costs, links={}), policy=policy.name)


def test_a_step_that_saves_nothing_is_kept() -> None:
    step = chain(0)
    link = Link("host", "out", "in", 1e9, 1e9)
    costs = priced(step, {}, links=(link,))
    for policy in OURS:
        assert policy.decide is not None
        decided = policy.decide(step, costs, 10)
        assert isinstance(decided, Decided) and decided.decisions == {}


@pytest.mark.parametrize("policy", OURS, ids=lambda policy: policy.name)
def test_without_a_budget_the_device_is_the_limit(policy: Policy) -> None:
    """The smallest plan that never waits is too large for this card, and one that waits a little fits."""
    step = planned_network("resnet50", batch=360)
    costs = roofline(step, device("titan-x"), workspace="none")
    found = plan_step(step, costs, policy=policy.name)
    assert found.fits and 0 < found.overhead < 0.2
    assert "no plan that only offloads waits less than" in found.note


def test_work_on_a_deep_network_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    num_made = 0

    def counting(*args: Any, **options: Any) -> Timetable | None:
        nonlocal num_made
        num_made += 1
        return timetable(*args, **options)

    monkeypatch.setattr("memfit.plan.offloading.step_pool.timetable", counting)
    step = planned_network("resnet152", batch=16)
    found = plan_step(step, titan(step), policy="offload-dp", budget=Budget(share=0.3))
    assert found.fits and found.overhead < 0.1
    # Each timetable walks over all ops. Improving may walk over 1.5 million, two seconds; prefixes are as many again.
    assert 0 < num_made * len(step.ops) < 3_000_000


# -- Training ---------------------------------------------------------------------------------------------------------


def swift(step: Step, **_: Any) -> Costs:
    """Paper prices, and a link that has time even for the tensors of narrow networks."""
    return replace(titan(step), links={"host": Link("host", "out", "in", 1e12, 1e12)})


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TIERS, "host", NullTier())
    monkeypatch.setattr("memfit.run.fitted.measure", swift)


def thin_vgg(name: str, *, batch: int) -> tuple[nn.Module, Any]:
    """A VGG of few channels that returns its loss, and its inputs; the first layers are the thinnest of all."""
    sizes: dict[str, Any] = {"image": 32, "num_classes": None}
    model = seeded(lambda: zoo.build(name, device="cpu", widths=(2, 8, 32, 64, 64), hidden=16))
    targets = zoo.targets(name, batch=batch, seed=1, **sizes)
    return WithLoss(model, lambda output, _: zoo.loss(name)(output, *targets)), lambda n: zoo.inputs(
        name, batch=n, seed=int(torch.randint(0, 1000, ())), **sizes
    )


@pytest.mark.parametrize("policy", OURS, ids=lambda policy: policy.name)
def test_tensors_go_to_this_machines_disk_and_back(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    def prices(step: Step, **_: Any) -> Costs:
        return replace(titan(step), links={"disk": Link("disk", "disk", "disk", 1e12, 1e12)})

    monkeypatch.setattr("memfit.run.fitted.measure", prices)
    ledger = assert_plan_is_followed(*thin_vgg("vgg16", batch=64), policy.name, batch=64, steps=2)
    sends = [i for i in ledger.program.instructions if isinstance(i, SendStart)]
    assert sends and all(send.tier == "disk" for send in sends)


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("policy", OURS, ids=lambda policy: policy.name)
@pytest.mark.parametrize("name", ["vgg16", "vgg19", "googlenet", "resnet50", "densenet121", "unet", "gpt2"])
def test_two_steps_match_eager_and_hold_what_the_plan_says(name: str, policy: Policy) -> None:
    # The peak of a small VGG is in its first layers or where its first gradient is made: nothing else is there to send.
    model, inputs, batch = (*with_loss(name), ALL[name][1]) if "vgg" not in name else (*thin_vgg(name, batch=64), 64)
    ledger = assert_plan_is_followed(model, inputs, policy.name, batch=batch, steps=2)
    assert any(isinstance(i, SendStart) for i in ledger.program.instructions), "nothing was sent"


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("policy", OURS, ids=lambda policy: policy.name)
def test_training_in_a_budget_over_a_slow_link_matches(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(step: Step, **_: Any) -> Costs:
        return replace(titan(step), links={"host": Link("host", "out", "in", 1e7, 1e7)})

    monkeypatch.setattr("memfit.run.fitted.measure", slow)
    model, inputs, loss = small("resnet50")
    fitted = assert_same_as_eager(
        model, inputs, batch=2, other_batch=None, steps=2, loss=loss, policy=policy.name, budget="50%"
    )
    planned = fitted.memfit.planned
    assert planned.fits and planned.simulated.stall_ps > 0


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("policy", OURS, ids=lambda policy: policy.name)
@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # shrinking takes minutes; the failing program prints as it is
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
@given(lines=st.lists(a_line(), min_size=4, max_size=16), returned=st.lists(st.integers(0, 30), max_size=2))
def test_random_programs_train_as_planned(policy: Policy, lines: list[Line], returned: list[int]) -> None:
    model = seeded(lambda: WithLoss(RandomProgram(lines, returned), weighted_sum))
    assert_plan_is_followed(model, lambda n: (torch.randn(n, 6),), policy.name, batch=4, steps=2)
