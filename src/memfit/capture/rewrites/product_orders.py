"""Find out in which order the products of a step are added up on this machine, and whether our kernel is faster.

Orders are tried on some columns of the result; the one that fits is then tested whole, on several draws at several
places in memory, with numbers that are zero, or so small that their products are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from memfit import stand_ins
from memfit.capture.rewrites import trials
from memfit.capture.rewrites.proof import Proofs, same_bits
from memfit.capture.schemas import named_operands
from memfit.capture.step import Op, Ref, Step, Value
from memfit.stand_ins.convolutions import are_there
from memfit.stand_ins.matrices import Kind, kind_of, orders
from memfit.stand_ins.orders import Order
from memfit.torch_internals import resolve

_NUM_DRAWS = 3
_FEW = 16  # columns on which orders are tried

Drawn = list[torch.Tensor]


class ProductTrials:
    """Trials of the products of one step."""

    def __init__(self, step: Step, proofs: Proofs, numbers: trials.Numbers) -> None:
        self._step = step
        self._proofs = proofs
        self._numbers = numbers

    def stand_in_of(self, op: Op) -> str:
        """The name of the stand-in, or nothing."""
        named = named_operands(op)
        operands = [named.pop(name) for name in ("self", "mat1", "mat2") if name in named]
        values = [self._step.values[arg.value] for arg in operands if isinstance(arg, Ref)]
        if not are_there() or len(values) < len(operands) or not all(map(_is_served, values)):
            return ""
        kind = kind_of(*((value.shape, value.stride) for value in values[-2:]))
        has_bias = len(values) > 2
        is_scaled = has_bias and (named["beta"], named["alpha"]) != (1, 1)
        # A bias is a number for each column; what is added whole is not read by rows.
        is_whole = has_bias and (values[0].shape != values[-1].shape[1:] or kind is not Kind.WITH_ROWS)
        if kind is None or is_scaled or is_whole:
            return ""
        signature = (op.target, repr([(value.shape, value.stride) for value in values]))
        return self._proofs.found("stand-ins", signature, lambda: self._search(op.target, kind, values))

    def _search(self, target: str, kind: Kind, values: list[Value]) -> str:
        draws = [self._drawn(values, seed) for seed in range(_NUM_DRAWS)]
        plain = [partial(resolve(target), *drawn) for drawn in draws]
        made = plain[0]()
        order = next((o for o in orders(kind, values[-1].shape[0]) if _fits(kind, o, draws[0], made)), None)
        if order is None:
            return ""
        name = f"memfit_ops.{target.split('.')[1]}.{order.name}"
        call = [partial(resolve(name), *drawn) for drawn in draws]
        return name if _are_same(plain, call) and trials.is_faster(plain[0], call[0]) else ""

    def _drawn(self, values: list[Value], seed: int) -> Drawn:
        """Numbers; but for the first draw some rows and columns are zero, or next to it."""
        drawn = [self._numbers.like(value, number, seed) for number, value in enumerate(values)]
        if seed == 0:
            return drawn
        changed = []
        for number, each in enumerate(drawn):
            copy = torch.empty_strided(each.shape, each.stride()).copy_(each)
            for axis in range(copy.dim()):
                for first, small in enumerate((0.0, -0.0, 1e-30, -1e-30)):
                    copy.movedim(axis, 0)[first + 3 * number :: 11 + seed] = small
            changed.append(copy)
        return changed


def _is_served(value: Value) -> bool:
    return value.dtype is torch.float32 and value.device == "cpu" and value.num_elements > 0


def _fits(kind: Kind, order: Order, drawn: Drawn, made: torch.Tensor) -> bool:
    """True if some columns of the result are what that order makes of them."""
    *bias, one, other = drawn
    if kind is Kind.OF_FEW_TERMS:
        return True  # there is but one
    few = other[:, :_FEW]
    few = few.t().contiguous().t() if kind is Kind.WITH_ROWS else few.contiguous()
    family = stand_ins.addmm if bias else stand_ins.mm
    found: torch.Tensor = getattr(family, order.name)(*(each[:_FEW] for each in bias), one, few)
    return torch.equal(found, made[:, :_FEW])


def _are_same(plain: Sequence[Callable[[], Any]], call: Sequence[Callable[[], Any]]) -> bool:
    return all(same_bits(one(), other()) for one, other in zip(plain, call, strict=True))
