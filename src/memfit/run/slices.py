"""The backward half in stretches that each end in handing over gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memfit.plan.program import Give, Instruction, Program

# The autograd engine keeps the order of two gradients returned together; of more it may not.
_MAX_GIVES = 2

Numbered = tuple[int, Instruction]


@dataclass(frozen=True)
class Slice:
    """A stretch of the backward half that ends in handing over gradients."""

    instructions: tuple[Numbered, ...]
    gives: tuple[int, ...]
    give_numbers: tuple[int, ...]


def slices_of(program: Program) -> Iterator[Slice]:
    """Cut the backward half after each handing-over."""
    held: list[Numbered] = []
    gives: list[int] = []
    numbers: list[int] = []

    def cut() -> Slice:
        made = Slice(tuple(held), tuple(gives), tuple(numbers))
        for collected in (held, gives, numbers):
            collected.clear()
        return made

    for number, instruction in enumerate(program.instructions):
        if number <= program.boundary:
            continue
        if isinstance(instruction, Give):
            # One tensor given twice at once would be copied both times; given one after the other it is only once.
            value = program.step.gradients[instruction.gradient].value
            if len(gives) == _MAX_GIVES or any(program.step.gradients[g].value == value for g in gives):
                yield cut()
            gives.append(instruction.gradient)
            numbers.append(number)
        else:
            if gives:
                yield cut()
            held.append((number, instruction))
    if gives:
        yield cut()
