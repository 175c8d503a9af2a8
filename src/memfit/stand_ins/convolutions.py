"""Convolutions whose windows are one element or three by three, and their gradients, by kernels of our own.

native/kernels/convolution_points.c, _windows.c and _weights.c say what oneDNN does, and why it takes longer. In which
order oneDNN adds up depends on shapes and threads, by rules of its own; so an order is part of what a kernel is asked
for, and which one gives oneDNN's bits is found by trying (capture/rewrites/convolution_orders.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from memfit.left_memory import let_go, new_empty
from memfit.precision import cpu_is_precise
from memfit.stand_ins import compiled
from memfit.stand_ins.compiled import Convolution, ConvolutionWeights, is_plain
from memfit.stand_ins.orders import Order

_CHANNELS_TOGETHER = 16  # with windows of three by three, always
_USUAL_SUMS = (80, 256, 512)  # with windows of one
_LEAST_POINTS, _MOST_POINTS = 512, 1536  # of a map, that are added up by themselves for the gradient of a weight


def orders(shape: Sequence[int], num_samples: int, image: Sequence[int], mask: Sequence[bool]) -> Iterator[Order]:
    """Those in which oneDNN may add up, likely ones first, by the shape of the weight and what is asked for.

    The mask is that of the gradients; the result of the convolution itself is asked for by an empty one.
    """
    num_out, num_in, window, _ = shape
    if not mask or mask[0]:
        num_channels = num_out if mask else num_in
        usual = [_CHANNELS_TOGETHER] if window > 1 else [num_channels, *_USUAL_SUMS]
        others = [] if window > 1 else range(_CHANNELS_TOGETHER, num_channels, _CHANNELS_TOGETHER)
        yield from map(Order, dict.fromkeys(min(count, num_channels) for count in (*usual, *others)))
        return
    num_threads, size = torch.get_num_threads(), image[0] * image[1]
    parts = [count for count in range(1, num_threads + 1) if num_threads % count == 0 and count <= num_samples]
    sums = [size // k for k in range(1, size + 1) if size % k == 0 and _LEAST_POINTS <= size // k <= _MOST_POINTS]
    for num_summed in dict.fromkeys((size, *sums) if window == 1 else (0,)):
        yield from (Order(num_summed, num_parts) for num_parts in parts)


def is_direct(shape: Sequence[int], image: Sequence[int], settings: Sequence[Any]) -> bool:
    """True if there are kernels for a convolution of such images, whose weight has that shape."""
    stride, padding, dilation, transposed, _, groups = settings
    if len(shape) != 4 or len(image) != 2 or transposed or groups != 1 or {*stride, *dilation} != {1}:
        return False
    if shape[2] != shape[3] or {*padding} != {shape[2] // 2}:
        return False
    return shape[2] == 1 or (shape[2] == 3 and image[1] > 1)


def convolve(
    order: Order, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *settings: Any
) -> torch.Tensor:
    """A convolution, added up in that order."""
    library = _library(input)
    is_served = order.num_summed > 0 and is_plain(weight) and (bias is None or is_plain(bias))
    if library is None or not is_served or not is_direct(weight.shape, input.shape[2:], settings):
        let_go()
        made: torch.Tensor = torch.ops.aten.convolution.default(input, weight, bias, *settings)
        return made
    return _convolved(library, order, input, weight, bias, is_backward=False)


def convolve_backward(
    order: Order,
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: list[int] | None,
    *rest: Any,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The gradient of a convolution's input, or those of its weight and bias; what it does not need may be a ghost."""
    *settings, mask = rest
    is_of_weight = order.num_parts > 0
    if is_of_weight:
        has_sums = order.num_summed > 0 or weight.shape[-1] > 1
        is_served = [*mask[:2]] == [False, True] and has_sums and order.num_parts <= len(input)
        library = _library(grad_output, input)
    else:
        is_served = [*mask] == [True, False, False] and order.num_summed > 0 and is_plain(weight)
        library = _library(grad_output)
    if library is None or not is_served or not is_direct(weight.shape, input.shape[2:], settings):
        let_go()
        made: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.aten.convolution_backward.default(
            grad_output, input, weight, bias_sizes, *rest
        )
        return made
    if not is_of_weight:
        return _convolved(library, order, grad_output, weight, None, is_backward=True), None, None
    return _weight_gradients(library, order, grad_output, input, weight.shape, has_bias=mask[2])


def has_planes(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True of maps if the channels of a sample follow each other, wherever samples are."""
    return len(shape) == 4 and 0 not in shape and tuple(strides[1:]) == (shape[2] * shape[3], shape[3], 1)


def are_there() -> bool:
    """True if this machine can run the kernels."""
    library = compiled.kernels()
    return library is not None and bool(library.memfit_has_avx512())


def _library(*maps: torch.Tensor) -> ctypes.CDLL | None:
    """The kernels, if they can be used for these."""
    library = compiled.kernels()
    if library is None or not library.memfit_has_avx512() or not cpu_is_precise():
        return None
    for each in maps:
        if each.dtype is not torch.float32 or not each.is_cpu or not has_planes(each.shape, each.stride()):
            return None
    return library


# Structures are filled by position: names would take as long as everything else before a small convolution runs.


def _convolved(
    library: ctypes.CDLL,
    order: Order,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    is_backward: bool,
) -> torch.Tensor:
    num_samples, num_in, height, width = input.shape
    num_out = weight.shape[1 if is_backward else 0]
    out = new_empty((num_samples, num_out, height, width), None, input)
    job = Convolution(
        input.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        None,
        input.stride(0),
        num_samples,
        num_in,
        num_out,
        height,
        width,
        is_backward,
        order.num_summed,
    )
    if weight.shape[2] > 1:
        _run(library.memfit_convolve_windows, library.memfit_convolve_windows_scratch, job)
    else:
        _run(library.memfit_convolve_points, library.memfit_convolve_points_scratch, job)
    return out


def _weight_gradients(
    library: ctypes.CDLL,
    order: Order,
    grad_output: torch.Tensor,
    input: torch.Tensor,
    shape: torch.Size,
    *,
    has_bias: bool,
) -> tuple[None, torch.Tensor, torch.Tensor | None]:
    num_samples, _, height, width = input.shape
    num_out, num_in, window, _ = shape
    made, grad_bias = input.new_empty(shape), input.new_empty(num_out) if has_bias else None
    job = ConvolutionWeights(
        input.data_ptr(),
        grad_output.data_ptr(),
        made.data_ptr(),
        None if grad_bias is None else grad_bias.data_ptr(),
        None,
        input.stride(0),
        grad_output.stride(0),
        num_samples,
        num_in,
        num_out,
        height,
        width,
        window,
        order.num_parts,
        order.num_summed,
    )
    _run(library.memfit_convolution_weights, library.memfit_convolution_weights_scratch, job)
    return None, made, grad_bias


def _run(kernel: Callable[..., None], num_floats: Callable[..., int], job: Convolution | ConvolutionWeights) -> None:
    """Call the kernel, with as much scratch as it asks for."""
    num_threads = torch.get_num_threads()
    scratch = torch.empty(num_floats(job, num_threads), dtype=torch.float32)
    job.scratch = scratch.data_ptr()
    kernel(job, num_threads)
