"""Operators of our own, registered with torch: they have names and schemas, are priced and re-run like torch's own.

[Note: in chunks]
A convolution on a CPU copies its operands into another layout and its result back out of it: it holds up to twice as
much again as it is given. Cut along the batch and computed piece by piece it holds a piece of that. Each piece goes
straight to its place in the one result, so never more than one is held beside it. The gradient of the weights is a sum
over the batch, and cut there it would round otherwise; it is cut along the channels of both of its operands. Whether
the bits are the same is asked of the machine, shape by shape (capture/rewrites/chunks.py), and so for what works in
blocks over its operand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import torch

from memfit import stand_ins

_BLOCK_BYTES = 1 << 19  # of one operand: large enough that calls do not count, small enough for the cache

LEAST_CHANNELS = 8
"""Of a convolution, that are computed at a time: kernels work on as many, so that fewer take as long."""

_LIBRARY = torch.library.Library("memfit_ops", "DEF")  # its operators live as long as it does
_SETTINGS = "int[] stride, int[] padding, int[] dilation, bool transposed, int[] output_padding, int groups"
_SCHEMAS = (
    "renormalise(Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd) -> Tensor",
    f"convolution_in_chunks(Tensor input, Tensor weight, Tensor? bias, {_SETTINGS}, int num_chunks) -> Tensor",
    (
        "convolution_gradient_in_chunks(Tensor grad_output, Tensor input, Tensor weight, int[]? bias_sizes, "
        f"{_SETTINGS}, bool[3] output_mask, int num_chunks) -> Tensor"
    ),
    (
        "convolution_weight_gradient_in_chunks(Tensor grad_output, Tensor input, Tensor weight, int[]? bias_sizes, "
        f"{_SETTINGS}, bool[3] output_mask, int num_chunks) -> (Tensor, Tensor)"
    ),
    (
        "batch_norm_backward_(Tensor(a!) grad_out, Tensor input, Tensor? weight, Tensor? running_mean, "
        "Tensor? running_var, Tensor? save_mean, Tensor? save_invstd, bool train, float eps, bool[3] output_mask) "
        "-> (Tensor(a!), Tensor, Tensor)"
    ),
    (
        "nll_loss_log_softmax_backward_(Tensor grad_output, Tensor(a!) self, Tensor target, Tensor? weight, "
        "int reduction, int ignore_index, Tensor total_weight, ScalarType input_dtype) -> Tensor(a!)"
    ),
)
for _schema in _SCHEMAS:
    _LIBRARY.define(_schema)


def renormalise(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    is_rectified: bool = False,
    in_place: bool = False,
) -> torch.Tensor:
    """What training-mode batch norm made of the input, from the statistics it saved: one pass instead of three.

    With the ReLU behind it in the same go, where that is asked. In place: the result may take the place of the input.

    torch's kernel computes x * alpha + beta with alpha = invstd * weight and beta = bias - mean * alpha, fused in its
    own way, and so does the one for evaluation with 1 / sqrt(variance + eps) for invstd. Asked to evaluate with a
    variance of 1, no eps and alpha for its weight, it goes through the same numbers. No elementwise op of torch does.
    """
    made = stand_ins.renormalised(input, weight, bias, mean, invstd, is_rectified, in_place)
    if made is not None:
        return made
    alpha = invstd if weight is None else invstd * weight
    result: torch.Tensor = torch.ops.aten.native_batch_norm.default(
        input, alpha, bias, mean, torch.ones_like(invstd), False, 0.0, 0.0
    )[0]
    return result.relu_() if is_rectified else result


def convolution_in_chunks(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    num_chunks: int,
) -> torch.Tensor:
    """The convolution, computed on a few samples at a time; see [Note: in chunks]."""
    call = torch.ops.aten.convolution.default
    settings = (stride, padding, dilation, transposed, output_padding, groups)
    return _in_chunks(
        len(input), num_chunks, lambda begin, end: call(_rows(input, begin, end), weight, bias, *settings)
    )


def convolution_gradient_in_chunks(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    output_mask: list[bool],
    num_chunks: int,
) -> torch.Tensor:
    """The gradient of a convolution's input alone, computed on a few samples at a time; the input may be a ghost."""
    call = torch.ops.aten.convolution_backward.default
    settings = (bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask)

    def compute(begin: int, end: int) -> torch.Tensor:
        made: torch.Tensor = call(_rows(grad_output, begin, end), _rows(input, begin, end), weight, *settings)[0]
        return made

    return _in_chunks(len(grad_output), num_chunks, compute)


def convolution_weight_gradient_in_chunks(
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    output_mask: list[bool],
    num_chunks: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of a convolution's weight and bias, computed on a few channels of each operand at a time."""
    call = torch.ops.aten.convolution_backward.default
    settings = (stride, padding, dilation, transposed, output_padding, groups)
    for_weight = torch.empty_like(weight)
    for_bias = weight.new_empty(len(weight)) if output_mask[2] else None
    for begin, end in _channel_chunks(weight.shape[1], num_chunks):
        some_input = _channels(input, begin, end)
        for first, last in _channel_chunks(len(weight), num_chunks):
            with_bias = for_bias is not None and begin == 0
            made = call(
                _channels(grad_output, first, last),
                some_input,
                weight[first:last, begin:end],
                [last - first] if bias_sizes is not None else None,
                *settings,
                [False, True, with_bias],
            )
            for_weight[first:last, begin:end].copy_(made[1])
            if for_bias is not None and with_bias:
                for_bias[first:last].copy_(made[2])
            del made
        del some_input  # before the next ones are copied, not after
    return for_weight, for_bias


def batch_norm_backward_(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    save_mean: torch.Tensor | None,
    save_invstd: torch.Tensor | None,
    train: bool,
    eps: float,
    output_mask: list[bool],
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Batch norm's backward with the gradient of its input written over that of its result, some channels at a time."""
    call = torch.ops.aten.native_batch_norm_backward.default
    for_weight = input.new_empty(input.shape[1], dtype=_parameter_dtype(weight, input)) if output_mask[1] else None
    for_bias = input.new_empty(input.shape[1], dtype=_parameter_dtype(weight, input)) if output_mask[2] else None
    per_channel = (weight, running_mean, running_var, save_mean, save_invstd)
    for begin, end in _blocks(input.shape[1], input.nbytes):
        made = call(
            _channels(grad_out, begin, end),
            _channels(input, begin, end),
            *(None if each is None else each[begin:end] for each in per_channel),
            train,
            eps,
            output_mask,
        )
        grad_out[:, begin:end].copy_(made[0])
        for whole, part in ((for_weight, made[1]), (for_bias, made[2])):
            if whole is not None:
                whole[begin:end].copy_(part)
        del made  # before the next block is made, not after
    return grad_out, for_weight, for_bias


def nll_loss_log_softmax_backward_(
    grad_output: torch.Tensor,
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
    input_dtype: torch.dtype,
) -> torch.Tensor:
    """The gradient of the logits behind a cross entropy, written over their log-probabilities, some rows at a time.

    In two ops the gradient of the log-probabilities, nearly all zeros, would be there whole.
    """
    aten = torch.ops.aten
    for begin, end in _blocks(len(self), self.nbytes, least=4 * torch.get_num_threads()):
        rows = self[begin:end]
        given = grad_output[begin:end] if grad_output.dim() else grad_output
        dense = aten.nll_loss_backward.default(
            given, rows, target[begin:end], weight, reduction, ignore_index, total_weight
        )
        # Each element is written after both that it is made from are read.
        aten._log_softmax_backward_data.out(dense, rows, 1, input_dtype, out=rows)
        del dense  # before the next block is made, not after
    return self


def _channel_chunks(num_channels: int, num_chunks: int) -> Iterator[tuple[int, int]]:
    """Cut channels into so many chunks, or fewer where there are few."""
    size = max(-(-num_channels // num_chunks), min(num_channels, LEAST_CHANNELS))
    return ((begin, min(begin + size, num_channels)) for begin in range(0, num_channels, size))


def _in_chunks(num_rows: int, num_chunks: int, compute: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
    """One result, filled from the results of some rows at a time, in the layout that these have."""
    size = -(-num_rows // num_chunks)
    whole: torch.Tensor | None = None
    for begin in range(0, num_rows, size):
        end = min(begin + size, num_rows)
        part = compute(begin, end)
        if whole is None:
            whole = part.new_empty_strided((num_rows, *part.shape[1:]), part.stride())
        whole[begin:end].copy_(part)
        del part  # before the next one is made, not after
    assert whole is not None, "a batch without samples has no chunks"
    return whole


def _blocks(length: int, num_bytes: int, *, least: int = 1) -> Iterator[tuple[int, int]]:
    """Cut an axis of a tensor of that size so that a block has about half a megabyte, and at least so many of it."""
    size = max(_BLOCK_BYTES * length // max(num_bytes, 1), least)
    return ((begin, min(begin + size, length)) for begin in range(0, length, size))


def _rows(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Some samples of a batch; those of a ghost are a ghost."""
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return _ghost((end - begin, *tensor.shape[1:]), tensor.stride(), tensor.dtype)
    return tensor[begin:end]


@cache
def _ghost(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor without bytes. Made once: where torch fills new tensors, that takes time and pages."""
    tensor = torch.empty_strided(shape, stride, dtype=dtype)
    tensor.untyped_storage().resize_(0)
    return tensor


def _channels(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Some channels of an image, contiguous as the whole is: kernels for other layouts round otherwise."""
    return tensor[:, begin:end].contiguous()


def _parameter_dtype(weight: torch.Tensor | None, input: torch.Tensor) -> torch.dtype:
    return input.dtype if weight is None else weight.dtype


for _kernel in (
    renormalise,
    convolution_in_chunks,
    convolution_gradient_in_chunks,
    convolution_weight_gradient_in_chunks,
    batch_norm_backward_,
    nll_loss_log_softmax_backward_,
):
    _LIBRARY.impl(_kernel.__name__, _kernel, "CompositeExplicitAutograd")
