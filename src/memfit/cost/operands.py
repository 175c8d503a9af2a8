"""One op taken out of its step so that it can be run alone: the call, and operands made for it.

    call = Call.of(step, op)          layouts, aliases and literals, no data; can be sent to another process
    operands = Operands(call)         tensors of exactly those layouts, with contents the kernel accepts
    result = operands.run()

[Note: contents]
Times hardly depend on values, but kernels check some of them: an index must be in range, a variance positive, a
probability between 0 and 1. And some values are slow: denormal numbers, and indices that all hit one place. So what is
filled in is chosen by the name that the operator's schema gives the argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from memfit.capture.step import Ghost, Half, Op, Opaque, Ref, Step
from memfit.errors import MemfitError
from memfit.torch_internals import argument_names, normalised, resolve

_POSITIVE = frozenset({"running_var", "save_var", "save_invstd", "rstd", "invstd", "var", "std", "reserve_var"})
_PROBABILITY = frozenset({"p", "probs"})
_PROBABILITY_SELF = ("aten.bernoulli", "aten.multinomial", "aten.binary_cross_entropy.", "aten.binary_cross_entropy_b")
_PRIVATE = frozenset({"workspace", "reserve", "reserveSpace"})  # state of one kernel for another, unchecked by either
_SEQUENCE_LENGTHS = frozenset({"batch_sizes", "lengths"})
_PATTERN = 65_537  # elements; prime, so that rows of a tensor do not repeat each other


class CannotRunAlone(MemfitError):
    """An op that cannot be called outside its step; its cost is estimated."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor operand: its layout, where it lies in which storage of the call, and what to fill in.

    Attributes:
        storage: number of the storage among those of the call; two operands of one number alias.
        offset: elements from the start of the storage.
        fill: "normal", "positive", "probability"; for whole numbers "choice" (any below num_choices), "lengths" (all
            num_choices), "spread" (rising from 0 to num_choices over `period` elements, again and again).
    """

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    fill: str = "normal"
    num_choices: int = 1
    period: int = 1

    @property
    def end_bytes(self) -> int:
        """Where in the storage its last element ends."""
        if 0 in self.shape:
            return self.offset * self.dtype.itemsize
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return (self.offset + last + 1) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Call:
    """An op's call without data: operands and literals in place, storages by number."""

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    written: frozenset[int]
    is_view: bool
    is_forward: bool
    result_bytes: int

    @classmethod
    def of(cls, step: Step, op: Op) -> Call:
        """The op's call; raises CannotRunAlone if one of its operands cannot be made up."""
        placed = _Placing(step, op)
        names = argument_names(op.target)
        args = tuple(placed.operand(arg, names[i] if i < len(names) else "") for i, arg in enumerate(op.args))
        kwargs = tuple((key, placed.operand(arg, key)) for key, arg in op.kwargs)
        read = {step.values[value].storage for value in op.reads()}
        made = {step.values[value].storage for value in op.made}
        return cls(
            target=op.called,
            args=args,
            kwargs=kwargs,
            written=frozenset(placed.number[storage] for storage in op.writes if storage in placed.number),
            is_view=bool(made) and made <= read and not op.writes,
            is_forward=op.half is Half.FORWARD,
            result_bytes=sum(step.storage_bytes[storage] for storage in made - read),
        )

    @property
    def operands(self) -> tuple[Operand, ...]:
        return tuple(_operands_in((self.args, [value for _, value in self.kwargs])))

    @property
    def storage_bytes(self) -> dict[int, int]:
        """Size of each storage the operands lie in."""
        found: dict[int, int] = {}
        for operand in self.operands:
            found[operand.storage] = max(found.get(operand.storage, 0), operand.end_bytes)
        return found

    @property
    def bytes(self) -> int:
        """What the operands and the new results take."""
        return sum(self.storage_bytes.values()) + self.result_bytes


class _Placing:
    """Numbers a call's storages as its operands come, and shifts offsets so that each storage starts at zero."""

    def __init__(self, step: Step, op: Op) -> None:
        self.step = step
        self.target = op.target
        self.named = normalised(op.target, op.args, op.kwargs)
        self.number: dict[int, int] = {}
        self.start_bytes: dict[int, int] = {}
        for value in map(step.values.__getitem__, op.reads()):
            start = value.offset * value.dtype.itemsize
            self.start_bytes[value.storage] = min(start, self.start_bytes.get(value.storage, start))

    def operand(self, arg: Any, name: str, index: int = 0) -> Any:
        if isinstance(arg, Ref):
            if name in _PRIVATE:
                raise CannotRunAlone(f"{self.target} reads '{name}', which only the kernel before it can make")
            value = self.step.values[arg.value]
            number = self.number.setdefault(value.storage, len(self.number))
            # Rounded down to whole elements: storages seen through two dtypes may start between two of them.
            offset = value.offset - self.start_bytes[value.storage] // value.dtype.itemsize
            fill, num_choices, period = self._contents(name, index, value.dtype, value.shape)
            return Operand(number, value.shape, value.stride, offset, value.dtype, fill, num_choices, period)
        if isinstance(arg, Opaque):
            raise CannotRunAlone(f"{self.target} takes {arg.text}, which is not known outside its step")
        if isinstance(arg, (tuple, list)):
            return [self.operand(item, name, i) for i, item in enumerate(arg)]
        if isinstance(arg, torch.device):
            return torch.device("cpu")
        return arg

    def _contents(self, name: str, index: int, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, int, int]:
        """What to fill an operand with, see [Note: contents]."""
        if dtype.is_floating_point or dtype.is_complex:
            if name in _POSITIVE:
                return "positive", 1, 1
            if name in _PROBABILITY or (name == "self" and self.target.startswith(_PROBABILITY_SELF)):
                return "probability", 1, 1
            return "normal", 1, 1
        if dtype is torch.bool:
            return "choice", 2, 1
        if name in _SEQUENCE_LENGTHS:
            return "lengths", max(self._size("input", 0), 1), 1
        if name == "indices" and "pool" in self.target and len(shape) >= 2:
            # Where each maximum was: in rising order over the plane, as real ones nearly are.
            num_spatial = 3 if "pool3d" in self.target else 2
            return "spread", math.prod(self._shape("self")[-num_spatial:]), math.prod(shape[-num_spatial:])
        return "choice", self._num_choices(name, index), 1

    def _num_choices(self, name: str, index: int) -> int:
        """How many values an index may have: 1 (all zeros) where it is not known."""
        named = self.named
        if name == "indices" and "embedding" in self.target:
            return int(named["num_weights"]) if "num_weights" in named else max(self._size("weight", 0), 1)
        if name == "target" and "nll_loss" in self.target:
            return max(self._size("self", 1 if len(self._shape("self")) > 1 else 0), 1)
        if name == "indices" and self.target.startswith(("aten.index.", "aten.index_put", "aten._unsafe_index")):
            return max(self._size("self", index), 1)
        if name == "index" and isinstance(named.get("dim"), int):
            return max(self._size("self", named["dim"]), 1)
        return 1

    def _shape(self, name: str) -> tuple[int, ...]:
        arg = self.named.get(name)
        if isinstance(arg, Ref):
            return self.step.values[arg.value].shape
        return arg.shape if isinstance(arg, Ghost) else ()

    def _size(self, name: str, axis: int) -> int:
        shape = self._shape(name)
        return shape[axis] if -len(shape) <= axis < len(shape) else 1


class Operands:
    """Tensors for one call. They are the only memory it holds, apart from a pattern of half a megabyte."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self._function = resolve(call.target)
        self._storages = {
            number: torch.empty(num_bytes, dtype=torch.uint8) for number, num_bytes in call.storage_bytes.items()
        }
        self._args = [self._make(arg) for arg in call.args]
        self._kwargs = {key: self._make(arg) for key, arg in call.kwargs}
        self._pointers = {storage.untyped_storage().data_ptr() for storage in self._storages.values()}
        self.fill(frozenset(self._storages))

    def run(self) -> Any:
        """Call the op as generated code does: below autograd."""
        return self._function(*self._args, **self._kwargs)

    def fill(self, storages: frozenset[int]) -> None:
        """Write fresh contents into these storages. The first operand of each says what."""
        done: set[int] = set()
        for operand in self.call.operands:
            if operand.storage in storages and operand.storage not in done:
                done.add(operand.storage)
                _fill(self._storages[operand.storage], operand)

    def restore(self) -> None:
        """Undo what a run wrote: a number multiplied by itself in a loop becomes denormal, and those are slow."""
        if self.call.written:
            self.fill(self.call.written)

    def new_bytes(self, result: Any) -> int:
        """Bytes of the storages in a result that are no operand's."""
        found: dict[int, int] = {}
        for tensor in _tensors_in(result):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._pointers:
                found[storage.data_ptr()] = storage.nbytes()
        return sum(found.values())

    def _make(self, arg: Any) -> Any:
        if isinstance(arg, Operand):
            storage = self._storages[arg.storage].untyped_storage()
            tensor = torch.empty(0, dtype=arg.dtype)
            return tensor.set_(storage, arg.offset, arg.shape, arg.stride)
        if isinstance(arg, Ghost):
            ghost = torch.empty_strided(arg.shape, arg.stride, dtype=arg.dtype)
            ghost.untyped_storage().resize_(0)
            return ghost
        if isinstance(arg, list):
            return [self._make(item) for item in arg]
        return arg


def _fill(storage: torch.Tensor, operand: Operand) -> None:
    """Write the pattern of that kind over the storage, end to end, from its first element."""
    size = operand.dtype.itemsize
    flat = storage[: len(storage) // size * size].view(operand.dtype)
    storage[len(flat) * size :].zero_()
    if operand.fill == "lengths":
        flat.fill_(operand.num_choices)
        return
    if operand.fill == "spread":
        ramp = torch.arange(operand.period, dtype=torch.int64) * operand.num_choices // operand.period
        pattern = ramp.to(operand.dtype)
    else:
        pattern = _pattern(operand.fill, operand.num_choices, operand.dtype)
    whole = len(flat) // len(pattern)
    flat[: whole * len(pattern)].view(whole, len(pattern)).copy_(pattern)
    flat[whole * len(pattern) :].copy_(pattern[: len(flat) - whole * len(pattern)])


@cache
def _pattern(fill: str, num_choices: int, dtype: torch.dtype) -> torch.Tensor:
    """Contents to repeat, drawn from a generator of its own."""
    generator = torch.Generator().manual_seed(0)
    if fill == "choice":
        return torch.randint(num_choices, (_PATTERN,), generator=generator).to(dtype)
    numbers = torch.randn(_PATTERN, generator=generator)
    if fill == "positive":
        return (numbers.abs() + 0.1).to(dtype)
    if fill == "probability":
        return torch.rand(_PATTERN, generator=generator).to(dtype)
    numbers[torch.rand(_PATTERN, generator=generator) < 0.1] = 0.0
    return numbers.to(dtype)


def _operands_in(arg: Any) -> Iterator[Operand]:
    if isinstance(arg, Operand):
        yield arg
    elif isinstance(arg, (tuple, list)):
        for item in arg:
            yield from _operands_in(item)


def _tensors_in(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for item in result:
            yield from _tensors_in(item)
