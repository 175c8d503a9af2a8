"""Operators that stand in for some of torch's own on a CPU: the same bits in less time.

They are registered with torch under the names of those they stand in for, take the same arguments, and call these where
they have no kernel for what they are given: another dtype or layout, no compiler on this machine. Whether the bits are
the same is asked of the machine (capture/rewrites/stand_ins.py); each file in native/kernels says what torch's kernel
does, and why it takes longer.
"""

from __future__ import annotations

import torch

from memfit.stand_ins import compiled
from memfit.stand_ins.batch_norm import (
    gate_and_add_up,
    has_channels_last,
    native_batch_norm,
    native_batch_norm_backward,
    renormalised,
)
from memfit.stand_ins.compiled import LEAST_ELEMENTS, kernels
from memfit.stand_ins.drawing import bernoulli_
from memfit.stand_ins.pooling import max_pool2d_with_indices
from memfit.stand_ins.products import SETTINGS, convolution, convolution_backward, is_product

__all__ = [
    "LEAST_ELEMENTS",
    "SETTINGS",
    "STAND_INS",
    "bernoulli_",
    "convolution",
    "convolution_backward",
    "gate_and_add_up",
    "has_channels_last",
    "is_product",
    "is_there",
    "kernels",
    "max_pool2d_with_indices",
    "native_batch_norm",
    "native_batch_norm_backward",
    "renormalised",
]

STAND_INS = {
    "aten.native_batch_norm.default": "memfit_ops.native_batch_norm.default",
    "aten.native_batch_norm_backward.default": "memfit_ops.native_batch_norm_backward.default",
    "aten.bernoulli_.float": "memfit_ops.bernoulli_.default",
    "aten.max_pool2d_with_indices.default": "memfit_ops.max_pool2d_with_indices.default",
    "aten.convolution.default": "memfit_ops.convolution.default",
    "aten.convolution_backward.default": "memfit_ops.convolution_backward.default",
}
"""What stands in for which of torch's, by name."""

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
for _kernel in (
    native_batch_norm,
    native_batch_norm_backward,
    bernoulli_,
    max_pool2d_with_indices,
    convolution,
    convolution_backward,
):
    _LIBRARY.impl(_kernel.__name__, _kernel, "CPU")


def is_there(target: str) -> bool:
    """True if something can stand in for that operator on this machine."""
    return target in _IN_TORCH or (target in STAND_INS and compiled.kernels() is not None)
