"""Plans as JSON: they come back as they were, or are refused with the reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planning import chain, planned_network, tanh_storages
from random_decisions import random_decisions

from memfit.cost.costs import Costs, free_of_charge
from memfit.errors import BadOption
from memfit.plan.check import IllegalProgram
from memfit.plan.decisions import Encode, EncodeThenOffload, Keep, Offload, Recompute, from_text, to_text, untimed
from memfit.plan.lower import lower, lower_keep
from memfit.plan.plan import Plan, WrongPlan
from memfit.plan.program import instructions_to_lists
from memfit.plan.simulate import simulate

STEP = planned_network("resnet18", batch=2, image=32)
COSTS = free_of_charge(STEP, tiers=("host", "disk"))


def a_plan(step: Any = STEP, costs: Costs = COSTS, seed: int = 3) -> Plan:
    decisions = random_decisions(step, costs, seed)
    program = lower(step, decisions, costs)
    return Plan(step, decisions, program, "random", costs.device, 10**9, simulate(program, costs).peak_bytes)


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6))
def test_a_plan_comes_back_as_it_was(seed: int) -> None:
    plan = a_plan(seed=seed)
    back = Plan.from_json(plan.to_json(), STEP, device=COSTS.device)
    assert back.decisions == plan.decisions
    assert back.program.instructions == plan.program.instructions
    assert back.program.step.digest == plan.program.step.digest
    assert (back.policy, back.device, back.budget_bytes, back.peak_bytes) == ("random", "none", 10**9, plan.peak_bytes)
    assert simulate(back.program, COSTS).peak_bytes == plan.peak_bytes
    assert back.to_json() == plan.to_json()


def test_a_plan_is_plain_json() -> None:
    data = json.loads(a_plan().to_json())
    assert data["step"] == STEP.digest and data["torch"] == torch.__version__ and data["network"] == "resnet18"
    assert all(isinstance(entry[0], str) for entry in data["instructions"])


def test_the_keep_program_as_json_runs_and_gives_everything_once() -> None:
    data = json.loads(json.dumps(instructions_to_lists(lower_keep(STEP).instructions)))
    assert data.count(["boundary"]) == 1
    assert [i[1] for i in data if i[0] == "run"] == list(range(len(STEP.ops)))
    assert [i[1] for i in data if i[0] == "give"] == list(range(len(STEP.gradients)))
    freed = [i[1] for i in data if i[0] == "free"]
    assert len(freed) == len(set(freed)) > 0


def test_a_plan_for_another_step_is_refused() -> None:
    other = planned_network("resnet18", batch=3, image=32)
    with pytest.raises(
        WrongPlan, match=f"this plan is for step '{STEP.digest}' \\(network 'resnet18'\\), and here step"
    ):
        Plan.from_json(a_plan().to_json(), other, device=COSTS.device)


@pytest.mark.parametrize(("key", "text"), [("torch", "torch '1.0'"), ("device", "device 'moon'")])
def test_a_plan_of_another_torch_or_device_is_refused(key: str, text: str) -> None:
    data = a_plan().to_dict() | {key: text.split("'")[1]}
    with pytest.raises(WrongPlan, match=f"this plan is for {text}.*Plan again"):
        Plan.from_dict(data, STEP, device=COSTS.device)


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d.pop("decisions"),
        lambda d: d["instructions"].append(["fly", 3]),
        lambda d: d["instructions"].append(["run", 1, 2, 3]),
        lambda d: d["instructions"].append(["free", None]),
        lambda d: d.update(instructions=7),
        lambda d: d.update(peak_bytes="much"),
        lambda d: d["decisions"].update({"x": "keep"}),
    ],
)
def test_a_damaged_plan_is_refused(damage: Any) -> None:
    data = json.loads(a_plan().to_json())
    damage(data)
    with pytest.raises(WrongPlan, match="is damaged"):
        Plan.from_dict(data, STEP, device=COSTS.device)


@pytest.mark.parametrize("text", ["", "7", "[]", '{"format": 0}', "{"])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(WrongPlan, match="not a plan"):
        Plan.from_json(text, STEP, device=COSTS.device)


def test_a_plan_whose_program_was_tampered_with_is_refused() -> None:
    data = a_plan().to_dict()
    data["instructions"].remove(next(entry for entry in data["instructions"] if entry[0] == "give"))
    with pytest.raises(IllegalProgram):
        Plan.from_dict(data, STEP, device=COSTS.device)


def test_decisions_have_a_text_form() -> None:
    plain = (Keep(), Recompute(), Offload("disk"), Encode("mask"), EncodeThenOffload("mask", "host"))
    with_ops = (Recompute(7), Offload("disk", back_by=7), EncodeThenOffload("sparse:0.5", "host", back_by=7))
    for decision in (*plain, *with_ops):
        assert from_text(to_text(decision)) == decision
    assert [to_text(d) for d in with_ops] == ["recompute:7", "offload:disk@7", "encode:sparse:0.5+offload:host@7"]
    assert [to_text(untimed(d)) for d in with_ops[1:]] == ["offload:disk", "encode:sparse:0.5+offload:host"]
    assert from_text("offload:ssd:1") == Offload("ssd:1"), "a tier may be called that"
    for text in ("offload:disk@0", "offload:disk@x", "offload:@7", "encode:mask+offload:host@-7"):
        with pytest.raises(BadOption, match="is no decision"):
            from_text(text)
    for text in ("", "keep:x", "offload", "offload:", "encode:a+keep", "encode:a+offload:b+offload:c", "KEEP"):
        with pytest.raises(BadOption, match="is no decision"):
            from_text(text)


def test_an_unknown_codec_in_a_plan_is_refused() -> None:
    step = chain(2)
    data = a_plan(step, free_of_charge(step), seed=0).to_dict()
    data["decisions"] = {str(tanh_storages(step)[0]): "encode:zip"}
    with pytest.raises(BadOption, match=r"codec 'zip': unknown"):
        Plan.from_dict(data, step, device="none")
