"""Let other kernels stand in for some of torch's own where they give the same bits on this machine.

The op stays what it is to everyone who reads the step: only what is called where it runs is another (Op.called). Tests
are on as much of an operand as makes a difference: channels and planes are computed each by itself, and numbers are
drawn one after the other, so that a few of them say what all do. Products of matrices are tested whole, at several
places in memory, and must be faster too: that depends on their shape.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from memfit import stand_ins
from memfit.capture.ghosts import make_ghost
from memfit.capture.rewrites.draft import Draft
from memfit.capture.rewrites.proof import Proofs, same_bits
from memfit.capture.schemas import named_operands
from memfit.capture.step import Ghost, Op, Ref, Step, Value
from memfit.torch_internals import resolve

_NUM_DRAWS = 4
_SIDE_BY_SIDE = 8  # channels that the kernel adds up at once; what is left over is added up by other code
_NUM_PLANES = 2
_NUM_NUMBERS = 5000
_NUM_TIMED, _FASTER = 5, 0.9
_SWEEP_BYTES = 64 << 20

Experiment = tuple[tuple[Any, ...], Callable[[int], bool]]
"""What tells one test from another, and the test itself, by seed."""


def let_kernels_stand_in(step: Step, proofs: Proofs) -> Step:
    """Name the stand-in of every op that has one which holds."""
    draft = Draft(step)
    for index, op in enumerate(step.ops):
        planned = _EXPERIMENTS[op.target](op, step) if stand_ins.is_there(op.target) else None
        if planned is not None and _holds(op.target, *planned, proofs):
            draft.ops[index] = replace(op, stand_in=stand_ins.STAND_INS[op.target])
    return draft.close()


def _holds(target: str, signature: tuple[Any, ...], same: Callable[[int], bool], proofs: Proofs) -> bool:
    return proofs.holds("stand-ins", (target, *signature), lambda: all(map(same, range(_NUM_DRAWS))))


def _of_batch_norm(op: Op, step: Step) -> Experiment | None:
    named = named_operands(op)
    tensors = [named[name] for name in ("input", "weight", "bias", "running_mean", "running_var")]
    if not named["training"] or not all(arg is None or _is_plain(arg, step) for arg in tensors):
        return None
    num_samples, num_channels, *image = step.values[tensors[0].value].shape
    if math.prod(image) < 2:
        return None
    tested = min(num_channels, _SIDE_BY_SIDE + num_channels % _SIDE_BY_SIDE)
    is_given = [arg is not None for arg in tensors[1:]]
    settings = (named["training"], named["momentum"], named["eps"])

    def same(seed: int) -> bool:
        generator = torch.Generator().manual_seed(seed)
        input = torch.randn(num_samples, tested, *image, generator=generator).mul_(3).add_(1)
        vectors = [torch.rand(tested, generator=generator).add_(0.5) if given else None for given in is_given]
        copies = [None if vector is None else vector.clone() for vector in vectors]
        plain = resolve(op.target)(input, *vectors, *settings)
        made = resolve(stand_ins.STAND_INS[op.target])(input, *copies, *settings)
        return same_bits([*plain, *vectors], [*made, *copies])  # the running statistics too

    return (num_samples, tested, *image, *is_given, *settings), same


def _of_drawing(op: Op, step: Step) -> Experiment | None:
    named = named_operands(op)
    if not _is_plain(named["self"], step, stand_ins.LEAST_ELEMENTS) or named["generator"] is not None:
        return None
    probability = named["p"]

    def same(seed: int) -> bool:
        results = []
        for target in (op.target, stand_ins.STAND_INS[op.target]):
            generator = torch.Generator().manual_seed(seed)
            for _ in range(seed):  # from an odd place in its state too
                torch.empty(1, dtype=torch.int32).random_(generator=generator)
            drawn = resolve(target)(torch.empty(_NUM_NUMBERS), probability, generator=generator)
            results.append((drawn, generator.get_state()))
        return same_bits(*results)

    return (probability,), same


def _of_pooling(op: Op, step: Step) -> Experiment | None:
    named = named_operands(op)
    input = named.pop("self")
    if not _is_plain(input, step, stand_ins.LEAST_ELEMENTS) or len(step.values[input.value].shape) != 4:
        return None
    shape = (_NUM_PLANES, _NUM_PLANES, *step.values[input.value].shape[2:])

    def same(seed: int) -> bool:
        generator = torch.Generator().manual_seed(seed)
        sample = torch.randn(shape, generator=generator).relu_()  # equal numbers, of which the first counts
        sample[torch.rand(shape, generator=generator) < 0.01] = float("nan")
        calls = (resolve(target) for target in (op.target, stand_ins.STAND_INS[op.target]))
        return same_bits(*(call(sample, **named) for call in calls))

    return (*shape, repr(sorted(named.items()))), same


def _of_convolution(op: Op, step: Step) -> Experiment | None:
    named = named_operands(op)
    operands = {name: named.pop(name) for name in ("grad_output", "input", "weight") if name in named}
    is_plain = all(isinstance(arg, Ghost) or _is_plain(arg, step) for arg in operands.values())
    is_of_input = [*named.get("output_mask", (True, False, False))] == [True, False, False]
    if not is_plain or not is_of_input or named.get("bias") is not None:
        return None
    shapes = {name: (arg if isinstance(arg, Ghost) else step.values[arg.value]).shape for name, arg in operands.items()}
    if not stand_ins.is_product(shapes["weight"], [named[name] for name in stand_ins.SETTINGS]):
        return None

    def same(seed: int) -> bool:
        generator = torch.Generator().manual_seed(seed)
        given = {
            # Each draw is elsewhere in memory: kernels may go another way where operands are not aligned.
            name: make_ghost(arg)
            if isinstance(arg, Ghost)
            else torch.randn(math.prod(shapes[name]) + seed, generator=generator)[seed:].view(shapes[name])
            for name, arg in operands.items()
        }
        calls = [partial(resolve(name), **given, **named) for name in (op.target, stand_ins.STAND_INS[op.target])]
        return same_bits(*(call() for call in calls)) and (seed > 0 or _is_faster(*calls))

    ghosts = [name for name, arg in operands.items() if isinstance(arg, Ghost)]
    return (repr(sorted(shapes.items())), repr(ghosts), repr(sorted(named.items()))), same


def _is_faster(plain: Callable[[], Any], made: Callable[[], Any]) -> bool:
    """True if the second call takes clearly less time than the first; in turn, as a machine may be slow for a while.

    What they work on is out of the cache, as it is in a step.
    """
    times_s: tuple[list[float], list[float]] = ([], [])
    sweep = torch.zeros(_SWEEP_BYTES, dtype=torch.uint8)
    for _ in range(_NUM_TIMED):
        for call, taken_s in zip((plain, made), times_s, strict=True):
            sweep.add_(1)
            start_s = time.perf_counter()
            call()
            taken_s.append(time.perf_counter() - start_s)
    return min(times_s[1]) <= _FASTER * min(times_s[0])


def _is_plain(arg: Any, step: Step, least: int = 1) -> bool:
    """True if it is a contiguous tensor of 32-bit floats on a CPU, and has at least so many."""
    if not isinstance(arg, Ref):
        return False
    value = step.values[arg.value]
    is_on_cpu = value.dtype is torch.float32 and value.device == "cpu"
    return is_on_cpu and value.num_elements >= least and _is_contiguous(value)


def _is_contiguous(value: Value) -> bool:
    expected = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride), strict=True):
        if stride != expected:
            return False
        expected *= size
    return True


_EXPERIMENTS: dict[str, Callable[[Op, Step], Experiment | None]] = {
    "aten.native_batch_norm.default": _of_batch_norm,
    "aten.bernoulli_.float": _of_drawing,
    "aten.max_pool2d_with_indices.default": _of_pooling,
    "aten.convolution.default": _of_convolution,
    "aten.convolution_backward.default": _of_convolution,
}
