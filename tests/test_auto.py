"""auto: never worse than any other way, as good as brute force where that can be had, and it says how good it is."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
from every_plan import LAYERS, LINKS, NAMES, drawn_codes, drawn_costs, drawn_step
from hypothesis import HealthCheck, Phase, assume, example, given, settings
from hypothesis import strategies as st
from planning import TENSOR, chain, planned_network, priced, tanh_storages

from memfit.capture.rewrites.proof import AssumedProofs
from memfit.capture.rewrites.tight import tighten
from memfit.capture.step import Step
from memfit.cost.costs import Costs, Link
from memfit.cost.devices import device
from memfit.cost.roofline import roofline
from memfit.cost.signature import signature
from memfit.errors import DoesNotFit
from memfit.plan import budget as budget_file
from memfit.plan import keep_timeline as keep_timeline_file
from memfit.plan.auto.board import Allowance, Board
from memfit.plan.auto.coded import CodedStep
from memfit.plan.auto.planner import Mix, MixPlanner
from memfit.plan.auto.search import Effort
from memfit.plan.auto.sites import (
    Site,
    first_ways_of,
    sites_made_often,
    sites_of,
    sites_out_of_turn,
    way_sites_of,
)
from memfit.plan.budget import Budget
from memfit.plan.decisions import Encode, EncodeThenOffload, Keep, Offload, Recompute
from memfit.plan.evaluate import Rank
from memfit.plan.planner import Planned, plan_step, whole_certificate
from memfit.plan.policies import auto
from memfit.plan.policies.gist import lossless_codes
from memfit.plan.policies.registry import RUNNABLE, policy_named
from memfit.plan.simulate import simulate

FEW = Effort(num_evaluations=6_000, cap_s=600)
OTHERS = [name for name in RUNNABLE if name != "auto" and not policy_named(name).is_lossy]
NETWORKS = {"vgg11_bn": 64, "resnet18": 64, "unet": 2, "googlenet": 32}
"""With batches at which activations matter: nothing of that size is made."""


def network(name: str) -> Step:
    return planned_network(name, batch=NETWORKS.get(name, 4))


@pytest.fixture(autouse=True)
def few_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "EFFORT", FEW)
    auto._last.clear()


def on(step: Step, name: str = "titan-x") -> Costs:
    """A device without launch times, which would be all that small networks take."""
    return roofline(step, replace(device(name), launch_s=0.0), workspace="fastest")


def planned(step: Step, costs: Costs, budget: str | int, policy: str = "auto") -> Planned:
    return plan_step(step, costs, policy=policy, budget=Budget.parse(budget))


def best_mix(mix: MixPlanner, budget_bytes: int, effort: Effort) -> Mix:
    return mix.kept(budget_bytes) or mix.finish(mix.begin(budget_bytes, effort))


# --- as good as brute force ------------------------------------------------------------------------------------------


@settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(LAYERS, st.sampled_from(sorted(LINKS)), st.booleans(), st.integers(0, 10_000))
@example(  # codes of storages that nothing is decided about
    [("softmax", 1, 2), ("softmax", 1, 2), ("tanh", 1, 2), ("dropout", 1, 0), ("softmax", 1, 0)],
    "both, compute slows",
    True,
    215,
)
@example(  # a slower way than would fit
    [("relu pool", 0, 2), ("norm relu_", 0, 2), ("norm relu_", 0, 2), ("relu pool", 1, 2)],
    "both, compute slows",
    True,
    182,
)
def test_it_is_as_good_as_all_plans_of_its_moves(
    layers: list[tuple[str, int, int]], links: str, with_ways: bool, seed: int
) -> None:
    rng = random.Random(seed)
    step = drawn_step(layers)
    costs = drawn_costs(step, LINKS[links], rng, with_ways=with_ways)
    codes = drawn_codes(step, rng, rng.choice([0, 2]))
    mix = MixPlanner(step, costs, codes)
    # At most nine storages are decided about, and at most so many plans that brute force is done in a second.
    sites = sorted(mix.sites, key=lambda site: -site.num_bytes)[:9]
    while len(list(itertools.islice(itertools.product(*(site.moves for site in sites)), 4_001))) > 4_000:
        sites.pop()
    mix.__dict__["sites"] = tuple(sorted(sites, key=lambda site: (site.maker, site.storage)))
    budget = int(mix.keep.peak_bytes * rng.uniform(0.5, 1.0))

    every = [*mix.sites, *(way_sites_of(mix.coded, budget) if mix.plain.tiers else ())]
    assume(math.prod(len(site.moves) for site in every) <= 50_000)
    board = Board(mix.coded, every, budget, Allowance(10**6))
    best = None
    for moves in itertools.product(*(range(len(site.moves)) for site in every)):
        board.put_all(moves)
        score = board.score()
        best = score if best is None or score < best else best
    assert best is not None

    found = best_mix(mix, budget, Effort(num_evaluations=20_000, cap_s=600)).plan
    if mix.keep.peak_bytes <= budget:
        assert found.found_by == "keep"
    elif best[0] == 0:
        assert found.peak_bytes <= budget
        # Single policies may know better, as they choose when things travel. With codes, the order in which things
        # leave at one op may differ from that on the board.
        assert found.step_ps <= best[1]
        if found.found_by == "auto" and not codes:
            assert found.step_ps == best[1]


def without_other_policies(mix: MixPlanner) -> MixPlanner:
    """Rotor's plans make storages again more than once too: here it is the search that is to find them."""
    mix.__dict__["_singles"] = SimpleNamespace(plans=lambda budget_bytes, known_ps: iter(()))
    return mix


def ranks(mix: MixPlanner, sites: Sequence[Site], budget_bytes: int) -> Iterator[Rank]:
    """What all plans of these moves come to."""
    board = Board(mix.coded, sites, budget_bytes, Allowance(10**6))
    for moves in itertools.product(*(range(len(site.moves)) for site in sites)):
        board.put_all(moves)
        yield board.score()


@pytest.mark.parametrize(("length", "num_tensors", "num_once"), [(8, 6, 7), (12, 7, 8), (12, 6, 8)])
def test_what_fits_no_other_way_is_made_again_more_than_once(length: int, num_tensors: int, num_once: int) -> None:
    step, costs = chain_of_seconds(length, link=False)
    mix = without_other_policies(MixPlanner(step, costs, {}))
    rest = mix.keep.peak_bytes % TENSOR
    budget = num_tensors * TENSOR + rest
    once = best_mix(mix, budget, FEW)
    assert once.plan.peak_bytes > budget and once.bound.over_ps is not None
    assert best_mix(mix, num_once * TENSOR + rest, FEW).plan.peak_bytes > budget
    often = mix.insist(once, FEW)
    assert often.plan.peak_bytes <= budget
    assert any(isinstance(d, Recompute) and d.held_from for d in often.plan.decisions.values())
    assert often.num_evaluations > once.num_evaluations
    assert often.plan.step_ps >= often.bound.keep_ps + (often.bound.over_ps or 0)


@settings(
    max_examples=6, deadline=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(LAYERS, st.sampled_from(sorted(LINKS)), st.integers(0, 10_000))
def test_made_again_more_than_once_it_is_as_good_as_all_such_plans(
    layers: list[tuple[str, int, int]], links: str, seed: int
) -> None:
    rng = random.Random(seed)
    step = drawn_step(layers)
    mix = without_other_policies(MixPlanner(step, drawn_costs(step, LINKS[links], rng, with_ways=False), {}))
    sites = sorted(mix.sites, key=lambda site: -site.num_bytes)
    while math.prod(len(site.moves) for site in sites_made_often(mix.coded, sites)) > 3_000:
        sites.pop()
    mix.__dict__["sites"] = tuple(sorted(sites, key=lambda site: (site.maker, site.storage)))
    often = sites_made_often(mix.coded, mix.sites)
    once_bytes, often_bytes = (1 + min(rank[0] for rank in ranks(mix, each, 1)) for each in (mix.sites, often))
    assume(often_bytes < once_bytes)
    budget = rng.randint(often_bytes, once_bytes - 1)
    fewest, fastest_ps = min(ranks(mix, often, budget))
    assume(fewest == 0)
    found = mix.insist(best_mix(mix, budget, FEW), Effort(num_evaluations=20_000, cap_s=600)).plan
    assert found.peak_bytes <= budget and found.step_ps == fastest_ps


def few_sites_out_of_turn(step: Step, costs: Costs) -> MixPlanner:
    """One that decides about so few storages that all plans of them can be tried, fetches out of turn included."""
    mix = without_other_policies(MixPlanner(step, costs, {}))
    sites = sorted(mix.sites, key=lambda site: -site.num_bytes)
    while math.prod(len(site.moves) for site in sites_out_of_turn(mix.coded, sites)) > 3_000:
        sites.pop()
    mix.__dict__["sites"] = tuple(sorted(sites, key=lambda site: (site.maker, site.storage)))
    return mix


@settings(
    max_examples=6, deadline=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(LAYERS, st.sampled_from(["host", "both, compute slows"]), st.integers(0, 10_000))
def test_fetched_out_of_turn_it_is_as_good_as_all_such_plans(
    layers: list[tuple[str, int, int]], links: str, seed: int
) -> None:
    rng = random.Random(seed)
    step = drawn_step(layers)
    mix = few_sites_out_of_turn(step, drawn_costs(step, LINKS[links], rng, with_ways=False))
    budget = int(mix.keep.peak_bytes * rng.uniform(0.5, 1.0))
    in_turn = best_mix(mix, budget, FEW)
    fewest, fastest_ps = min(ranks(mix, sites_out_of_turn(mix.coded, mix.sites), budget))
    assume(in_turn.plan.peak_bytes <= budget < mix.keep.peak_bytes)
    found = mix.reordered(in_turn, Effort(num_evaluations=20_000, cap_s=600))
    gap_ps = in_turn.plan.step_ps - in_turn.bound.keep_ps - (in_turn.bound.over_ps or 0)
    if gap_ps <= 0.005 * in_turn.bound.keep_ps:
        assert found is in_turn, "it cannot be much better"
    else:
        assert fewest == 0 and found.plan.peak_bytes <= budget and found.plan.step_ps == fastest_ps


def test_fetched_out_of_turn_it_can_be_faster() -> None:
    """A case that was found by drawing many: it is faster than all plans that fetch in turn."""
    rng = random.Random(157)
    step = drawn_step([(rng.choice(NAMES), rng.randrange(3), rng.randrange(3)) for _ in range(rng.randint(4, 6))])
    mix = few_sites_out_of_turn(step, drawn_costs(step, LINKS["host"], rng, with_ways=False))
    budget = int(mix.keep.peak_bytes * rng.uniform(0.5, 1.0))
    in_turn = best_mix(mix, budget, FEW)
    assert in_turn.plan.step_ps == min(ranks(mix, mix.sites, budget))[1]
    found = mix.reordered(in_turn, FEW)
    assert found.plan.peak_bytes <= budget and found.plan.step_ps < 0.97 * in_turn.plan.step_ps
    assert any(isinstance(decision, Offload) and decision.back_by for decision in found.plan.decisions.values())
    assert found.num_evaluations > in_turn.num_evaluations
    assert found.plan.step_ps >= found.bound.keep_ps + (found.bound.over_ps or 0)


# --- switching codes -------------------------------------------------------------------------------------------------


def with_workspaces(step: Step, costs: Costs) -> Costs:
    """The same with workspaces of the ops that would work on a code as it is."""
    prices = dict(costs.by_signature)
    for op in step.ops:
        if op.target.startswith(("aten.threshold_backward", "aten.max_pool2d_with_indices_backward")):
            prices[signature(step, op)] = replace(prices[signature(step, op)], workspace_bytes=max(step.storage_bytes))
    return replace(costs, by_signature=prices)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_code_that_is_switched_on_is_as_if_it_were_written_in(name: str) -> None:
    step = network(name)
    costs = with_workspaces(step, on(step, "v100-16gb"))
    mix = MixPlanner(step, costs, lossless_codes(step, costs))
    sites = (*mix.sites, *way_sites_of(mix.coded, budget_bytes=1))
    assert len(sites) > len(mix.sites), "nothing here can be computed in several ways"
    board = Board(mix.coded, sites, int(0.6 * mix.keep.peak_bytes), Allowance(10**6))
    rng = random.Random(0)
    coded = [index for index, site in enumerate(mix.sites) if site.storage in mix.codes]
    assert coded, "nothing here can be encoded"
    for _ in range(8):
        for index in rng.sample(range(len(sites)), len(sites) // 3):
            board.put(index, rng.randrange(len(sites[index].moves)))
        outcome = board.outcome()
        found = mix._judged(board.decisions, first_ways_of(sites, board.moves), board.budget_bytes)
        assert (outcome.step_ps, outcome.peak_bytes) == (found.step_ps, found.peak_bytes)


def test_codes_that_are_off_leave_the_step_as_it_was() -> None:
    step = network("vgg11_bn")
    costs = on(step)
    coded = CodedStep.of(step, costs, lossless_codes(step, costs))
    board = Board(coded, sites_of(coded), 1 << 60, Allowance(10))
    plain = Board(CodedStep.of(step, costs, {}), (), 1 << 60, Allowance(10))
    assert board.outcome() == plain.outcome()


@pytest.mark.slow
def test_a_slower_way_is_taken_where_it_leaves_room_for_a_transfer() -> None:
    """With what is decided there is room for the fastest way of each op, but then a fetch begins too late."""
    step = tighten(planned_network("vgg13_bn", batch=64), proofs=AssumedProofs())
    costs = on(step, "rtx-4090")
    found = planned(step, costs, "40%")
    assert found.plan is not None and found.fits and found.budget_bytes is not None
    mix = MixPlanner(step, costs, lossless_codes(step, costs))
    hasty = mix._judged(found.plan.decisions, {}, found.budget_bytes)
    assert hasty.peak_bytes <= found.budget_bytes
    assert hasty.step_ps > found.simulated.step_ps


def test_without_a_compiler_it_plans_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.plan.evaluate.native_library", lambda: None)
    monkeypatch.setattr(auto, "EFFORT", Effort(num_evaluations=60, cap_s=600))
    step = network("vgg11_bn")
    found = planned(step, on(step), "85%")
    assert found.fits and found.overhead >= (found.lower_bound_overhead or 0) - 1e-12


# --- beside other policies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "target", "budgets"),
    [
        ("vgg11_bn", "titan-x", ("60%", "80%")),
        pytest.param("resnet18", "v100-16gb", ("52%", "70%"), marks=pytest.mark.slow),
        pytest.param("unet", "rtx-4090", ("50%",), marks=pytest.mark.slow),
        pytest.param("resnet50", "titan-x", ("25%", "40%", "60%", "80%"), marks=pytest.mark.slow),
        pytest.param("gpt2", "v100-16gb", ("25%", "40%", "60%", "80%"), marks=pytest.mark.slow),
        pytest.param("googlenet", "rtx-4090", ("25%", "40%", "60%", "80%"), marks=pytest.mark.slow),
    ],
)
def test_it_is_never_worse_than_any_policy_and_never_below_the_bound(
    name: str, target: str, budgets: tuple[str, ...]
) -> None:
    step = network(name)
    costs = on(step, target)
    overheads = []
    for budget in budgets:
        mine = planned(step, costs, budget)
        for policy in OTHERS:
            theirs = planned(step, costs, budget, policy)
            if theirs.fits:
                assert mine.fits, f"{policy} fits {budget}"
                assert mine.step_s <= theirs.step_s, f"{policy} at {budget}"
        if mine.fits:
            assert mine.lower_bound_overhead is not None
            assert mine.lower_bound_overhead <= mine.overhead + 1e-12
            overheads.append(mine.overhead)
        elif mine.lower_bound_overhead is None:
            assert mine.certificate
    assert overheads == sorted(overheads, reverse=True), "a larger budget must not cost more"
    assert overheads, "no budget was large enough"


def test_all_techniques_are_mixed() -> None:
    step = network("resnet18")
    found = planned(step, on(step, "v100-16gb"), "52%")
    assert found.fits and found.plan is not None
    kinds = {type(decision) for decision in found.plan.decisions.values()}
    assert {Offload, Recompute} <= kinds and kinds & {Encode, EncodeThenOffload}


def test_the_same_plan_comes_of_the_same_evaluations() -> None:
    step = network("resnet18")
    plans = []
    for _ in range(2):
        auto._last.clear()
        plans.append(planned(step, on(step), "55%").plan)
    assert plans[0] is not None and plans[1] is not None
    assert plans[0].to_json() == plans[1].to_json()


def test_smaller_budgets_help_larger_ones() -> None:
    step = network("resnet18")
    costs = on(step)
    small = planned(step, costs, "55%")
    auto.EFFORT = Effort(num_evaluations=1, cap_s=600)
    assert planned(step, costs, "60%").step_s <= small.step_s


# --- what it says ----------------------------------------------------------------------------------------------------


def chain_of_seconds(length: int, link: bool = True) -> tuple[Step, Costs]:
    step = chain(length)
    way = Link("host", "out", "back", TENSOR, TENSOR)  # a second for each tensor
    return step, priced(step, {"tanh": 1.0, "tanh_backward": 1.0}, links=(way,) if link else ())


def test_where_everything_fits_nothing_is_done() -> None:
    step, costs = chain_of_seconds(6)
    found = planned(step, costs, "100%")
    assert found.plan is not None and found.plan.decisions == {} and found.overhead == 0
    assert found.note == "everything fits: nothing is done"
    assert found.lower_bound_overhead == 0


def test_where_everything_fits_and_a_plan_of_a_smaller_budget_is_faster_that_is_taken() -> None:
    """Codes can make a step shorter than keeping everything: overhead must not rise with the budget."""
    step, costs = chain_of_seconds(6)
    forms = auto._forms(step, costs)
    keep = forms.plain.keep
    faster = replace(keep, found_by="gist-lossless", peak_bytes=keep.peak_bytes // 2, step_ps=keep.step_ps - 1)
    forms.plain.judged.add(faster)
    mix, form = forms.plan(keep.peak_bytes, FEW)
    assert mix.plan is faster and form is step
    decided = auto.decide(step, costs, keep.peak_bytes)
    assert decided.note == "everything fits; the plan of a smaller budget takes less time than keeping it"
    other, costs_of_other = chain_of_seconds(6)
    assert auto.decide(other, costs_of_other, keep.peak_bytes).note == "everything fits: nothing is done"


def test_a_chain_that_is_nearly_free_to_send_away_is_sent() -> None:
    step, costs = chain_of_seconds(8)
    found = planned(step, costs, "60%")
    assert found.plan is not None
    sent = [s for s in tanh_storages(step) if isinstance(found.plan.decisions.get(s), Offload)]
    assert found.fits and sent and found.overhead == pytest.approx(found.lower_bound_overhead or 0, abs=0.07)


def test_without_a_link_it_recomputes() -> None:
    step, costs = chain_of_seconds(8, link=False)
    found = planned(step, costs, "60%")
    assert found.plan is not None and found.fits
    kinds = {type(decision) for decision in found.plan.decisions.values()}
    assert Recompute in kinds and kinds <= {Recompute, Keep}


def test_a_budget_that_nothing_fits_is_refused_with_a_proof() -> None:
    step, costs = chain_of_seconds(4)
    found = planned(step, costs, 3 * TENSOR)
    assert not found.fits
    with pytest.raises(DoesNotFit) as refusal:
        found.require_fit()
    said = str(refusal.value)
    assert "No plan fits: while aten." in said and "every plan has at least" in said
    assert f"Give a budget of at least {found.peak_bytes:,} bytes" in said
    assert planned(step, costs, found.peak_bytes).fits, "the smallest budget that it names must do"


def test_the_proof_says_what_there_must_be_room_for_beside_any_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    step, costs = chain_of_seconds(4)
    budget = Budget.parse(3 * TENSOR)
    alone = plan_step(step, costs, policy="auto", budget=budget).certificate
    assert alone.endswith(" bytes") and "beside" not in alone
    monkeypatch.setattr(budget_file, "_LEAST_WITH_HEADROOM", 0)
    monkeypatch.setattr(budget_file, "_HEADROOM_BYTES", 1000)
    set_aside_bytes = 1000 + 3 * TENSOR // 200
    found = plan_step(step, costs, policy="auto", budget=budget, headroom=True).certificate
    assert found == f"{alone}, beside {set_aside_bytes:,} bytes set aside for what a process holds besides tensors"
    assert whole_certificate("all", state_bytes=5_000, headroom_bytes=9) == (
        "all, beside 5,000 bytes of the optimizer's state and 9 bytes set aside"
        " for what a process holds besides tensors"
    )
    assert whole_certificate("", state_bytes=5_000) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target", "budget", "most"),
    [("vgg16", "rtx-4090", "60%", 0.0002), ("nin", "rtx-4090", "60%", 0.015), ("vgg16_bn", "rtx-4090", "40%", 0.03)],
)
def test_where_tensors_are_few_and_huge_the_bound_is_near_too(
    name: str, target: str, budget: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "EFFORT", Effort())
    step = planned_network(name, batch=64)
    tight = tighten(step, proofs=AssumedProofs())
    found = planned(step, roofline(step, device(target), also=[tight]), budget)
    assert found.fits and found.lower_bound_overhead is not None
    assert -1e-9 <= found.overhead - found.lower_bound_overhead <= most


def test_it_tells_how_it_goes() -> None:
    step = network("resnet18")
    told: list[str] = []
    plan_step(step, on(step), policy="auto", budget=Budget.parse("60%"), progress=told.append)
    assert any(text.startswith("first plan by ") and text.endswith(" evaluations") for text in told)
    assert "how good a plan can be" in told


def test_the_keep_plan_is_simulated_once_for_planner_and_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    step = network("resnet18")
    costs = on(step)
    calls = []
    monkeypatch.setattr(keep_timeline_file, "simulate", lambda *args: calls.append(1) or simulate(*args))
    found = planned(step, costs, "60%")
    assert len(calls) == 1 and found.keep is keep_timeline_file.keep_timeline(step, costs)
    assert keep_timeline_file.keep_timeline(step, replace(costs)) is not found.keep
    assert len(calls) == 2
