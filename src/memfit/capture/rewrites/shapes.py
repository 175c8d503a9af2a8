"""Rewrites that take away reads which are none: detach, shapes without bytes, statistics that are not used."""

from __future__ import annotations

from typing import Any

import torch

from memfit.capture.needs import GHOSTABLE, GHOSTABLE_IF_ALIKE, NULLABLE, Need
from memfit.capture.rewrites.draft import Draft, with_operand
from memfit.capture.rewrites.proof import Proofs, is_testable, layout, same_bits, sample
from memfit.capture.schemas import named_operands, visible_needs
from memfit.capture.step import Ghost, Half, Op, Ref, Step, Value

_DETACHES = frozenset({"aten.detach.default", "aten.alias.default"})


def strip_detach(step: Step, proofs: Proofs) -> Step:
    """Read through detach and alias: the same storage under another name."""
    draft = Draft(step)
    same: dict[int, int] = {}
    for index, op in enumerate(step.ops):
        # An output that is a detach stays one: to the caller it is another tensor, without a gradient.
        if op.target in _DETACHES and isinstance(op.args[0], Ref) and op.made[0] not in step.outputs:
            same[op.made[0]] = op.args[0].value
            draft.ops[index] = None
    return draft.close(substitute=same)


def drop_statistics(step: Step, proofs: Proofs) -> Step:
    """Pass None for the statistics a batch-norm backward does not read in its mode."""
    draft = Draft(step)
    for index, op in enumerate(step.ops):
        for name in _shape_operands(op, step, NULLABLE):
            op = with_operand(op, name, None)
        draft.ops[index] = op
    return draft.close()


def ghost_shapes(step: Step, proofs: Proofs) -> Step:
    """Give an operand of which only the shape is read as a tensor without bytes."""
    draft = Draft(step)
    for index, op in enumerate(step.ops):
        if op.half is not Half.BACKWARD:
            continue
        for name in _shape_operands(op, step, GHOSTABLE | GHOSTABLE_IF_ALIKE):
            value = step.values[named_operands(op)[name].value]
            if _may_be_ghost(op, name, value, step) and proofs.holds(
                "shape-only", _signature(op, name, step), lambda: _same_with_ghost(op, name, step)
            ):
                op = with_operand(op, name, ghost_of(value))
        draft.ops[index] = op
    return draft.close()


def ghost_of(value: Value) -> Ghost:
    """The ghost with a value's layout."""
    return Ghost(value.shape, value.stride, value.dtype, value.device)


def conv_input_may_be_ghost(input: Value, weight: Value) -> bool:
    """True where oneDNN's data gradient never touches the input's pointer; elsewhere a ghost kills the process."""
    return (
        input.device == "cpu"
        and input.dtype is torch.float32
        and len(input.shape) == 4
        and _is_contiguous(input) == _is_contiguous(weight)
        and input.is_dense
        and weight.is_dense
    )


def _is_contiguous(value: Value) -> bool:
    expected = 1
    for stride, size in zip(reversed(value.stride), reversed(value.shape), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _shape_operands(op: Op, step: Step, among: frozenset[tuple[str, str]]) -> list[str]:
    """Names of the operands in `among` that this call reads only the shape of."""
    if not any(target == op.target for target, _ in among):
        return []
    named = named_operands(op)
    needs = visible_needs(op, step.values)
    return [
        name
        for name, operand in named.items()
        if isinstance(operand, Ref) and (op.target, name) in among and needs[name] is Need.SHAPE
    ]


def _may_be_ghost(op: Op, name: str, value: Value, step: Step) -> bool:
    if value.device != "cpu" or not value.is_dense:
        return False
    if (op.target, name) in GHOSTABLE_IF_ALIKE:
        weight = named_operands(op)["weight"]
        return isinstance(weight, Ref) and conv_input_may_be_ghost(value, step.values[weight.value])
    return True


def _signature(op: Op, ghost: str, step: Step) -> Any:
    return (
        op.target,
        ghost,
        tuple(layout(step.values[a.value]) if isinstance(a, Ref) else repr(a) for _, a in op.operands()),
    )


def _same_with_ghost(op: Op, ghost: str, step: Step) -> bool:
    """Run the op on random operands with and without bytes behind the shape."""
    from memfit.torch_internals import argument_names, resolve

    func = resolve(op.target)
    args: list[Any] = []
    for number, arg in enumerate(op.args):
        if isinstance(arg, Ref):
            value = step.values[arg.value]
            args.append(_filled(value, number))
        else:
            args.append(arg)
    kwargs = {k: _filled(step.values[v.value], 99) if isinstance(v, Ref) else v for k, v in op.kwargs}
    plain = func(*args, **kwargs)
    position = argument_names(op.target).index(ghost)
    tensor = torch.empty_strided(args[position].shape, args[position].stride(), dtype=args[position].dtype)
    tensor.untyped_storage().resize_(0)
    args[position] = tensor
    return same_bits(plain, func(*args, **kwargs))


def _filled(value: Value, seed: int) -> torch.Tensor:
    """Random floats; integers are zeros, which is an index, a label and a slot wherever one is asked for."""
    if is_testable(value):
        return sample(value, seed=seed)
    return torch.empty_strided(value.shape, value.stride, dtype=value.dtype).zero_()
