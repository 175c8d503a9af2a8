"""ReLU in front of max-pool: gate the pooled gradient by the pooled output, then scatter it.

    eager:     g -> max_pool backward -> threshold backward by y            y = relu(x), p = max_pool(y)
    rewritten: g -> threshold backward by p -> max_pool backward

The winner of a window is positive exactly if the pooled value is, so both gate the same gradients; p is smaller than y,
and the next layer keeps it anyway, so y is needed by nobody.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from memfit.capture.rewrites.draft import Draft, with_operand
from memfit.capture.rewrites.proof import Proofs, is_testable, layout, same_bits, sample
from memfit.capture.schemas import named_operands
from memfit.capture.step import Op, Ref, Step, Value

_POOL = "aten.max_pool2d_with_indices.default"
_POOL_BACKWARD = "aten.max_pool2d_with_indices_backward.default"
_GATE = "aten.threshold_backward.default"


def swap_relu_and_pool(step: Step, proofs: Proofs) -> Step:
    """Gate before scattering wherever a max-pool reads a ReLU's output."""
    draft = Draft(step)
    pooled = {op.outputs[1]: op for op in step.ops if op.target == _POOL and op.outputs[1] is not None}
    for index, op in enumerate(step.ops):
        if op.target != _POOL_BACKWARD:
            continue
        gate_index = _gate_behind(op, step)
        if gate_index is None:
            continue
        named = named_operands(op)
        gate = step.ops[gate_index]
        forward = pooled.get(named["indices"].value)
        if forward is None or forward.outputs[0] is None or forward.args[0] != named["self"]:
            continue
        y = named["self"].value
        if gate.args[1] != Ref(y) or gate.args[2] != 0 or not _worth_it(y, forward.outputs[0], gate_index, step):
            continue
        grad, p = step.values[named["grad_output"].value], step.values[forward.outputs[0]]
        out = step.values[gate.made[0]]
        if not is_testable(grad, p, out) or grad.stride != p.stride or not p.is_dense:
            continue
        signature = (layout(grad), layout(step.values[y]), repr(op.args[2:7]))
        if not proofs.holds("pool-swap", signature, lambda: _same_swapped(op, grad, step.values[y])):
            continue
        gated = draft.new_value(grad, "gated")
        draft.insert_before(
            index, replace(gate, args=(named["grad_output"], Ref(p.id), gate.args[2]), outputs=(gated.id,))
        )
        draft.ops[index] = replace(with_operand(op, "grad_output", Ref(gated.id)), outputs=gate.outputs)
        draft.ops[gate_index] = None
    return draft.close()


def _gate_behind(op: Op, step: Step) -> int | None:
    """The one op that reads the scattered gradient, if it is a ReLU's backward."""
    scattered = op.made[0]
    readers = step.readers.get(scattered, ())
    given = {gradient.value for gradient in step.gradients} | set(step.outputs)
    if len(readers) != 1 or scattered in given or step.ops[readers[0]].target != _GATE:
        return None
    gate = step.ops[readers[0]]
    return readers[0] if gate.args[0] == Ref(scattered) else None


def _worth_it(y: int, p: int, gate: int, step: Step) -> bool:
    """True if the pooled output is kept for the backward half anyway, or the ReLU's output no longer is."""

    def read_later(value: int, besides: int) -> bool:
        storage = step.values[value].storage
        return any(
            reader >= step.num_forward and reader != besides and step.ops[reader].target != _POOL_BACKWARD
            for other, readers in step.readers.items()
            if step.values[other].storage == storage
            for reader in readers
        )

    return read_later(p, -1) or not read_later(y, gate)


def _same_swapped(op: Op, grad: Value, y: Value) -> bool:
    aten = torch.ops.aten
    kernel, stride, padding, dilation, ceil = op.args[2:7]
    tensor = sample(y, seed=1).relu_()
    # A negative zero and a NaN among the winners must gate alike in both forms.
    tensor.flatten()[:1] = float("nan")
    p, indices = aten.max_pool2d_with_indices(tensor, kernel, stride, padding, dilation, ceil)
    g = sample(grad, seed=2)
    scattered = aten.max_pool2d_with_indices_backward(g, tensor, kernel, stride, padding, dilation, ceil, indices)
    plain = aten.threshold_backward(scattered, tensor, 0)
    del scattered
    gated = aten.threshold_backward(g, p, 0)
    swapped = aten.max_pool2d_with_indices_backward(gated, tensor, kernel, stride, padding, dilation, ceil, indices)
    return same_bits(plain, swapped)
