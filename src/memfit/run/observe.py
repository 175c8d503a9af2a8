"""Watch a Program run: which storages are really alive at every instruction, and what each op holds besides."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from memfit.capture.step import Kind, Origin
from memfit.errors import MemfitError
from memfit.plan.ledger import KINDS, Ledger
from memfit.plan.program import FetchStart, FetchWait, Free, Give, Program, Run
from memfit.resident import high_water_bytes, reset_high_water, resident_bytes, trim
from memfit.torch_internals import StorageWatch

# A caller may hold what it gave and what it is given longer or shorter than the ledger says.
_OURS = tuple(KINDS.index(kind) for kind in (Kind.SAVED, Kind.TRANSIENT))


class LedgerBroken(MemfitError):
    """A step that holds more than its ledger says: a defect of memfit."""


class LiveBytes:
    """An observer that keeps the real ledger: after each instruction the bytes of the storages that are alive.

    It looks at torch's own count of references, not at what the Program says: a variable that was not deleted, or a
    tensor that autograd still holds, is found. It raises where more is alive than the ledger says.

    A gradient that has been given counts until the Program frees it, whether or not it is still the tensor we made:
    autograd keeps that one, or a copy of it, or its sum with other parts.
    """

    def __init__(self, promised: Ledger, sources: list[torch.Tensor | None]) -> None:
        self._promised = promised
        self._step = step = promised.program.step
        self._given: set[int] = set()
        self._watches: list[tuple[int, StorageWatch]] = []
        self.entries: dict[int, tuple[int, ...]] = {}
        # Sources are there throughout. A caller's tensor may be a view of something larger; the step counts what it
        # was shown.
        given = {
            step.values[source.value].storage
            for source, tensor in zip(step.sources, sources, strict=True)
            if source.origin is not Origin.TANGENT and tensor is not None
        }
        self._always = dict.fromkeys(KINDS, 0)
        for storage in given:
            self._always[step.storage[storage].kind] += step.storage_bytes[storage]

    def __call__(self, number: int, made: Mapping[int, torch.Tensor] | None = None) -> None:
        for storage, tensor in (made or {}).items():
            if tensor is None:  # a gradient that nobody asked for
                continue
            if not any(s == storage and watch.watches(tensor) for s, watch in self._watches):  # else taken back
                self._watches.append((storage, StorageWatch(tensor, self._planned_bytes(storage, tensor))))
        instruction = self._promised.entries[number].instruction
        if isinstance(instruction, Give):
            storage = self._step.values[self._step.gradients[instruction.gradient].value].storage
            self._given.add(storage)
        elif isinstance(instruction, Free):
            self._given.discard(instruction.storage)
        self._watches = [(s, watch) for s, watch in self._watches if watch.is_alive or s in self._given]
        total = dict(self._always)
        for storage, watch in self._watches:
            total[self._step.storage[storage].kind] += watch.num_bytes
        self.entries[number] = tuple(total[kind] for kind in KINDS)
        self._compare(number)

    def _planned_bytes(self, storage: int, tensor: torch.Tensor) -> int:
        """What a storage counts. A code that had to be a dense copy is counted elsewhere, by codecs/dense.py."""
        maker, size = self._step.storage[storage].maker, tensor.untyped_storage().nbytes()
        is_code = maker is not None and self._step.ops[maker].target == "memfit.encode"
        return min(size, self._step.storage_bytes[storage]) if is_code else size

    def _compare(self, number: int) -> None:
        entry, found = self._promised.entries[number], self.entries[number]
        alive, expected = sum(found[kind] for kind in _OURS), sum(entry.bytes[kind] for kind in _OURS)
        if alive > expected:
            op = self._step.ops[entry.instruction.op] if isinstance(entry.instruction, Run) else None
            where = "" if op is None else f" ({op.target} in module '{op.path or '(root)'}')"
            raise LedgerBroken(
                f"after instruction {number}, {entry.instruction}{where}, {alive:,} bytes of the step's own are alive "
                f"and its ledger says {expected:,}. Please report this model; memfit.unfit(model) trains without memfit"
            )


_EMPTY = ("aten.empty", "aten.new_empty")
"""Ops whose results have no pages before somebody writes to them: these are then no workspace of the writer's."""


class Transients:
    """An observer that reads how far the resident set rises: in the step, and above operands and results in each op.

    What malloc holds in reserve is given back before each op, so it is the step's own growth. Where malloc
    keeps some all the same (in the middle of a page), that is resident already, and what a tier is bringing back
    is counted as if all of it came in each op: what is found of an op can be too little, never too much.

    Attributes:
        growth_bytes: the most that was resident above what was there when it was made.
    """

    def __init__(self, program: Program, tell: Callable[[int, int], None]) -> None:
        self._program = program
        self._tell = tell
        self.growth_bytes = 0
        self._untouched: set[int] = set()
        self._arriving: dict[int, int] = {}
        trim()
        reset_high_water()
        self._begin_bytes = self._before_bytes = resident_bytes()

    def __call__(self, number: int, made: Mapping[int, torch.Tensor | None] | None = None) -> None:
        high_bytes = self.look()
        instruction = self._program.instructions[number]
        if isinstance(instruction, Run):
            op = self._program.step.ops[instruction.op]
            # Of several results some may be None, such as the gradient of an input that needs none.
            fresh = sum(tensor.untyped_storage().nbytes() for tensor in (made or {}).values() if tensor is not None)
            if op.target.startswith(_EMPTY):
                self._untouched |= {self._program.step.values[v].storage for v in op.made}
            written = self._untouched & set(op.writes)
            fresh += sum(self._program.step.storage_bytes[storage] for storage in written)
            self._untouched -= written
            # Pages of what is on its way come while any op runs, and are not its doing.
            arriving = sum(self._arriving.values())
            self._tell(instruction.op, high_bytes - self._before_bytes - fresh - arriving)
        elif isinstance(instruction, FetchStart):
            self._arriving[instruction.storage] = self._program.step.storage_bytes[instruction.storage]
        elif isinstance(instruction, FetchWait):
            self._arriving.pop(instruction.storage, None)
        following = self._program.instructions[number + 1 : number + 2]
        if any(isinstance(instruction, Run) for instruction in following):  # before an op: giving back takes time
            self.go_on()

    def look(self) -> int:
        """What the process had resident at most since it last went on; the step's growth takes note of it."""
        high_bytes = high_water_bytes()
        self.growth_bytes = max(self.growth_bytes, high_bytes - self._begin_bytes)
        return high_bytes

    def go_on(self) -> None:
        """Begin with the next op: what happened before is not its doing."""
        trim()
        reset_high_water()
        self._before_bytes = resident_bytes()
