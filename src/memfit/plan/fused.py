"""Backward ops that work on a code as it is, so that nothing is decoded for them.

Only where a kernel does it: its twin in torch would decode the whole tensor after all, which no ledger would know of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from memfit.capture.schemas import named_operands
from memfit.capture.step import Ghost, Op, Ref, Value
from memfit.codecs import kernels
from memfit.codecs.codec import Settings
from memfit.codecs.window import is_in_order

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Coded:
    """A storage and its code.

    Attributes:
        value: what was encoded.
        members: all values that look at its storage.
        code: the value that is the code.
    """

    value: Value
    members: frozenset[int]
    code: int
    codec: str
    settings: Settings


def fused(op: Op, coded: Coded, values: Sequence[Value]) -> Op | None:
    """The op on the code in place of the storage that it reads; None if there is no such form.

    `values` are those of the step and of what has been put into it so far.
    """
    name, _, overload = op.target.removeprefix("aten.").partition(".")
    if coded.codec == "mask" and name == "threshold_backward":
        return _threshold_backward(op, coded, values, in_place=overload == "grad_input")
    if coded.codec == "window" and op.target == "aten.max_pool2d_with_indices_backward.default":
        return _max_pool_backward(op, coded, values)
    return None


def _threshold_backward(op: Op, coded: Coded, values: Sequence[Value], *, in_place: bool) -> Op | None:
    """The gradient where the element was above the threshold, else zero: a bit says which."""
    named = named_operands(op)
    gradient, gated = named["grad_output"], named["self"]
    if gradient.value in coded.members or gated.value not in coded.members:
        return None
    # Codes are in the order of memory, so the gradient must be laid out as the tensor was.
    seen, found = values[gated.value], values[gradient.value]
    if seen.offset != 0 or seen.bytes != coded.value.bytes or not seen.is_dense:
        return None
    if (found.shape, found.stride, found.dtype) != (seen.shape, seen.stride, seen.dtype) or found.dtype not in _FLOATS:
        return None
    target = "memfit.threshold_backward_" if in_place else "memfit.threshold_backward"
    args = (gradient, Ref(coded.code), ghost_of(seen), coded.settings, coded.codec)
    return replace(op, target=target, args=args, kwargs=())


def _max_pool_backward(op: Op, coded: Coded, values: Sequence[Value]) -> Op | None:
    """The gradient put where each window's slot says: the indices themselves, eight bytes each, are never made."""
    named = named_operands(op)
    gradient, pooled = named["grad_output"], named["self"]
    found, made = values[gradient.value], values[op.made[0]]
    if (found.shape, found.stride) != (coded.value.shape, coded.value.stride) or gradient.value in coded.members:
        return None
    if isinstance(pooled, Ref):
        pooled = ghost_of(values[pooled.value])
    if (made.shape, made.stride, made.dtype) != (pooled.shape, pooled.stride, found.dtype):
        return None
    if not _has_kernel(found, torch.float32, torch.float64) or _order(found) is None or _order(found) != _order(made):
        return None
    args = (gradient, Ref(coded.code), ghost_of(coded.value), pooled, coded.settings, coded.codec)
    return replace(op, target="memfit.max_pool_backward", args=args, kwargs=())


def ghost_of(value: Value) -> Ghost:
    """A value's layout without its bytes."""
    return Ghost(value.shape, value.stride, value.dtype, value.device)


def _has_kernel(value: Value, *dtypes: torch.dtype) -> bool:
    """True if there are kernels in C for tensors like that."""
    return value.device == "cpu" and value.dtype in dtypes and kernels.can_run(torch.empty(0))


def _order(value: Value) -> str | None:
    """Which of two orders the elements of an image have in memory; None for another one."""
    if is_in_order(value.shape, value.stride, list(range(len(value.shape)))):
        return "contiguous"
    is_last = len(value.shape) == 4 and is_in_order(value.shape, value.stride, [0, 2, 3, 1])
    return "channels last" if is_last else None
