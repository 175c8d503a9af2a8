"""Policies that recompute: real training by each, bit for bit, holding what the plan says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equivalence import assert_same_as_eager
from random_decisions import policy_of, random_policy
from test_exact_zoo import small
from test_ledger_real import assert_plan_is_followed, with_loss
from test_offload_policies import thin_vgg
from torch import nn

from memfit.capture.step import Step
from memfit.cost.costs import Costs
from memfit.cost.devices import device
from memfit.cost.roofline import roofline
from memfit.plan.decisions import Decisions, Offload
from memfit.plan.program import Run
from memfit.plan.rerun import Reruns

POLICIES = ("sqrt", "checkpoint-search", "checkpoint-search-peak", "rotor")
NETWORKS = ("vgg16", "vgg16_bn", "resnet50", "densenet121", "unet", "darts", "gpt2")
CASES = [(name, policy) for name in NETWORKS for policy in POLICIES]
CASES += [pytest.param("inception_v3", policy, marks=pytest.mark.slow) for policy in POLICIES]  # it takes longest


def titan(step: Step, **_: Any) -> Costs:
    return roofline(step, device("titan-x"), workspace="none")


@pytest.fixture(autouse=True)
def paper_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring takes seconds for each network, and the bits do not depend on the prices."""
    monkeypatch.setattr("memfit.run.fitted.measure", titan)


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_two_steps_match_eager_and_hold_what_the_plan_says(name: str, policy: str) -> None:
    # Of a narrow VGG at batch 1 the peak is where the first gradient is made: nothing there is worth recomputing.
    model, inputs, batch = (*thin_vgg(name, batch=64), 64) if name == "vgg16" else (*with_loss(name), 2)
    ledger = assert_plan_is_followed(model, inputs, policy, batch=batch, steps=2)
    assert any(isinstance(i, Run) and i.again for i in ledger.program.instructions), "nothing was recomputed"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_loss_outside_the_model_whose_tangent_is_laid_out_differently_matches(policy: str) -> None:
    """The tangent of a sum is one number, expanded: the backward half is captured again, for the same decisions."""
    model, inputs, _ = small("resnet18")
    assert_same_as_eager(
        model, inputs, batch=2, other_batch=None, steps=2, loss=lambda output, _: output.sum(), policy=policy
    )


@pytest.mark.parametrize("seed", range(6))
def test_random_plans_serve_tangents_that_are_laid_out_differently(seed: int) -> None:
    model, inputs, _ = small("resnet18")
    with random_policy(seed) as policy:
        assert_same_as_eager(
            model, inputs, batch=2, other_batch=None, steps=2, loss=lambda output, _: output.sum(), policy=policy
        )


def test_where_storages_are_back_says_nothing_of_another_backward_half() -> None:
    """Backward from one of two outputs has fewer ops than the half that the plan was made for."""

    class Two(nn.Sequential):
        def forward(self, x: torch.Tensor) -> Any:
            first = self[0](x).tanh()
            return self[1](first).tanh(), first.mean()

    def back_by_the_last_op(step: Step, costs: Costs, budget: int | None) -> Decisions:
        reruns = Reruns(step)
        sent = [s for s in reruns.owned if not reruns.why_not_offload(s)]
        return {storage: Offload("first", back_by=len(step.ops) - 1) for storage in sent}

    with policy_of("late", back_by_the_last_op) as policy:
        assert_same_as_eager(
            Two(nn.Linear(4, 4), nn.Linear(4, 4)),
            lambda batch: (torch.randn(batch, 4),),
            other_batch=None,
            loss=lambda output, _: output[0].sum(),
            policy=policy,
        )


@pytest.mark.parametrize("policy", ["sqrt", "rotor"])
def test_darts_trains_exactly_in_half_of_the_memory(policy: str) -> None:
    """No vertex of its graph splits it: stages end at sets of storages."""
    model, inputs, loss = small("darts")
    fitted = assert_same_as_eager(
        model, inputs, batch=2, other_batch=None, steps=3, loss=loss, policy=policy, budget="50%"
    )
    planned = fitted.memfit.planned
    assert planned.fits and any(isinstance(i, Run) and i.again for i in planned.program.instructions)
