"""Write a result over an operand that dies there, instead of into fresh memory.

Safe if the operand's storage, over all its aliases and both halves, is touched for the last time by this op; if nobody
outside owns it; if operand and result have the same layout and fill the storage; and if no other operand looks at it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit.capture.rewrites.draft import Draft
from memfit.capture.rewrites.proof import Proofs, is_testable, same_bits, sample
from memfit.capture.step import Op, Ref, Step, Value
from memfit.torch_internals import resolve

_UNDERSCORED = (
    "add.Tensor add.Scalar sub.Tensor sub.Scalar mul.Tensor mul.Scalar div.Tensor div.Scalar neg.default relu.default "
    "tanh.default sigmoid.default gelu.default silu.default hardtanh.default leaky_relu.default elu.default "
    "hardswish.default clamp.default clamp_min.default exp.default sqrt.default rsqrt.default masked_fill.Scalar"
)
_GRAD_INPUT = (
    "threshold_backward hardtanh_backward leaky_relu_backward gelu_backward silu_backward sigmoid_backward "
    "tanh_backward elu_backward"
)


@dataclass(frozen=True)
class Form:
    """The in-place form of an op: its name, and the keyword the overwritten operand is passed as once more."""

    target: str
    keyword: str | None = None


_FORMS: dict[str, Form] = {}
for _entry in _UNDERSCORED.split():
    _base, _overload = _entry.split(".")
    _FORMS[f"aten.{_entry}"] = Form(f"aten.{_base}_.{_overload}")
for _entry in _GRAD_INPUT.split():
    _FORMS[f"aten.{_entry}.default"] = Form(f"aten.{_entry}.grad_input", "grad_input")
_SOFTMAX_FORMS = {
    "aten._log_softmax.default": Form("aten._log_softmax.out", "out"),
    "aten._softmax.default": Form("aten._softmax.out", "out"),
    "aten._log_softmax_backward_data.default": Form("aten._log_softmax_backward_data.out", "out"),
    "aten._softmax_backward_data.default": Form("aten._softmax_backward_data.out", "grad_input"),
}


def reuse_operands(step: Step, proofs: Proofs) -> Step:
    """Overwrite dying operands of elementwise ops."""
    return overwrite(step, _FORMS, lambda op, step: _elementwise_holds(op, step, proofs))


def softmax_in_place(step: Step, proofs: Proofs) -> Step:
    """Overwrite the logits with their (log-)softmax, and its tangent with the gradient of the logits."""
    return overwrite(step, _SOFTMAX_FORMS, lambda op, step: _softmax_holds(op, step, proofs))


def overwrite(step: Step, forms: dict[str, Form], holds: Callable[[Op, Step], bool]) -> Step:
    """Write the first result of such ops over their first operand wherever it dies there and the form holds."""
    draft = Draft(step)
    last_touch: dict[int, int] = {}
    for index, op in enumerate(step.ops):
        for value in (*op.reads(), *op.made):
            last_touch[step.values[value].storage] = index
    owned_outside = set(step.kept)
    merged: dict[int, int] = {}

    def final(storage: int) -> int:
        while storage in merged:
            storage = merged[storage]
        return storage

    def storage_of(value: int) -> int:
        return final(step.values[value].storage)

    for index, op in enumerate(step.ops):
        form = forms.get(op.target)
        if form is None or op.writes or not isinstance(op.args[0], Ref):
            continue
        operand, result = step.values[op.args[0].value], step.values[op.made[0]]
        storage = storage_of(operand.id)
        if (
            storage in owned_outside
            or last_touch[storage] != index
            or not _same_layout(operand, result, step.storage_bytes[step.values[operand.id].storage])
            or any(storage_of(v) == storage for v in op.reads() if v != operand.id)
            or list(op.reads()).count(operand.id) != 1
            or not holds(op, step)
        ):
            continue
        extra = ((form.keyword, Ref(operand.id)),) if form.keyword else ()
        draft.ops[index] = replace(op, target=form.target, kwargs=(*op.kwargs, *extra), writes=(storage,), stand_in="")
        if storage_of(result.id) in owned_outside:
            owned_outside.add(storage)
        last_touch[storage] = last_touch[storage_of(result.id)]
        merged[storage_of(result.id)] = storage
    draft.merge_storages({old: final(old) for old in merged})
    return draft.close()


def _same_layout(operand: Value, result: Value, storage_bytes: int) -> bool:
    return (
        operand.shape == result.shape
        and operand.stride == result.stride
        and operand.dtype == result.dtype
        and operand.device == result.device
        and operand.is_dense
        and operand.offset == 0
        and operand.bytes == storage_bytes
    )


def _elementwise_holds(op: Op, step: Step, proofs: Proofs) -> bool:
    """Test on a tensor of the same rank, order of dimensions and dtype: kernels choose by these, not by size."""
    values = [step.values[v] for v in op.reads()]
    if not all(v.device == "cpu" and (v.dtype.is_floating_point or v.dtype is torch.bool) for v in values):
        return False
    small = {v.id: _small(v) for v in values}
    signature = (
        op.target,
        tuple((s.shape, s.stride, str(s.dtype)) for s in small.values()),
        tuple("value" if isinstance(a, Ref) else repr(a) for _, a in op.operands()),
    )
    return proofs.holds("reinplace", signature, lambda: _same_overwritten(op, _FORMS[op.target], small))


def _softmax_holds(op: Op, step: Step, proofs: Proofs) -> bool:
    """Test at full length along the softmax's dimension, with few rows."""
    values = [step.values[v] for v in op.reads()]
    dim = int(op.args[1] if op.target.count("backward") == 0 else op.args[2])
    rank = len(values[0].shape)
    if dim % rank != rank - 1 or not is_testable(*values) or any(v.stride != values[0].stride for v in values):
        return False
    small = {v.id: _few_rows(v) for v in values}
    if any(v.shape != next(iter(small.values())).shape for v in small.values()):
        return False
    signature = (op.target, tuple((s.shape, str(s.dtype)) for s in small.values()), repr(op.args[1:]))
    return proofs.holds("log-softmax", signature, lambda: _same_overwritten(op, _SOFTMAX_FORMS[op.target], small))


def _same_overwritten(op: Op, form: Form, small: dict[int, Value]) -> bool:
    def arguments() -> tuple[list[Any], dict[str, Any]]:
        def tensor(value: Value, seed: int) -> torch.Tensor:
            if value.dtype.is_floating_point:
                return sample(value, seed=seed)
            mask = torch.rand(value.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
            return torch.empty_strided(value.shape, value.stride, dtype=value.dtype).copy_(mask)

        args = [tensor(small[a.value], i) if isinstance(a, Ref) else a for i, a in enumerate(op.args)]
        return args, dict(op.kwargs)

    args, kwargs = arguments()
    plain = resolve(op.target)(*args, **kwargs)
    args, kwargs = arguments()
    if form.keyword:
        kwargs[form.keyword] = args[0]
    written = resolve(form.target)(*args, **kwargs)
    return written.data_ptr() == args[0].data_ptr() and same_bits(plain, written)


def _small(value: Value) -> Value:
    """A value of the same rank and order in memory with about a thousand elements; dimensions of size 1 stay so.

    Large enough that a form which rounds differently is caught, and that vector loops and their tails both run.
    """
    wide = {1: 1031, 2: 37, 3: 13}.get(sum(size > 1 for size in value.shape), 7)
    shape = tuple(size if size <= 1 else wide for size in value.shape)
    order = sorted(range(len(shape)), key=lambda d: (value.stride[d], value.shape[d]))
    stride = [0] * len(shape)
    step = 1
    for dimension in order:
        if value.stride[dimension] == 0 and value.shape[dimension] > 1:
            continue
        stride[dimension] = step
        step *= shape[dimension]
    return replace(value, shape=shape, stride=tuple(stride), offset=0)


def _few_rows(value: Value) -> Value:
    """The value as a few rows of full length."""
    shape = tuple(min(size, 3) for size in value.shape[:-1]) + value.shape[-1:]
    stride = [1] * len(shape)
    for dimension in reversed(range(len(shape) - 1)):
        stride[dimension] = stride[dimension + 1] * shape[dimension + 1]
    return replace(value, shape=shape, stride=tuple(stride), offset=0)
