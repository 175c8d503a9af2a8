"""Accounts against the literature: fp32, in-place ReLU, 224 x 224 images, no workspace unless said."""

from __future__ import annotations

import pytest
from planning import chain, planned_network, priced

from memfit.cost.costs import free_of_charge
from memfit.cost.devices import device
from memfit.cost.roofline import roofline
from memfit.errors import BadOption, DoesNotFit
from memfit.plan.budget import Budget, optimizer_bytes
from memfit.plan.planner import plan_step, runnable_plan
from memfit.plan.policies.network_wide import NetworkWide, layer_input_bytes

GIB = 2**30


@pytest.mark.parametrize(
    ("batch", "both_gib", "convolutions_gib"), [(64, 3.62, 2.17), (128, 7.25, 4.33), (256, 14.50, 8.66)]
)
def test_inputs_of_vgg16s_convolutions_and_pools(batch: int, both_gib: float, convolutions_gib: float) -> None:
    found = layer_input_bytes(planned_network("vgg16", batch=batch, rewritten=False))
    assert sum(found.values()) / GIB == pytest.approx(both_gib, rel=0.01)
    assert found["convolution"] / GIB == pytest.approx(convolutions_gib, rel=0.01)


@pytest.mark.parametrize(
    ("network", "batch", "gib"),
    [
        ("vgg16", 64, 6.20),
        ("vgg16", 128, 11.36),
        ("vgg16", 256, 21.69),
        ("vgg19", 64, 6.55),
        ("vgg116", 32, 19.03),
        ("vgg416", 32, 65.27),
    ],
)
def test_the_network_wide_baseline(network: str, batch: int, gib: float) -> None:
    step = planned_network(network, batch=batch, rewritten=False)
    account = NetworkWide.of(step, free_of_charge(step))
    assert account.workspace_bytes == 0
    assert account.total_bytes / GIB == pytest.approx(gib, rel=0.02)


def test_vgg16_at_256_with_the_fastest_algorithms_needs_28_gb() -> None:
    step = planned_network("vgg16", batch=256, rewritten=False)
    costs = roofline(step, device("titan-x"))
    planned = plan_step(step, costs, policy="network-wide")
    assert planned.peak_bytes == pytest.approx(28e9, rel=0.1)
    assert planned.peak_bytes == sum(planned.parts.values()) == planned.average_bytes
    assert not planned.fits and planned.budget_bytes == 12 * GIB
    assert planned.parts["workspace"] > 1e9 and any("workspace" in note for note in costs.notes)
    with pytest.raises(DoesNotFit, match=r"policy 'network-wide' needs 2\d,\d{3},\d{3},\d{3} bytes"):
        planned.require_fit()


# --- budgets --------------------------------------------------------------------------------------------------------


def test_a_percentage_is_a_share_of_the_keep_plans_activations_on_top_of_what_is_fixed() -> None:
    step = planned_network("resnet18", batch=4, image=64)
    costs = free_of_charge(step)
    for optimizer, copies in (("none", 0), ("sgd", 1), ("adam", 2)):
        planned = plan_step(step, costs, budget=Budget.parse("60%"), optimizer=optimizer)
        trained = step.gradient_bytes  # every parameter is trained
        assert planned.optimizer_bytes == optimizer_bytes(step, optimizer) == copies * trained
        keep = planned.keep.ledger
        assert planned.fixed_bytes == keep.base_bytes + step.gradient_bytes + copies * trained
        assert planned.budget_bytes == planned.fixed_bytes + int(0.6 * keep.activation_bytes)
        assert planned.peak_bytes == keep.peak_bytes + copies * trained == planned.keep_peak_bytes
        assert not planned.fits


def test_the_smallest_budget_named_is_enough_and_one_byte_less_is_not() -> None:
    step = chain(5)
    costs = priced(step, {"tanh": 1}, workspace_bytes={"tanh_backward": 12345})
    peak = plan_step(step, costs).peak_bytes
    assert plan_step(step, costs, budget=Budget(peak)).fits
    with pytest.raises(DoesNotFit, match=f"Give a budget of at least {peak:,} bytes"):
        runnable_plan(step, costs, policy="keep", budget=Budget(peak - 1))


def test_without_a_budget_the_devices_memory_is_the_limit() -> None:
    step = chain(5)
    assert plan_step(step, priced(step, {}, memory_bytes=1 << 20)).fits is False
    assert plan_step(step, priced(step, {}, memory_bytes=1 << 30)).fits is True
    assert plan_step(step, priced(step, {})).fits is True


def test_keep_has_no_overhead_and_the_plan_is_its_own_measure() -> None:
    step = chain(5)
    planned = plan_step(step, priced(step, {"tanh": 1}))
    assert planned.overhead == 0 and planned.step_s == planned.keep.step_s == 5
    assert planned.plan is not None and planned.plan.decisions == {}


@pytest.mark.parametrize("text", ["0", "0%", "-3GiB", "lots", "12 parsecs", "%", "1.2.3GB"])
def test_budgets_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(BadOption, match="budget="):
        Budget.parse(text)


@pytest.mark.parametrize(
    ("text", "num_bytes", "share"),
    [
        ("6GiB", 6 * GIB, None),
        ("1.5 GB", 1_500_000_000, None),
        (7, 7, None),
        ("60%", None, 0.6),
        (" 12.5 % ", None, 0.125),
    ],
)
def test_budgets_are_bytes_or_shares(text: int | str, num_bytes: int | None, share: float | None) -> None:
    budget = Budget.parse(text)
    assert budget == Budget(num_bytes, share)
    assert Budget.parse(budget.text) == budget


def test_unknown_policies_and_optimizers_are_named() -> None:
    step = chain(1)
    with pytest.raises(BadOption, match=r"policy='magic': unknown. Known policies: keep, network-wide, auto, sqrt"):
        plan_step(step, priced(step, {}), policy="magic")
    with pytest.raises(BadOption, match=r"optimizer 'lion': unknown. Choose from none, sgd, adam"):
        plan_step(step, priced(step, {}), optimizer="lion")
