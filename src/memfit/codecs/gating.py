"""A ReLU's backward from a code: the gradient where the gate is open, zero where it is closed, in one pass.

The gradient must have the layout of the tensor that was encoded. A mask has a bit for each gate, and its settings must
be those of a threshold; of codes that hold values a stretch at a time is decoded, so that no dense tensor is made.
"""

from __future__ import annotations

import torch

from memfit.codecs import bits, dense, kernels
from memfit.codecs.codec import PackedCodec, Settings, flat
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


def threshold_backward_by_values(
    gradient: torch.Tensor,
    code: torch.Tensor,
    threshold: float,
    codec: PackedCodec,
    settings: Settings,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """The same by a code that holds values: fill `out`, which has the gradient's layout or is the gradient."""
    can_run = gradient.dtype is torch.float32 and kernels.can_run(gradient, Kernel.CODE_GATE)
    if not can_run or dense.is_dense(code, gradient):
        like = torch.empty_like(gradient)
        decoded = codec.decode(code, like, settings)
        return torch.ops.aten.threshold_backward.grad_input(gradient, decoded, threshold, grad_input=out)
    decode_kernel, numbers = codec.decoding(gradient, settings)
    kernels.run(
        Kernel.CODE_GATE,
        code,
        out,
        count=gradient.numel(),
        numbers=(decode_kernel, *numbers),
        reals=(threshold,),
        table=gradient,
    )
    return out


def _check_threshold(settings: Settings) -> None:
    if len(settings) != 4 or settings[0] != -float("inf") or settings[2] == settings[3]:
        raise ValueError(f"these are not the settings of a threshold: {settings}")
