"""A step with every code that a planner may choose written into it, each of which can be switched on and off.

Writing a code into a Step takes longer than a thousand evaluations, and a search wants to try codes one by one. So all
of them are written in once. One that is switched off leaves no trace: its own ops take no time and no bytes, and who
reads the code or a decoded copy reads the storage itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from memfit.capture.step import Step
from memfit.cost.costs import Costs
from memfit.plan.decisions import Encode
from memfit.plan.encode import encode_step
from memfit.plan.evaluate import NativeEvaluator
from memfit.plan.problem import Problem

_WRITTEN_IN = ("memfit.encode", "memfit.decode", "memfit.view")


@dataclass(frozen=True)
class CodedStep:
    """A step, and the same with codes in it.

    Attributes:
        codes: by storage, how each would be encoded.
        problem: of the step with all of them.
        owner_of: for each storage that came with a code, and each decoded copy, the storage that was encoded.
    """

    step: Step
    costs: Costs
    codes: Mapping[int, Encode]
    problem: Problem
    owner_of: Mapping[int, int]

    @classmethod
    def of(cls, step: Step, costs: Costs, codes: Mapping[int, Encode]) -> CodedStep:
        encoded = encode_step(step, codes).step
        owner_of: dict[int, int] = {}
        for op in encoded.ops:
            if op.target in _WRITTEN_IN:
                read = encoded.values[next(iter(op.reads()))].storage
                owner_of[encoded.values[op.made[0]].storage] = owner_of.get(read, read)
        return cls(step, costs, codes, Problem.of(encoded, costs), owner_of)

    @cached_property
    def number_of(self) -> dict[int, int]:
        """The number that each op of the step has among those with codes; what stands in its place makes the same."""
        number = {op.outputs: index for index, op in enumerate(self.problem.step.ops)}
        return {index: number[op.outputs] for index, op in enumerate(self.step.ops) if op.outputs in number}

    @cached_property
    def codes_of(self) -> dict[int, tuple[int, ...]]:
        """For each storage that can be encoded those of its codes, values before gates."""
        found: dict[int, list[int]] = {storage: [] for storage in self.codes}
        for op in self.problem.step.ops[: self.problem.num_forward]:
            if op.target == "memfit.encode":
                code = self.problem.step.values[op.made[0]].storage
                found[self.owner_of[code]].append(code)
        return {storage: tuple(codes) for storage, codes in found.items()}

    @cached_property
    def written_for(self) -> npt.NDArray[np.int32]:
        """For each op that was put in, whose code it makes or decodes; -1 for the step's own."""
        step = self.problem.step
        return np.array(
            [self.owner_of[step.values[op.made[0]].storage] if op.target in _WRITTEN_IN else -1 for op in step.ops],
            dtype=np.int32,
        )

    @cached_property
    def reads_code_of(self) -> npt.NDArray[np.int32]:
        """For each op of the step that would work on a code as it is, whose; -1 for others."""
        step = self.problem.step
        found = np.full(len(step.ops), -1, dtype=np.int32)
        for index, op in enumerate(step.ops):
            if op.target.startswith("memfit.") and op.target not in _WRITTEN_IN:
                owners = {self.owner_of.get(step.values[v].storage, -1) for v in op.reads()} - {-1}
                if owners:
                    found[index] = owners.pop()
        return found

    @cached_property
    def plain_ps(self) -> npt.NDArray[np.int64]:
        """What each op takes where no code is on; nothing for those that were put in."""
        return self._plain(self.problem.op_ps, [cost.time_ps for cost in self.costs.of(self.step)])

    @cached_property
    def plain_workspaces(self) -> npt.NDArray[np.int64]:
        """The workspace of each op where no code is on."""
        return self._plain(self.problem.workspace_bytes, [cost.workspace_bytes for cost in self.costs.of(self.step)])

    def _plain(self, coded: list[int], plain: list[int]) -> npt.NDArray[np.int64]:
        """What each op of the coded step has without codes: known by its outputs there, nothing if put in."""
        found = np.array(coded, dtype=np.int64)
        found[self.written_for >= 0] = 0
        by_outputs = {op.outputs: number for op, number in zip(self.step.ops, plain, strict=True)}
        for index in np.flatnonzero(self.reads_code_of >= 0):
            found[index] = by_outputs[self.problem.step.ops[index].outputs]
        return found

    def code_ps(self, storage: int) -> int:
        """How much longer the step takes, or less, if that storage is encoded and nothing else changes."""
        mine = (self.written_for == storage) | (self.reads_code_of == storage)
        return int((np.array(self.problem.op_ps, dtype=np.int64) - self.plain_ps)[mine].sum())


class Switchboard:
    """Switches codes of a native evaluator's problem on and off, in the arrays that C reads.

    Lists keep their lengths, so whoever reads a code that is off reads the encoded storage in its place, and the ops
    that would make and decode it pass storages of no bytes to each other.
    """

    def __init__(self, coded: CodedStep, evaluator: NativeEvaluator) -> None:
        self._evaluator = evaluator
        self._touches = evaluator.array_named("touches_items")
        self._op_ps, self._rerun_ps = evaluator.array_named("op_ps"), evaluator.array_named("rerun_ps")
        self._workspaces = evaluator.array_named("workspace_bytes")
        self._sizes = evaluator.array_named("storage_bytes")
        starts = evaluator.array_named("touches_starts")
        self._wirings = {s: _Wiring.of(coded, s, starts, self._touches, self._sizes) for s in coded.codes}
        for storage in coded.codes:
            self.switch(storage, on=False)

    def switch(self, storage: int, *, on: bool) -> None:
        """Encode a storage, or leave it as it is."""
        wiring = self._wirings[storage]
        self._touches[wiring.places] = wiring.coded_items if on else wiring.plain_items
        self._op_ps[wiring.ops] = wiring.coded_ps if on else wiring.plain_ps
        self._rerun_ps[wiring.ops] = wiring.coded_ps if on else wiring.plain_ps
        self._workspaces[wiring.ops] = wiring.coded_workspaces if on else wiring.plain_workspaces
        self._sizes[wiring.storages] = wiring.coded_bytes if on else 0
        self._evaluator.changed()


@dataclass(frozen=True)
class _Wiring:
    """What differs between one code on and off: items of lists, times of ops, bytes of storages."""

    places: npt.NDArray[np.int64]
    coded_items: npt.NDArray[np.int32]
    plain_items: npt.NDArray[np.int32]
    ops: npt.NDArray[np.int64]
    coded_ps: npt.NDArray[np.int64]
    plain_ps: npt.NDArray[np.int64]
    coded_workspaces: npt.NDArray[np.int64]
    plain_workspaces: npt.NDArray[np.int64]
    storages: npt.NDArray[np.int64]
    coded_bytes: npt.NDArray[np.int64]

    @classmethod
    def of(
        cls,
        coded: CodedStep,
        storage: int,
        starts: npt.NDArray[np.int32],
        items: npt.NDArray[np.int32],
        sizes: npt.NDArray[np.int64],
    ) -> _Wiring:
        mine = [s for s, owner in coded.owner_of.items() if owner == storage]
        rows = np.searchsorted(starts, np.flatnonzero(np.isin(items, mine)), side="right") - 1
        places: list[int] = []
        plain: list[int] = []
        for row in sorted(set(rows.tolist())):
            here = range(int(starts[row]), int(starts[row + 1]))
            own = [k for k in here if items[k] in mine]
            if coded.written_for[row] == storage:
                made = int(items[own[-1]])  # what it makes is the newest of its storages
                own = [k for k in here if items[k] in mine or items[k] == storage]
                places, plain = places + own, plain + [made] * len(own)
                continue
            is_there = any(items[k] == storage for k in here)
            for k in own:
                places.append(k)
                plain.append(int(items[k]) if is_there else storage)
                is_there = True
        ops = np.flatnonzero((coded.written_for == storage) | (coded.reads_code_of == storage))
        where = np.array(places, dtype=np.int64)
        return cls(
            where,
            items[where].copy(),
            np.array(plain, dtype=np.int32),
            ops,
            np.array(coded.problem.op_ps, dtype=np.int64)[ops],
            coded.plain_ps[ops],
            np.array(coded.problem.workspace_bytes, dtype=np.int64)[ops],
            coded.plain_workspaces[ops],
            np.array(mine, dtype=np.int64),
            sizes[mine].copy(),
        )
