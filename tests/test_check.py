"""The checker of programs: it proves legal ones, finds each way to break one, and what it proves computes the step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from check_programs import (
    LEGAL,
    MODELS,
    ROWS,
    after,
    before,
    broken,
    chain_recomputed,
    insert,
    keep,
    made_by,
    net_offloaded,
    net_recomputed,
    offload,
    op_of,
    recompute,
    saved,
    source_of,
    step_of,
    swapped,
    without,
)
from equivalence import Apply, seeded

import memfit
from memfit.capture.rewrites import rewrite
from memfit.capture.step import Ghost, Half, Origin
from memfit.errors import BadOption, MemfitError
from memfit.plan.check import Rule, check
from memfit.plan.program import (
    Boundary,
    FetchStart,
    FetchWait,
    Free,
    Give,
    Instruction,
    Program,
    Run,
    SendStart,
    SendWait,
)
from memfit.torch_internals import normalised

# --- what is legal ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LEGAL)
def test_a_legal_program_is_proven(name: str) -> None:
    program = LEGAL[name]()
    step = program.step
    proof = check(program)
    assert proof.num_instructions == len(program.instructions)
    assert proof.num_sends == ("offloaded" in name) and bool(proof.num_reruns) == ("recomputed" in name)
    gradients = {step.values[g.value].storage for g in step.first_parts}
    tangents = {step.values[s.value].storage for s in step.sources if s.origin is Origin.TANGENT}
    assert proof.live == step.kept - (tangents - gradients) - {
        step.values[g.value].storage for g in step.gradients if g not in step.first_parts
    }


@pytest.mark.parametrize("name", MODELS)
def test_a_rewritten_step_is_proven(name: str) -> None:
    step = rewrite(step_of(name))
    assert check(keep(step)).peak_bytes <= check(keep(step_of(name))).peak_bytes


@pytest.mark.parametrize("name", MODELS)
def test_every_saved_storage_can_be_sent_and_fetched(name: str) -> None:
    step = step_of(name)
    for storage in saved(step):
        assert check(offload(keep(step), storage)).num_sends == 1


def test_what_was_fetched_can_be_sent_and_fetched_once_more() -> None:
    step = step_of("net")
    storage = made_by(step, op_of(step, "convolution"))
    trip = SendStart(storage, "disk"), SendWait(storage), FetchStart(storage, "disk"), FetchWait(storage)
    assert check(after(net_offloaded(), FetchWait(storage), *trip)).num_sends == 2


def test_a_storage_may_be_read_while_it_is_sent() -> None:
    step = step_of("net")
    conv, norm = op_of(step, "convolution"), op_of(step, "native_batch_norm")
    storage = made_by(step, conv)
    program = without(net_offloaded(), SendStart(storage, "ram"))
    assert check(before(program, Run(norm), SendStart(storage, "ram"))).num_sends == 1


def test_a_view_may_be_run_again_while_its_storage_is_as_it_was() -> None:
    step = step_of("net")
    assert check(after(keep(step), Boundary(), Run(op_of(step, "view"), again=True))).num_reruns == 1


def test_neighbouring_frees_may_change_places() -> None:
    program = keep(step_of("net"))
    pairs = [
        i for i, pair in enumerate(zip(program.instructions, program.instructions[1:], strict=False))
        if all(isinstance(instruction, Free) for instruction in pair)
    ]  # fmt: skip
    assert pairs
    for first in pairs:
        assert check(swapped(program, first, first + 1)) == check(program)


# --- bytes -----------------------------------------------------------------------------------------------------------


def test_the_peak_is_what_is_here_at_once() -> None:
    step = memfit.capture(seeded(lambda: Apply(lambda m, x: (x * m.w).exp(), w=(6,))), (torch.randn(ROWS),))
    program = keep(step)
    # w, then x, the output, the tangent, and the product of these two that exp's backward makes.
    proof = check(program, peak_bytes=6 * 4 + 4 * (3 * 6 * 4))
    assert program.instructions[proof.peak_index] == Run(op_of(step, "mul", Half.BACKWARD))
    # w, its gradient, x and the output are left.
    assert sum(step.storage_bytes[storage] for storage in proof.live) == 2 * (6 * 4) + 2 * (3 * 6 * 4)


def test_workspace_counts_while_its_op_runs() -> None:
    program = keep(step_of("net"))
    plain = check(program)
    conv = op_of(program.step, "convolution")
    workspace = [0] * len(program.step.ops)
    workspace[conv] = 10**6
    proof = check(program, workspace_bytes=workspace)
    assert proof.peak_index == program.instructions.index(Run(conv))
    made = {made_by(program.step, conv)} | {
        program.step.values[s.value].storage for s in program.step.sources if s.origin is not Origin.TANGENT
    }
    assert proof.peak_bytes == 10**6 + sum(program.step.storage_bytes[s] for s in made) > plain.peak_bytes
    with pytest.raises(BadOption, match="workspace_bytes has 1 entries, but the step has"):
        check(program, workspace_bytes=[0])


def test_what_a_rerun_makes_twice_counts_while_it_runs() -> None:
    step = step_of("net")
    pool = op_of(step, "max_pool2d_with_indices")
    workspace = [0] * len(step.ops)
    workspace[pool] = 10**6
    program = after(keep(step), Boundary(), Run(pool, again=True))
    both = sum(step.storage_bytes[made_by(step, pool, nth)] for nth in (0, 1))
    tangent = sum(step.values[s.value].bytes for s in step.sources if s.origin is Origin.TANGENT)
    index = program.instructions.index(Run(pool, again=True))
    proof = check(program, workspace_bytes=workspace)
    here = check(keep(step), workspace_bytes=[10**6 * (op == step.num_forward) for op in range(len(step.ops))])
    assert proof.peak_index == index and proof.peak_bytes == here.peak_bytes + both
    assert tangent < both


def test_bytes_count_from_the_start_of_a_fetch_and_to_the_end_of_a_send() -> None:
    step = step_of("net")
    storage = made_by(step, op_of(step, "convolution"))
    program = net_offloaded()
    late = after(without(program, SendWait(storage)), Boundary(), SendWait(storage))
    size = step.storage_bytes[storage]

    def bytes_at(program: Program, op: int) -> int:
        return check(program, workspace_bytes=[10**6 * (i == op) for i in range(len(step.ops))]).peak_bytes

    first, last = step.num_forward, step.storage[storage].first_backward
    assert bytes_at(program, first) == bytes_at(late, first) == bytes_at(keep(step), first) - size
    assert bytes_at(program, first - 1) == bytes_at(late, first - 1) == bytes_at(keep(step), first - 1)
    early = after(without(program, FetchStart(storage, "ram")), Boundary(), FetchStart(storage, "ram"))
    assert bytes_at(early, first) == bytes_at(keep(step), first)
    assert bytes_at(early, last) == bytes_at(program, last) == bytes_at(keep(step), last)


def test_another_peak_than_the_promised_one_is_refused() -> None:
    program = keep(step_of("net"))
    peak_bytes = check(program).peak_bytes
    error = broken(program, Rule.PEAK, f"{peak_bytes + 1} bytes were promised", peak_bytes=peak_bytes + 1)
    assert f"but there are {peak_bytes} at instruction" in str(error)
    broken(program, Rule.PEAK, "the peak is the one that was promised", peak_bytes=peak_bytes - 1)


# --- order -----------------------------------------------------------------------------------------------------------


def test_every_op_runs_once_in_order() -> None:
    program = keep(step_of("net"))
    step = program.step
    last = len(step.ops) - 1
    broken(without(program, Run(3)), Rule.ORDER, "op 3, aten.native_batch_norm.default, comes first")
    broken(Program(step, program.instructions[:5]), Rule.ORDER, "there is no boundary")
    end = program.instructions.index(Run(last))
    broken(Program(step, program.instructions[:end]), Rule.ORDER, f"op {last}, {step.ops[last].target}, has not run")
    broken(after(program, Run(0), Run(0)), Rule.ORDER, "the op has run already")
    broken(swapped(program, 0, 1), Rule.ORDER, "op 0, aten.convolution.default, comes first")
    broken(insert(program, 0, Run(99)), Rule.ORDER, f"the step has {len(step.ops)} ops")
    broken(insert(program, 0, Run(-1)), Rule.ORDER, f"the step has {len(step.ops)} ops")


def test_there_is_one_boundary_between_the_halves() -> None:
    program = keep(step_of("net"))
    early = before(without(program, Boundary()), Run(9), Boundary())
    broken(early, Rule.ORDER, "op 9, aten.addmm.default, comes first")
    late = after(without(program, Boundary()), Run(10), Boundary())
    broken(late, Rule.ORDER, "a backward op runs before the boundary")
    broken(after(program, Boundary(), Boundary()), Rule.ORDER, "there is a second boundary")


# --- reads and versions ----------------------------------------------------------------------------------------------


def test_what_is_freed_is_not_read() -> None:
    program = keep(step_of("net"))
    conv = made_by(program.step, 0)
    error = broken(after(without(program, Free(conv)), Run(0), Free(conv)), Rule.READ, "it is read but not here")
    assert error.target == "aten.native_batch_norm.default" and error.path == "1" and error.instruction == Run(3)
    assert error.storage == conv and error.storage_bytes == program.step.storage_bytes[conv] == 2 * 4 * 6 * 6 * 4
    assert str(error).startswith(
        f"illegal program at instruction {error.index}, Run(op=3, again=False) of aten.native_batch_norm.default in "
        f"module '1', storage {conv} of 1152 bytes: it is read but not here. Rule READ: "
    )
    assert isinstance(error, MemfitError)


def test_what_a_result_looks_at_is_here_even_if_no_operand_does() -> None:
    step = step_of("net")
    view, pooled = op_of(step, "view"), made_by(step, op_of(step, "max_pool2d_with_indices"))
    value = step.values[step.ops[view].args[0].value]
    ops = list(step.ops)
    ops[view] = replace(ops[view], args=(Ghost(value.shape, value.stride, value.dtype, "cpu"), *ops[view].args[1:]))
    program = before(keep(replace(step, ops=tuple(ops))), Run(view), Free(pooled))
    error = broken(program, Rule.READ, "it is read but not here")
    assert error.instruction == Run(view) and error.storage == pooled


def test_what_is_away_or_on_its_way_is_not_read() -> None:
    program = net_offloaded()
    storage = made_by(program.step, 0)
    wait = without(program, FetchWait(storage))
    broken(wait, Rule.READ, "it is read before it has arrived")
    broken(without(wait, FetchStart(storage, "ram")), Rule.READ, "it is read but is in 'ram'")
    reader = Run(program.step.storage[storage].first_backward)
    broken(after(wait, reader, FetchWait(storage)), Rule.READ, "it is read before it has arrived")


def test_a_tangent_is_not_read_by_the_forward_half() -> None:
    program = keep(step_of("net"))
    tangent = source_of(program.step, "tangent_0")
    broken(before(program, Boundary(), Free(tangent)), Rule.FREE, "it is freed but not here")


def test_an_op_does_not_write_twice() -> None:
    step = step_of("net")
    relu = op_of(step, "relu_")
    broken(after(keep(step), Boundary(), Run(relu, again=True)), Rule.VERSION, "written 2 times, in the step 1 times")


def test_a_rerun_goes_through_every_write() -> None:
    step = step_of("net")
    norm, relu = (Run(op_of(step, name), again=True) for name in ("native_batch_norm", "relu_"))
    broken(without(net_recomputed(), relu), Rule.VERSION, "written 1 times, in the step 2 times")
    swap = without(net_recomputed(), norm)
    broken(after(swap, relu, norm), Rule.READ, "it is read but not here")
    step = step_of("chain")
    add, sigmoid = (Run(op_of(step, name), again=True) for name in ("add_", "sigmoid_"))
    broken(without(chain_recomputed(), add), Rule.VERSION, "written 1 times, in the step 2 times")
    broken(after(without(chain_recomputed(), add), sigmoid, add), Rule.VERSION, "written 1 times")
    broken(after(chain_recomputed(), sigmoid, sigmoid), Rule.VERSION, "written 3 times, in the step 2 times")


def test_a_rerun_does_not_read_what_was_overwritten_since() -> None:
    step = step_of("net")
    conv, norm = op_of(step, "convolution"), op_of(step, "native_batch_norm")
    assert check(after(keep(step), Boundary(), Run(conv, again=True))).num_reruns == 1
    pool = op_of(step, "max_pool2d_with_indices")
    early = after(net_recomputed(), Run(norm, again=True), Run(pool, again=True))
    broken(early, Rule.VERSION, "written 1 times, in the step 2 times")


def test_a_fetch_brings_back_the_version_that_was_sent() -> None:
    step = step_of("net")
    norm, relu = op_of(step, "native_batch_norm"), op_of(step, "relu_")
    storage = made_by(step, norm)
    trip = SendStart(storage, "ram"), SendWait(storage), FetchStart(storage, "ram"), FetchWait(storage)
    assert check(after(keep(step), Run(norm), *trip)).num_sends == 1
    # Sent before the write, made again, freed, and fetched: the copy is the old version.
    program = net_recomputed()
    program = after(program, Run(norm, again=True), SendStart(storage, "ram"), SendWait(storage), Run(norm, again=True))
    program = after(program, Run(relu, again=True), Free(storage), FetchStart(storage, "ram"), FetchWait(storage))
    broken(program, Rule.VERSION, "written 1 times, in the step 2 times")


# --- running again ---------------------------------------------------------------------------------------------------


def test_only_forward_ops_run_again_and_only_after_the_boundary() -> None:
    program = keep(step_of("net"))
    end = len(program.instructions)
    broken(after(program, Run(0), Run(0, again=True)), Rule.RERUN, "an op is run again before the boundary")
    mm = op_of(program.step, "mm", Half.BACKWARD)
    broken(after(program, Run(mm), Run(mm, again=True)), Rule.RERUN, "a backward op is run again")
    broken(insert(program, end, Run(99, again=True)), Rule.RERUN, f"the step has {len(program.step.ops)} ops")


def test_random_ops_run_once() -> None:
    step = step_of("tied")
    draw, empty = op_of(step, "bernoulli_"), op_of(step, "empty_like")
    broken(after(keep(step), Boundary(), Run(draw, again=True)), Rule.RERUN, "a random op is run again")
    mask = made_by(step, empty)
    scale = op_of(step, "div_")
    broken(recompute(keep(step), mask, scale), Rule.READ, "it is read but not here")


def test_a_source_is_written_once() -> None:
    step = step_of("net")
    count = op_of(step, "add_")
    error = broken(after(keep(step), Boundary(), Run(count, again=True)), Rule.RERUN, "would be written once more")
    assert "'1.num_batches_tracked'" in str(error) and error.storage_bytes == 8
    step = step_of("written input")
    double = op_of(step, "mul_")
    broken(after(keep(step), Boundary(), Run(double, again=True)), Rule.RERUN, "'input_0' would be written once more")


def test_an_op_that_read_a_source_before_it_was_written_cannot_run_again() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = x + m.w
        x.mul_(2)
        return y.sin()

    step = memfit.capture(seeded(lambda: Apply(body, w=(6,))), (torch.randn(ROWS),))
    total = op_of(step, "add")
    broken(after(keep(step), Boundary(), Run(total, again=True)), Rule.VERSION, "written 1 times, in the step 0 times")


def test_batch_norm_runs_again_without_its_statistics() -> None:
    # The statistics have been moved by then: reading them would be a version too late, writing them one too many.
    step = step_of("net")
    norm = op_of(step, "native_batch_norm")
    assert {source_of(step, "1.running_mean"), source_of(step, "1.running_var")} == set(step.ops[norm].writes)
    assert check(net_recomputed()).num_reruns == 2


@pytest.mark.parametrize(
    "form", ["_native_batch_norm_legit", "cudnn_batch_norm", "_batch_norm_with_update", "keywords"]
)
def test_every_form_of_batch_norm_runs_again_without_its_statistics(form: str) -> None:
    program = net_recomputed()
    norm = op_of(program.step, "native_batch_norm")
    op = program.step.ops[norm]
    target = op.target if form == "keywords" else f"aten.{form}.default"
    args, kwargs = op.args, op.kwargs
    if form == "keywords":
        args, kwargs = (), tuple(normalised(target, args, kwargs).items())
    elif form == "_batch_norm_with_update":
        args = args[:5] + args[6:]  # it has no flag, it always trains
    ops = list(program.step.ops)
    ops[norm] = replace(op, target=target, args=args, kwargs=kwargs)
    assert check(Program(replace(program.step, ops=tuple(ops)), program.instructions)).num_reruns == 2
    # Any other op that writes a source is refused, whatever its arguments are called.
    ops[norm] = replace(op, target="aten.batch_norm_gather_stats_with_counts.default")
    other = Program(replace(program.step, ops=tuple(ops)), program.instructions)
    broken(other, Rule.RERUN, "would be written once more")


def test_batch_norm_in_evaluation_reads_its_statistics() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = F.batch_norm(x, m.mean, m.var)
        m.mean.add_(1)
        return y * m.w

    model = seeded(lambda: Apply(body, w=(6,), mean=torch.zeros(6), var=torch.ones(6)))
    step = memfit.capture(model, (torch.randn(ROWS),))
    norm = Run(op_of(step, "native_batch_norm"), again=True)
    error = broken(after(keep(step), Boundary(), norm), Rule.VERSION, "written 1 times, in the step 0 times")
    assert error.storage == source_of(step, "mean")


# --- frees -----------------------------------------------------------------------------------------------------------


def test_only_the_steps_own_storages_are_freed() -> None:
    program = keep(step_of("net"))
    step = program.step
    end = len(program.instructions)

    def freed(storage: int) -> Program:
        return insert(program, end, Free(storage))

    broken(freed(source_of(step, "0.weight")), Rule.FREE, "'0.weight' is freed, a source")
    broken(freed(source_of(step, "input_0")), Rule.FREE, "'input_0' is freed, a source")
    broken(freed(step.values[step.outputs[0]].storage), Rule.FREE, "an output is freed")
    broken(freed(step.values[step.gradients[0].value].storage), Rule.FREE, "a gradient is freed that autograd keeps")
    broken(freed(999), Rule.FREE, f"the step has {len(step.storage_bytes)} storages")
    broken(freed(-1), Rule.FREE, f"the step has {len(step.storage_bytes)} storages")


def test_a_storage_is_freed_once_in_each_life() -> None:
    program = keep(step_of("net"))
    conv = made_by(program.step, 0)
    error = broken(after(program, Free(conv), Free(conv)), Rule.FREE, "it is freed but not here")
    assert error.target == "aten.convolution.default" and error.path == "0"
    broken(insert(program, 0, Free(conv)), Rule.FREE, "it is freed but not here")


def test_what_travels_is_not_freed() -> None:
    program = net_offloaded()
    storage = made_by(program.step, 0)
    sent = after(program, SendStart(storage, "ram"), Free(storage))
    broken(sent, Rule.FREE, "it is freed while it is being sent to 'ram'")
    fetched = after(program, FetchStart(storage, "ram"), Free(storage))
    broken(fetched, Rule.FREE, "it is freed before it has arrived")


def test_a_later_part_of_a_gradient_is_given_before_it_is_freed() -> None:
    step = step_of("tied")
    program = keep(step)
    (part,) = [g for g in step.gradients if g not in step.first_parts]
    storage = step.values[part.value].storage
    index = step.gradients.index(part)
    assert Free(storage) in program.instructions
    early = before(without(program, Free(storage)), Give(index), Free(storage))
    broken(early, Rule.FREE, f"it is freed before gradient {index}, which looks at it, is given")


# --- sends and fetches -----------------------------------------------------------------------------------------------


def test_only_what_the_forward_half_made_is_sent() -> None:
    program = keep(step_of("net"))
    step = program.step
    mm = op_of(step, "mm", Half.BACKWARD)

    def sent(storage: int, anchor: Instruction | None = None) -> Program:
        return after(program, anchor or Boundary(), SendStart(storage, "ram"), SendWait(storage))

    broken(sent(source_of(step, "0.weight")), Rule.SEND, "'0.weight' is sent, a source")
    broken(sent(source_of(step, "tangent_0")), Rule.SEND, "'tangent_0' is sent, a source")
    broken(sent(step.values[step.outputs[0]].storage), Rule.SEND, "an output is sent")
    gradient = step.values[step.gradients[0].value].storage
    broken(sent(gradient, Give(0)), Rule.SEND, "a gradient is sent")
    broken(sent(made_by(step, mm), Run(mm)), Rule.SEND, "the forward half does not make it")
    broken(sent(999), Rule.SEND, "storages")
    empty = made_by(step, op_of(step, "empty"))
    broken(sent(empty), Rule.SEND, "it is sent but not here")


def test_a_send_is_started_once_and_waited_for_once() -> None:
    program = net_offloaded()
    storage = made_by(program.step, 0)
    start, wait = SendStart(storage, "ram"), SendWait(storage)
    broken(after(program, start, SendStart(storage, "disk")), Rule.SEND, "it is being sent to 'ram' already")
    broken(after(program, wait, wait), Rule.SEND, "its send is waited for, but none is under way")
    broken(without(program, start), Rule.SEND, "its send is waited for, but none is under way")
    arriving = after(program, FetchStart(storage, "ram"), start)
    broken(arriving, Rule.SEND, "it is sent before it has arrived")
    again = after(program, Boundary(), Run(0, again=True), start)
    broken(again, Rule.SEND, "'ram' holds a copy of it already")


def test_what_is_being_sent_is_not_written() -> None:
    step = step_of("net")
    norm = op_of(step, "native_batch_norm")
    storage = made_by(step, norm)
    program = after(keep(step), Run(norm), SendStart(storage, "ram"))
    broken(program, Rule.SEND, "it is written while it is being sent to 'ram'")


def test_a_fetch_finds_a_complete_copy_and_room() -> None:
    program = net_offloaded()
    storage = made_by(program.step, 0)
    start, wait = FetchStart(storage, "ram"), FetchWait(storage)
    broken(after(program, start, start), Rule.FETCH, "it is fetched but here")
    elsewhere = FetchStart(storage, "disk")
    broken(before(program, SendWait(storage), elsewhere), Rule.FETCH, "it is fetched but here")
    other = after(without(program, start), Boundary(), FetchStart(storage, "disk"))
    broken(other, Rule.FETCH, "it is fetched, but 'disk' holds no copy of it")
    twice = after(program, wait, Free(storage), start)
    broken(twice, Rule.FETCH, "it is fetched, but 'ram' holds no copy of it")
    broken(after(program, wait, wait), Rule.FETCH, "its fetch is waited for, but none is under way")
    broken(without(program, start), Rule.FETCH, "its fetch is waited for, but none is under way")


def test_what_is_being_sent_can_be_taken_back() -> None:
    program = net_offloaded()
    storage = made_by(program.step, 0)
    back = without(program, SendWait(storage))
    assert check(back).peak_bytes >= check(program).peak_bytes
    start, wait = FetchStart(storage, "ram"), FetchWait(storage)
    broken(without(back, wait), Rule.READ, "it is read before it has arrived")
    broken(without(back, start), Rule.FETCH, "its fetch is waited for, but none is under way")
    broken(after(back, start, SendWait(storage)), Rule.SEND, "its send is waited for, but none is under way")


# --- gradients -------------------------------------------------------------------------------------------------------


def test_gradients_are_given_once_in_order() -> None:
    program = keep(step_of("net"))
    end = len(program.instructions)
    broken(before(program, Boundary(), Give(0)), Rule.GIVE, "a gradient is given before the boundary")
    broken(after(program, Boundary(), Give(1)), Rule.GIVE, "gradient 0 comes first")
    broken(after(program, Give(0), Give(0)), Rule.GIVE, "the gradient is given already")
    broken(without(program, Give(0)), Rule.GIVE, "gradient 0 comes first")
    broken(without(program, Give(5)), Rule.GIVE, "gradient 5 is not given")
    broken(insert(program, end, Give(6)), Rule.GIVE, "the step has 6 gradients")
    early = after(without(program, Give(0)), Boundary(), Give(0))
    broken(early, Rule.GIVE, "the gradient is given but not here")


def test_a_gradient_is_complete_when_it_is_given() -> None:
    step = rewrite(memfit.capture(seeded(lambda: Apply(lambda m, x: x * m.w.exp(), w=(6,))), (torch.randn(ROWS),)))
    (gradient,) = step.gradients
    (write,) = step.storage[step.values[gradient.value].storage].writers
    assert step.ops[write].half is Half.BACKWARD
    early = before(without(keep(step), Give(0)), Run(write), Give(0))
    broken(early, Rule.GIVE, "the gradient is given after 1 of 2 writes")


def test_a_source_is_not_read_after_its_last_gradient() -> None:
    program = keep(step_of("net"))
    step = program.step
    weight = next(i for i, g in enumerate(step.gradients) if step.source_of[g.of].name == "5.weight")
    again = after(program, Give(weight), Run(op_of(step, "t"), again=True))
    error = broken(again, Rule.GIVEN, "'5.weight' is read after its last gradient is given")
    assert error.target == "aten.t.default" and error.path == "5"
    assert check(before(program, Give(weight), Run(op_of(step, "t"), again=True))).num_reruns == 1


def test_a_tied_source_is_read_until_its_last_part() -> None:
    step = step_of("tied")
    names = [step.source_of[g.of].name for g in step.gradients]
    first, last = (i for i, name in enumerate(names) if name == "w")
    transpose = Run(op_of(step, "t"), again=True)
    program = keep(step)
    assert program.instructions.index(Give(first)) < program.instructions.index(Give(last))
    assert check(after(program, Give(first), transpose)).num_reruns == 1
    broken(after(program, Give(last), transpose), Rule.GIVEN, "'w' is read after its last gradient is given")


# --- the end ---------------------------------------------------------------------------------------------------------


def test_nothing_is_left_over() -> None:
    program = keep(step_of("net"))
    conv, tangent = made_by(program.step, 0), source_of(program.step, "tangent_0")
    error = broken(without(program, Free(conv)), Rule.END, "it is left over")
    assert error.index == len(program.instructions) - 1 and error.instruction is None
    assert str(error).startswith(f"illegal program at the end, storage {conv} of 1152 bytes made by aten.convolution")
    assert broken(without(program, Free(tangent)), Rule.END, "it is left over").storage == tangent
    again = insert(program, len(program.instructions), Run(op_of(program.step, "empty"), again=True))
    broken(again, Rule.END, "it is left over")


def test_nothing_is_left_in_a_tier_or_on_its_way() -> None:
    program = net_offloaded()
    storage = made_by(program.step, 0)
    end = len(program.instructions)
    last = [i for i in program.instructions if i == Free(storage)]
    unsent = without(program, SendWait(storage), FetchStart(storage, "ram"), FetchWait(storage), *last)
    broken(unsent, Rule.END, "its send to 'ram' is never waited for")
    once_more = SendStart(storage, "disk"), SendWait(storage)
    left = before(without(program, Free(storage)), program.instructions[-1], *once_more)
    broken(left, Rule.END, "its copy is left in 'disk'")
    broken(insert(left, end + 1, FetchStart(storage, "disk")), Rule.END, "its fetch is never waited for")
