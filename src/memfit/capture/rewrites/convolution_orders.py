"""Find out which stand-in for a convolution gives the same bits on this machine, and whether it is faster.

The candidates are kernels that add up in the orders that oneDNN is known to use, and for windows of one element a
product of matrices. Orders are tried on a part of what torch made: some samples, or some channels of a weight. The one
that fits is then tested whole, at several places in memory, as kernels may go another way where operands are not
aligned; and it has to be faster, which depends on the shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from memfit import stand_ins
from memfit.capture.ghosts import make_ghost
from memfit.capture.rewrites import trials
from memfit.capture.rewrites.proof import Proofs, same_bits
from memfit.capture.schemas import named_operands
from memfit.capture.step import Ghost, Op, Ref, Step, Value
from memfit.stand_ins.convolutions import are_there, has_planes, is_direct, orders
from memfit.stand_ins.orders import Order
from memfit.torch_internals import argument_names, resolve

_TENSORS = ("grad_output", "input", "weight", "bias")
_NUM_DRAWS = 3
_MASKS: tuple[list[bool], ...] = ([], [True, False, False], [False, True, False], [False, True, True])
_FEW_OUT, _FEW_IN = 16, 8  # channels of a weight on which orders are tried

Operands = dict[str, Any]


class ConvolutionTrials:
    """Trials of the convolutions of one step."""

    def __init__(self, step: Step, proofs: Proofs, numbers: trials.Numbers) -> None:
        self._step = step
        self._proofs = proofs
        self._numbers = numbers

    def stand_in_of(self, op: Op) -> str:
        """The name of the stand-in, or nothing."""
        named = named_operands(op)
        operands: Operands = {name: named.pop(name) for name in _TENSORS if name in named}
        if not all(map(self._is_served, operands.values())):
            return ""
        seen: Operands = {name: self._value(arg) for name, arg in operands.items()}
        candidates = _Candidates(op.target, seen, named)
        if not candidates.has_any:
            return ""
        layouts = [None if each is None else (each.shape, getattr(each, "stride", None)) for each in seen.values()]
        ghosts = [name for name, arg in operands.items() if isinstance(arg, Ghost)]
        signature = (op.target, repr(layouts), repr(ghosts), repr(sorted(named.items())))
        return self._proofs.found("stand-ins", signature, lambda: self._search(candidates, operands))

    def _is_served(self, arg: Any) -> bool:
        if not isinstance(arg, Ref):
            return arg is None or isinstance(arg, Ghost)
        value = self._step.values[arg.value]
        return value.dtype is torch.float32 and value.device == "cpu" and value.num_elements > 0

    def _value(self, arg: Any) -> Value | Ghost | None:
        return self._step.values[arg.value] if isinstance(arg, Ref) else arg

    def _search(self, candidates: _Candidates, operands: Operands) -> str:
        """The first candidate that gives the same bits and is faster."""
        draws = [self._drawn(operands, seed) for seed in range(_NUM_DRAWS)]
        plain = [candidates.call(candidates.target, drawn) for drawn in draws]
        made = plain[0]()
        for name in candidates.names(draws[0], made):
            call = [candidates.call(name, drawn) for drawn in draws]
            pairs = zip(plain[1:], call[1:], strict=True)
            is_same = same_bits(made, call[0]()) and all(same_bits(one(), other()) for one, other in pairs)
            if is_same and trials.is_faster(plain[0], call[0]):
                return name
        return ""

    def _drawn(self, operands: Operands, seed: int) -> Operands:
        """Numbers for the operands, other ones for each, and elsewhere in memory with each seed."""
        drawn: Operands = {}
        number = 0
        for name, arg in operands.items():
            value = self._value(arg)
            if arg is None or isinstance(arg, Ghost):
                drawn[name] = None if arg is None else make_ghost(arg)
                continue
            assert isinstance(value, Value)
            drawn[name] = self._numbers.like(value, number, seed)
            number += 1
        return drawn


class _Candidates:
    """What may stand in for one convolution."""

    def __init__(self, target: str, seen: Operands, named: Operands) -> None:
        self.target = target
        self._named = named
        self._mask = [*named.get("output_mask", ())]
        self._shape = seen["weight"].shape
        settings = [named[name] for name in stand_ins.SETTINGS]
        maps = [seen[name] for name in ("grad_output", "input") if name in seen]
        self._num_samples, *self._image = maps[0].shape[:1] + maps[0].shape[2:]
        held = [each for each in maps if isinstance(each, Value)]
        is_served = are_there() and self._mask in _MASKS and all(has_planes(each.shape, each.stride) for each in held)
        self._is_direct = is_served and is_direct(self._shape, self._image, settings)
        is_plain = all(_is_contiguous(each) for each in (*held, seen["weight"]))
        is_for_products = self._mask in ([], [True, False, False]) and seen.get("bias") is None
        self._is_product = is_for_products and is_plain and stand_ins.is_product(self._shape, settings)

    @property
    def has_any(self) -> bool:
        return self._is_direct or self._is_product

    def call(self, name: str, operands: Operands) -> Callable[[], Any]:
        return partial(resolve(name), **operands, **self._named)

    def names(self, operands: Operands, made: Any) -> Iterator[str]:
        """Stand-ins that may give what torch made of the operands, one that adds up in an order that fits first."""
        usual = stand_ins.STAND_INS[self.target]
        if self._is_direct:
            order = self._fitting(operands, made)
            if order is not None:
                yield f"{usual.removesuffix('.default')}.{order.name}"
        if self._is_product:
            yield usual

    def _fitting(self, operands: Operands, made: Any) -> Order | None:
        family = stand_ins.convolution_backward if self._mask else stand_ins.convolution
        is_of_weight = self._mask[:1] == [False]
        part, expected = dict(operands), made
        if is_of_weight:
            part["grad_output"], part["input"] = operands["grad_output"][:, :_FEW_OUT], operands["input"][:, :_FEW_IN]
            part["weight"] = operands["weight"][:_FEW_OUT, :_FEW_IN]
            expected = made[1][:_FEW_OUT, :_FEW_IN].contiguous()
        else:
            first = "grad_output" if self._mask else "input"
            part[first] = operands[first][:1]
            expected = (made[0] if self._mask else made)[:1]
        named = part | self._named | ({"output_mask": [*self._mask[:2], False]} if self._mask else {})
        args = [named[name] for name in argument_names(self.target)]
        for order in orders(self._shape, self._num_samples, self._image, self._mask):
            result = getattr(family, order.name)(*args)
            found = result if not self._mask else result[1 if is_of_weight else 0]
            if torch.equal(found, expected):
                return order
        return None


def _is_contiguous(value: Value | Ghost) -> bool:
    return isinstance(value, Ghost) or torch.empty_strided(value.shape, value.stride, device="meta").is_contiguous()
