"""Max pooling with indices, several windows side by side."""

from __future__ import annotations

import torch

from memfit.stand_ins import compiled
from memfit.stand_ins.compiled import LEAST_ELEMENTS, MaxPool, is_plain, num_threads_for


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


def _pair(numbers: list[int]) -> list[int]:
    """One number stands for both axes."""
    return [*numbers] * 2 if len(numbers) == 1 else [*numbers]
