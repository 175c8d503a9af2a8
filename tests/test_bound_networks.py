"""The lower bound of networks of the zoo: below every shipped policy's plan, and rising where it must."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

import memfit
from memfit import zoo
from memfit.capture.rewrites import rewrite
from memfit.capture.rewrites.proof import AssumedProofs
from memfit.capture.step import Step
from memfit.cost.costs import Costs
from memfit.cost.devices import device
from memfit.cost.roofline import roofline
from memfit.plan.bound import Bounds
from memfit.plan.budget import Budget
from memfit.plan.decisions import Encode
from memfit.plan.lower import lower
from memfit.plan.planner import plan_step
from memfit.plan.policies.gist import GIST_LOSSLESS, lossless_codes
from memfit.plan.program import Free, Run
from memfit.plan.simulate import simulate

DEVICES = {"titan-x": "40%", "v100-16gb": "60%", "rtx-4090": "80%"}
NETWORKS = {
    "vgg16": {"batch": 32, "image": 64},
    "resnet18": {"batch": 64, "image": 64},
    "densenet121": {"batch": 32, "image": 32, "blocks": (3, 4, 3, 2)},
    "gpt2": {"batch": 8, "image": 32, "num_layers": 2, "vocab_size": 199, "width": 48, "num_classes": 199},
}
POLICIES = {
    "titan-x": ("keep", "checkpoint-search-peak", "vdnn-dyn"),
    "v100-16gb": ("sqrt", "vdnn-all", "offload-greedy"),
    "rtx-4090": ("checkpoint-search", "rotor", "overlap"),
}


@cache
def step_of(name: str) -> Step:
    options = dict(NETWORKS[name])
    batch, image, num_classes = (options.pop(key, None) for key in ("batch", "image", "num_classes"))
    model = zoo.build(name, **zoo.spec(name).fitting(image), **options)
    shape = {"batch": batch, "image": image, "num_classes": num_classes, "device": "meta"}
    step = memfit.capture(
        model, zoo.inputs(name, **shape), loss=zoo.loss(name), targets=zoo.targets(name, **shape), device="cpu"
    )
    return rewrite(step, proofs=AssumedProofs())


@cache
def costs_of(name: str, device_name: str) -> Costs:
    """The device's prices without the time that a launch takes, which is all that small tensors cost."""
    return roofline(step_of(name), replace(device(device_name), launch_s=0.0))


@cache
def bounds_of(name: str, device_name: str, *, with_codes: bool) -> Bounds:
    step, costs = step_of(name), costs_of(name, device_name)
    codes = GIST_LOSSLESS.decide(step, costs, None) if with_codes and GIST_LOSSLESS.decide is not None else {}
    assert isinstance(codes, dict)
    return Bounds(step, costs, {s: d for s, d in codes.items() if isinstance(d, Encode)})


@pytest.mark.parametrize("name", NETWORKS)
def test_no_policy_is_better(name: str) -> None:
    seen = 0
    for device_name, share in DEVICES.items():
        step, costs = step_of(name), costs_of(name, device_name)
        for policy in POLICIES[device_name]:
            planned = plan_step(step, costs, policy=policy, budget=Budget.parse(share))
            peak = planned.simulated.peak_bytes
            for with_codes in (False, True):
                bound = bounds_of(name, device_name, with_codes=with_codes).at(peak)
                assert bound.over_ps is not None, (policy, bound.describe())
                assert bound.over_ps <= planned.simulated.step_ps - bound.keep_ps, (policy, bound.describe())
                seen += bound.over_ps > 0
    assert seen, "nothing was bounded from below by more than nothing"


def test_codes_that_are_all_taken_up() -> None:
    """gist's plan at its own peak; what all codes add is the sum of what each adds."""
    for name in ("vgg16", "resnet18"):
        for device_name in DEVICES:
            bounds = bounds_of(name, device_name, with_codes=True)
            costs, codings = bounds.costs, bounds.account.codings
            timeline = simulate(lower(bounds.step, bounds.codes, costs), costs)
            assert sum(codings.added_ps.values()) + codings.sure_ps == timeline.step_ps - bounds.account.keep_ps
            bound = bounds.at(timeline.peak_bytes)
            assert bound.over_ps is not None and bound.over_ps <= timeline.step_ps - bound.keep_ps


@pytest.mark.parametrize("name", ["densenet121", "gpt2"])
def test_it_rises_as_budgets_and_links_shrink(name: str) -> None:
    step, costs = step_of(name), costs_of(name, "v100-16gb")
    slow = {tier: replace(link, send_bytes_per_s=1e9, fetch_bytes_per_s=1e9) for tier, link in costs.links.items()}
    kinds = [costs, replace(costs, links=slow), replace(costs, links={})]
    keep = simulate(lower(step, {}, costs), costs)
    overheads = []
    for prices in kinds:
        bounds = Bounds(step, prices)
        budgets = [keep.ledger.fixed_bytes + int(s * keep.ledger.activation_bytes) for s in (0.5, 0.65, 0.8, 1.0)]
        found = [bounds.at(budget).over_ps for budget in budgets]
        assert all(over_ps is not None for over_ps in found)
        row = [over_ps or 0 for over_ps in found]
        assert sorted(row, reverse=True) == row and row[-1] == 0
        overheads.append(row)
    for better, worse in pairwise(overheads):
        assert all(a <= b + keep.step_ps * 1e-7 for a, b in zip(better, worse, strict=True))
    assert overheads[-1][0] > overheads[0][-1]


def test_several_cuts_at_once_prove_more_than_one() -> None:
    """Where re-runs are too dear, both halves wait for the link: a single cut sees only one of them whole."""
    step, costs = step_of("resnet18"), costs_of("resnet18", "v100-16gb")
    dear = {key: replace(cost, rerun_ps=10**12) for key, cost in costs.by_signature.items()}
    costs = replace(costs, by_signature=dear, algorithms={})
    bounds = Bounds(step, costs)
    floor_bytes, keep_bytes = bounds.floor().needed_bytes, int(bounds.account.keep_bytes.max())
    bound = bounds.at(floor_bytes + (keep_bytes - floor_bytes) // 5)
    assert bound.cut is not None and bound.cut.over_ps is not None and bound.over_ps is not None
    assert bound.over_ps > 1.05 * bound.cut.over_ps > 0
    assert "other instants" in bound.describe()
    plan = plan_step(step, costs, policy="offload-greedy", budget=Budget(num_bytes=bound.budget_bytes))
    at_its_peak = bounds.at(plan.simulated.peak_bytes)
    assert at_its_peak.over_ps is not None
    assert 0 < at_its_peak.over_ps <= plan.simulated.step_ps - bound.keep_ps


@pytest.mark.parametrize("name", NETWORKS)
def test_its_account_is_the_ledgers(name: str) -> None:
    """Where nothing is decided: the keep plan's bytes at every op, to the byte, but for gradients not yet given."""
    step, costs = step_of(name), costs_of(name, "titan-x")
    account = bounds_of(name, "titan-x", with_codes=False).account
    timeline = simulate(lower(step, {}, costs), costs)
    by_op = {e.instruction.op: e.total_bytes for e in timeline.ledger.entries if hasattr(e.instruction, "op")}
    assert timeline.step_ps == account.keep_ps
    assert all(int(account.keep_bytes[op]) <= size for op, size in by_op.items())
    assert int(account.keep_bytes.max()) == max(by_op.values())
    assert all(account.needed_bytes <= account.keep_bytes)


def test_shares_are_those_of_a_cut() -> None:
    bounds = bounds_of("densenet121", "rtx-4090", with_codes=True)
    keep = int(bounds.account.keep_bytes.max())
    bound = bounds.at((keep + bounds.floor().needed_bytes) // 2)
    assert bound.over_ps is not None and bound.over_ps > 0 and bound.shares
    held = sum(share.here * bounds.step.storage_bytes[storage] for storage, share in bound.shares.items())
    assert held <= bound.budget_bytes
    assert any(share.again > 0.5 for share in bound.shares.values())


@pytest.mark.parametrize("name", NETWORKS)
def test_codes_are_held_as_long_as_their_programs_hold_them(name: str) -> None:
    """Each code by itself, from its making to the last op of the step that runs while it is there."""
    step, costs = step_of(name), costs_of(name, "titan-x")
    codes = lossless_codes(step, costs)
    number = {op.outputs: index for index, op in enumerate(step.ops)}
    for storage in sorted(codes, key=lambda s: -step.storage_bytes[s])[:6]:
        (coding, *_) = Bounds(step, costs, {storage: codes[storage]}).account.codings.codes
        program = lower(step, {storage: codes[storage]}, costs)
        ops, values = program.step.ops, program.step.values
        made = next(values[op.made[0]].storage for op in ops if op.target == "memfit.encode")
        ran: list[int] = []
        is_there = False
        for instruction in program.instructions:
            match instruction:
                case Run(index) if ops[index].target == "memfit.encode":
                    is_there = is_there or values[ops[index].made[0]].storage == made
                case Run(index) if is_there and ops[index].outputs in number:
                    ran.append(number[ops[index].outputs])
                case Free(freed) if freed == made:
                    is_there = False
        assert ran and not is_there
        assert ran[-1] == coding.held_to <= coding.last_use
