"""Where the lowering puts things, given only the decisions, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from equivalence import Apply
from planning import SIDE, TENSOR, chain, priced, tanh_storages
from torch import nn

import memfit
from memfit.capture.step import Step
from memfit.cost.costs import Link, free_of_charge
from memfit.errors import BadOption, MemfitError
from memfit.plan.check import check
from memfit.plan.decisions import Encode, Keep, Moments, Offload, Recompute
from memfit.plan.lower import lower, lower_keep
from memfit.plan.program import Boundary, FetchStart, FetchWait, Free, Give, Program, Run, SendStart, SendWait
from memfit.plan.rerun import Reruns
from memfit.plan.simulate import simulate

FAST = Link("host", "d2h", "h2d", TENSOR, TENSOR)  # a tensor a second, each way


def targets_run(program: Program) -> list[str]:
    """The ops in the order they run, re-runs marked; not those that only look at a tensor in another way."""
    names = [
        program.step.ops[i.op].target.split(".")[1] + ("!" if i.again else "")
        for i in program.instructions
        if isinstance(i, Run)
    ]
    return [name for name in names if name not in ("detach", "expand")]


def test_without_decisions_everything_runs_once_in_order() -> None:
    step = chain(3)
    program = lower_keep(step)
    assert [i.op for i in program.instructions if isinstance(i, Run)] == list(range(len(step.ops)))
    assert not any(isinstance(i, (SendStart, FetchStart)) for i in program.instructions)
    check(program)


def test_a_dropped_storage_is_made_again_right_before_its_use() -> None:
    step = chain(3)
    _first, second, _third = tanh_storages(step)
    program = lower(step, {second: Recompute()}, free_of_charge(step))
    check(program)
    runs = targets_run(program)
    again = runs.index("tanh!")
    assert runs[again + 1] == "tanh_backward" and runs[again - 1] == "tanh_backward"
    assert runs.count("tanh!") == 1, "its operand is kept"
    dropped_at = program.instructions.index(Free(second))
    assert dropped_at < program.boundary


def test_a_whole_dropped_chain_is_made_again_once_from_what_is_left() -> None:
    step = chain(4)
    storages = tanh_storages(step)
    program = lower(step, dict.fromkeys(storages, Recompute()), free_of_charge(step))
    check(program)
    runs = targets_run(program)
    assert runs.count("tanh!") == 4 and runs.count("mul!") == 1
    start = runs.index("mul!")
    assert runs[start : start + 5] == ["mul!", "tanh!", "tanh!", "tanh!", "tanh!"]


def test_a_storage_that_backward_does_not_read_can_be_kept_to_recompute_from() -> None:
    step = chain(3)
    product = next(step.values[op.made[0]].storage for op in step.ops if op.target == "aten.mul.Tensor")
    assert step.storage[product].first_backward is None
    decisions = {tanh_storages(step)[0]: Recompute()}
    without, kept = (lower(step, d, free_of_charge(step)) for d in (decisions, decisions | {product: Keep()}))
    check(kept)
    assert "mul!" in targets_run(without) and "mul!" not in targets_run(kept)


def test_a_send_starts_after_the_last_forward_use_and_a_fetch_ends_before_the_first_backward_use() -> None:
    step = chain(3)
    storage = tanh_storages(step)[0]
    costs = priced(step, {"tanh": 2, "tanh_backward": 2}, links=(FAST,))
    program = lower(step, {storage: Offload("host")}, costs)
    check(program)
    known, instructions = step.storage[storage], program.instructions
    start = instructions.index(SendStart(storage, "host"))
    assert isinstance(instructions[start - 1], (Run, Free))
    last_run = max(i.op for i in instructions[:start] if isinstance(i, Run))
    assert last_run == known.last_forward
    wait = instructions.index(FetchWait(storage))
    assert instructions[wait + 1] == Run(known.first_backward)
    # The fetch takes half as long as the op before it, so it starts right before that op, not earlier.
    fetch = instructions.index(FetchStart(storage, "host"))
    between = [i for i in instructions[fetch:wait] if isinstance(i, Run)]
    assert [step.ops[i.op].target for i in between] == ["aten.tanh_backward.default"]
    assert simulate(program, costs).stall_ps == 0


def test_out_of_turn_a_fetch_comes_before_one_that_is_needed_sooner() -> None:
    step = chain(4)
    early, late = tanh_storages(step)[1:3]  # backward needs the later one first
    costs = priced(step, {"tanh": 2, "tanh_backward": 2}, links=(FAST,))
    place = step.storage[late].first_backward
    assert place is not None

    def fetches(back_by: int) -> tuple[list[FetchStart], float]:
        decisions = {early: Offload("host", back_by=back_by), late: Offload("host")}
        program = lower(step, decisions, costs)
        check(program)
        wait = program.instructions.index(FetchWait(early))
        assert program.instructions[wait + 1] == Run(step.storage[early].first_backward), "waited for where it is used"
        average_bytes = simulate(program, costs).average_bytes
        return [i for i in program.instructions if isinstance(i, FetchStart)], average_bytes

    in_turn, low_bytes = fetches(0)
    out_of_turn, high_bytes = fetches(place)
    assert in_turn == [FetchStart(late, "host"), FetchStart(early, "host")]
    assert out_of_turn == [FetchStart(early, "host"), FetchStart(late, "host")]
    assert high_bytes > low_bytes, "it takes up room for longer"
    assert fetches(len(step.ops) - 1) == (in_turn, low_bytes), "by an op after its first use: it is back by then"


def test_places_that_cannot_be_are_refused() -> None:
    step = chain(4)
    storage = tanh_storages(step)[1]
    life, first, last = step.storage[storage], step.num_forward, len(step.ops) - 1
    assert life.last_forward is not None and life.first_backward is not None
    when = Moments(life.last_forward + 1, life.last_forward + 1, life.first_backward, life.first_backward)
    for decision, why in (
        (Offload("host", back_by=first - 1), f"it is back by one of the backward ops, {first} to {last}"),
        (Offload("host", back_by=last + 1), f"it is back by one of the backward ops, {first} to {last}"),
        (Offload("host", when, back_by=first), "its moments say when it is fetched"),
    ):
        with pytest.raises(BadOption, match=rf"storage {storage} \(.* bytes, .* cannot be decided to .*: {why}"):
            lower(step, {storage: decision}, priced(step, {}, links=(FAST,)))


def test_a_send_that_ends_while_an_op_runs_is_released_before_the_next() -> None:
    step = chain(4)
    storage = tanh_storages(step)[0]
    costs = priced(step, {"tanh": 0.6, "tanh_backward": 2}, links=(FAST,))
    program = lower(step, {storage: Offload("host")}, costs)
    between = program.instructions[
        program.instructions.index(SendStart(storage, "host")) : program.instructions.index(SendWait(storage))
    ]
    # Sent after the second tanh, it ends during the fourth: two tanhs lie between.
    assert sum(isinstance(i, Run) and step.ops[i.op].target == "aten.tanh.default" for i in between) == 2
    assert simulate(program, costs).stall_ps == 0


def test_a_tight_budget_makes_compute_wait_for_memory() -> None:
    step = chain(6)
    storages = tanh_storages(step)
    costs = priced(step, {"tanh": 0.1, "tanh_backward": 0.1}, links=(FAST,))
    decisions = dict.fromkeys(storages[:-1], Offload("host"))
    roomy = simulate(lower(step, decisions, costs), costs)
    limit = simulate(lower(step, {}, costs), costs).peak_bytes - 2 * TENSOR
    tight_program = lower(step, decisions, costs, budget_bytes=limit)
    tight = simulate(tight_program, costs)
    check(tight_program, peak_bytes=tight.peak_bytes)
    assert roomy.peak_bytes > limit >= tight.peak_bytes
    assert tight.step_ps >= roomy.step_ps
    assert {stall.cause for stall in tight.stalls} == {"memory", "data"}


def test_gradients_are_given_in_eagers_order_and_not_before_their_parameter_is_read_for_the_last_time() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    step = memfit.capture(model, (torch.randn(3, 4),))
    reruns = Reruns(step)
    program = lower(step, dict.fromkeys(reruns.recomputable, Recompute()), free_of_charge(step))
    check(program)  # which proves that no re-run reads a parameter after its gradient
    assert [i.gradient for i in program.instructions if isinstance(i, Give)] == list(range(len(step.gradients)))


def test_an_op_that_makes_two_things_is_run_again_for_one_and_its_other_copy_counts() -> None:
    step = memfit.capture(
        Apply(lambda m, x: (lambda v, i: v * m.w + i)(*(x * m.w).sort(1)), w=(SIDE, SIDE)), (torch.zeros(SIDE, SIDE),)
    )
    sort = next(op for op in step.ops if op.target.startswith("aten.sort"))
    values, indices = (step.values[v].storage for v in sort.made)
    program = lower(step, {values: Recompute(), indices: Keep()}, free_of_charge(step))
    timeline = simulate(program, free_of_charge(step))
    check(program, peak_bytes=timeline.peak_bytes)
    entries = timeline.ledger.entries
    number = next(k for k, e in enumerate(entries) if e.instruction == Run(step.ops.index(sort), again=True))
    extra = entries[number].total_bytes - entries[number - 1].total_bytes
    assert extra == step.storage_bytes[values] + step.storage_bytes[indices]


# --- refused --------------------------------------------------------------------------------------------------------


def a_step() -> Step:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))
    return memfit.capture(model, (torch.randn(3, 8),))


def test_random_numbers_are_never_drawn_twice() -> None:
    step = a_step()
    mask = next(s.id for s in step.storages if any(step.ops[w].random for w in s.writers))
    with pytest.raises(BadOption, match=r"storage \d+ \(96 bytes, made by aten\..* in module '2'\) cannot be decided"):
        lower(step, {mask: Recompute()}, free_of_charge(step))


@pytest.mark.parametrize("decision", [Recompute(), Offload("host")])
def test_parameters_do_not_travel_and_are_not_recomputed(decision: object) -> None:
    step = a_step()
    parameter = step.values[step.sources[0].value].storage
    costs = priced(step, {}, links=(FAST,))
    with pytest.raises(BadOption, match="not made by the forward half, or it is handed to the caller"):
        lower(step, {parameter: decision}, costs)


def test_what_does_not_exist_is_named() -> None:
    step = a_step()
    costs, some = priced(step, {}, links=(FAST,)), Reruns(step).owned[0]
    with pytest.raises(MemfitError, match=r"device 'test' has no tier 'moon'. Tiers it has: host"):
        lower(step, {some: Offload("moon")}, costs)
    with pytest.raises(BadOption, match=r"storage 9999: the step has storages 0 to \d+"):
        lower(step, {9999: Keep()}, costs)
    with pytest.raises(BadOption, match=r"codec 'zip': unknown. Codecs: mask"):
        lower(step, {some: Encode("zip")}, costs)


def test_costs_of_another_step_are_refused() -> None:
    step, other = chain(2), a_step()
    with pytest.raises(MemfitError, match="do not cover op 0 of the step, aten"):
        lower(other, {}, free_of_charge(step))


def test_one_boundary_and_nothing_of_the_backward_half_before_it() -> None:
    program = lower_keep(a_step())
    assert program.instructions.count(Boundary()) == 1
    assert all(not isinstance(i, Give) for i in program.instructions[: program.boundary])
