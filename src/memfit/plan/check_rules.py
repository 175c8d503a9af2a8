"""The rules of programs, and the error for one that breaks a rule."""

from __future__ import annotations

import enum

from memfit.errors import MemfitError
from memfit.plan.program import Instruction, Run


class Rule(enum.Enum):
    """What a legal program keeps to."""

    ORDER = "every op runs once, in the step's order, forward ops before the one boundary and backward ops after it"
    RERUN = "only forward ops run again, only after the boundary, no random one and none that writes a source"
    READ = "what is read is here and has arrived"
    VERSION = "what is read holds what the same ops wrote, in the same order, as in the step"
    GIVEN = "a source is not read any more once its last gradient is given, for an optimizer may have stepped"
    FREE = "only what is here, does not travel and belongs to the step is freed; a gradient's part is given first"
    SEND = "only what the forward half made is sent; until the wait it may be read, but not written or freed"
    FETCH = "what is fetched lies complete in that tier and is not here; each copy is fetched once"
    GIVE = "every gradient is given once, in order, in the backward half, when it is complete"
    END = "in the end sources, outputs and first gradients are here, nothing else, and no tier holds anything"
    PEAK = "the peak is the one that was promised"


class IllegalProgram(MemfitError):
    """A program that does not compute its step, or not in its bytes; says at which instruction, and by which rule.

    Attributes:
        rule: the rule that is broken.
        index: of the instruction; the number of instructions if it shows only at the end.
        instruction: None at the end.
        target, path: the op that runs, or else made the storage in question, and its module; None if there is none.
        storage, storage_bytes: the storage in question, if one is.
    """

    def __init__(
        self,
        rule: Rule,
        what: str,
        *,
        index: int,
        instruction: Instruction | None = None,
        target: str | None = None,
        path: str | None = None,
        storage: int | None = None,
        storage_bytes: int | None = None,
    ) -> None:
        where = "at the end" if instruction is None else f"at instruction {index}, {instruction}"
        op = "" if target is None else f"{target} in module '{path or '(root)'}'"
        if isinstance(instruction, Run) and op:
            where += f" of {op}"
        if storage is not None:
            where += f", storage {storage} of {storage_bytes} bytes"
            if op and not isinstance(instruction, Run):
                where += f" made by {op}"
        super().__init__(f"illegal program {where}: {what}. Rule {rule.name}: {rule.value}")
        self.rule = rule
        self.index = index
        self.instruction = instruction
        self.target = target
        self.path = path
        self.storage = storage
        self.storage_bytes = storage_bytes
