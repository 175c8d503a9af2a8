"""Convolutions with a window of one element, and the gradients of their inputs, as products of matrices.

A convolution with a window of one element is a product of matrices, for each sample its channels by its elements.
oneDNN copies its operands into blocks of channels first, and its result back: a third of its time, and as much memory
again. MKL's product takes them as they are. Both add up over channels from the first to the last, as long as MKL does
not cut the sum in pieces, which it does beyond some hundred terms: so some shapes have the same bits and some have not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from memfit.precision import cpu_is_precise
from memfit.stand_ins.compiled import is_plain, is_suspended

SETTINGS = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
"""Of a convolution, in the order of its arguments."""


def product(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *settings: Any) -> torch.Tensor:
    """A convolution with a window of one element, as a product."""
    is_served = bias is None and is_product(weight.shape, settings)
    if not is_served or not _are_for_products(input, weight):
        made: torch.Tensor = torch.ops.aten.convolution.default(input, weight, bias, *settings)
        return made
    num_samples, (num_out, num_in) = len(input), weight.shape[:2]
    matrix = weight.view(num_out, num_in).expand(num_samples, num_out, num_in)
    return torch.bmm(matrix, input.view(num_samples, num_in, -1)).view(num_samples, num_out, *input.shape[2:])


def product_backward(
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
    return all(map(is_plain, tensors)) and cpu_is_precise() and not is_suspended()
