"""Find out in which order the products of a step are added up on this machine, and whether our kernel is faster.

Orders are tried on some columns of the result; the one that fits is then tested whole, on several draws at several
places in memory, with numbers that are zero, or so small that their products are.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from functools import partial

import torch

from memfit import stand_ins
from memfit.capture.rewrites import trials
from memfit.capture.rewrites.proof import Proofs, same_bits
from memfit.capture.schemas import named_operands
from memfit.capture.step import Op, Ref, Step, Value
from memfit.stand_ins.convolutions import are_there
from memfit.stand_ins.matrices import LEAST_LARGE, Kind, kind_of, orders
from memfit.stand_ins.orders import Order
from memfit.torch_internals import resolve

_NUM_DRAWS = 3
_FEW = 16  # columns on which orders are tried
_MOST_AT_ONCE, _LEAST_ROWS = 1 << 22, 64  # elements of a result, and rows
_SMALL = (0.0, -0.0, 1e-30, -1e-30)

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
        """No more is held than the step itself will: of a large result one, and never one beside a large operand."""
        try:
            return self._found(target, kind, values)
        finally:
            self._numbers.forget()

    def _found(self, target: str, kind: Kind, values: list[Value]) -> str:
        drawn = self._drawn(values, 0)
        made = resolve(target)(*drawn)
        order = next((o for o in orders(kind, values[-1].shape[0]) if _fits(kind, o, drawn, made)), None)
        if order is None:
            return ""
        del made
        overload = target.split(".")[1]
        name = f"memfit_ops.{overload}.{order.name}"
        for seed in range(_NUM_DRAWS):
            drawn = self._drawn(values, seed)
            with contextlib.ExitStack() as stack:
                if seed:
                    for number, each in enumerate(drawn):
                        stack.enter_context(_next_to_zero(each, 5 * number + seed))
                if not _are_same(kind, overload, order, drawn, resolve(target)(*drawn)):
                    return ""
        plain, call = (partial(resolve(each), *drawn) for each in (target, name))
        return name if trials.is_faster(plain, call) else ""

    def _drawn(self, values: list[Value], seed: int) -> Drawn:
        return [self._numbers.like(value, number, seed) for number, value in enumerate(values)]


def _is_served(value: Value) -> bool:
    return value.dtype is torch.float32 and value.device == "cpu" and value.num_elements > 0


def _fits(kind: Kind, order: Order, drawn: Drawn, made: torch.Tensor) -> bool:
    """True if some columns of the result are what that order makes of them."""
    *bias, one, other = drawn
    if kind is Kind.OF_FEW_TERMS:
        return True  # there is but one
    count = max(_FEW, -(-LEAST_LARGE // len(other)))  # of fewer there is no kernel
    few = other[:, :count]
    few = few.t().contiguous().t() if kind is Kind.WITH_ROWS else few.contiguous()
    family = stand_ins.addmm if bias else stand_ins.mm
    found: torch.Tensor = getattr(family, order.name)(*(each[:count] for each in bias), one, few)
    return torch.equal(found, made[:, :count])


def _are_same(kind: Kind, overload: str, order: Order, drawn: Drawn, plain: torch.Tensor) -> bool:
    """True if the kernel makes the same bits; of a large result it makes some rows at a time."""
    run = getattr(stand_ins.addmm if overload == "addmm" else stand_ins.mm, order.name)
    if kind is not Kind.OF_FEW_TERMS:
        return same_bits(run(*drawn), plain)
    one, other = drawn
    count = max(1, len(plain) // max(_LEAST_ROWS, _MOST_AT_ONCE // len(plain[0])))
    parts = zip(one.t().tensor_split(count, dim=1), plain.tensor_split(count), strict=True)
    return all(same_bits(run(part.contiguous().t(), other), expected) for part, expected in parts)


@contextlib.contextmanager
def _next_to_zero(values: torch.Tensor, first: int) -> Iterator[None]:
    """Some rows and columns are zeros for a while, or so small that their products are."""
    places = [
        values.select(axis, (first + 7 * k) % values.shape[axis]) for axis in range(values.dim()) for k in range(4)
    ]
    before = [place.clone() for place in places]
    for place, small in zip(places, itertools.cycle(_SMALL)):
        place.fill_(small)
    try:
        yield
    finally:
        for place, numbers in zip(reversed(places), reversed(before), strict=True):
            place.copy_(numbers)
