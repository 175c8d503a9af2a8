"""Peak and time of a plan in one call: what a search asks a hundred thousand times.

    evaluator = Evaluator.of(problem)
    states = evaluator.array(problem.default_states())
    states[storage] = DROP
    outcome = evaluator.evaluate(states, budget_bytes)
    better = evaluator.improves(states, budget_bytes, outcome.rank)  # None, mostly at once

In C where a compiler is at hand (native/*.c), else by lower_states and simulate; the numbers are the same.
"""

from __future__ import annotations

import abc
import ctypes
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memfit.errors import BadOption
from memfit.native.library import native_library
from memfit.plan.flat_problem import NO_LIMIT, FlatProblem, largest_growth
from memfit.plan.lower import choose_ways as choose_ways_of
from memfit.plan.lower import lower_states
from memfit.plan.problem import AWAY, Problem
from memfit.plan.program import (
    Boundary,
    FetchStart,
    FetchWait,
    Free,
    Give,
    Instruction,
    Run,
    SendStart,
    SendWait,
)
from memfit.plan.simulate import simulate

States: TypeAlias = Sequence[int] | npt.NDArray[np.int32]
"""One state per storage (plan/problem.py); an int32 array is read where it lies."""

Rank: TypeAlias = tuple[int, int]
"""How good a plan is, less is better: first how far it is above the budget, then how long it takes."""

_SUM_SHARE = 50  # so many ops above the budget weigh as much together as the one that is furthest above it


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a plan needs and takes.

    Attributes:
        peak_bytes: the most bytes that are here at once.
        step_ps, stall_ps: the whole step, and how much of it compute only waits for transfers.
        max_excess_bytes, sum_excess_bytes: how far ops are above the budget, at most and in all; 0 without a budget.
        num_reruns: how many times an op runs again.
    """

    peak_bytes: int
    step_ps: int
    stall_ps: int
    max_excess_bytes: int
    sum_excess_bytes: int
    num_reruns: int

    @property
    def violation_bytes(self) -> int:
        """Zero if it fits; else the largest excess, and a share of their sum, so that one op less above it counts."""
        return self.max_excess_bytes + self.sum_excess_bytes // _SUM_SHARE

    @property
    def rank(self) -> Rank:
        return self.violation_bytes, self.step_ps


class Evaluator(abc.ABC):
    """Evaluates states of the storages of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._num_storages = len(problem.step.storage_bytes)
        self._num_states = AWAY + len(problem.tiers) * problem.num_ops

    @cached_property
    def first_ways(self) -> npt.NDArray[np.int32]:
        """For each op of `problem.ways` how many of its fastest ways are not to be taken, to be changed in place."""
        return np.zeros(len(self.problem.ways), dtype=np.int32)

    @staticmethod
    def of(problem: Problem) -> Evaluator:
        """In C if that can be had, else in Python."""
        library = native_library()
        if library is None or not largest_growth(problem):
            return PythonEvaluator(problem)
        return NativeEvaluator(problem, library)

    @property
    @abc.abstractmethod
    def is_native(self) -> bool:
        """True if it runs in C."""

    @abc.abstractmethod
    def evaluate(self, states: States, budget_bytes: int | None = None, *, choose_ways: bool = False) -> Outcome:
        """Lower the states and run the program on paper. The budget decides where compute waits for transfers.

        With `choose_ways` each op that can be computed in several ways, and has none picked, is computed in the fastest
        that fits (see `choose_ways` in plan/lower.py), not in that of the price list. `ways` says which; those before
        `first_ways` are left out.
        """

    @abc.abstractmethod
    def improves(
        self, states: States, budget_bytes: int | None, incumbent: Rank, *, choose_ways: bool = False
    ) -> Outcome | None:
        """The same if its rank is less than the incumbent's, else None: mostly far sooner than the whole is evaluated.

        For what is not worse, ask to beat (violation_bytes, step_ps + 1).
        """

    @abc.abstractmethod
    def ways(self, states: States, budget_bytes: int | None = None) -> dict[int, str]:
        """The ways that `choose_ways` takes, by op. Costs that pick these give the same outcome and instructions."""

    @abc.abstractmethod
    def instructions(
        self, states: States, budget_bytes: int | None = None, *, choose_ways: bool = False
    ) -> tuple[Instruction, ...]:
        """The program that `evaluate` speaks of."""

    def array(self, states: Sequence[int]) -> npt.NDArray[np.int32]:
        """The states as an array to change in place: evaluating the same array again and again is fastest."""
        self._check_length(states)
        made = np.asarray(states)
        self._check_values(made)
        return made.astype(np.int32)

    def _check_length(self, states: States) -> None:
        if len(states) != self._num_storages:
            raise BadOption(f"{len(states)} states were given, but the step has {self._num_storages} storages")

    def _check_values(self, states: npt.NDArray[Any]) -> None:
        if states.ndim != 1 or (states.size and states.dtype.kind not in "iu"):
            raise BadOption(f"states are a flat list of whole numbers, not {states.dtype}{list(states.shape)}")
        wrong = np.flatnonzero((states < -self.problem.num_ops) | (states >= self._num_states))
        if wrong.size:
            raise self._bad_state(int(wrong[0]), int(states[wrong[0]]))

    def _bad_state(self, storage: int, state: int) -> BadOption:
        tiers = "".join(f", {AWAY + number} (away in '{tier}')" for number, tier in enumerate(self.problem.tiers))
        later = f", each and {len(self.problem.tiers)} times N (back by backward op N)" if tiers else ""
        return BadOption(
            f"storage {storage}: there is no state {state}; states are 0 (keep), 1 (drop){tiers}{later}"
            f", and -N (drop, and again after use, until backward op N; up to {self.problem.num_ops})"
        )


def _limit(budget_bytes: int | None) -> int:
    """The budget as a number that C can hold."""
    if budget_bytes is None:
        return NO_LIMIT
    if budget_bytes < 0:
        raise BadOption(f"a budget of {budget_bytes} bytes makes no sense")
    return min(budget_bytes, NO_LIMIT)


class PythonEvaluator(Evaluator):
    """By the lowering and the simulator themselves."""

    is_native = False

    def evaluate(self, states: States, budget_bytes: int | None = None, *, choose_ways: bool = False) -> Outcome:
        limit = _limit(budget_bytes)
        plain = self._plain(states)
        problem = self._picking(plain, limit) if choose_ways else self.problem
        program = lower_states(problem, plain, budget_bytes=limit)
        timeline = simulate(program, problem.costs)
        return Outcome(
            timeline.peak_bytes,
            timeline.step_ps,
            timeline.stall_ps,
            *timeline.excess_bytes(limit),
            sum(isinstance(i, Run) and i.again for i in program.instructions),
        )

    def improves(
        self, states: States, budget_bytes: int | None, incumbent: Rank, *, choose_ways: bool = False
    ) -> Outcome | None:
        outcome = self.evaluate(states, budget_bytes, choose_ways=choose_ways)
        return outcome if outcome.rank < incumbent else None

    def ways(self, states: States, budget_bytes: int | None = None) -> dict[int, str]:
        return self._chosen(self._plain(states), _limit(budget_bytes))

    def instructions(
        self, states: States, budget_bytes: int | None = None, *, choose_ways: bool = False
    ) -> tuple[Instruction, ...]:
        limit = _limit(budget_bytes)
        plain = self._plain(states)
        problem = self._picking(plain, limit) if choose_ways else self.problem
        return lower_states(problem, plain, budget_bytes=limit).instructions

    def _picking(self, states: list[int], limit_bytes: int) -> Problem:
        return self.problem.picking(self._chosen(states, limit_bytes))

    def _chosen(self, states: list[int], limit_bytes: int) -> dict[int, str]:
        return choose_ways_of(self.problem, states, budget_bytes=limit_bytes, first_ways=self.first_ways.tolist())

    def _plain(self, states: States) -> list[int]:
        self._check_length(states)
        array = np.asarray(states)
        self._check_values(array)
        return array.tolist()


class NativeEvaluator(Evaluator):
    """By native/evaluate.c. Threads may share one, but take turns; with one each they run side by side."""

    is_native = True

    def __init__(self, problem: Problem, library: ctypes.CDLL) -> None:
        super().__init__(problem)
        self._library = library
        self._flat = FlatProblem(problem)
        self._desks: dict[bool, _Desk] = {}
        self._lock = threading.Lock()
        # The array of the last call, and where it lies: finding that out costs as much as a small network.
        self._states: States | None = None
        self._address = 0
        self._desk(False)

    def evaluate(self, states: States, budget_bytes: int | None = None, *, choose_ways: bool = False) -> Outcome:
        limit = _limit(budget_bytes)
        with self._lock:
            if (desk := self._run(states, limit, _ANYTHING, choose_ways)) is not None:
                return Outcome(*desk.trial[_OUTCOME])
        return self._in_python.evaluate(states, budget_bytes, choose_ways=choose_ways)

    def improves(
        self, states: States, budget_bytes: int | None, incumbent: Rank, *, choose_ways: bool = False
    ) -> Outcome | None:
        limit = _limit(budget_bytes)
        violation, step_ps = incumbent
        if not (0 <= violation <= NO_LIMIT and 0 <= step_ps <= NO_LIMIT):  # ctypes would cut it short without a word
            incumbent = min(max(violation, -1), NO_LIMIT), min(max(step_ps, -1), NO_LIMIT)
        with self._lock:
            if (desk := self._run(states, limit, incumbent, choose_ways)) is not None:
                return Outcome(*desk.trial[_OUTCOME]) if desk.verdict == _EVALUATED else None
        return self._in_python.improves(states, budget_bytes, incumbent, choose_ways=choose_ways)

    def ways(self, states: States, budget_bytes: int | None = None) -> dict[int, str]:
        limit = _limit(budget_bytes)
        with self._lock:
            if (desk := self._run(states, limit, _ANYTHING, True)) is not None:
                choices = self.problem.ways
                chosen = np.empty(len(choices), dtype=np.int32)
                self._library.memfit_ways(desk.evaluator, chosen.ctypes.data)
                return {op: choices[op][way].name for op, way in zip(choices, chosen.tolist(), strict=True)}
        return self._in_python.ways(states, budget_bytes)

    def instructions(
        self, states: States, budget_bytes: int | None = None, *, choose_ways: bool = False
    ) -> tuple[Instruction, ...]:
        limit = _limit(budget_bytes)
        with self._lock:
            if (desk := self._run(states, limit, _ANYTHING, choose_ways)) is not None:
                out = np.empty((desk.trial[-1], 3), dtype=np.int32)
                self._library.memfit_instructions(desk.evaluator, out.ctypes.data)
                tiers = self.problem.tiers
                return tuple(_MAKERS[kind](number, tiers, tier) for kind, number, tier in out.tolist())
        return self._in_python.instructions(states, budget_bytes, choose_ways=choose_ways)

    @cached_property
    def _in_python(self) -> PythonEvaluator:
        """For programs that are too long for C."""
        found = PythonEvaluator(self.problem)
        found.__dict__["first_ways"] = self.first_ways
        return found

    def array_named(self, name: str) -> npt.NDArray[Any]:
        """One of the arrays that C reads (native/evaluator.h), to be changed in place; say so by `changed`.

        What is evaluated in Python, as when a program is too long for C, does not see that.
        """
        return self._flat.arrays[name]

    def changed(self) -> None:
        """Say that some of these arrays were changed: C keeps sums of their numbers."""
        for desk in self._desks.values():
            desk.trial[_IS_CHANGED] = 1

    def _run(self, states: States, limit_bytes: int, incumbent: Rank, choose_ways: bool) -> _Desk | None:
        """Where it was evaluated, with what came of it; None if the program is too long for C."""
        if states is not self._states:
            self._point_at(states)
        desk = self._desks.get(choose_ways) or self._desk(choose_ways)
        while desk is not None:
            trial = desk.trial
            trial[0] = self._address
            trial[1] = limit_bytes
            trial[2], trial[3] = incumbent
            desk.verdict = verdict = desk.call(desk.evaluator, desk.trial_pointer)
            if verdict >= 0:
                raise self._bad_state(verdict, int(states[verdict]))
            if verdict != _OUTGROWN:
                return desk
            desk = self._desk(choose_ways, 2 * desk.growth)
        return None

    def _desk(self, choose_ways: bool, growth: int = 1) -> _Desk | None:
        """Make one, with more room if the last one had too little."""
        if choose_ways and not self.problem.ways:
            desk = self._desk(False, growth) if growth > 1 else self._desks[False]
        elif growth > largest_growth(self.problem, choose_ways=choose_ways):
            return None
        else:
            desk = _Desk(self._library, self._flat, self.first_ways if choose_ways else None, growth)
        if desk is not None:
            self._desks[choose_ways] = desk
        return desk

    def _point_at(self, states: States) -> None:
        self._check_length(states)
        if (
            isinstance(states, np.ndarray)
            and states.dtype == np.int32
            and states.ndim == 1
            and states.flags.c_contiguous
        ):
            array = states
        else:
            self._check_values(np.asarray(states))
            array = np.array(states, dtype=np.int32)
        # A list can change in place without its copy knowing, so what is remembered is the array.
        self._states = array
        self._address = array.ctypes.data


class _Desk:
    """An evaluator in C, what it was made from, and the trial it is working on."""

    def __init__(
        self, library: ctypes.CDLL, flat: FlatProblem, first_ways: npt.NDArray[np.int32] | None, growth: int
    ) -> None:
        self.growth = growth
        self.verdict = _EVALUATED
        self._flat = flat  # C reads its arrays
        library.memfit_evaluator_new.argtypes = [ctypes.c_void_p]
        library.memfit_evaluator_new.restype = ctypes.c_void_p
        for function in (library.memfit_instructions, library.memfit_ways):
            function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p], None
        library.memfit_evaluator_free.argtypes, library.memfit_evaluator_free.restype = [ctypes.c_void_p], None
        self.call = library.memfit_evaluate
        self.call.argtypes, self.call.restype = [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int64
        struct = flat.struct(first_ways=first_ways, growth=growth)
        pointer = library.memfit_evaluator_new(ctypes.addressof(struct))
        if pointer is None:
            raise MemoryError("no memory for the evaluator")
        weakref.finalize(self, library.memfit_evaluator_free, pointer)
        self.evaluator = ctypes.c_void_p(pointer)
        self.trial = (ctypes.c_int64 * _TRIAL_LENGTH)()
        self.trial_pointer = ctypes.c_void_p(ctypes.addressof(self.trial))


# struct Trial of native/evaluator.h: states, limit, what to beat (2), if arrays were changed, the outcome (6), and the
# number of its instructions.
_IS_CHANGED = 4
_OUTCOME = slice(5, 5 + len(Outcome.__slots__))
_TRIAL_LENGTH = _OUTCOME.stop + 1
_EVALUATED, _OUTGROWN = -1, -3
_ANYTHING: Rank = (NO_LIMIT, NO_LIMIT)

# The kinds of native/evaluate.c, in its order.
_MAKERS: tuple[Any, ...] = (
    lambda number, tiers, tier: Run(number),
    lambda number, tiers, tier: Run(number, again=True),
    lambda number, tiers, tier: Free(number),
    lambda number, tiers, tier: Give(number),
    lambda number, tiers, tier: SendStart(number, tiers[tier]),
    lambda number, tiers, tier: SendWait(number),
    lambda number, tiers, tier: FetchStart(number, tiers[tier]),
    lambda number, tiers, tier: FetchWait(number),
    lambda number, tiers, tier: Boundary(),
)
