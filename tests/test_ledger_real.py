"""The ledger of a real run is the simulated one, instruction by instruction, and every plan trains like eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equivalence import assert_same_as_eager, seeded, weighted_sum
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_decisions import random_policy
from test_exact_random import Line, Program, a_line
from test_exact_zoo import ALL, SMALL, small, small_sizes
from torch import nn

from memfit import zoo
from memfit.plan.ledger import Ledger


class WithLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self, model: nn.Module, loss: Any) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.loss(self.model(*args), self.model)


def with_loss(name: str) -> tuple[nn.Module, Any]:
    """A network of the zoo that returns its loss, and its inputs."""
    model, inputs, _ = small(name)
    targets = zoo.targets(name, batch=ALL[name][1], seed=1, **small_sizes(name))
    return WithLoss(model, lambda output, _: zoo.loss(name)(output, *targets)), inputs


def assert_plan_is_followed(model: nn.Module, inputs: Any, policy: str, *, batch: int, steps: int) -> Ledger:
    """Train exactly like eager by that policy, and hold the bytes really alive against the ledger."""
    # Not the loss itself: the tangent of a root is held by whoever called backward.
    fitted = assert_same_as_eager(
        model,
        inputs,
        batch=batch,
        steps=steps,
        other_batch=None,
        loss=lambda output, _: output * 1.0,
        policy=policy,
        debug=True,
    )
    ledger, observed = fitted.memfit.ledger, fitted.memfit.observed
    trailing = fitted.memfit.newest.code.trailing
    assert observed.entries.keys() | set(trailing) == set(range(len(ledger.entries)))
    for number, entry in enumerate(ledger.entries):
        if number not in trailing:
            assert observed.entries[number] == entry.bytes, f"instruction {number}: {entry.instruction}"
    return ledger


def test_the_table_has_every_network_of_the_zoo() -> None:
    assert set(ALL) == set(zoo.names())


# Graphs like those of shallower ones of their family.
DEEP = ("densenet161", "densenet169", "densenet201", "resnet101", "resnet152", "vgg216", "vgg316", "vgg416")
# Branches side by side, as googlenet has them, and more of them.
LARGE = ("inception_v3",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in DEEP else ()) for n in ALL])
def test_networks_of_the_zoo_hold_what_their_ledger_says(name: str) -> None:
    model, inputs = with_loss(name)
    assert_plan_is_followed(model, inputs, "keep", batch=ALL[name][1], steps=1)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in LARGE else ()) for n in SMALL if n != "overfeat"]
)
def test_networks_of_the_zoo_follow_random_plans(name: str, seed: int) -> None:
    model, inputs = with_loss(name)
    with random_policy(seed) as policy:
        assert_plan_is_followed(model, inputs, policy, batch=SMALL[name][1], steps=2 - seed)


@settings(
    max_examples=70,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # shrinking takes minutes; the failing program prints as it is
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    lines=st.lists(a_line(), min_size=1, max_size=12),
    returned=st.lists(st.integers(0, 30), max_size=2),
    seed=st.integers(0, 2**32),
)
def test_random_programs_follow_random_plans(lines: list[Line], returned: list[int], seed: int) -> None:
    model = seeded(lambda: WithLoss(Program(lines, returned), weighted_sum))
    with random_policy(seed) as policy:
        assert_plan_is_followed(model, lambda n: (torch.randn(n, 6),), policy, batch=4, steps=3)
