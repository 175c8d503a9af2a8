"""Which results are made in the memory of what was freed just before, or of what they are made from.

Nothing may come to be in between, not even a sum of gradients: so a step holds no more than without. To leave memory
for longer, as long as a plan has room for it, was tried and dropped: malloc's heap has gaps, and a step in which there
is room nowhere needs more than its plan says.

Only results that kernels of ours make can be told where to be, and only what was certainly made for itself leaves its
memory: not what a caller has, a tier is busy with, or a batch norm's backward may have overwritten with its result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from memfit.capture.rerun_form import RENORMALISE, rerun_form
from memfit.capture.schemas import named_operands
from memfit.capture.step import Op, Ref, Step
from memfit.plan.program import Boundary, FetchStart, Free, Give, Program, Run, SendStart
from memfit.run.neighbours import BATCH_NORM, BATCH_NORM_BACKWARD, GATE, RELU, is_behind_concatenation
from memfit.stand_ins import CONVOLUTIONS, COUNT_UP, STAND_INS

LEAST_BYTES = 1 << 20
"""Less is memory that malloc keeps."""

_CONVOLUTION, _GRADIENTS = "memfit_ops.convolution.", "memfit_ops.convolution_backward."
_OURS = frozenset({"memfit.decode", "memfit.max_pool_backward"})
_POOLS = frozenset(STAND_INS[f"aten.{name}.default"] for name in ("max_pool2d_with_indices", "avg_pool2d"))


@dataclass(frozen=True)
class Heirs:
    """Who takes whose memory.

    Attributes:
        of: by the number of the instruction that frees a storage, that of the op whose result takes its memory.
        in_place: the numbers of the batch norms whose result takes the place of their input, which goes with them.
    """

    of: Mapping[int, int] = field(default_factory=dict)
    in_place: frozenset[int] = frozenset()

    @classmethod
    def found_in(cls, program: Program) -> Heirs:
        """Those of a program."""
        leaving = _leaving(program)
        in_place = frozenset(_in_place(program, leaving))
        return cls(_matched(program, leaving, in_place), in_place)


def _matched(program: Program, leaving: set[int], in_place: frozenset[int]) -> dict[int, int]:
    step = program.step
    left: defaultdict[int, list[int]] = defaultdict(list)  # by bytes
    found: dict[int, int] = {}
    stays: set[int] = set()  # storages whose memory has another's data in it when they are freed
    for number, instruction in enumerate(program.instructions):
        match instruction:
            case Free(storage) if storage in stays:
                stays.discard(storage)
            case Free(storage) if storage in leaving:
                left[step.storage[storage].bytes].append(number)
            case Run(index, again):
                op = rerun_form(step.ops[index]) if again else step.ops[index]
                if _makes_nothing(op):
                    continue
                if number in in_place:
                    stays.add(_storage_of_input(op, step))
                elif _can_be_told_where(op, index, step):
                    num_bytes = step.storage[step.values[op.made[0]].storage].bytes
                    if freed := left[num_bytes]:
                        found[freed[-1]] = number
                left.clear()
            case Give(gradient) if step.addition_bytes[gradient]:
                left.clear()
            case Boundary() | SendStart() | FetchStart():
                left.clear()
            case _:
                pass
    return found


def _leaving(program: Program) -> set[int]:
    """The storages that leave their memory to others when they are freed."""
    step = program.step
    theirs = {step.values[value].storage for value in (*step.outputs, *(each.value for each in step.gradients))}
    theirs |= {i.storage for i in program.instructions if isinstance(i, SendStart | FetchStart)}
    theirs |= {storage for op in step.ops for storage in _overwritten(op, step)}
    made = {storage.id: storage.maker for storage in step.storages if storage.bytes >= LEAST_BYTES}
    return {
        storage
        for storage, maker in made.items()
        if maker is not None and storage not in theirs and _makes_memory(step.ops[maker])
    }


def _overwritten(op: Op, step: Step) -> list[int]:
    """The gradient that a batch norm's backward of ours may put its result in the place of."""
    if op.stand_in != BATCH_NORM_BACKWARD:
        return []
    grad = named_operands(op)["grad_out"]
    return [step.values[grad.value].storage] if isinstance(grad, Ref) else []


def _in_place(program: Program, leaving: set[int]) -> Iterator[int]:
    """The batch norms of ours that are the last to read their input, whose memory is the step's own."""
    step = program.step
    for number, instruction in enumerate(program.instructions):
        if not isinstance(instruction, Run):
            continue
        op = rerun_form(step.ops[instruction.op]) if instruction.again else step.ops[instruction.op]
        if not _normalises(op) or is_behind_concatenation(op, step):
            continue
        storage, made = _storage_of_input(op, step), step.storage[step.values[op.made[0]].storage]
        is_whole = made.maker == instruction.op and made.bytes == step.storage[storage].bytes
        if storage in leaving and is_whole and storage in _freed_behind(program, number):
            yield number


def _storage_of_input(op: Op, step: Step) -> int:
    """Of a batch norm."""
    return step.values[op.args[0].value].storage


def _freed_behind(program: Program, number: int) -> Iterator[int]:
    for instruction in program.instructions[number + 1 :]:
        if not isinstance(instruction, Free):
            return
        yield instruction.storage


def _makes_nothing(op: Op) -> bool:
    """True of what writes over what is there, and has no need of room for itself."""
    return op.stand_in == COUNT_UP or op.target in (RELU, GATE)


def _normalises(op: Op) -> bool:
    """True of a batch norm of ours by the statistics of the batch, or again by those that it saved."""
    return op.target == RENORMALISE or (op.stand_in == BATCH_NORM and bool(named_operands(op)["training"]))


def _makes_memory(op: Op) -> bool:
    """True if its result is never in the memory of an operand that somebody else still has."""
    return op.target in CONVOLUTIONS or op.target in _OURS or op.stand_in in (BATCH_NORM, BATCH_NORM_BACKWARD, *_POOLS)


def _can_be_told_where(op: Op, index: int, step: Step) -> bool:
    """True if a kernel of ours makes its first result; products of matrices are torch's."""
    if not op.made or op.outputs[0] != op.made[0] or step.storage[step.values[op.made[0]].storage].maker != index:
        return False
    if _normalises(op):
        return not is_behind_concatenation(op, step)
    if op.stand_in in STAND_INS.values():
        return False
    if op.stand_in.startswith(_GRADIENTS):
        return [*named_operands(op)["output_mask"]] == [True, False, False]
    return op.target in _OURS or op.stand_in.startswith(_CONVOLUTION)
