"""The gradient of the logits over their log-probabilities: cross entropy's backward in one op, in place.

As two ops it makes the gradient of the log-probabilities, which is nearly all zeros and as large as they are, and then
that of the logits from both. In blocks of rows (operators.py) only a block of the first is there at a time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from memfit.capture.rewrites.draft import Draft, touched_bytes
from memfit.capture.rewrites.proof import Proofs, is_testable, layout, same_bits, sample
from memfit.capture.schemas import named_operands
from memfit.capture.step import Ghost, Op, Ref, Step, Value
from memfit.torch_internals import resolve

_LOSS = "aten.nll_loss_backward.default"
_SOFTMAX = "aten._log_softmax_backward_data.default"
_SOFTMAX_IN_PLACE = "aten._log_softmax_backward_data.out"
_FUSED = "memfit_ops.nll_loss_log_softmax_backward_.default"
_NUM_ROWS = 67  # enough to have blocks of several lengths at any width


def loss_backward_in_place(step: Step, proofs: Proofs, above_bytes: int) -> Step:
    """Make one op of the two behind a cross entropy, wherever nobody reads the log-probabilities afterwards.

    Of those only that touch more than so many bytes.
    """
    draft = Draft(step)
    last_touch: dict[int, int] = {}
    for index, op in enumerate(step.ops):
        for value in (*op.reads(), *op.made):
            last_touch[step.values[value].storage] = index
    merged: dict[int, int] = {}
    for index, op in enumerate(step.ops):
        if op.target not in (_SOFTMAX, _SOFTMAX_IN_PLACE):
            continue
        found = _loss_before(step, index)
        if found is None or touched_bytes(step, op) <= above_bytes:
            continue
        loss = step.ops[found]
        named = named_operands(op)
        probabilities = step.values[named["output"].value]
        result = step.values[op.made[0]]
        storage = probabilities.storage
        if (
            storage in step.kept
            or result.storage in step.kept
            or last_touch[storage] != index
            or _is_overwritten(step, found, index)
            or not _is_whole(probabilities, step.storage_bytes[storage])
            or (result.shape, result.stride, result.dtype)
            != (probabilities.shape, probabilities.stride, probabilities.dtype)
            or result.offset != 0
            or not _holds(loss, op, step, proofs)
        ):
            continue
        from_loss = named_operands(loss)
        args = (
            from_loss["grad_output"],
            Ref(probabilities.id),
            *(from_loss[name] for name in ("target", "weight", "reduction", "ignore_index", "total_weight")),
            named["input_dtype"],
        )
        draft.ops[index] = replace(op, target=_FUSED, args=args, kwargs=(), writes=(storage,))
        draft.ops[found] = None
        merged[result.storage] = storage
    draft.merge_storages(merged)
    return draft.close()


def _loss_before(step: Step, index: int) -> int | None:
    """The loss's backward whose result this op alone reads, if it is one and of the same log-probabilities."""
    op = step.ops[index]
    named = named_operands(op)
    grad, output = named["grad_output"], named["output"]
    if not isinstance(grad, Ref) or not isinstance(output, Ref):
        return None
    rank = len(step.values[output.value].shape)
    maker = step.maker_of.get(grad.value)
    if maker is None or step.ops[maker].target != _LOSS or rank != 2 or named["dim"] % rank != 1:
        return None
    storage = step.values[grad.value].storage
    touching = {i for v in step.storage[storage].values for i in step.readers.get(v, ()) if v != op.made[0]}
    # Written in place, what it makes is in that storage too, and has readers of its own after it.
    is_alone = step.readers[grad.value] == (index,) and min(touching, default=index) == index
    seen = named_operands(step.ops[maker])["self"]
    shape = step.values[seen.value].shape if isinstance(seen, Ref) else seen.shape if isinstance(seen, Ghost) else None
    given = {gradient.value for gradient in step.gradients} | set(step.outputs)
    return maker if is_alone and grad.value not in given and shape == step.values[output.value].shape else None


def _is_overwritten(step: Step, loss: int, index: int) -> bool:
    """True if something that the loss's backward reads is written before the op that would read it in its place."""
    read = {step.values[v].storage for v in step.ops[loss].reads()}
    return any(read & set(op.writes) for op in step.ops[loss + 1 : index])


def _is_whole(value: Value, storage_bytes: int) -> bool:
    """True if its rows fill the storage, one after the other."""
    rows, columns = value.shape
    return value.stride == (columns, 1) and value.offset == 0 and value.bytes == storage_bytes and rows * columns > 0


def _holds(loss: Op, op: Op, step: Step, proofs: Proofs) -> bool:
    """Test at full width, with few rows: each is computed by itself."""
    from_loss, named = named_operands(loss), named_operands(op)
    operands = {name: step.values[a.value] for name, a in from_loss.items() if isinstance(a, Ref)}
    probabilities = step.values[named["output"].value]
    floats = [value for name, value in operands.items() if name != "target"]
    if "target" not in operands or not is_testable(probabilities, *floats):
        return False
    rows, columns = min(probabilities.shape[0], _NUM_ROWS), probabilities.shape[1]
    few = replace(probabilities, shape=(rows, columns), stride=(columns, 1))
    signature = (
        layout(few),
        *(layout(replace(v, shape=v.shape[1:], stride=v.stride[1:])) for v in floats),
        *(repr(from_loss[name]) for name in ("reduction", "ignore_index")),
        repr(named["input_dtype"]),
    )
    return proofs.holds("loss in place", signature, lambda: _same_fused(few, from_loss, operands, named["input_dtype"]))


def _same_fused(few: Value, from_loss: dict[str, Any], operands: dict[str, Value], dtype: torch.dtype) -> bool:
    """Both forms on random logits; one label in seven is one to be left out."""
    rows, columns = few.shape
    probabilities = sample(few, seed=1).float().log_softmax(1).to(few.dtype)
    target = torch.randint(columns, (rows,), generator=torch.Generator().manual_seed(2))
    reduction, ignored = from_loss["reduction"], from_loss["ignore_index"]
    target[::7] = ignored
    weight = sample(operands["weight"], seed=3).abs_() if "weight" in operands else None
    given = operands["grad_output"]
    grad = sample(replace(given, shape=(rows,), stride=(1,)) if given.shape else given, seed=4)
    total = torch.tensor(17.3, dtype=operands["total_weight"].dtype)
    dense = resolve(_LOSS)(grad, probabilities, target, weight, reduction, ignored, total)
    plain = resolve(_SOFTMAX)(dense, probabilities, 1, dtype)
    written = resolve(_FUSED)(grad, probabilities, target, weight, reduction, ignored, total, dtype)
    return bool(written.data_ptr() == probabilities.data_ptr()) and same_bits(plain, written)
