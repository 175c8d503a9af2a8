"""Everything at once, at random: codes, offloads, re-runs, ops in chunks, tight steps. Still eager's bits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from equivalence import assert_same_as_eager
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from planning import planned_network
from random_decisions import random_decisions
from test_ways_chunks import with_ways
from torch import nn

from memfit import operators
from memfit.capture.rewrites import batch_norm_in_place
from memfit.capture.rewrites.chunks import WHOLE, in_chunks, is_in_chunks, way_name
from memfit.capture.rewrites.tight import tight_above_bytes, tighten
from memfit.capture.step import Step
from memfit.cost.costs import Costs, OpCost, free_of_charge
from memfit.cost.signature import signature
from memfit.plan.check import check
from memfit.plan.lower import lower
from memfit.plan.policies.policy import Decided, Policy
from memfit.plan.policies.registry import POLICIES
from memfit.plan.simulate import simulate
from memfit.tiers.null import NullTier
from memfit.tiers.registry import TIERS

POLICY = "random-ways"


class Residual(nn.Module):
    """Convolutions, batch norms, a shortcut, pooling, dropout and cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.body = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
        )
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(6, 11)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        h = F.relu(self.body(h) + h)
        return F.cross_entropy(self.head(self.drop(F.relu(self.up(h)).mean((2, 3)))), y)


@pytest.fixture
def tiers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(batch_norm_in_place, "_WORTH_BYTES", 0)
    monkeypatch.setattr(operators, "_BLOCK_BYTES", 1 << 10)
    TIERS.update({"first": NullTier(), "second": NullTier()})
    yield
    del POLICIES[POLICY], TIERS["first"], TIERS["second"]


def random_ways(step: Step, costs: Costs, seed: int) -> dict[int, str]:
    rng = random.Random(seed)
    return {op: rng.choice(list(ways)) for op, ways in costs.choices(step).items()}


@pytest.mark.parametrize("seed", range(6))
def test_random_plans_are_exact(seed: int, tiers: None) -> None:
    steps: list[Step] = []

    def decide(step: Step, costs: Costs, budget_bytes: int | None) -> Decided:
        tight = tighten(step) if seed % 2 else step
        steps.append(tight)
        priced = replace(with_ways(tight, free_of_charge(tight, tiers=costs.links)), densities=costs.densities)
        picked = random_ways(tight, priced, seed)
        return Decided(random_decisions(tight, priced, seed), priced.picking(picked), step=tight)

    POLICIES[POLICY] = Policy(POLICY, "for tests", decide)
    fitted = assert_same_as_eager(
        Residual(),
        lambda batch: (torch.randn(batch, 3, 12, 10), torch.randint(11, (batch,))),
        batch=5,
        other_batch=4,
        loss=lambda output, model: output,
        policy=POLICY,
        debug=True,
    )
    assert len(steps) == 2 and all((tight_above_bytes(step) is not None) == bool(seed % 2) for step in steps)
    assert any(map(is_in_chunks, fitted.memfit.step.ops))


STEP = planned_network("resnet18", batch=4, image=32)


def made_up_ways(step: Step) -> Costs:
    """Prices with three ways for each convolution's forward, and every op with a workspace of its own."""
    costs = free_of_charge(step, tiers=("disk", "host"))
    prices = {key: OpCost(1000 + n, 64 * n) for n, key in enumerate(costs.by_signature)}
    algorithms: dict[str, dict[str, OpCost]] = {}
    for op in step.ops:
        if op.target == "aten.convolution.default":
            key = signature(step, op)
            algorithms[key] = {WHOLE: prices[key], "fastest": OpCost(10, 1 << 20)}
            for count in (2, 4):
                cost = OpCost(2000 + count, 7 * count)
                prices[signature(step, in_chunks(op, count))] = algorithms[key][way_name(count)] = cost
    return replace(costs, by_signature=prices, algorithms=algorithms)


COSTS = made_up_ways(STEP)


@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(seed=st.integers(0, 10**6))
def test_prices_and_peaks_of_random_plans_agree(seed: int) -> None:
    """What an op costs is the price of its way, wherever codes have moved it; the checker finds the same peak."""
    decisions, picked = random_decisions(STEP, COSTS, seed), random_ways(STEP, COSTS, seed)
    costs = COSTS.picking(picked)
    program = lower(STEP, decisions, costs)
    following = costs.following(STEP, program.step)
    prices = following.of(program.step)
    by_value = {op.made[0]: price for op, price in zip(program.step.ops, prices, strict=True) if op.made}
    expected = costs.of(STEP)
    assert all(by_value[STEP.ops[index].made[0]] == expected[index] for index in picked)
    timeline = simulate(program, following)
    check(program, workspace_bytes=[price.workspace_bytes for price in prices], peak_bytes=timeline.peak_bytes)
    num_chunked = sum(way.startswith("chunks") for way in picked.values())
    assert sum(map(is_in_chunks, program.step.ops)) == num_chunked
