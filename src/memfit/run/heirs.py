"""Which results are made in the memory of what was freed just before.

Nothing may run or come to be in between, not even a sum of gradients: so a step holds no more than without. Only
results that kernels of ours make can be told where to be, and only what was certainly made for itself leaves its
memory: not what a caller has, a tier is busy with, or a batch norm's backward may have overwritten with its result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from memfit.capture.rerun_form import RENORMALISE, rerun_form
from memfit.capture.schemas import named_operands
from memfit.capture.step import Op, Ref, Step
from memfit.plan.program import Boundary, FetchStart, Free, Give, Program, Run, SendStart
from memfit.run.neighbours import BATCH_NORM, BATCH_NORM_BACKWARD
from memfit.stand_ins import STAND_INS

LEAST_BYTES = 1 << 20
"""Less is memory that malloc keeps."""

_CONVOLUTION, _GRADIENTS = "memfit_ops.convolution.", "memfit_ops.convolution_backward."
_OURS = frozenset({"memfit.decode", "memfit.max_pool_backward"})


def heirs(program: Program) -> Mapping[int, int]:
    """By the number of the instruction that frees a storage, that of the op whose result takes its memory."""
    step = program.step
    leaving = _leaving(program)
    left: defaultdict[int, list[int]] = defaultdict(list)  # by bytes
    found: dict[int, int] = {}
    for number, instruction in enumerate(program.instructions):
        match instruction:
            case Free(storage) if storage in leaving:
                left[step.storage[storage].bytes].append(number)
            case Run(index, again):
                op = rerun_form(step.ops[index]) if again else step.ops[index]
                made = {step.values[value].storage for value in op.made}
                made = {storage for storage in made if step.storage[storage].maker == index}
                if len(made) == 1 and _can_be_told_where(op) and (known := left[step.storage[min(made)].bytes]):
                    found[known[-1]] = number
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


def _makes_memory(op: Op) -> bool:
    """True if its result is never in the memory of an operand that somebody else still has."""
    if op.target in _OURS or op.stand_in in (BATCH_NORM, BATCH_NORM_BACKWARD):
        return True
    return op.stand_in.startswith((_CONVOLUTION, _GRADIENTS))


def _can_be_told_where(op: Op) -> bool:
    """True if a kernel of ours makes the result; products of matrices are torch's."""
    if op.stand_in in STAND_INS.values():
        return False
    if op.stand_in.startswith(_GRADIENTS):
        return [*named_operands(op)["output_mask"]] == [True, False, False]
    return op.target in _OURS or op.target == RENORMALISE or op.stand_in.startswith(_CONVOLUTION)
