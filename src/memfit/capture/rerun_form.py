"""The form in which an op is run again in the backward half.

Running it again must make the same bits and change nothing else. Batch norm moves its running statistics when it
trains, so it is run again without them; or, where that was found to make the same bits (rewrites/batch_norm.py), its
result alone is made, from the statistics of the batch that it saved.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memfit.capture.schemas import named_operands
from memfit.capture.step import Op, Ref
from memfit.torch_internals import argument_names

RENORMALISE = "memfit_ops.renormalise.default"
# Training-mode batch norm computes its result from the batch alone; without running statistics it leaves them alone.
_STATISTICS = ("running_mean", "running_var")
BATCH_NORMS = (
    "aten.native_batch_norm.default",
    "aten._native_batch_norm_legit.default",
    "aten.cudnn_batch_norm.default",
    "aten.miopen_batch_norm.default",
)


def rerun_form(op: Op) -> Op:
    """The op as it is run again: batch norm leaves its running statistics alone, everything else is as it is."""
    if op.target not in BATCH_NORMS:
        return op
    named = named_operands(op)
    if op.again:
        return _from_statistics(op, named)
    if not named.get("training"):
        return replace(op, writes=())  # it reads the statistics, and capture takes it to write them
    names = argument_names(op.target)
    args = tuple(None if name in _STATISTICS else arg for name, arg in zip(names, op.args, strict=False))
    kwargs = tuple((name, None if name in _STATISTICS else arg) for name, arg in op.kwargs)
    if op.target == "aten._native_batch_norm_legit.default":
        # Its schema insists on statistics; this is the overload that has none.
        kept = tuple(arg for name, arg in zip(names, op.args, strict=False) if name not in _STATISTICS)
        return replace(
            op,
            target="aten._native_batch_norm_legit.no_stats",
            args=kept,
            kwargs=tuple((name, arg) for name, arg in op.kwargs if name not in _STATISTICS),
            writes=(),
            stand_in="",
        )
    return replace(op, args=args, kwargs=kwargs, writes=())


def _from_statistics(op: Op, named: dict[str, Any]) -> Op:
    """The call that makes a batch norm's first result from its input and its other two."""
    out, mean, invstd = op.outputs
    assert mean is not None and invstd is not None, op
    return replace(
        op,
        target=op.again,
        args=(named["input"], named["weight"], named["bias"], Ref(mean), Ref(invstd)),
        kwargs=(),
        outputs=(out,),
        returns_many=False,
        writes=(),
        stand_in="",
    )
