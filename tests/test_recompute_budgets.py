"""Policies that recompute, on paper: what they need and take at published sizes, and how that follows the budget."""

from __future__ import annotations

import pytest
from planning import planned_network
from test_recompute import titan

from memfit import zoo
from memfit.capture.step import Step
from memfit.cost.costs import Costs
from memfit.cost.devices import device
from memfit.cost.roofline import roofline
from memfit.errors import DoesNotFit
from memfit.plan.budget import Budget, with_headroom
from memfit.plan.check import check
from memfit.plan.checkpointing.pool import Entry, Pool
from memfit.plan.checkpointing.storage_graph import StorageGraph
from memfit.plan.decisions import Keep
from memfit.plan.planner import plan_step, runnable_plan
from memfit.plan.policies.registry import policy_named

BUDGETED = ("sqrt", "checkpoint-search-peak", "rotor")
NUM_BUDGETS = 20
# Capturing and planning take 5 to 15 s each; vgg116, densenet121 and resnet152 are the same graphs, less or more deep.
SLOW = (
    *("vgg216", "vgg316", "vgg416", "densenet121", "densenet161", "densenet169", "densenet201"),
    *("resnet101", "resnet152", "inception_v3"),
)


class Published:
    """A network at its published size with the prices of one device, and what plans of it need and take."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.step: Step = planned_network(name, batch=zoo.spec(name).batch)
        self.costs: Costs = roofline(self.step, device("rtx-2080ti"), workspace="none")
        self._judge = Pool.of(self.step, self.costs)
        self._judged: dict[int, Entry] = {}
        self.keep = self._judge.add({})

    def decided(self, policy: str, budget_bytes: int | None) -> Entry:
        """The plan that the policy takes, judged anew."""
        decide = policy_named(policy).decide
        assert decide is not None
        decisions = decide(self.step, self.costs, budget_bytes)
        # Policies hand out the very mapping they remember, so that each plan is judged once.
        if id(decisions) not in self._judged:
            self._judged[id(decisions)] = self._judge.add(decisions)
        return self._judged[id(decisions)]


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in zoo.names()],
)
def published(request: pytest.FixtureRequest) -> Published:
    return Published(request.param)


def test_peak_and_time_are_monotone_over_the_whole_zoo(published: Published) -> None:
    keep = published.keep
    for policy in BUDGETED:
        floor = published.decided(policy, 0).peak_bytes
        assert floor <= keep.peak_bytes, policy
        span = keep.peak_bytes - floor
        budgets = [floor + span * k // (NUM_BUDGETS - 1) for k in range(NUM_BUDGETS)]
        found = [published.decided(policy, budget) for budget in budgets]
        peaks, times = [plan.peak_bytes for plan in found], [plan.step_ps for plan in found]
        assert all(peak <= budget for peak, budget in zip(peaks, budgets, strict=True)), policy
        assert peaks == sorted(peaks), policy
        assert times == sorted(times, reverse=True), policy
        assert times[-1] == keep.step_ps, f"{policy}: a budget for everything still recomputes"
        # A quarter of the way up, a plan of any worth costs less than running the whole forward half again.
        assert published.decided(policy, floor + span // 4).step_ps < 1.4 * keep.step_ps, policy


def test_the_true_peak_takes_less_than_one_forward_pass_over_the_whole_zoo(published: Published) -> None:
    ours, papers = published.decided("checkpoint-search-peak", None), published.decided("checkpoint-search", None)
    assert published.keep.step_ps <= ours.step_ps <= papers.step_ps
    assert ours.step_ps < 1.33 * published.keep.step_ps
    assert ours.peak_bytes <= min(published.keep.peak_bytes, papers.peak_bytes)
    if published.name in ("resnet50", "resnet152", "densenet121"):
        assert ours.peak_bytes < papers.peak_bytes < published.keep.peak_bytes


@pytest.mark.parametrize("policy", BUDGETED)
@pytest.mark.parametrize("name", ["vgg11", "resnet18", "googlenet", "unet", "gpt2"])
def test_checked_programs_are_monotone_in_the_budget(name: str, policy: str) -> None:
    step = planned_network(name, batch=2, image=64 if name != "gpt2" else 32)
    costs = titan(step)
    peaks, times = [], []
    for percent in range(10, 101, 15):
        found = plan_step(step, costs, policy=policy, budget=Budget(share=percent / 100))
        assert found.plan is not None
        check(found.plan.program)
        peaks.append(found.peak_bytes)
        if found.fits:
            times.append(found.step_s)
    assert peaks == sorted(peaks)
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("policy", BUDGETED)
def test_a_budget_below_the_floor_names_the_floor_and_its_op(policy: str) -> None:
    step = planned_network("resnet18", batch=2, image=64)
    costs = titan(step)
    with pytest.raises(DoesNotFit, match=r"policy '.*' needs .* bytes.*at aten\..*Give a budget of at least") as caught:
        runnable_plan(step, costs, policy=policy, budget=Budget(share=0.01))
    floor = plan_step(step, costs, policy=policy, budget=Budget(share=0.01)).peak_bytes
    assert f"Give a budget of at least {with_headroom(floor):,} bytes" in str(caught.value)
    assert runnable_plan(step, costs, policy=policy, budget=Budget(with_headroom(floor))).fits
    assert plan_step(step, costs, policy=policy, budget=Budget(floor)).fits
    assert not plan_step(step, costs, policy=policy, budget=Budget(floor - 1)).fits


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        pytest.param("darts", "50%", marks=pytest.mark.slow),
        pytest.param("densenet121", "30%", marks=pytest.mark.slow),
        ("vit_b16", "40%"),
    ],
)
def test_graphs_that_few_vertices_split_are_cut_at_sets_of_them(name: str, budget: str) -> None:
    step = planned_network(name, batch=zoo.spec(name).batch)
    costs = titan(step)
    for policy in ("sqrt", "rotor"):
        found = plan_step(step, costs, policy=policy, budget=Budget.parse(budget))
        assert found.fits and found.overhead < 0.33, policy


@pytest.mark.parametrize(
    "name",
    ["resnet18", *(pytest.param(name, marks=pytest.mark.slow) for name in ("darts", "densenet121")), "unet", "gpt2"],
)
def test_everything_after_a_boundary_is_made_from_it_alone(name: str) -> None:
    graph = StorageGraph.of(planned_network(name, batch=2, image=32))
    assert graph.boundaries and list(graph.boundaries) == sorted(graph.boundaries)
    for last, boundary in graph.boundaries.items():
        crossing = {u for u, v in graph.edges if 0 < u <= last < v < graph.target}
        assert set(boundary) == crossing and last in boundary
    # Cutting pays: between two neighbours lies more than either weighs, but for vertices that split the graph alone.
    sets = [v for v, boundary in graph.boundaries.items() if len(boundary) > 1]
    assert bool(sets) == (name in ("darts", "densenet121", "unet"))
    for last in sets:
        before = max((v for v in graph.boundaries if v < last), default=0)
        between = sum(map(graph.num_bytes, range(before + 1, last + 1)))
        assert between > sum(map(graph.num_bytes, graph.boundaries[last]))


def test_what_follows_the_last_checkpoint_is_kept_as_backward_needs_it_at_once() -> None:
    graph = StorageGraph.of(planned_network("resnet18", batch=2, image=64))
    cut = graph.splittable[len(graph.splittable) // 2]
    plain, lazy = graph.decisions(frozenset({cut})), graph.decisions_but_the_last(frozenset({cut}))
    end = graph.reruns.writers[graph.storages[cut - 1]][-1]
    changed = {storage for storage in plain if plain[storage] != lazy[storage]}
    assert changed and all(lazy[s] == Keep() and graph.reruns.writers[s][0] > end for s in changed)
    step, size = graph.step, graph.step.storage_bytes
    left = [s for s, d in lazy.items() if d != Keep() and graph.reruns.writers[s][0] > end]
    assert all(step.storage[s].first_backward is None for s in left)
    # Small storages are kept whatever is decided; together they are small too.
    kept = [s for s, decision in plain.items() if decision == Keep() and s != graph.storages[cut - 1]]
    assert sum(size[s] for s in kept) * 50 < sum(size[s] for s in graph.reruns.owned)
