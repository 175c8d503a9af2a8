"""What the schema of an op says about its operands: their names, their needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from memfit.capture.needs import Need, needs_of
from memfit.torch_internals import normalised

if TYPE_CHECKING:
    from memfit.capture.step import Op


def named_operands(op: Op) -> dict[str, Any]:
    """The op's arguments by the names of its schema; ops of our own have none."""
    if not op.target.startswith("memfit."):
        return normalised(op.target, op.args, op.kwargs)
    return dict(op.operands())


def operand_needs(op: Op) -> Iterator[tuple[str, int, Need]]:
    """For each value the op reads: through which operand, and what it truly needs of it."""
    from memfit.capture.step import refs_in

    named = named_operands(op)
    needs = needs_of(op.target, named)
    for name, operand in named.items():
        for value in refs_in(operand):
            yield name, value, needs.get(name, Need.VALUE)
