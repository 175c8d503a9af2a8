"""What the schema of an op says about its operands: their names, their needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from memfit.capture.needs import Need, needs_of
from memfit.torch_internals import normalised

if TYPE_CHECKING:
    from memfit.capture.step import Op, Value


def named_operands(op: Op) -> dict[str, Any]:
    """The op's arguments by the names of its schema; ops of our own have none."""
    if not op.target.startswith("memfit."):
        return normalised(op.target, op.args, op.kwargs)
    return dict(op.operands())


def visible_needs(op: Op, values: tuple[Value, ...]) -> dict[str, Need]:
    """What the op needs of each argument; some rows of the table ask for dtypes and strides."""
    return needs_of(op.target, visible_arguments(op, values))


def visible_arguments(op: Op, values: tuple[Value, ...]) -> dict[str, Any]:
    """The op's arguments by name, tensors as the table of needs may look at them."""
    from memfit.capture.step import Ref

    named = named_operands(op)
    return {name: _Seen(values[arg.value]) if isinstance(arg, Ref) else arg for name, arg in named.items()}


class _Seen:
    """A value as the table of needs may look at it: like a tensor without data."""

    def __init__(self, value: Value) -> None:
        self.dtype = value.dtype
        self.shape = value.shape
        self._stride = value.stride

    def stride(self) -> tuple[int, ...]:
        return self._stride


def operand_needs(op: Op, values: tuple[Value, ...]) -> Iterator[tuple[str, int, Need]]:
    """For each value the op reads: through which operand, and what it truly needs of it."""
    from memfit.capture.step import refs_in

    named = named_operands(op)
    needs = visible_needs(op, values)
    for name, operand in named.items():
        for value in refs_in(operand):
            yield name, value, needs.get(name, Need.VALUE)
