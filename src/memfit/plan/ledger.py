"""Live bytes at every instruction of a Program, by kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from memfit.capture.step import Kind, Origin
from memfit.plan.program import Boundary, Free, Give, Instruction, Program, Run

_ORDER = (Kind.PARAMETER, Kind.INPUT, Kind.GRADIENT, Kind.SAVED, Kind.TRANSIENT)


@dataclass(frozen=True)
class Entry:
    """Bytes that are live while one instruction runs."""

    instruction: Instruction
    bytes: tuple[int, ...]  # in the order of Ledger.kinds

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes)


@dataclass(frozen=True)
class Ledger:
    """The account of a Program: what is live when, and where the peak is."""

    program: Program
    entries: tuple[Entry, ...]

    kinds = _ORDER

    @classmethod
    def of(cls, program: Program) -> Ledger:
        return cls(program, tuple(_entries(program)))

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
        tangents = {step.values[s.value].storage for s in step.sources if s.origin is Origin.TANGENT}
        return sum(s.bytes for s in step.storages if s.kind in (Kind.PARAMETER, Kind.INPUT) and s.id not in tangents)

    @property
    def growth_bytes(self) -> int:
        """The most bytes the step adds to what was there before it, gradients included."""
        return self.peak_bytes - self.base_bytes

    @cached_property
    def activation_bytes(self) -> int:
        """The same without the bytes of gradients: what a plan can change."""
        skip = _ORDER.index(Kind.GRADIENT)
        return max(e.total_bytes - e.bytes[skip] for e in self.entries) - self.base_bytes

    def describe_peak(self) -> str:
        """One line: where the peak is and what it is made of."""
        step = self.program.step
        parts = ", ".join(
            f"{kind.value} {size / 2**20:.1f}" for kind, size in zip(_ORDER, self.peak.bytes, strict=True)
        )
        where = ""
        if isinstance(self.peak.instruction, Run):
            op = step.ops[self.peak.instruction.op]
            where = f" at {op.target} ({op.half.value}) in module '{op.path or '(root)'}'"
        return f"{self.peak_bytes / 2**20:.1f} MiB{where}: {parts} MiB"


def _entries(program: Program) -> Iterator[Entry]:
    step = program.step
    live = dict.fromkeys(_ORDER, 0)
    tangents = {step.values[s.value].storage for s in step.sources if s.origin is Origin.TANGENT}
    present: set[int] = set()

    def arrive(storage: int) -> None:
        if storage not in present:
            present.add(storage)
            live[step.storage[storage].kind] += step.storage[storage].bytes

    for known in step.storages:
        if known.kind in (Kind.PARAMETER, Kind.INPUT) and known.id not in tangents:
            arrive(known.id)
    for instruction in program.instructions:
        match instruction:
            case Run(index):
                for value in step.ops[index].made:
                    arrive(step.values[value].storage)
            case Boundary():
                for tangent in sorted(tangents):
                    arrive(tangent)
            case Free(storage):
                present.discard(storage)
                live[step.storage[storage].kind] -= step.storage[storage].bytes
            case Give():
                pass
        yield Entry(instruction, tuple(live[kind] for kind in _ORDER))
