"""The linear list of instructions that the simulator, the checker and the runtime all follow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from memfit.capture.step import Step


@dataclass(frozen=True, slots=True)
class Run:
    """Run the step's op of that index. `again`: recompute, in the form that leaves buffers alone (plan/rerun.py)."""

    op: int
    again: bool = False


@dataclass(frozen=True, slots=True)
class Free:
    """Drop the storage: nothing reads it any more in this life."""

    storage: int


@dataclass(frozen=True, slots=True)
class Give:
    """Hand over the step's gradient of that index."""

    gradient: int


@dataclass(frozen=True, slots=True)
class SendStart:
    """Begin to copy the storage to the tier; compute goes on."""

    storage: int
    tier: str


@dataclass(frozen=True, slots=True)
class SendWait:
    """Wait until the copy is complete, then drop the storage here."""

    storage: int


@dataclass(frozen=True, slots=True)
class FetchStart:
    """Allocate the storage here and begin to copy it back from the tier; compute goes on.

    One whose sending nobody has waited for is still here: it is taken back as it is, without a copy.
    """

    storage: int
    tier: str


@dataclass(frozen=True, slots=True)
class FetchWait:
    """Wait until the storage has arrived."""

    storage: int


@dataclass(frozen=True, slots=True)
class Boundary:
    """The forward half ends here and the backward half begins; the tangents arrive."""


Instruction = Run | Free | Give | SendStart | SendWait | FetchStart | FetchWait | Boundary
_NAMES: dict[type, str] = {
    Run: "run",
    Free: "free",
    Give: "give",
    SendStart: "send",
    SendWait: "sent",
    FetchStart: "fetch",
    FetchWait: "fetched",
    Boundary: "boundary",
}
_TYPES = {name: kind for kind, name in _NAMES.items()} | {"rerun": Run}


@dataclass(frozen=True)
class Program:
    """Instructions for one step, forward half first.

    A storage lives at most once at a time: it is made, dropped, and may be made again by a re-run or a fetch. So its
    lives need no names of their own.
    """

    step: Step
    instructions: tuple[Instruction, ...]

    @property
    def boundary(self) -> int:
        return self.instructions.index(Boundary())


def instructions_to_lists(instructions: Iterable[Instruction]) -> list[list[Any]]:
    """The instructions as JSON-able lists: a name, then numbers and names."""
    return [_to_list(instruction) for instruction in instructions]


def instructions_from_lists(lists: Iterable[list[Any]]) -> tuple[Instruction, ...]:
    """The instructions that instructions_to_lists wrote; raises ValueError for anything else."""
    return tuple(_from_list(entry) for entry in lists)


def _to_list(instruction: Instruction) -> list[Any]:
    match instruction:
        case Run(op, again):
            return ["rerun" if again else "run", op]
        case Free(number) | SendWait(number) | FetchWait(number) | Give(number):
            return [_NAMES[type(instruction)], number]
        case SendStart(storage, tier) | FetchStart(storage, tier):
            return [_NAMES[type(instruction)], storage, tier]
        case Boundary():
            return ["boundary"]


def _from_list(entry: list[Any]) -> Instruction:
    name, *rest = entry
    if name not in _TYPES or not all(isinstance(item, (int, str)) for item in rest):
        raise ValueError(f"{entry!r} is no instruction")
    try:
        made: Instruction = Run(int(*rest), again=True) if name == "rerun" else _TYPES[name](*rest)
    except TypeError as error:
        raise ValueError(f"{entry!r} is no instruction") from error
    return made
