"""Live bytes at every instruction of a Program, by kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from memfit.capture.rerun_form import rerun_form
from memfit.capture.step import Kind
from memfit.plan.program import Boundary, FetchStart, Free, Give, Instruction, Program, Run, SendWait
from memfit.plan.rerun import tangent_storages

KINDS = (Kind.PARAMETER, Kind.INPUT, Kind.GRADIENT, Kind.SAVED, Kind.TRANSIENT)


@dataclass(frozen=True, slots=True)
class Entry:
    """Bytes that are live while one instruction runs."""

    instruction: Instruction
    bytes: tuple[int, ...]  # in the order of Ledger.kinds
    workspace_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes) + self.workspace_bytes


@dataclass(frozen=True)
class Ledger:
    """The account of a Program: what is live when, and where the peak is.

    Workspaces are those of the costs it was made with, and what autograd needs to add up parts of a gradient; without
    costs, ops have none.
    """

    program: Program
    entries: tuple[Entry, ...]

    kinds = KINDS

    @classmethod
    def of(cls, program: Program, workspace_bytes: Sequence[int] | None = None) -> Ledger:
        return cls(program, tuple(_entries(program, workspace_bytes)))

    @cached_property
    def peak(self) -> Entry:
        """The entry with the most bytes (the first of them)."""
        return max(self.entries, key=lambda entry: entry.total_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most bytes live at once, parameters and inputs included."""
        return self.peak.total_bytes

    @cached_property
    def base_bytes(self) -> int:
        """Bytes that are there before the step: parameters, buffers, inputs."""
        step = self.program.step
        tangents = tangent_storages(step)
        return sum(s.bytes for s in step.storages if s.kind in (Kind.PARAMETER, Kind.INPUT) and s.id not in tangents)

    @property
    def fixed_bytes(self) -> int:
        """Bytes that no plan can change: what is there before the step, and all gradients."""
        return self.base_bytes + self.program.step.gradient_bytes

    @property
    def growth_bytes(self) -> int:
        """The most bytes the step adds to what was there before it, gradients included."""
        return self.peak_bytes - self.base_bytes

    @cached_property
    def activation_bytes(self) -> int:
        """The same without the bytes of gradients: what a plan can change."""
        skip = KINDS.index(Kind.GRADIENT)
        return max(e.total_bytes - e.bytes[skip] for e in self.entries) - self.base_bytes

    def describe_peak(self) -> str:
        """One line: where the peak is and what it is made of."""
        step = self.program.step
        parts = [f"{kind.value} {size / 2**20:.1f}" for kind, size in zip(KINDS, self.peak.bytes, strict=True)]
        if self.peak.workspace_bytes:
            parts.append(f"workspace {self.peak.workspace_bytes / 2**20:.1f}")
        where = ""
        if isinstance(self.peak.instruction, Run):
            op = step.ops[self.peak.instruction.op]
            half = "recomputed" if self.peak.instruction.again else op.half.value
            where = f" at {op.target} ({half}) in module '{op.path or '(root)'}'"
        elif isinstance(self.peak.instruction, Give):
            source = step.source_of[step.gradients[self.peak.instruction.gradient].of]
            where = f" where the gradient of '{source.name}' is handed over"
        return f"{self.peak_bytes / 2**20:.1f} MiB{where}: {', '.join(parts)} MiB"


def _entries(program: Program, workspace_bytes: Sequence[int] | None) -> Iterator[Entry]:
    step = program.step
    live = dict.fromkeys(KINDS, 0)
    tangents = tangent_storages(step)
    present: set[int] = set()

    def arrive(storage: int) -> None:
        if storage not in present:
            present.add(storage)
            live[step.storage[storage].kind] += step.storage[storage].bytes

    def leave(storage: int) -> None:
        present.discard(storage)
        live[step.storage[storage].kind] -= step.storage[storage].bytes

    for known in step.storages:
        if known.kind in (Kind.PARAMETER, Kind.INPUT) and known.id not in tangents:
            arrive(known.id)
    for instruction in program.instructions:
        workspace = 0
        discarded: list[int] = []
        match instruction:
            case Run(index, again):
                op = rerun_form(step.ops[index]) if again else step.ops[index]
                made = dict.fromkeys(step.values[value].storage for value in op.made)
                if again:
                    # A re-run makes everything anew; copies of what is here already go with the call.
                    discarded = [s for s in made if s in present and step.storage[s].maker == index]
                for storage in made:
                    arrive(storage)
                workspace = workspace_bytes[index] if workspace_bytes is not None else 0
            case Boundary():
                for tangent in sorted(tangents):
                    arrive(tangent)
            case Free(storage) | SendWait(storage):
                leave(storage)
            case FetchStart(storage):
                arrive(storage)
            case Give(gradient):
                workspace = step.addition_bytes[gradient]
            case _:
                pass
        for storage in discarded:
            live[step.storage[storage].kind] += step.storage[storage].bytes
        yield Entry(instruction, tuple(live[kind] for kind in KINDS), workspace)
        for storage in discarded:
            live[step.storage[storage].kind] -= step.storage[storage].bytes
