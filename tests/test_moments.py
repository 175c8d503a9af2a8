"""Storages that travel at moments a policy has chosen: where the instructions stand, and what cannot be asked for."""

from __future__ import annotations

import random

import pytest
from planning import chain, tanh_storages
from random_decisions import random_moments

from memfit.capture.step import Step
from memfit.cost.costs import Costs, Link, free_of_charge
from memfit.errors import BadOption
from memfit.plan.check import check
from memfit.plan.decisions import Encode, Moments, Offload, Recompute, from_text, to_text
from memfit.plan.encode import encode_step, why_not_encode
from memfit.plan.lower import lower
from memfit.plan.program import Boundary, FetchStart, FetchWait, Instruction, Run, SendStart, SendWait
from memfit.plan.rerun import Reruns
from memfit.plan.simulate import simulate


def priced(step: Step) -> Costs:
    costs = free_of_charge(step, tiers=["ram"])
    return Costs("test", costs.by_signature, {"ram": Link("ram", "out", "in", 1e9, 1e9)})


@pytest.fixture
def step() -> Step:
    return chain(6)


def following(instructions: tuple[Instruction, ...], instruction: Instruction) -> Instruction:
    """The first instruction after that one that is no transfer."""
    rest = instructions[instructions.index(instruction) + 1 :]
    return next(i for i in rest if isinstance(i, (Run, Boundary)))


def test_instructions_stand_in_front_of_the_ops_asked_for(step: Step) -> None:
    storage = tanh_storages(step)[1]
    life = step.storage[storage]
    assert life.last_forward is not None and life.first_backward is not None
    when = Moments(life.last_forward, life.last_forward + 2, life.first_backward - 3, life.first_backward - 1)
    instructions = lower(step, {storage: Offload("ram", when)}, priced(step)).instructions
    assert following(instructions, SendStart(storage, "ram")) == Run(when.send)
    assert following(instructions, SendWait(storage)) == Run(life.last_forward + 2)
    assert following(instructions, FetchStart(storage, "ram")) == Run(when.fetch)
    assert following(instructions, FetchWait(storage)) == Run(when.fetched)


def test_one_that_nobody_waits_for_is_taken_back_without_a_copy(step: Step) -> None:
    storage = tanh_storages(step)[1]
    life = step.storage[storage]
    assert life.last_forward is not None and life.first_backward is not None
    when = Moments(life.last_forward, None, life.first_backward, life.first_backward)
    costs = priced(step)
    program = lower(step, {storage: Offload("ram", when)}, costs)
    assert SendWait(storage) not in program.instructions and FetchStart(storage, "ram") in program.instructions
    timeline, kept = simulate(program, costs), simulate(lower(step, {}, costs), costs)
    assert timeline.peak_bytes == kept.peak_bytes and timeline.step_ps == kept.step_ps
    assert "in" not in timeline.busy and len(timeline.busy["out"]) == 1
    check(program, peak_bytes=timeline.peak_bytes)


def test_compute_waits_where_the_policy_says_so(step: Step) -> None:
    storage = tanh_storages(step)[1]
    life = step.storage[storage]
    assert life.last_forward is not None and life.first_backward is not None
    slow = Costs("test", free_of_charge(step).by_signature, {"ram": Link("ram", "out", "in", 1e6, 1e6)})
    at_once = Moments(life.last_forward + 1, life.last_forward + 1, life.first_backward, life.first_backward)
    timeline = simulate(lower(step, {storage: Offload("ram", at_once)}, slow), slow)
    sent_ps = slow.links["ram"].send_ps(life.bytes)
    stalls = [(stall.cause, stall.end_ps - stall.start_ps) for stall in timeline.stalls]
    assert stalls == [("memory", sent_ps), ("data", slow.links["ram"].fetch_ps(life.bytes))]


@pytest.mark.parametrize("sent", [None, 7])
def test_moments_have_a_text_form(sent: int | None) -> None:
    decision = Offload("disk", Moments(5, sent, 20, 21))
    assert to_text(decision) == f"offload:disk@5,{'-' if sent is None else 7},20,21"
    assert from_text(to_text(decision)) == decision


@pytest.mark.parametrize(
    "text",
    [
        "offload:disk@",
        "offload:disk@1,2,3",
        "offload:@1,2,3,4",
        "offload:disk@1,2,-,4",
        "encode:mask+offload:host@1,2,3,4",
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(BadOption, match="is no decision"):
        from_text(text)


def test_moments_that_cannot_be_are_refused(step: Step) -> None:
    storage = tanh_storages(step)[2]
    life = step.storage[storage]
    assert life.last_forward is not None and life.first_backward is not None and life.maker is not None
    good = Moments(life.last_forward, life.last_forward + 1, life.first_backward, life.first_backward)
    bad = {
        "so its sending begins after that": Moments(life.maker, good.sent, good.fetch, good.fetched),
        "so it is sent by an op after that": Moments(good.send, life.last_forward, good.fetch, good.fetched),
        "it is fetched from op": Moments(good.send, good.sent, good.fetch, good.fetched + 1),
    }
    lower(step, {storage: Offload("ram", good)}, priced(step))
    for text, when in bad.items():
        with pytest.raises(BadOption, match=text):
            lower(step, {storage: Offload("ram", when)}, priced(step))


def test_numbers_follow_the_ops_when_codes_are_written_into_the_step() -> None:
    from planning import planned_network

    step = planned_network("resnet18", batch=1)
    reruns, rng = Reruns(step), random.Random(0)
    gates = [s for s in reruns.owned if not why_not_encode(step, s, "mask")]
    moved = [s for s in reruns.owned if s not in gates and not reruns.why_not_offload(s)]
    moved = [s for s in moved if step.storage[s].first_backward is not None]
    late = next(s for s in reversed(moved) if s in reruns.recomputable)
    decisions = {s: Offload("ram", random_moments(step, s, reruns, rng)) for s in moved if s != late}
    decisions |= dict.fromkeys(gates, Encode("mask"))
    held_from = step.num_forward + 5
    decisions[late] = Recompute(held_from)
    encoded = encode_step(step, decisions)
    again = encoded.decisions[late]
    assert isinstance(again, Recompute)
    assert encoded.step.ops[again.held_from].made == step.ops[held_from].made
    for storage in moved:
        new, old = encoded.decisions[storage], decisions[storage]
        if isinstance(new, Offload) and new.when is not None:
            assert isinstance(old, Offload) and old.when is not None
            assert encoded.step.ops[new.when.fetch].made == step.ops[old.when.fetch].made
    check(lower(step, decisions, priced(step)))
