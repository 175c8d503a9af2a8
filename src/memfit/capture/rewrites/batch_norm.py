"""Let batch norm be run again from the statistics it saved: one pass over its input, where the bits are the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from memfit import operators
from memfit.capture.rerun_form import RENORMALISE
from memfit.capture.rewrites.draft import Draft
from memfit.capture.rewrites.proof import Proofs, is_testable, layout, same_bits, sample
from memfit.capture.schemas import named_operands
from memfit.capture.step import Half, Op, Ref, Step, Value

_NUM_DRAWS = 8  # small tensors may agree by luck
_TARGETS = ("aten.native_batch_norm.default", "aten._native_batch_norm_legit.default")


def rebuild_batch_norms(step: Step, proofs: Proofs) -> Step:
    """Mark the batch norms whose result can be made again from the statistics they saved."""
    draft = Draft(step)
    for index, op in enumerate(step.ops):
        if _may_be_rebuilt(op, step) and _holds(op, step, proofs):
            draft.ops[index] = replace(op, again=RENORMALISE)
    return draft.close()


def _may_be_rebuilt(op: Op, step: Step) -> bool:
    if op.target not in _TARGETS or op.half is not Half.FORWARD or not named_operands(op).get("training"):
        return False
    # Without its statistics kept there is nothing to make it from; a step that nobody trains does not keep them.
    if None in op.outputs or not all(step.values[v].num_elements for v in op.made):
        return False
    # In half precision, and where a general loop serves other layouts, the two forms round apart on some data only:
    # no self-test can rule that out.
    input = named_operands(op)["input"]
    return (
        isinstance(input, Ref)
        and step.values[op.made[0]].dtype in (torch.float32, torch.float64)
        and is_laid_out_plainly(step.values[input.value])
    )


def is_laid_out_plainly(value: Value) -> bool:
    """True if it is contiguous, channels first or last."""
    orders: list[Sequence[int]] = [range(len(value.shape))]
    if len(value.shape) > 2:
        orders.append((0, *range(2, len(value.shape)), 1))
    for order in orders:
        expected = 1
        for axis in reversed(order):
            if value.shape[axis] != 1 and value.stride[axis] != expected:
                break
            expected *= value.shape[axis]
        else:
            return True
    return False


def _holds(op: Op, step: Step, proofs: Proofs) -> bool:
    named = named_operands(op)
    operands = [
        step.values[arg.value] if isinstance(arg := named[name], Ref) else None for name in ("input", "weight", "bias")
    ]
    known = [value for value in operands if value is not None]
    eps = named["eps"]
    if not is_testable(*known):
        return False
    signature = (op.target, eps, *(None if value is None else layout(value) for value in operands))
    # Named for the form that was tested: outcomes are kept on disk.
    return proofs.holds(
        "batch-norm by evaluation",
        signature,
        lambda: all(_same_from_statistics(operands, eps, 3 * draw) for draw in range(_NUM_DRAWS)),
    )


def _same_from_statistics(operands: list[Value | None], eps: Any, seed: int) -> bool:
    """Normalise a random input both ways."""
    input, weight, bias = (None if v is None else sample(v, seed=seed + n) for n, v in enumerate(operands))
    assert input is not None
    input.mul_(3.0).add_(1.0)  # statistics like those of a standard normal would hide what is done with them
    if weight is not None:
        weight.add_(weight.eq(0))  # a zero would hide the input
    out, mean, invstd = torch.ops.aten.native_batch_norm.default(input, weight, bias, None, None, True, 0.1, eps)
    vectors = weight, bias, mean, invstd
    made, rectified = (operators.renormalise(input, *vectors, each) for each in (False, True))
    in_place = operators.renormalise(input.clone(), *vectors, in_place=True)
    return same_bits((out, out.relu(), out), (made, rectified, in_place))
