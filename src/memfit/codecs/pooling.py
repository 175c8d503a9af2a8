"""A max pooling's backward from the code of its indices, which are never made: eight bytes for each window of them.

Every window adds its gradient to the element that was its largest, in the order of the windows. torch's own kernels add
in that order too, so the sums are equal to the last bit, also where windows overlap.
"""

from __future__ import annotations

import functools
import math

import torch

from memfit.codecs import dense, kernels
from memfit.codecs.codec import Settings
from memfit.codecs.kernels import Kernel
from memfit.codecs.pool import Pool
from memfit.codecs.window import Window, Windows, is_in_order

_DTYPES = (torch.float32, torch.float64)  # the kernel's; narrower ones torch sums in ways of its own


def max_pool_backward(
    gradient: torch.Tensor, code: torch.Tensor, like: torch.Tensor, settings: Settings
) -> torch.Tensor:
    """Fill `like`, which has the layout of the pooling's input, with the gradient of that input, and return it.

    Args:
        gradient: that of the pooling's output, in the layout of the indices that were encoded.
        code: what `window` made of the indices.
        settings: those of that code.
    """
    pool = _pool(settings)
    output_size = _check_shapes(gradient, like, pool)
    inner = _common_inner(gradient, like, len(pool.input_size))
    planned_bytes = Window().packed_bytes(gradient.numel(), 8, settings)
    is_dense = code.untyped_storage().nbytes() >= 8 * gradient.numel()
    has_kernel = gradient.dtype in _DTYPES and kernels.can_run(gradient, Kernel.WINDOW_BACKWARD)
    if is_dense or inner is None or not has_kernel:
        return max_pool_backward_twin(gradient, code, like, settings)
    if code.numel() < planned_bytes:
        raise ValueError(f"the code has {code.numel():,} bytes, and indices like these have {planned_bytes:,}")
    numbers = _numbers(settings, output_size, inner, gradient.element_size())
    num_planes = gradient.shape[: -len(output_size)].numel()
    kernels.run(Kernel.WINDOW_BACKWARD, code, like, count=num_planes, numbers=numbers, table=gradient)
    return like


def max_pool_backward_twin(
    gradient: torch.Tensor, code: torch.Tensor, like: torch.Tensor, settings: Settings
) -> torch.Tensor:
    """The same by torch's own backward. It holds the indices meanwhile, unless the code is a dense copy of them."""
    if _is_dense(code, gradient):
        indices = dense.seen(code, torch.int64, gradient.shape, gradient.stride())
    else:
        indices = torch.empty_strided(gradient.shape, gradient.stride(), dtype=torch.int64, device=gradient.device)
        Window().decode(code, indices, settings)
    pool, ops = _pool(settings), torch.ops.aten
    is_flat = len(pool.input_size) == 2
    if not pool.stride:
        adaptive = ops.adaptive_max_pool2d_backward if is_flat else ops.adaptive_max_pool3d_backward
        adaptive.grad_input(gradient, like, indices, grad_input=like)  # of `like` itself the shape is read
        return like
    backward = ops.max_pool2d_with_indices_backward if is_flat else ops.max_pool3d_with_indices_backward
    has_more_windows = tuple(gradient.shape[-len(pool.kernel) :]) != _floor_size(pool)
    geometry = (pool.kernel, pool.stride, pool.padding, pool.dilation)
    backward.grad_input(gradient, like, *geometry, has_more_windows, indices, grad_input=like)
    return like


@functools.lru_cache(maxsize=256)
def _pool(settings: Settings) -> Pool:
    return Pool.of_numbers(settings)


def _is_dense(code: torch.Tensor, gradient: torch.Tensor) -> bool:
    """True if the indices were kept as they are, eight bytes for each element of the gradient."""
    return code.untyped_storage().nbytes() >= 8 * gradient.numel()


def _check_shapes(gradient: torch.Tensor, like: torch.Tensor, pool: Pool) -> tuple[int, ...]:
    """The size of the output; refuses tensors that are not of this pooling."""
    num_dims = len(pool.input_size)
    outer, input_size = tuple(like.shape[:-num_dims]), tuple(like.shape[-num_dims:])
    if input_size != pool.input_size or tuple(gradient.shape[:-num_dims]) != outer or gradient.dtype is not like.dtype:
        raise ValueError(
            f"a gradient of {tuple(gradient.shape)} ({gradient.dtype}) is not that of a pooling of "
            f"{tuple(like.shape)} ({like.dtype}) over {pool.input_size}"
        )
    return tuple(gradient.shape[-num_dims:])


def _common_inner(gradient: torch.Tensor, like: torch.Tensor, num_dims: int) -> int | None:
    """1 if both are contiguous, the number of channels if both are channels_last, else None."""
    both = [(tuple(tensor.shape), tuple(tensor.stride())) for tensor in (gradient, like)]
    order = list(range(like.dim()))
    if all(is_in_order(shape, stride, order) for shape, stride in both):
        return 1
    if num_dims == 2 and like.dim() == 4 and all(is_in_order(shape, stride, [0, 2, 3, 1]) for shape, stride in both):
        return like.shape[1]
    return None


@functools.lru_cache(maxsize=256)
def _numbers(settings: Settings, output_size: tuple[int, ...], inner: int, item_bytes: int) -> tuple[int, ...]:
    """As the kernel takes them."""
    windows, pool = Windows.of(settings, output_size), _pool(settings)
    bits, *sizes = windows.numbers(inner)[:4]
    starts = windows.numbers(inner)[6:]
    slots = (math.prod(pool.kernel), pool.stride[-1] if pool.stride else 0)
    plane = math.prod(pool.input_size)
    return (bits, *sizes, inner, item_bytes, plane, *slots, *starts, *windows.distance_of.tolist())


def _floor_size(pool: Pool) -> tuple[int, ...]:
    """The size of the output unless it was asked to round up."""
    along = zip(pool.input_size, pool.kernel, pool.stride, pool.padding, pool.dilation, strict=True)
    return tuple((size + 2 * pad - apart * (k - 1) - 1) // step + 1 for size, k, step, pad, apart in along)
