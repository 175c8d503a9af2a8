"""Ops that follow one another and are done in one pass over memory, where kernels of ours do the one or the other.

A ReLU that overwrites the result of a batch norm of ours is left to the batch norm. The backward of such a ReLU, in
place, does that of the batch norm as well and overwrites the gradient once more, where nobody else reads that. Nothing
is held longer by that; the self-tests of batch norm hold for these forms too. So does the backward of a batch norm by
itself overwrite its gradient where nobody reads that any more: a step holds a map less, and touches less fresh memory.

A concatenation that a batch norm of ours follows on is made in that one's pass, and not at all where nobody else reads
it. What that one makes is there a little sooner: so nothing may be freed between the two.

Additions of ours in place that follow one another, none of which reads what another makes, are made at once. Slices
that divide a tensor, as the backward of a concatenation takes them, are taken by one call.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

from memfit.capture.rerun_form import RENORMALISE
from memfit.capture.schemas import named_operands
from memfit.capture.step import Op, Ref, Step, Value
from memfit.stand_ins import COUNT_UP, STAND_INS

BATCH_NORM = STAND_INS["aten.native_batch_norm.default"]
BATCH_NORM_BACKWARD = STAND_INS["aten.native_batch_norm_backward.default"]
_ADDITION = STAND_INS["aten.add_.Tensor"]
_CAT = "aten.cat.default"
_SLICE = "aten.slice.Tensor"
RELU, GATE = "aten.relu_.default", "aten.threshold_backward.grad_input"


def is_rectified(op: Op, following: Op | None) -> bool:
    """True if the op is a batch norm of ours, and the following one a ReLU of its result, in place."""
    if following is None or (op.stand_in != BATCH_NORM and op.target != RENORMALISE):
        return False
    return following.target == RELU and following.args == (Ref(op.made[0]),)


def normalised_behind(op: Op, following: Op | None, freed: Collection[int], step: Step) -> tuple[Ref, ...] | None:
    """Of a ReLU's backward, in place, that a batch norm's of ours follows on: what else that reads.

    These are its input, weight, mean and deviation. `freed` are the storages that go with that batch norm: what it
    makes takes the place of the gradient, which must be one of them and have as many bytes.
    """
    if op.target != GATE or following is None or following.stand_in != BATCH_NORM_BACKWARD:
        return None
    named = named_operands(following)
    others = tuple(named[name] for name in ("input", "weight", "save_mean", "save_invstd"))
    is_next = named["grad_out"] == Ref(op.made[0]) and op.kwargs == (("grad_input", op.args[0]),)
    is_whole = named["train"] and all(named["output_mask"]) and all(isinstance(other, Ref) for other in others)
    if not is_next or not is_whole:
        return None
    before, after = (step.storage[step.values[value].storage] for value in (op.made[0], following.made[0]))
    return others if before.id in freed and before.bytes == after.bytes else None


def overwrites_gradient(op: Op, freed: Collection[int], step: Step) -> bool:
    """True of a batch norm's backward of ours if what it makes can take the place of the gradient that comes in.

    `freed` are the storages that go with that op. The gradient must be among them, made in the backward half, have as
    many bytes, and never be anybody's but the step's.
    """
    if op.stand_in != BATCH_NORM_BACKWARD:
        return False
    named = named_operands(op)
    if not named["train"] or not all(named["output_mask"]) or not isinstance(named["grad_out"], Ref):
        return False
    before, after = (step.storage[step.values[v].storage] for v in (named["grad_out"].value, op.made[0]))
    handed_out = {step.values[v].storage for v in (*step.outputs, *(each.value for each in step.gradients))}
    is_ours = before.maker is not None and before.maker >= step.num_forward and before.id not in handed_out
    return is_ours and before.id in freed and before.bytes == after.bytes


def additions(ops: Iterable[Op], step: Step) -> list[Op]:
    """The first of these ops, as many as are additions that can be made at once."""
    found: list[Op] = []
    read: set[int] = set()
    written: set[int] = set()
    for op in ops:
        if op.stand_in != _ADDITION or not op.made:  # not a counter's
            break
        into, what = (step.values[value].storage for value in op.reads())
        if into in read | written or what in written:
            break
        read.add(what)
        written.add(into)
        found.append(op)
    return found


def divisions(ops: Iterable[Op], step: Step) -> list[Op]:
    """The first of these ops, if they are slices that lie side by side and together are all of one tensor."""
    found: list[Op] = []
    until = 0
    for op in ops:
        if op.target != _SLICE or op.kwargs or len(op.args) != 4 or not op.made:
            break
        base, dim, begin, end = op.args
        if begin != until or (found and op.args[:2] != found[0].args[:2]):
            break
        found.append(op)
        until, size = end, step.values[base.value].shape[dim]
        if end == size:
            return found
    return []


def joined(op: Op, following: Op | None, step: Step) -> tuple[Any, ...] | None:
    """Of a concatenation of channels that a batch norm of ours follows on: what that is told besides.

    These are its weight, bias and running statistics, in a list, its momentum and what it adds to variances. Both must
    have channels first: of single channels torch may take either layout, and pieces do not say which.
    """
    if op.target != _CAT or following is None or following.stand_in != BATCH_NORM:
        return None
    is_of_channels = len(op.args) == 2 and op.args[1] == 1 and all(isinstance(piece, Ref) for piece in op.args[0])
    named = named_operands(following)
    if not is_of_channels or not named["training"] or named["input"] != Ref(op.made[0]):
        return None
    if not all(_has_channels_first(step.values[each.made[0]]) for each in (op, following)):
        return None
    vectors = [named[name] for name in ("weight", "bias", "running_mean", "running_var")]
    return vectors, named["momentum"], named["eps"]


def is_behind_concatenation(op: Op, step: Step) -> bool:
    """True of a batch norm that may be made in one pass with what it reads."""
    maker = step.maker_of.get(op.args[0].value)
    return maker is not None and step.ops[maker].target == _CAT


def _has_channels_first(value: Value) -> bool:
    expected = tuple(math.prod(value.shape[axis + 1 :]) for axis in range(len(value.shape)))
    return value.stride == expected


def is_counting(op: Op) -> bool:
    """True of what is done between a concatenation and its batch norm, and has nothing to do with either."""
    return op.stand_in == COUNT_UP
