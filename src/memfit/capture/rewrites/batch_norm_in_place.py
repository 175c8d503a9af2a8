"""Batch norm's backward in place: the gradient of its input is written over that of its result.

Its kernel makes the one while it reads the other, so three maps are there at once: what it saved, and two gradients. In
blocks of channels (operators.py) it is two maps and a block, at the price of copying each block there and back.
"""

from __future__ import annotations

from typing import Any

import torch

from memfit.capture.rewrites.draft import touched_bytes
from memfit.capture.rewrites.inplace import Form, overwrite
from memfit.capture.rewrites.proof import Proofs, is_testable, layout, same_bits, sample
from memfit.capture.schemas import named_operands
from memfit.capture.step import Op, Ref, Step, Value
from memfit.torch_internals import resolve

_TARGET = "aten.native_batch_norm_backward.default"
_IN_PLACE = "memfit_ops.batch_norm_backward_.default"
_WORTH_BYTES = 2 << 20  # three blocks are there at a time, and have nearly as much


def batch_norm_backward_in_place(step: Step, proofs: Proofs, above_bytes: int) -> Step:
    """Overwrite the gradient that a batch norm's backward is given, wherever nobody reads it afterwards.

    Of those only that touch more than so many bytes.
    """
    return overwrite(
        step,
        {_TARGET: Form(_IN_PLACE)},
        lambda op, step: touched_bytes(step, op) > above_bytes and _holds(op, step, proofs),
    )


def _holds(op: Op, step: Step, proofs: Proofs) -> bool:
    named = named_operands(op)
    grad, input = named["grad_out"], named["input"]
    if not isinstance(grad, Ref) or not isinstance(input, Ref) or not named["train"]:
        return False
    values = [step.values[arg.value] for arg in named.values() if isinstance(arg, Ref)]
    maps = [step.values[grad.value], step.values[input.value]]
    if not is_testable(*values) or not all(map(_is_contiguous, maps)) or maps[0].bytes <= _WORTH_BYTES:
        return False
    signature = tuple(layout(step.values[a.value]) if isinstance(a, Ref) else repr(a) for a in named.values())
    return proofs.holds("batch-norm in place", signature, lambda: _same_in_place(named, step))


def _is_contiguous(value: Value) -> bool:
    """Channels first: where they come last the kernel adds up many at a time, otherwise for blocks than for all."""
    expected = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return value.offset == 0


def _same_in_place(named: dict[str, Any], step: Step) -> bool:
    """Run both on random operands, as far as they are like those of a batch norm."""

    def operand(name: str, seed: int) -> Any:
        arg = named[name]
        if not isinstance(arg, Ref):
            return arg
        tensor = sample(step.values[arg.value], seed=seed)
        if name == "save_invstd":
            return tensor.abs_().add_(0.1)
        # Statistics like those of a standard normal would hide what is done with them.
        return tensor.mul_(3.0).add_(1.0) if name == "input" else tensor

    operands = [operand(name, seed) for seed, name in enumerate(named)]
    plain = resolve(_TARGET)(*operands)
    grad: torch.Tensor = operands[0]
    written = resolve(_IN_PLACE)(*operands)
    return bool(written[0].data_ptr() == grad.data_ptr()) and same_bits(plain, written)
