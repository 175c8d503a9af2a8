"""Max pooling with indices, and average pooling with its backward, several windows side by side."""

from __future__ import annotations

import functools

import torch

from memfit.stand_ins import compiled
from memfit.stand_ins.compiled import LEAST_ELEMENTS, AveragePool, MaxPool, is_plain, num_threads_for


def max_pool2d_with_indices(
    self: torch.Tensor,
    kernel_size: list[int],
    stride: list[int] = [],  # noqa: B006  as torch's schema has it; nobody writes to it
    padding: list[int] = [0],  # noqa: B006
    dilation: list[int] = [1],  # noqa: B006
    ceil_mode: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of each window, and where in its plane it is."""
    library = compiled.kernels()
    settings = [_pair(each) for each in (kernel_size, stride or kernel_size, padding, dilation)]
    is_served = library is not None and self.dim() == 4 and is_plain(self) and self.shape[2:].numel() < 2**31
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
        MaxPool(
            self.data_ptr(),
            out.data_ptr(),
            indices.data_ptr(),
            self.shape[0] * self.shape[1],
            *self.shape[2:],
            *shape[2:],
            *(number for pair in settings for number in pair),
        ),
        num_threads_for(self),
    )
    return out, indices


def avg_pool2d(
    self: torch.Tensor,
    kernel_size: list[int],
    stride: list[int] = [],  # noqa: B006
    padding: list[int] = [0],  # noqa: B006
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> torch.Tensor:
    """The mean of each window."""
    library = compiled.kernels()
    if library is None or not _has_planes(self) or divisor_override == 0:
        made: torch.Tensor = torch.ops.aten.avg_pool2d.default(
            self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
        )
        return made
    settings = [_pair(each) for each in (kernel_size, stride or kernel_size, padding)]
    out = self.new_empty(_averaged(tuple(self.shape), tuple(map(tuple, settings)), ceil_mode))
    library.memfit_average_pool(
        _average_pool(self, out, self.shape, out.shape, settings, count_include_pad, divisor_override),
        num_threads_for(self),
    )
    return out


def avg_pool2d_backward(
    grad_output: torch.Tensor,
    self: torch.Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> torch.Tensor:
    """The gradient of its input, of which nothing but the shape is read; left to torch where windows overlap."""
    library = compiled.kernels()
    settings = [_pair(each) for each in (kernel_size, stride or kernel_size, padding)]
    is_served = (
        library is not None
        and _has_planes(self)
        and is_plain(grad_output)
        and are_apart(kernel_size, stride)
        and divisor_override != 0
        and grad_output.shape == _averaged(tuple(self.shape), tuple(map(tuple, settings)), ceil_mode)
    )
    if not is_served:
        made: torch.Tensor = torch.ops.aten.avg_pool2d_backward.default(
            grad_output, self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
        )
        return made
    assert library is not None
    out = torch.empty_like(self)
    library.memfit_average_pool_backward(
        _average_pool(grad_output, out, self.shape, grad_output.shape, settings, count_include_pad, divisor_override),
        num_threads_for(out),
    )
    return out


def are_apart(kernel_size: list[int], stride: list[int]) -> bool:
    """True if windows do not overlap."""
    return all(size <= step for size, step in zip(_pair(kernel_size), _pair(stride or kernel_size), strict=True))


def _has_planes(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and is_plain(tensor) and tensor.numel() >= LEAST_ELEMENTS


@functools.lru_cache(maxsize=256)
def _averaged(shape: tuple[int, ...], settings: tuple[tuple[int, ...], ...], ceil_mode: bool) -> torch.Size:
    """The shape of the result. Sizes are torch's to say, and so is what is wrong with the settings."""
    return torch.ops.aten.avg_pool2d.default(torch.empty(shape, device="meta"), *settings, ceil_mode).shape


def _average_pool(
    given: torch.Tensor,
    out: torch.Tensor,
    before: torch.Size,
    after: torch.Size,
    settings: list[list[int]],
    counts_padding: bool,
    divisor: int | None,
) -> AveragePool:
    numbers = (number for pair in settings for number in pair)
    planes = before[0] * before[1]
    return AveragePool(
        given.data_ptr(), out.data_ptr(), planes, *before[2:], *after[2:], *numbers, counts_padding, divisor or 0
    )


def _pair(numbers: list[int]) -> list[int]:
    """One number stands for both axes."""
    return [*numbers] * 2 if len(numbers) == 1 else [*numbers]
