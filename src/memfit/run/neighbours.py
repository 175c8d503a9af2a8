"""Ops that follow one another and are done in one pass over memory, where kernels of ours do the one or the other.

A ReLU that overwrites the result of a batch norm of ours is left to the batch norm. The backward of such a ReLU, in
place, adds up on its way what the backward of the batch norm has to know. Nothing is held longer or shorter by that,
but for two numbers for each channel; the self-tests of batch norm hold for these forms too.
"""

from __future__ import annotations

from memfit.capture.rerun_form import RENORMALISE
from memfit.capture.schemas import named_operands
from memfit.capture.step import Op, Ref
from memfit.stand_ins import STAND_INS

_BATCH_NORM = STAND_INS["aten.native_batch_norm.default"]
_BATCH_NORM_BACKWARD = STAND_INS["aten.native_batch_norm_backward.default"]
_RELU, _GATE = "aten.relu_.default", "aten.threshold_backward.grad_input"


def is_rectified(op: Op, following: Op | None) -> bool:
    """True if the op is a batch norm of ours, and the following one a ReLU of its result, in place."""
    if following is None or (op.stand_in != _BATCH_NORM and op.target != RENORMALISE):
        return False
    return following.target == _RELU and following.args == (Ref(op.made[0]),)


def to_add_up(op: Op, following: Op | None) -> tuple[Ref, Ref] | None:
    """Of a ReLU's backward, in place, that a batch norm's of ours follows on: the input of that, and its mean."""
    if op.target != _GATE or following is None or following.stand_in != _BATCH_NORM_BACKWARD:
        return None
    named = named_operands(following)
    is_next = named["grad_out"] == Ref(op.made[0]) and op.kwargs == (("grad_input", op.args[0]),)
    return (named["input"], named["save_mean"]) if is_next else None
