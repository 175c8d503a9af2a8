"""Timelines against seconds and bytes counted by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from planning import SECOND, TENSOR, chain, planned_network, priced, tanh_storages

from memfit.cost.costs import Link, free_of_charge
from memfit.errors import BadOption
from memfit.plan.decisions import Offload, Recompute
from memfit.plan.ledger import Ledger
from memfit.plan.lower import lower
from memfit.plan.program import FetchStart, Run, SendStart
from memfit.plan.rerun import Reruns
from memfit.plan.simulate import COMPUTE, simulate

SLOW = Link("host", "d2h", "h2d", TENSOR / 4, TENSOR / 5)  # four seconds out, five back
DISK = Link("disk", "disk", "disk", TENSOR / 2, TENSOR / 3, latency_s=0.5)


def test_compute_alone_is_the_sum_of_its_ops() -> None:
    step = chain(3)
    costs = priced(step, {"tanh": 1, "tanh_backward": 2, "mul": 0.5})
    timeline = simulate(lower(step, {}, costs), costs)
    muls = sum(op.target == "aten.mul.Tensor" for op in step.ops)
    assert timeline.step_ps == (3 * 1 + 3 * 2) * SECOND + muls * SECOND // 2
    assert timeline.stalls == () and list(timeline.busy) == [COMPUTE]
    assert timeline.step_s == pytest.approx(9 + muls / 2)


def test_recomputing_costs_the_ops_that_run_again() -> None:
    step = chain(3)
    costs = priced(step, {"tanh": 1, "tanh_backward": 2})
    keep = simulate(lower(step, {}, costs), costs)
    again = simulate(lower(step, {tanh_storages(step)[1]: Recompute()}, costs), costs)
    assert again.step_ps == keep.step_ps + SECOND


def test_a_transfer_that_is_too_slow_stalls_compute_and_says_why() -> None:
    step = chain(2)
    first, _ = tanh_storages(step)
    costs = priced(step, {"tanh": 1, "tanh_backward": 1}, links=(SLOW,))
    timeline = simulate(lower(step, {first: Offload("host")}, costs), costs)
    # Forward ends after 2 s, the send of 4 s began then; its bytes must be gone before backward begins.
    out, back = timeline.busy["d2h"][0], timeline.busy["h2d"][0]
    assert (out.start_ps, out.end_ps) == (2 * SECOND, 6 * SECOND) and out.what == first
    assert (back.start_ps, back.end_ps) == (6 * SECOND, 11 * SECOND)
    memory, data = timeline.stalls
    assert (memory.cause, memory.storage, memory.start_ps, memory.end_ps) == ("memory", first, 2 * SECOND, 6 * SECOND)
    # The second tanh's backward runs from 6 to 7 while the fetch is on its way.
    assert (data.cause, data.start_ps, data.end_ps) == ("data", 7 * SECOND, 11 * SECOND)
    assert timeline.step_ps == 12 * SECOND and timeline.stall_ps == 8 * SECOND


def test_what_compute_loses_to_transfers_counts_where_they_begin() -> None:
    step = chain(3)
    first = tanh_storages(step)[0]
    link = replace(SLOW, send_drag=0.25, fetch_drag=0.2)  # one second of four, one of five
    costs = priced(step, {"tanh": 8, "tanh_backward": 8}, links=(link,))
    program = lower(step, {first: Offload("host")}, costs)
    timeline = simulate(program, costs)
    keep = simulate(lower(step, {}, costs), costs)
    assert timeline.drag_ps == 2 * SECOND and timeline.stall_ps == 0 == keep.drag_ps
    assert timeline.step_ps == keep.step_ps + 2 * SECOND
    # The send itself is not slower, and what comes back still starts as late as it can.
    out, back = timeline.busy["d2h"][0], timeline.busy["h2d"][0]
    assert (out.start_ps, out.end_ps) == (16 * SECOND, 20 * SECOND)
    assert back.end_ps - back.start_ps == 5 * SECOND
    starts = [
        i for i, instruction in enumerate(program.instructions) if isinstance(instruction, (SendStart, FetchStart))
    ]
    assert [timeline.ends_ps[i] - timeline.starts_ps[i] for i in starts] == [SECOND, SECOND]


@pytest.mark.parametrize(("name", "drag"), [("send_drag", 1.5), ("fetch_drag", -0.1), ("fetch_drag", float("nan"))])
def test_a_drag_is_a_share(name: str, drag: float) -> None:
    with pytest.raises(BadOption, match=rf"link to 'host': {name}=.*: give a share of the transfer's time, 0 to 1"):
        replace(SLOW, **{name: drag})


def test_one_channel_takes_one_transfer_at_a_time_and_latency_counts_once_each() -> None:
    step = chain(4)
    storages = tanh_storages(step)
    costs = priced(step, {"tanh": 0.1, "tanh_backward": 0.1}, links=(DISK,))
    timeline = simulate(lower(step, dict.fromkeys(storages[:3], Offload("disk")), costs), costs)
    work = timeline.busy["disk"]
    assert [w.what for w in work] == [*storages[:3], *reversed(storages[:3])]
    assert [w.end_ps - w.start_ps for w in work] == [round(2.5 * SECOND)] * 3 + [round(3.5 * SECOND)] * 3
    assert all(before.end_ps <= after.start_ps for before, after in itertools.pairwise(work))


def test_the_average_is_over_time() -> None:
    step = chain(1)
    costs = priced(step, {"tanh": 3, "tanh_backward": 1})
    timeline = simulate(lower(step, {}, costs), costs)
    at = {
        step.ops[e.instruction.op].target.split(".")[1]: e.total_bytes
        for e in timeline.ledger.entries
        if isinstance(e.instruction, Run)
    }
    assert timeline.average_bytes == (3 * at["tanh"] + at["tanh_backward"]) // 4
    assert timeline.average_bytes <= timeline.peak_bytes


def test_workspaces_count_while_their_op_runs_and_only_then() -> None:
    step = chain(2)
    plain = simulate(lower(step, {}, priced(step, {})), priced(step, {}))
    costs = priced(step, {}, workspace_bytes={"tanh_backward": 5 * TENSOR})
    timeline = simulate(lower(step, {}, costs), costs)
    for before, after in zip(plain.ledger.entries, timeline.ledger.entries, strict=True):
        extra = 0
        if isinstance(after.instruction, Run) and step.ops[after.instruction.op].target == "aten.tanh_backward.default":
            extra = 5 * TENSOR
        assert after.bytes == before.bytes and after.workspace_bytes == extra
    assert "workspace 1.2 MiB" in timeline.ledger.describe_peak()


def test_the_excess_over_a_budget_is_the_most_and_the_sum() -> None:
    step = chain(3)
    costs = free_of_charge(step)
    timeline = simulate(lower(step, {}, costs), costs)
    totals = [e.total_bytes for e in timeline.ledger.entries if isinstance(e.instruction, Run)]
    budget = timeline.peak_bytes - TENSOR
    above = [total - budget for total in totals if total > budget]
    assert timeline.excess_bytes(budget) == (TENSOR, sum(above))
    assert timeline.excess_bytes(timeline.peak_bytes) == (0, 0)


def test_the_profile_has_every_op_and_every_kind() -> None:
    step = chain(2)
    timeline = simulate(lower(step, {}, free_of_charge(step)), free_of_charge(step))
    points = timeline.profile()
    assert len(points) == len(step.ops)
    assert set(points[0][1]) == {"parameter", "input", "gradient", "saved", "transient", "workspace"}
    assert [second for second, _ in points] == sorted(second for second, _ in points)
    assert max(sum(kinds.values()) for _, kinds in points) == timeline.peak_bytes


def test_the_same_program_has_the_same_timeline() -> None:
    step = planned_network("resnet18", batch=2, image=32)
    costs = free_of_charge(step, tiers=("host",))
    decisions = dict.fromkeys(Reruns(step).recomputable, Offload("host"))
    first, second = (simulate(lower(step, decisions, costs), costs) for _ in range(2))
    assert first.program.instructions == second.program.instructions
    assert (first.starts_ps, first.ends_ps, first.stalls) == (second.starts_ps, second.ends_ps, second.stalls)
    assert first.ledger.entries == Ledger.of(second.program, [0] * len(step.ops)).entries
