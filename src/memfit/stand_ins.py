"""Operators that stand in for some of torch's own on a CPU: the same bits in less time.

They are registered with torch under the names of those they stand in for, take the same arguments, and call these where
they have no kernel for what they are given: another dtype or layout, no compiler on this machine. Whether the bits are
the same is asked of the machine (capture/rewrites/stand_ins.py); each file in native/kernels says what torch's kernel
does, and why it takes longer.

[Note: products]
A convolution with a window of one element is a product of matrices, for each sample its channels by its elements.
oneDNN copies its operands into blocks of channels first, and its result back: a third of its time, and as much memory
again. MKL's product takes them as they are. Both add up over channels from the first to the last, as long as MKL does
not cut the sum in pieces, which it does beyond some hundred terms: so some shapes have the same bits and some have not.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch

from memfit.native.library import KERNELS, native_library
from memfit.precision import cpu_is_precise

STAND_INS = {
    "aten.native_batch_norm.default": "memfit_ops.native_batch_norm.default",
    "aten.native_batch_norm_backward.default": "memfit_ops.native_batch_norm_backward.default",
    "aten.bernoulli_.float": "memfit_ops.bernoulli_.default",
    "aten.max_pool2d_with_indices.default": "memfit_ops.max_pool2d_with_indices.default",
    "aten.convolution.default": "memfit_ops.convolution.default",
    "aten.convolution_backward.default": "memfit_ops.convolution_backward.default",
}
"""What stands in for which of torch's, by name."""

SETTINGS = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
"""Of a convolution, in the order of its arguments."""

_IN_TORCH = frozenset({"aten.convolution.default", "aten.convolution_backward.default"})

_LIBRARY = torch.library.Library("memfit_ops", "FRAGMENT")  # its operators live as long as it does
_SCHEMAS = (
    # It writes the running statistics, and as torch's does not say so, nor does ours: versions would be counted.
    (
        "native_batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, "
        "bool training, float momentum, float eps) -> (Tensor, Tensor, Tensor)"
    ),
    (
        "native_batch_norm_backward(Tensor grad_out, Tensor input, Tensor? weight, Tensor? running_mean, "
        "Tensor? running_var, Tensor? save_mean, Tensor? save_invstd, bool train, float eps, bool[3] output_mask) "
        "-> (Tensor, Tensor, Tensor)"
    ),
    "bernoulli_(Tensor(a!) self, float p=0.5, *, Generator? generator=None) -> Tensor(a!)",
    (
        "max_pool2d_with_indices(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0, "
        "int[2] dilation=1, bool ceil_mode=False) -> (Tensor, Tensor)"
    ),
    (
        "convolution(Tensor input, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, "
        "bool transposed, int[] output_padding, int groups) -> Tensor"
    ),
    (
        "convolution_backward(Tensor grad_output, Tensor input, Tensor weight, int[]? bias_sizes, int[] stride, "
        "int[] padding, int[] dilation, bool transposed, int[] output_padding, int groups, bool[3] output_mask) "
        "-> (Tensor, Tensor, Tensor)"
    ),
)
for _schema in _SCHEMAS:
    _LIBRARY.define(_schema)

LEAST_ELEMENTS = 1 << 12
"""Of what is drawn or pooled; for fewer torch's own is as fast."""

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_VECTOR = 16  # floats, at the most
_LEAST_SHARED = 1 << 15  # fewer elements are done by one thread
_STATE_BYTES = 5056  # of torch's generator for CPUs, as get_state() gives it
# Between taking a generator's state and putting it back nobody else of us may draw. A draw of torch's own in another
# thread meanwhile is lost; but then which of the two is first is up to chance in eager too.
_DRAWING = threading.Lock()


class _BatchNorm(ctypes.Structure):
    """`struct batch_norm` of native/kernels/kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input", "weight", "bias", "running_mean", "running_var")),
        *((name, ctypes.c_void_p) for name in ("out", "save_mean", "save_invstd")),
        *((name, ctypes.c_double) for name in ("momentum", "eps")),
        *((name, ctypes.c_int64) for name in ("num_samples", "num_channels", "image_size")),
        *((name, ctypes.c_int64) for name in ("num_parts", "is_rectified")),
    )


class _BatchNormBackward(ctypes.Structure):
    """`struct batch_norm_backward` of native/kernels/kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("grad_out", "input", "weight", "mean", "invstd", "gate", "sums")),
        *((name, ctypes.c_void_p) for name in ("grad_in", "grad_weight", "grad_bias")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_channels", "num_parts")),
    )


class _MaxPool(ctypes.Structure):
    """`struct max_pool` of native/kernels/kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input", "out", "indices")),
        *((name, ctypes.c_int64) for name in ("num_planes", "in_height", "in_width", "out_height", "out_width")),
        *((f"{what}_{axis}", ctypes.c_int64) for what in ("kernel", "stride") for axis in ("height", "width")),
        *((f"{what}_{axis}", ctypes.c_int64) for what in ("pad", "dilation") for axis in ("height", "width")),
    )


@functools.cache
def _compiled() -> ctypes.CDLL | None:
    library = native_library(KERNELS)
    if library is not None:
        library.memfit_bernoulli.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64]
        library.memfit_bernoulli.restype = None
        for function, struct in (
            (library.memfit_batch_norm, _BatchNorm),
            (library.memfit_batch_norm_rows, _BatchNorm),
            (library.memfit_renormalise, _BatchNorm),
            (library.memfit_renormalise_rows, _BatchNorm),
            (library.memfit_batch_norm_rows_sums, _BatchNormBackward),
            (library.memfit_batch_norm_rows_backward, _BatchNormBackward),
            (library.memfit_max_pool, _MaxPool),
        ):
            function.argtypes = [ctypes.POINTER(struct), ctypes.c_int]
            function.restype = None
    return library


def kernels() -> ctypes.CDLL | None:
    """The compiled kernels, or None where there are none; MEMFIT_NATIVE=0 forbids them."""
    return None if os.environ.get("MEMFIT_NATIVE") == "0" else _compiled()


def is_there(target: str) -> bool:
    """True if something can stand in for that operator on this machine."""
    return target in _IN_TORCH or (target in STAND_INS and kernels() is not None)


def native_batch_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    is_rectified: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Batch norm by the statistics of the batch; with the ReLU behind it in the same go, where that is asked."""
    library = kernels()
    vectors = (weight, bias, running_mean, running_var)
    is_served = training and _has_maps(input) and (running_mean is None) == (running_var is None)
    if library is None or not is_served or not all(vector is None or _is_plain(vector) for vector in vectors):
        made: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.aten.native_batch_norm.default(
            input, weight, bias, running_mean, running_var, training, momentum, eps
        )
        if is_rectified:
            made[0].relu_()
        return made
    num_channels = input.shape[1]
    out, mean, invstd = torch.empty_like(input), input.new_empty(num_channels), input.new_empty(num_channels)
    run = library.memfit_batch_norm_rows if has_channels_last(input) else library.memfit_batch_norm
    run(_batch_norm(input, vectors, (out, mean, invstd), momentum, eps, is_rectified), _num_threads(input))
    return out, mean, invstd


def renormalised(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    is_rectified: bool,
) -> torch.Tensor | None:
    """What batch norm made of the input, by the statistics it saved; None if there is no kernel for it."""
    library = kernels()
    vectors = (weight, bias, None, None)
    if library is None or not _has_maps(input) or not all(v is None or _is_plain(v) for v in (*vectors, mean, invstd)):
        return None
    out = torch.empty_like(input)
    run = library.memfit_renormalise_rows if has_channels_last(input) else library.memfit_renormalise
    run(_batch_norm(input, vectors, (out, mean, invstd), 0, 0, is_rectified), _num_threads(input))
    return out


def _has_maps(input: torch.Tensor) -> bool:
    """True if a kernel can go through it."""
    # Maps of one element each, or of one channel, may be channels last to torch, and are added up in another order.
    is_plain = _is_plain(input) and input.dim() > 2 and input.stride(1) != 1 and input.numel() > 0
    return is_plain or has_channels_last(input)


def _batch_norm(
    input: torch.Tensor,
    vectors: Sequence[torch.Tensor | None],
    made: Sequence[torch.Tensor],
    momentum: float,
    eps: float,
    is_rectified: bool,
) -> _BatchNorm:
    num_samples, num_channels = input.shape[:2]
    return _BatchNorm(
        input.data_ptr(),
        *(None if vector is None else vector.data_ptr() for vector in vectors),
        *(tensor.data_ptr() for tensor in made),
        momentum,
        eps,
        num_samples,
        num_channels,
        input.numel() // (num_samples * num_channels),
        torch.get_num_threads(),
        is_rectified,
    )


def native_batch_norm_backward(
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
    sums: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of such a batch norm whose channels are last in memory; from sums, if somebody has them."""
    library = kernels()
    is_served = train and all(output_mask) and _are_rows(grad_out, input)
    vectors = [vector for vector in (weight, save_mean, save_invstd) if vector is not None and _is_plain(vector)]
    if library is None or not is_served or len(vectors) < 3:
        made: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.aten.native_batch_norm_backward.default(
            grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask
        )
        return made
    num_channels = input.shape[1]
    grads = torch.empty_like(input), input.new_empty(num_channels), input.new_empty(num_channels)
    library.memfit_batch_norm_rows_backward(
        _BatchNormBackward(
            *(tensor.data_ptr() for tensor in (grad_out, input, *vectors)),
            None,
            None if sums is None else sums.data_ptr(),
            *(tensor.data_ptr() for tensor in grads),
            input.numel() // num_channels,
            num_channels,
            torch.get_num_threads(),
        ),
        _num_threads(input),
    )
    return grads


def gate_and_add_up(
    grad: torch.Tensor, gate: torch.Tensor, threshold: float, input: torch.Tensor, mean: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A ReLU's backward in place, and in the same go the sums for the backward of the batch norm before it.

    The sums are None where there is no kernel for them.
    """
    library = kernels()
    if library is None or threshold != 0 or not _are_rows(grad, gate, input) or not _is_plain(mean):
        return torch.ops.aten.threshold_backward.grad_input(grad, gate, threshold, grad_input=grad), None
    num_channels = input.shape[1]
    sums = input.new_empty(2, num_channels)
    library.memfit_batch_norm_rows_sums(
        _BatchNormBackward(
            grad_out=grad.data_ptr(),
            input=input.data_ptr(),
            mean=mean.data_ptr(),
            gate=gate.data_ptr(),
            sums=sums.data_ptr(),
            num_rows=input.numel() // num_channels,
            num_channels=num_channels,
            num_parts=torch.get_num_threads(),
        ),
        _num_threads(input),
    )
    return grad, sums


def _are_rows(*maps: torch.Tensor) -> bool:
    """True if a kernel for gradients can go through these side by side."""
    # Of channels that do not fill a vector torch's compiler rounds otherwise.
    is_whole = maps[0].shape[1] % _VECTOR == 0
    return is_whole and all(each.shape == maps[0].shape and has_channels_last(each) for each in maps)


def bernoulli_(self: torch.Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """Ones with that probability, else zeros; the generator is left where torch's own would leave it."""
    library = kernels()
    source = torch.default_generator if generator is None else generator
    is_served = source.device.type == "cpu" and _is_plain(self) and 0 <= p <= 1 and self.numel() >= LEAST_ELEMENTS
    with _DRAWING:
        state = source.get_state() if is_served else None
        if library is None or state is None or state.numel() != _STATE_BYTES:
            torch.ops.aten.bernoulli_.float(self, p, generator=generator)
        else:
            library.memfit_bernoulli(state.data_ptr(), self.data_ptr(), self.numel(), math.ceil(p * 2.0**53))
            source.set_state(state)
    return self


def max_pool2d_with_indices(
    self: torch.Tensor,
    kernel_size: list[int],
    stride: list[int] = [],  # noqa: B006  as torch's schema has it; nobody writes to it
    padding: list[int] = [0],  # noqa: B006
    dilation: list[int] = [1],  # noqa: B006
    ceil_mode: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each window, and where in its plane it is."""
    library = kernels()
    settings = [_pair(each) for each in (kernel_size, stride or kernel_size, padding, dilation)]
    is_served = library is not None and self.dim() == 4 and _is_plain(self) and self.shape[2:].numel() < 2**31
    if not is_served or self.numel() < LEAST_ELEMENTS:
        made: tuple[torch.Tensor, torch.Tensor] = torch.ops.aten.max_pool2d_with_indices.default(
            self, kernel_size, stride, padding, dilation, ceil_mode
        )
        return made
    assert library is not None
    # Sizes are torch's to say, and so is what is wrong with the settings.
    like = torch.empty_like(self, device="meta")
    shape = torch.ops.aten.max_pool2d_with_indices.default(like, *settings, ceil_mode)[0].shape
    out, indices = self.new_empty(shape), self.new_empty(shape, dtype=torch.int64)
    library.memfit_max_pool(
        _MaxPool(
            self.data_ptr(),
            out.data_ptr(),
            indices.data_ptr(),
            self.shape[0] * self.shape[1],
            *self.shape[2:],
            *shape[2:],
            *(number for pair in settings for number in pair),
        ),
        _num_threads(self),
    )
    return out, indices


def convolution(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *settings: Any) -> torch.Tensor:
    """A convolution with a window of one element, as a product; see [Note: products]."""
    is_served = bias is None and is_product(weight.shape, settings)
    if not is_served or not _are_for_products(input, weight):
        made: torch.Tensor = torch.ops.aten.convolution.default(input, weight, bias, *settings)
        return made
    num_samples, (num_out, num_in) = len(input), weight.shape[:2]
    matrix = weight.view(num_out, num_in).expand(num_samples, num_out, num_in)
    return torch.bmm(matrix, input.view(num_samples, num_in, -1)).view(num_samples, num_out, *input.shape[2:])


def convolution_backward(
    grad_output: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, bias_sizes: list[int] | None, *rest: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The gradient of such a convolution's input; the input itself may be a ghost."""
    *settings, output_mask = rest
    is_served = [*output_mask] == [True, False, False] and is_product(weight.shape, settings)
    if not is_served or not _are_for_products(grad_output, weight):
        made: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.aten.convolution_backward.default(
            grad_output, input, weight, bias_sizes, *rest
        )
        return made
    num_samples, (num_out, num_in) = len(grad_output), weight.shape[:2]
    matrix = weight.view(num_out, num_in).t().expand(num_samples, num_in, num_out)
    return torch.bmm(matrix, grad_output.view(num_samples, num_out, -1)).view(input.shape), None, None


def is_product(shape: Sequence[int], settings: Sequence[Any]) -> bool:
    """True if a convolution whose weight has that shape looks at one element of each channel at a time."""
    stride, padding, _, transposed, _, groups = settings
    is_one = len(shape) > 2 and math.prod(shape[2:]) == 1
    return is_one and groups == 1 and not transposed and set(stride) == {1} and set(padding) == {0}


def _are_for_products(*tensors: torch.Tensor) -> bool:
    """True if products of these, and convolutions that they stand in for, are computed in full."""
    return all(map(_is_plain, tensors)) and cpu_is_precise()


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous()


def has_channels_last(tensor: torch.Tensor) -> bool:
    """True if it is rows of channels in memory and nothing else, and so many that torch adds them up in parts."""
    if tensor.dtype is not torch.float32 or not tensor.is_cpu or tensor.is_contiguous() or tensor.dim() not in (4, 5):
        return False
    is_last = tensor.is_contiguous(memory_format=_CHANNELS_LAST[tensor.dim()])
    return is_last and tensor.numel() > torch.get_num_threads() * tensor.shape[1]


def _num_threads(tensor: torch.Tensor) -> int:
    return torch.get_num_threads() if tensor.numel() >= _LEAST_SHARED else 1


def _pair(numbers: list[int]) -> list[int]:
    """One number stands for both axes."""
    return [*numbers] * 2 if len(numbers) == 1 else [*numbers]


for _kernel in (
    native_batch_norm,
    native_batch_norm_backward,
    bernoulli_,
    max_pool2d_with_indices,
    convolution,
    convolution_backward,
):
    _LIBRARY.impl(_kernel.__name__, _kernel, "CPU")
