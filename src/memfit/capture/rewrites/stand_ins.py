"""Let other kernels stand in for some of torch's own where they give the same bits on this machine.

The op stays what it is to everyone who reads the step: only what is called where it runs is another (Op.called). Tests
are on as much of an operand as makes a difference: channels and planes are computed each by itself, and numbers are
drawn one after the other, so that a few of them say what all do. Convolutions and products of matrices have files of
their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit import stand_ins
from memfit.capture.rewrites.convolution_orders import ConvolutionTrials
from memfit.capture.rewrites.draft import Draft
from memfit.capture.rewrites.product_orders import ProductTrials
from memfit.capture.rewrites.proof import Proofs, same_bits, sample
from memfit.capture.rewrites.trials import Numbers
from memfit.capture.schemas import named_operands
from memfit.capture.step import Ghost, Op, Ref, Step, Value
from memfit.torch_internals import resolve

_NUM_DRAWS = 4
_SIDE_BY_SIDE = 32  # channels that a kernel goes through at once; what is left over is done by other code
_NUM_PLANES = 2
_NUM_NUMBERS = 5000
_ADDITION = "aten.add_.Tensor"

Experiment = tuple[tuple[Any, ...], Callable[[int], bool]]
"""What tells one test from another, and the test itself, by seed."""


def let_kernels_stand_in(step: Step, proofs: Proofs) -> Step:
    """Name the stand-in of every op that has one which holds."""
    draft = Draft(step)
    numbers = Numbers()
    convolutions, products = ConvolutionTrials(step, proofs, numbers), ProductTrials(step, proofs, numbers)
    for index, op in enumerate(step.ops):
        if op.target in stand_ins.CONVOLUTIONS:
            draft.ops[index] = replace(op, stand_in=convolutions.stand_in_of(op))
        elif op.target in stand_ins.PRODUCTS:
            draft.ops[index] = replace(op, stand_in=products.stand_in_of(op))
        elif stand_ins.is_there(op.target):
            is_counting = _counts_up(op, step)
            name = stand_ins.COUNT_UP if is_counting else stand_ins.STAND_INS[op.target]
            planned = _of_counting(op) if is_counting else _EXPERIMENTS[op.target](op, step)
            if planned is not None and _holds(name, *planned, proofs):
                draft.ops[index] = replace(op, stand_in=name)
    return draft.close()


def _holds(target: str, signature: tuple[Any, ...], same: Callable[[int], bool], proofs: Proofs) -> bool:
    return proofs.holds("stand-ins", (target, *signature), lambda: all(same(seed) for seed in range(_NUM_DRAWS)))


def _of_batch_norm(op: Op, step: Step) -> Experiment | None:
    named = named_operands(op)
    vectors = [named[name] for name in ("weight", "bias", "running_mean", "running_var")]
    sample = _sampler(named["input"], step)
    if sample is None or not named["training"] or not all(arg is None or _is_plain(arg, step) for arg in vectors):
        return None
    is_given = [arg is not None for arg in vectors]
    settings: tuple[bool, float, float] = (named["training"], named["momentum"], named["eps"])

    def same(seed: int) -> bool:
        drawing = _drawing(seed)
        input = sample.draw(drawing).mul_(3).add_(1)
        drawn = [torch.rand(input.shape[1], **drawing).add_(0.5) if given else None for given in is_given]
        copies = [None if vector is None else vector.clone() for vector in drawn]
        plain = resolve(op.target)(input, *drawn, *settings)
        made = resolve(stand_ins.STAND_INS[op.target])(input, *copies, *settings)
        weight, bias, _, _ = copies
        rectified, *_ = stand_ins.native_batch_norm(input, weight, bias, None, None, *settings, True)
        # The running statistics too, the result that leaves a ReLU nothing to do, and that of a map in pieces.
        pieces = input.tensor_split([min(5, input.shape[1])], 1)
        _, joined = stand_ins.cat_and_normalise(pieces, (weight, bias, None, None), *settings[1:], False, False)
        in_place = stand_ins.native_batch_norm(input.clone(), weight, bias, None, None, *settings, in_place=True)
        expected = [*plain, *drawn, plain[0].relu(), *plain, *plain]
        return same_bits(expected, [*made, *copies, rectified, *(joined or plain), *in_place])

    return (*sample.signature, *is_given, *settings), same


def _of_batch_norm_backward(op: Op, step: Step) -> Experiment | None:
    named = named_operands(op)
    samples = [_sampler(named[name], step) for name in ("grad_out", "input")]
    vectors = [named[name] for name in ("weight", "save_mean", "save_invstd")]
    is_served = named["train"] and all(named["output_mask"]) and all(_is_plain(arg, step) for arg in vectors)
    if not is_served or None in samples:
        return None
    settings = (named["train"], named["eps"], named["output_mask"])

    def same(seed: int) -> bool:
        drawing = _drawing(seed)
        grad, input = (sample.draw(drawing) for sample in samples if sample is not None)
        weight, mean, invstd = (torch.rand(input.shape[1], **drawing).add_(0.5) for _ in vectors)
        operands = (input.mul_(3).add_(1), weight, None, None, mean, invstd, *settings)
        calls = [resolve(target) for target in (op.target, stand_ins.STAND_INS[op.target])]
        # And behind a ReLU, whose backward does it in the same go.
        plain = torch.ops.aten.threshold_backward.default(grad, input, 0)
        gated, made = stand_ins.gate_and_go_on(grad.clone(), input, 0, input, weight, mean, invstd)
        behind = [calls[0](plain, *operands), stand_ins.native_batch_norm_backward(gated, *operands, made)]
        results = [call(grad, *operands) for call in calls]
        in_place = stand_ins.native_batch_norm_backward(grad.clone(), *operands, in_place=True)
        return same_bits(*results) and same_bits(*behind) and same_bits(results[0], in_place)

    return (*(part for sample in samples if sample for part in sample.signature), repr(settings)), same


@dataclass(frozen=True)
class _Sampler:
    """As many channels of a batch norm's maps as make a difference, in their layout."""

    shape: tuple[int, ...]
    has_rows: bool  # channels last

    @property
    def signature(self) -> tuple[Any, ...]:
        # How rows are added up depends on how many threads there are.
        return (*self.shape, torch.get_num_threads() if self.has_rows else 0)

    def draw(self, drawing: dict[str, Any]) -> torch.Tensor:
        made = torch.randn(self.shape, **drawing)
        return made.movedim(-1, 1) if self.has_rows else made


def _sampler(arg: Any, step: Step) -> _Sampler | None:
    """None for maps that no kernel serves."""
    if not _is_plain(arg, step, is_contiguous=False):
        return None
    value = step.values[arg.value]
    num_samples, num_channels, *image = value.shape
    if math.prod(image) < 2:
        return None
    tested = min(num_channels, _SIDE_BY_SIDE + num_channels % _SIDE_BY_SIDE)
    if _is_contiguous(value.shape, value.stride):
        return _Sampler((num_samples, tested, *image), has_rows=False)
    rows = [*range(len(value.shape))]
    rows.append(rows.pop(1))
    is_last = _is_contiguous([value.shape[axis] for axis in rows], [value.stride[axis] for axis in rows])
    return _Sampler((num_samples, *image, tested), has_rows=True) if is_last and len(image) > 1 else None


def _of_addition(op: Op, step: Step) -> Experiment | None:
    """Which bits a sum has is no question, but layouts and places may be one."""
    refs = op.args
    least = stand_ins.LEAST_ELEMENTS
    if op.kwargs or len(refs) != 2 or not all(_is_plain(arg, step, least, is_contiguous=False) for arg in refs):
        return None
    one, other = (step.values[arg.value] for arg in refs)
    if one.shape != other.shape or len(one.shape) < 2 or one.storage == other.storage:
        return None
    if not all(_is_contiguous(value.shape[1:], value.stride[1:]) for value in (one, other)):
        return None

    def same(seed: int) -> bool:
        into, what = (sample(value, seed=seed + number) for number, value in enumerate((one, other)))
        copy = torch.empty_strided(one.shape, one.stride, dtype=torch.float32).copy_(into)
        made = resolve(op.target)(into, what), stand_ins.add_(copy, what)
        return same_bits(*made) and into._version == copy._version

    return (one.shape, one.stride, other.stride), same


def _counts_up(op: Op, step: Step) -> bool:
    """True if the op adds a number to a counter."""
    if op.target != _ADDITION or op.kwargs or len(op.args) != 2 or type(op.args[1]) is not int:
        return False
    counter = step.values[op.args[0].value]
    return stand_ins.is_counter(counter.shape, counter.dtype, counter.device)


def _of_counting(op: Op) -> Experiment:
    number = op.args[1]

    def same(seed: int) -> bool:
        one, other = torch.tensor(seed), torch.tensor(seed)
        made = resolve(op.target)(one, number), stand_ins.count_up(other, number)
        return same_bits(*made) and one._version == other._version

    return (number,), same


def _of_drawing(op: Op, step: Step) -> Experiment | None:
    named = named_operands(op)
    if not _is_plain(named["self"], step, stand_ins.LEAST_ELEMENTS) or named["generator"] is not None:
        return None
    probability = named["p"]

    def same(seed: int) -> bool:
        results, versions = [], set()
        for draw in (resolve(op.target), stand_ins.bernoulli_):
            generator = torch.Generator().manual_seed(seed)
            for _ in range(seed):  # from an odd place in its state too
                torch.empty(1, dtype=torch.int32).random_(generator=generator)
            drawn = draw(torch.empty(_NUM_NUMBERS, dtype=torch.float32), probability, generator=generator)
            results.append((drawn, generator.get_state()))
            versions.add(drawn._version)
        return same_bits(*results) and len(versions) == 1

    return (probability,), same


def _of_pooling(op: Op, step: Step) -> Experiment | None:
    named = named_operands(op)
    maps = _maps(named.pop("self"), step, stand_ins.LEAST_ELEMENTS)
    if maps is None:
        return None
    shape = (*_num_planes(maps), *maps.shape[2:])

    def same(seed: int) -> bool:
        sample = _numbers_and_others(shape, seed)
        calls = (resolve(target) for target in (op.target, stand_ins.STAND_INS[op.target]))
        return same_bits(*(call(sample, **named) for call in calls))

    return (*shape, repr(sorted(named.items()))), same


def _of_pooling_backward(op: Op, step: Step) -> Experiment | None:
    named = named_operands(op)
    grad = _maps(named.pop("grad_output"), step)
    maps = _maps(named.pop("self"), step, stand_ins.LEAST_ELEMENTS)
    if grad is None or maps is None or not stand_ins.are_apart(named["kernel_size"], named["stride"]):
        return None
    planes = _num_planes(maps)
    shapes = [(*planes, *each.shape[2:]) for each in (grad, maps)]

    def same(seed: int) -> bool:
        sample, like = _numbers_and_others(shapes[0], seed), torch.empty(shapes[1], dtype=torch.float32)
        calls = (resolve(target) for target in (op.target, stand_ins.STAND_INS[op.target]))
        return same_bits(*(call(sample, like, **named) for call in calls))

    return (*shapes[1], repr(sorted(named.items()))), same


def _drawing(seed: int) -> dict[str, Any]:
    """How to draw numbers of the one dtype that kernels serve, whatever the default is."""
    return {"dtype": torch.float32, "generator": torch.Generator().manual_seed(seed)}


def _maps(arg: Any, step: Step, least: int = 1) -> Value | Ghost | None:
    """What poolings are done on, if there are kernels for it; a ghost will do."""
    if isinstance(arg, Ghost):
        is_plain = arg.dtype is torch.float32 and arg.device == "cpu" and _is_contiguous(arg.shape, arg.stride)
        return arg if is_plain and len(arg.shape) == 4 and math.prod(arg.shape) >= least else None
    if not _is_plain(arg, step, least) or len(step.values[arg.value].shape) != 4:
        return None
    return step.values[arg.value]


def _num_planes(maps: Value | Ghost) -> tuple[int, int]:
    """As few as make a difference, but not so few that they would be left to torch."""
    enough = -(-stand_ins.LEAST_ELEMENTS // (_NUM_PLANES * math.prod(maps.shape[2:])))
    return _NUM_PLANES, max(_NUM_PLANES, enough)


def _numbers_and_others(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Numbers, in the first sample many that are equal, of which the first is the maximum; zeros of either sign."""
    drawing = _drawing(seed)
    sample = torch.randn(shape, **drawing)
    sample[0].relu_()
    for special in (float("nan"), float("inf"), -0.0):
        sample[torch.rand(shape, **drawing) < 0.01] = special
    return sample


def _is_plain(arg: Any, step: Step, least: int = 1, *, is_contiguous: bool = True) -> bool:
    """True if it is a tensor of at least so many 32-bit floats on a CPU, and contiguous where that is asked."""
    if not isinstance(arg, Ref):
        return False
    value = step.values[arg.value]
    is_on_cpu = value.dtype is torch.float32 and value.device == "cpu" and value.num_elements >= least
    return is_on_cpu and (not is_contiguous or _is_contiguous(value.shape, value.stride))


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if stride != expected:
            return False
        expected *= size
    return True


_EXPERIMENTS: dict[str, Callable[[Op, Step], Experiment | None]] = {
    "aten.native_batch_norm.default": _of_batch_norm,
    "aten.native_batch_norm_backward.default": _of_batch_norm_backward,
    _ADDITION: _of_addition,
    "aten.bernoulli_.float": _of_drawing,
    "aten.max_pool2d_with_indices.default": _of_pooling,
    "aten.avg_pool2d.default": _of_pooling,
    "aten.avg_pool2d_backward.default": _of_pooling_backward,
}
