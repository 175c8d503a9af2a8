"""Operators that stand in for some of torch's own on a CPU: the same bits in less time.

They are registered with torch under the names of those they stand in for, take the same arguments, and call these where
they have no kernel for what they are given: another dtype or layout, no compiler on this machine. Whether the bits are
the same is asked of the machine (capture/rewrites/stand_ins.py); each file in native/kernels says what torch's kernel
does, and why it takes longer.
"""

from __future__ import annotations

import functools

import torch

from memfit.stand_ins import compiled
from memfit.stand_ins.adding import add_, add_all, count_up, is_counter
from memfit.stand_ins.batch_norm import (
    cat_and_normalise,
    gate_and_go_on,
    has_channels_last,
    native_batch_norm,
    native_batch_norm_backward,
    renormalised,
)
from memfit.stand_ins.compiled import LEAST_ELEMENTS, kernels, torchs_own
from memfit.stand_ins.convolutions import convolve, convolve_backward
from memfit.stand_ins.drawing import bernoulli_
from memfit.stand_ins.matrices import PRODUCTS
from memfit.stand_ins.matrices import addmm as addmm_in_order
from memfit.stand_ins.matrices import mm as mm_in_order
from memfit.stand_ins.orders import Family, Order
from memfit.stand_ins.pooling import are_apart, avg_pool2d, avg_pool2d_backward, max_pool2d_with_indices
from memfit.stand_ins.products import SETTINGS, is_product, product, product_backward

__all__ = [
    "CONVOLUTIONS",
    "COUNT_UP",
    "LEAST_ELEMENTS",
    "PRODUCTS",
    "SETTINGS",
    "STAND_INS",
    "add_",
    "add_all",
    "addmm",
    "are_apart",
    "avg_pool2d",
    "avg_pool2d_backward",
    "bernoulli_",
    "cat_and_normalise",
    "convolution",
    "convolution_backward",
    "count_up",
    "define",
    "gate_and_go_on",
    "has_channels_last",
    "is_counter",
    "is_product",
    "is_there",
    "kernels",
    "max_pool2d_with_indices",
    "mm",
    "native_batch_norm",
    "native_batch_norm_backward",
    "renormalised",
    "torchs_own",
]

STAND_INS = {
    "aten.native_batch_norm.default": "memfit_ops.native_batch_norm.default",
    "aten.native_batch_norm_backward.default": "memfit_ops.native_batch_norm_backward.default",
    "aten.add_.Tensor": "memfit_ops.add_.default",
    "aten.bernoulli_.float": "memfit_ops.bernoulli_.default",
    "aten.max_pool2d_with_indices.default": "memfit_ops.max_pool2d_with_indices.default",
    "aten.avg_pool2d.default": "memfit_ops.avg_pool2d.default",
    "aten.avg_pool2d_backward.default": "memfit_ops.avg_pool2d_backward.default",
    "aten.convolution.default": "memfit_ops.convolution.default",
    "aten.convolution_backward.default": "memfit_ops.convolution_backward.default",
}
"""What stands in for which of torch's, by name."""

COUNT_UP = "memfit_ops.count_up.default"
"""What stands in for an addition in place of a number to a counter."""

CONVOLUTIONS = frozenset({"aten.convolution.default", "aten.convolution_backward.default"})
"""Those with more than one: a product of matrices, which the table above has, and one for each order of sums."""

convolution = Family(product, convolve)
convolution_backward = Family(product_backward, convolve_backward)
mm = Family(torch.ops.aten.mm.default, mm_in_order)
addmm = Family(torch.ops.aten.addmm.default, addmm_in_order)

_LIBRARY = torch.library.Library("memfit_ops", "FRAGMENT")  # its operators live as long as it does
_CONVOLUTION = (
    "(Tensor input, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, bool transposed, "
    "int[] output_padding, int groups) -> Tensor"
)
_CONVOLUTION_BACKWARD = (
    "(Tensor grad_output, Tensor input, Tensor weight, int[]? bias_sizes, int[] stride, int[] padding, int[] dilation, "
    "bool transposed, int[] output_padding, int groups, bool[3] output_mask) -> (Tensor, Tensor, Tensor)"
)
_FAMILIES = {
    "convolution": (_CONVOLUTION, convolution),
    "convolution_backward": (_CONVOLUTION_BACKWARD, convolution_backward),
    "mm": ("(Tensor self, Tensor mat2) -> Tensor", mm),
    "addmm": ("(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor", addmm),
}
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
    "add_(Tensor(a!) self, Tensor other) -> Tensor(a!)",
    "count_up(Tensor(a!) self, int number) -> Tensor(a!)",
    "bernoulli_(Tensor(a!) self, float p=0.5, *, Generator? generator=None) -> Tensor(a!)",
    (
        "max_pool2d_with_indices(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0, "
        "int[2] dilation=1, bool ceil_mode=False) -> (Tensor, Tensor)"
    ),
    (
        "avg_pool2d(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0, bool ceil_mode=False, "
        "bool count_include_pad=True, int? divisor_override=None) -> Tensor"
    ),
    (
        "avg_pool2d_backward(Tensor grad_output, Tensor self, int[2] kernel_size, int[2] stride, int[2] padding, "
        "bool ceil_mode, bool count_include_pad, int? divisor_override) -> Tensor"
    ),
)
for _schema in _SCHEMAS:
    _LIBRARY.define(_schema)
_KERNELS = (
    native_batch_norm,
    native_batch_norm_backward,
    add_,
    count_up,
    bernoulli_,
    max_pool2d_with_indices,
    avg_pool2d,
    avg_pool2d_backward,
)
for _kernel in _KERNELS:
    _LIBRARY.impl(_kernel.__name__, _kernel, "CPU")
for _name, (_arguments, _family) in _FAMILIES.items():
    _LIBRARY.define(f"{_name}{_arguments}")
    _LIBRARY.impl(_name, _family, "CPU")


@functools.cache
def define(target: str) -> None:
    """Register an operator that adds up in some order: there are more of these than anybody needs."""
    namespace, name, order = target.split(".")
    if namespace == "memfit_ops" and name in _FAMILIES and Order.named(order) is not None:
        arguments, family = _FAMILIES[name]
        _LIBRARY.define(f"{name}.{order}{arguments}")
        _LIBRARY.impl(f"{name}.{order}", getattr(family, order), "CPU")


def is_there(target: str) -> bool:
    """True if something can stand in for that operator on this machine."""
    return target in CONVOLUTIONS or (target in STAND_INS and compiled.kernels() is not None)
