"""Let batch norm be run again from the statistics it saved: one pass over its input, where the bits are the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from memfit.capture.rerun_form import RENORMALISE
from memfit.capture.rewrites.draft import Draft
from memfit.capture.rewrites.proof import Proofs, is_testable, layout, same_bits, sample
from memfit.capture.schemas import named_operands
from memfit.capture.step import Half, Op, Ref, Step, Value
from memfit.operators import renormalise

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
    return None not in op.outputs and all(step.values[v].num_elements for v in op.made)


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
    return proofs.holds("batch-norm", signature, lambda: _same_from_statistics(op, operands, eps))


def _same_from_statistics(op: Op, operands: list[Value | None], eps: Any) -> bool:
    """Normalise a random input both ways."""
    input, weight, bias = (None if v is None else sample(v, seed=seed) for seed, v in enumerate(operands))
    assert input is not None
    input.mul_(3.0).add_(1.0)  # statistics like those of a standard normal would hide what is done with them
    out, mean, invstd = torch.ops.aten.native_batch_norm.default(input, weight, bias, None, None, True, 0.1, eps)
    return same_bits(out, renormalise(input, weight, bias, mean, invstd))
