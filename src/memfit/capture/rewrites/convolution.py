"""Convolution backward in two calls: the weight first, which frees the saved input, then the data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memfit.capture.ghosts import make_ghost
from memfit.capture.rewrites.draft import Draft, with_operand
from memfit.capture.rewrites.proof import Proofs, is_testable, layout, same_bits, sample
from memfit.capture.rewrites.shapes import conv_input_may_be_ghost, ghost_of
from memfit.capture.schemas import named_operands
from memfit.capture.step import Ghost, Op, Ref, Step

_TARGET = "aten.convolution_backward.default"
_OPERANDS = ("grad_output", "input", "weight")


def split_convolutions(step: Step, proofs: Proofs) -> Step:
    """Cut each convolution backward that makes both gradients into two calls."""
    draft = Draft(step)
    for index, op in enumerate(step.ops):
        if op.target != _TARGET:
            continue
        named = named_operands(op)
        mask = tuple(named["output_mask"])
        if not (mask[0] and mask[1]) or not all(isinstance(named[name], Ref) for name in _OPERANDS):
            continue
        grad, input, weight = (step.values[named[name].value] for name in _OPERANDS)
        if not is_testable(grad, input, weight) or not conv_input_may_be_ghost(input, weight):
            continue  # the data call would need the input's bytes after all: nothing gained
        data, for_weight, bias = op.outputs
        weight_call = replace(with_operand(op, "output_mask", (False, True, mask[2])), outputs=(None, for_weight, bias))
        data_call = replace(
            with_operand(with_operand(op, "output_mask", (True, False, False)), "input", ghost_of(input)),
            outputs=(data, None, None),
        )
        signature = (layout(grad), layout(input), layout(weight), repr(op.args[3:]), repr(op.kwargs))
        if proofs.holds("conv-split", signature, lambda: _same_split(op, weight_call, data_call, step)):
            draft.insert_before(index, weight_call)
            draft.ops[index] = data_call
    return draft.close()


def _same_split(op: Op, weight_call: Op, data_call: Op, step: Step) -> bool:
    from memfit.torch_internals import resolve

    func = resolve(_TARGET)
    tensors = {
        arg.value: sample(step.values[arg.value], seed=seed) for seed, arg in enumerate(op.args) if isinstance(arg, Ref)
    }

    def call(form: Op) -> Any:
        args = [
            tensors[a.value] if isinstance(a, Ref) else make_ghost(a) if isinstance(a, Ghost) else a for a in form.args
        ]
        return func(*args, **dict(form.kwargs))

    whole = call(op)
    data = call(data_call)[0]
    if not same_bits(whole[0], data):
        return False
    del data
    _, weight, bias = call(weight_call)
    return same_bits(whole[1], weight) and same_bits(whole[2], bias)
