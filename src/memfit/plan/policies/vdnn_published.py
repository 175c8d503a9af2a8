"""The step as vDNN's paper counts it: max-pools read their input and their result in backward, and keep no indices.

ATen's max-pool keeps the places of its winners, 64 bits each, and reads nothing else in backward; cuDNN's of 2016 read
both X and Y. That decides which storages travel, and where the peak is. `as_published` changes only these operands, so
the result can be lowered, simulated and checked like any step. It is for accounts: nothing can run it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memfit.capture.step import Op, Ref, Step, refs_in

_FORWARD = "aten.max_pool2d_with_indices.default"
_BACKWARD = "aten.max_pool2d_with_indices_backward.default"


def as_published(step: Step) -> Step:
    """The step with X and Y in place of the indices of every max-pool. Leave the rewrite `pool-swap` out before."""
    pools = {op.outputs[1]: op for op in step.ops if op.target == _FORWARD}
    ops = []
    for op in step.ops:
        if op.target == _FORWARD:
            op = replace(op, outputs=(op.outputs[0], None))
        elif op.target == _BACKWARD:
            op = _reading_both(op, pools)
        ops.append(op)
    return replace(step, ops=tuple(ops), rewrites=(*step.rewrites, "as-published"))


def _reading_both(op: Op, pools: dict[int | None, Op]) -> Op:
    """A pool's backward that is given X where its shape was enough, and Y where the indices were."""
    *others, indices = op.args
    (index,) = refs_in(indices)
    forward = pools[index]
    assert forward.outputs[0] is not None
    args: list[Any] = [others[0], Ref(next(forward.reads())), *others[2:], Ref(forward.outputs[0])]
    return replace(op, args=tuple(args))
