"""Convolutions in chunks: other ways to compute an op, which hold less while they run.

Forward, and the gradient of the input, they are cut along the batch; for the gradient of the weights, along channels.

Unlike the rewrites, they are not for free and not always on. Which ones there are for an op, proven bit-equal on this
machine, is said here; what they cost is measured (cost/ways.py); a policy picks one by its name, `chunks:4`, and it is
written into the step that its program runs (plan/encode.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from memfit.capture.ghosts import make_ghost
from memfit.capture.rewrites.proof import Proofs, is_testable, layout, same_bits, sample
from memfit.capture.schemas import named_operands
from memfit.capture.step import Ghost, Op, Ref, Step, Value
from memfit.operators import LEAST_CHANNELS
from memfit.torch_internals import argument_names, resolve

WHOLE = "whole"
"""The name of the way that every op has: the call as it is."""

_PREFIX = "chunks:"
_FORWARD = "aten.convolution.default"
_BACKWARD = "aten.convolution_backward.default"
_IN_CHUNKS = "memfit_ops.convolution_in_chunks.default"
_DATA_IN_CHUNKS = "memfit_ops.convolution_gradient_in_chunks.default"
_WEIGHT_IN_CHUNKS = "memfit_ops.convolution_weight_gradient_in_chunks.default"
_WHOLE_OF = {_IN_CHUNKS: _FORWARD, _DATA_IN_CHUNKS: _BACKWARD, _WEIGHT_IN_CHUNKS: _BACKWARD}
_COUNTS = (2, 4, 8, 16, 32)


def way_name(num_chunks: int) -> str:
    """`chunks:4`."""
    return f"{_PREFIX}{num_chunks}"


def num_chunks_of(way: str) -> int | None:
    """How many chunks a way of that name has; None if it is no such name."""
    number = way.removeprefix(_PREFIX)
    return int(number) if way.startswith(_PREFIX) and number.isdecimal() and number == str(int(number)) else None


def is_in_chunks(op: Op) -> bool:
    """True if the op is one that works in chunks."""
    return op.target in _WHOLE_OF


def way_of(op: Op) -> str:
    """The way in which the op is computed, as it stands."""
    return way_name(op.args[-1]) if is_in_chunks(op) else WHOLE


def whole_target(target: str) -> str:
    """The name of the op that computes the same in one piece."""
    return _WHOLE_OF.get(target, target)


def chunk_counts(step: Step, op: Op) -> tuple[int, ...]:
    """In how many chunks the op could be computed; none if it is no convolution, or makes all gradients at once."""
    most = _most_chunks(step, op)
    counts = {count for count in _COUNTS if count <= most} | ({most} if 2 <= most <= _COUNTS[-1] else set())
    # Chunks of channels are copied before the kernel copies them: two of them are as much as the whole.
    least = 4 if most and _target_in_chunks(op) == _WEIGHT_IN_CHUNKS else 2
    return tuple(sorted(count for count in counts if count >= least))


def why_not_in_chunks(step: Step, op: Op, num_chunks: int) -> str:
    """What stands in the way of computing the op in so many chunks, or nothing."""
    if op.target not in (_FORWARD, _BACKWARD):
        return "only convolutions and their gradients can be computed in chunks"
    most = _most_chunks(step, op)
    if not most:
        return "it makes all gradients at once, has groups or too few channels, or its operands are not plain tensors"
    return "" if 2 <= num_chunks <= most else f"at most {most} are possible"


def in_chunks(op: Op, num_chunks: int) -> Op:
    """The op as a call that works in so many chunks; it reads and makes the same values."""
    named = named_operands(op)
    args = (*(named[name] for name in argument_names(op.target)), num_chunks)
    target = _target_in_chunks(op)
    if target == _WEIGHT_IN_CHUNKS:
        return replace(op, target=target, args=args, kwargs=(), outputs=op.outputs[1:], stand_in="")
    return replace(op, target=target, args=args, kwargs=(), outputs=(op.made[0],), returns_many=False, stand_in="")


def proven_counts(step: Step, op: Op, counts: Sequence[int], proofs: Proofs) -> tuple[int, ...]:
    """Those of the counts with which the op makes the same bits on this machine, in the same layout."""
    trial = _Trial(step, op)
    signature = (op.target, *(_seen(step, arg) for arg in named_operands(op).values()))

    def experiment(count: int) -> Callable[[], bool]:
        return lambda: trial.is_same(count)

    return tuple(count for count in counts if proofs.holds("chunks", (count, *signature), experiment(count)))


def _target_in_chunks(op: Op) -> str:
    if op.target == _FORWARD:
        return _IN_CHUNKS
    return _DATA_IN_CHUNKS if named_operands(op)["output_mask"][0] else _WEIGHT_IN_CHUNKS


def _most_chunks(step: Step, op: Op) -> int:
    """How many chunks the op can be cut into; 0 if it cannot be cut."""
    if op.target not in (_FORWARD, _BACKWARD):
        return 0
    named = named_operands(op)
    first = named["input" if op.target == _FORWARD else "grad_output"]
    operands = [step.values[arg.value] for arg in named.values() if isinstance(arg, Ref)]
    made = [step.values[value] for value in op.made]
    if not isinstance(first, Ref) or not made or not is_testable(*operands) or not made[0].num_elements:
        return 0
    shape, weight = step.values[first.value].shape, _value(step, named["weight"])
    if len(shape) != len(weight.shape):  # there is no batch
        return 0
    if op.target == _FORWARD or tuple(named["output_mask"]) == (True, False, False):
        return shape[0]
    return _most_channel_chunks(step, named, weight)


def _most_channel_chunks(step: Step, named: dict[str, Any], weight: Value | Ghost) -> int:
    """In how many chunks the gradient of a weight can be computed."""
    is_only_weight = tuple(named["output_mask"][:2]) == (False, True) and isinstance(named["input"], Ref)
    if not is_only_weight or named["groups"] != 1 or named["transposed"]:
        return 0
    # Where channels come last, some of them are not next to each other in memory, nor is a copy like the whole.
    maps = [step.values[named[name].value] for name in ("grad_output", "input")]
    if not all(value.stride[1] > value.stride[-1] for value in maps):
        return 0
    most = -(-max(weight.shape[:2]) // LEAST_CHANNELS)
    return most if most >= 2 else 0


def _value(step: Step, arg: Any) -> Value | Ghost:
    return step.values[arg.value] if isinstance(arg, Ref) else arg


def _seen(step: Step, arg: Any) -> Any:
    """What a kernel sees of an operand besides its bits."""
    return layout(step.values[arg.value]) if isinstance(arg, Ref) else repr(arg)


class _Trial:
    """An op on random operands, computed whole when it is first asked for."""

    def __init__(self, step: Step, op: Op) -> None:
        self.step = step
        self.op = op

    @cached_property
    def _operands(self) -> list[Any]:
        return [self._operand(arg, seed) for seed, arg in enumerate(named_operands(self.op).values())]

    @cached_property
    def _whole(self) -> Any:
        made = resolve(self.op.target)(*self._operands)
        return {_IN_CHUNKS: made, _DATA_IN_CHUNKS: made[0], _WEIGHT_IN_CHUNKS: made[1:]}[_target_in_chunks(self.op)]

    def is_same(self, num_chunks: int) -> bool:
        return same_bits(self._whole, resolve(_target_in_chunks(self.op))(*self._operands, num_chunks))

    def _operand(self, arg: Any, seed: int) -> Any:
        if isinstance(arg, Ref):
            return sample(self.step.values[arg.value], seed=seed)
        return make_ghost(arg) if isinstance(arg, Ghost) else arg
