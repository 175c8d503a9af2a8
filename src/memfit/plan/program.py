"""The linear list of instructions that the simulator, the checker and the runtime all follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memfit.capture.step import Step


@dataclass(frozen=True, slots=True)
class Run:
    """Run the step's op of that index."""

    op: int


@dataclass(frozen=True, slots=True)
class Free:
    """Drop the storage: nothing reads it any more."""

    storage: int


@dataclass(frozen=True, slots=True)
class Give:
    """Hand over the step's gradient of that index."""

    gradient: int


@dataclass(frozen=True, slots=True)
class Boundary:
    """The forward half ends here and the backward half begins."""


Instruction = Run | Free | Give | Boundary


@dataclass(frozen=True)
class Program:
    """Instructions for one step, forward half first."""

    step: Step
    instructions: tuple[Instruction, ...]
    policy: str = "keep"

    @property
    def boundary(self) -> int:
        return self.instructions.index(Boundary())

    def to_dict(self) -> dict[str, Any]:
        """The program as JSON-able data, tied to its step by the step's digest."""
        return {
            "step": self.step.digest,
            "policy": self.policy,
            "instructions": [_instruction(i) for i in self.instructions],
        }


def _instruction(instruction: Instruction) -> list[Any]:
    match instruction:
        case Run(op):
            return ["run", op]
        case Free(storage):
            return ["free", storage]
        case Give(gradient):
            return ["give", gradient]
        case Boundary():
            return ["boundary"]
