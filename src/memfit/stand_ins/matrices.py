"""Products of matrices whose result has few rows, or whose sums have few terms, by a kernel of our own.

Where a batch is small, these are all products of a linear layer: its result, its input's gradient and its weight's. In
which order MKL adds up depends on the machine; so an order is part of what the kernel is asked for, and which one gives
MKL's bits is found by trying (capture/rewrites/product_orders.py). native/kernels/products.c says why MKL takes longer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any

import torch

from memfit.precision import cpu_is_precise
from memfit.stand_ins import compiled
from memfit.stand_ins.compiled import Product, is_plain
from memfit.stand_ins.orders import Order

PRODUCTS = frozenset({"aten.mm.default", "aten.addmm.default"})
"""What a product stands in for."""

_MOST = 64  # rows of the result, or terms of a sum
LEAST_LARGE = 1 << 16
"""Elements of the large matrix: a smaller one is read in no time."""

_USUAL_SUMS = (192, 384)
_ALL_SUMS = range(64, 1025, 16)


class Kind(IntEnum):
    """How the large matrix lies, as native/kernels/kernels.h has it."""

    WITH_ROWS = 0  # a row for each column of the result
    WITH_COLUMNS = 1  # a row for each term
    OF_FEW_TERMS = 2  # it is the result


Layout = tuple[Sequence[int], Sequence[int]]
"""A tensor's shape and strides."""


def kind_of(one: Layout, other: Layout) -> Kind | None:
    """Which product of two matrices there is a kernel for, if there is one."""
    if len(one[0]) != 2 or len(other[0]) != 2:
        return None
    (num_rows, num_terms), num_columns = one[0], other[0][1]
    num_large = {
        Kind.WITH_ROWS: num_terms * num_columns,
        Kind.WITH_COLUMNS: num_terms * num_columns,
        Kind.OF_FEW_TERMS: num_rows * num_columns,
    }
    has_few_rows = num_rows <= _MOST and _is_by_rows(*one)
    if has_few_rows and _is_by_rows(*map(_turned, other)):
        kind = Kind.WITH_ROWS
    elif has_few_rows and _is_by_rows(*other):
        kind = Kind.WITH_COLUMNS
    elif num_terms <= _MOST and _is_by_rows(*map(_turned, one)) and _is_by_rows(*other):
        kind = Kind.OF_FEW_TERMS
    else:
        return None
    return kind if num_large[kind] >= LEAST_LARGE else None


def orders(kind: Kind, num_terms: int) -> Iterator[Order]:
    """Those in which MKL may add up, likely ones first."""
    if kind is Kind.OF_FEW_TERMS:
        yield Order(num_terms)
        return
    counts = (*_USUAL_SUMS, num_terms, *_ALL_SUMS)
    yield from map(Order, dict.fromkeys(min(count, num_terms) for count in counts))


def mm(order: Order, self: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    """A product of matrices, added up in that order."""
    kind = _served(order, self, mat2)
    if kind is None:
        made: torch.Tensor = torch.ops.aten.mm.default(self, mat2)
        return made
    return _multiplied(kind, order, self, mat2, None)


def addmm(
    order: Order, self: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> torch.Tensor:
    """A product of matrices, added up in that order to a number for each column."""
    kind = _served(order, mat1, mat2)
    if kind is not Kind.WITH_ROWS or not (beta == alpha == 1 and is_plain(self) and self.shape == mat2.shape[1:]):
        made: torch.Tensor = torch.ops.aten.addmm.default(self, mat1, mat2, beta=beta, alpha=alpha)
        return made
    return _multiplied(kind, order, mat1, mat2, self)


def _is_by_rows(shape: Sequence[int], strides: Sequence[int]) -> bool:
    return tuple(strides) == (shape[1], 1)


def _turned(pair: Sequence[int]) -> Sequence[int]:
    return pair[::-1]


def _served(order: Order, one: torch.Tensor, other: torch.Tensor) -> Kind | None:
    """Which product it is, if there is a kernel for it and it may be used."""
    library = compiled.kernels()
    if library is None or not library.memfit_has_avx512() or not cpu_is_precise() or order.num_summed < 1:
        return None
    if not all(each.dtype is torch.float32 and each.is_cpu for each in (one, other)):
        return None
    kind = kind_of((one.shape, one.stride()), (other.shape, other.stride()))
    return None if kind is Kind.OF_FEW_TERMS and order.num_summed < one.shape[1] else kind


def _multiplied(
    kind: Kind, order: Order, one: torch.Tensor, other: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    library = compiled.kernels()
    assert library is not None
    (num_rows, num_terms), num_columns = one.shape, other.shape[1]
    out = one.new_empty(num_rows, num_columns)
    job = Product(
        one.data_ptr(),
        other.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        None,
        num_rows,
        num_columns,
        num_terms,
        order.num_summed,
        kind,
    )
    scratch = torch.empty(library.memfit_multiply_scratch(job), dtype=torch.float32)
    job.scratch = scratch.data_ptr()
    library.memfit_multiply(ctypes.byref(job), torch.get_num_threads())
    return out
