"""A ReLU's backward from its mask: the gradient where the gate is open, zero where it is closed, in one pass.

The gradient must have the layout of the tensor that was encoded, and the settings must be those of a threshold.
"""

from __future__ import annotations

import torch

from memfit.codecs import bits, kernels
from memfit.codecs.codec import Settings, flat
from memfit.codecs.kernels import Kernel


def threshold_backward(gradient: torch.Tensor, code: torch.Tensor, settings: Settings) -> torch.Tensor:
    """What threshold_backward makes of the gradient and the encoded tensor."""
    _check_threshold(settings)
    gated = torch.empty_like(gradient)
    if not kernels.can_run(gradient, Kernel.MASK_GATE):
        return threshold_backward_twin(gradient, code, gated)
    numbers = (1, gradient.element_size())
    kernels.run(Kernel.MASK_GATE, code, gated, count=gradient.numel(), numbers=numbers, table=gradient)
    return gated


def threshold_backward_(gradient: torch.Tensor, code: torch.Tensor, settings: Settings) -> torch.Tensor:
    """The same in the gradient's place. Autograd does not see the change: for gradients that nothing else holds."""
    _check_threshold(settings)
    if not kernels.can_run(gradient, Kernel.MASK_GATE):
        return threshold_backward_twin(gradient, code, gradient)
    numbers = (1, gradient.element_size())
    kernels.run(Kernel.MASK_GATE, code, gradient, count=gradient.numel(), numbers=numbers)
    return gradient


def threshold_backward_twin(gradient: torch.Tensor, code: torch.Tensor, gated: torch.Tensor) -> torch.Tensor:
    """Fill `gated`, which has the gradient's layout or is the gradient, in torch."""
    whole, target = flat(gradient), flat(gated)
    for start in range(0, whole.numel(), bits.CHUNK):
        stretch = whole[start : start + bits.CHUNK]
        is_shut = bits.unpack(code[start // 8 : (start + bits.CHUNK) // 8], 1, stretch.numel()).bool()
        torch.where(is_shut, stretch.new_zeros(()), stretch, out=target[start : start + bits.CHUNK])
    return gated


def _check_threshold(settings: Settings) -> None:
    if len(settings) != 4 or settings[0] != -float("inf") or settings[2] == settings[3]:
        raise ValueError(f"these are not the settings of a threshold: {settings}")
