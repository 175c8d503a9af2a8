"""Peak and time of a plan in one call: what a search asks ten thousand times.

    evaluator = Evaluator.of(problem)
    states = evaluator.array(problem.default_states())
    states[storage] = DROP
    outcome = evaluator.evaluate(states, budget_bytes)

In C where a compiler is at hand (native/*.c), else by lower_states and simulate; the numbers are the same.
"""

from __future__ import annotations

import abc
import ctypes
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from memfit.errors import BadOption
from memfit.native.library import native_library
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

States: TypeAlias = Sequence[int] | npt.NDArray[np.int8]
"""One state per storage (plan/problem.py); an int8 array is read where it lies."""

_NO_LIMIT = 1 << 62


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


class Evaluator(abc.ABC):
    """Evaluates states of the storages of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._num_storages = len(problem.step.storage_bytes)
        self._num_states = AWAY + len(problem.tiers)

    @staticmethod
    def of(problem: Problem) -> Evaluator:
        """In C if that can be had, else in Python."""
        library = native_library()
        if library is None or not _fits_int64(problem):
            return PythonEvaluator(problem)
        return NativeEvaluator(problem, library)

    @property
    @abc.abstractmethod
    def is_native(self) -> bool:
        """True if it runs in C."""

    @abc.abstractmethod
    def evaluate(self, states: States, budget_bytes: int | None = None) -> Outcome:
        """Lower the states and run the program on paper. The budget decides where compute waits for transfers."""

    @abc.abstractmethod
    def instructions(self, states: States, budget_bytes: int | None = None) -> tuple[Instruction, ...]:
        """The program that `evaluate` speaks of."""

    def array(self, states: Sequence[int]) -> npt.NDArray[np.int8]:
        """The states as an array to change in place: evaluating the same array again and again is fastest."""
        self._check_length(states)
        made = np.asarray(states)
        self._check_values(made)
        return made.astype(np.int8)

    def _check_length(self, states: States) -> None:
        if len(states) != self._num_storages:
            raise BadOption(f"{len(states)} states were given, but the step has {self._num_storages} storages")

    def _check_values(self, states: npt.NDArray[Any]) -> None:
        if states.ndim != 1 or (states.size and states.dtype.kind not in "iu"):
            raise BadOption(f"states are a flat list of whole numbers, not {states.dtype}{list(states.shape)}")
        wrong = np.flatnonzero((states < 0) | (states >= self._num_states))
        if wrong.size:
            raise self._bad_state(int(wrong[0]), int(states[wrong[0]]))

    def _bad_state(self, storage: int, state: int) -> BadOption:
        tiers = "".join(f", {AWAY + number} (away in '{tier}')" for number, tier in enumerate(self.problem.tiers))
        return BadOption(f"storage {storage}: there is no state {state}; states are 0 (keep), 1 (drop){tiers}")


def _limit(budget_bytes: int | None) -> int:
    """The budget as a number that C can hold."""
    if budget_bytes is None:
        return _NO_LIMIT
    if budget_bytes < 0:
        raise BadOption(f"a budget of {budget_bytes} bytes makes no sense")
    return min(budget_bytes, _NO_LIMIT)


class PythonEvaluator(Evaluator):
    """By the lowering and the simulator themselves."""

    is_native = False

    def evaluate(self, states: States, budget_bytes: int | None = None) -> Outcome:
        limit = _limit(budget_bytes)
        program = lower_states(self.problem, self._plain(states), budget_bytes=limit)
        timeline = simulate(program, self.problem.costs)
        return Outcome(
            timeline.peak_bytes,
            timeline.step_ps,
            timeline.stall_ps,
            *timeline.excess_bytes(limit),
            sum(isinstance(i, Run) and i.again for i in program.instructions),
        )

    def instructions(self, states: States, budget_bytes: int | None = None) -> tuple[Instruction, ...]:
        return lower_states(self.problem, self._plain(states), budget_bytes=_limit(budget_bytes)).instructions

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
        self._flat = _Flat(problem)
        library.memfit_evaluator_new.argtypes = [ctypes.POINTER(_CProblem)]
        library.memfit_evaluator_new.restype = ctypes.c_void_p
        library.memfit_evaluator_free.argtypes = [ctypes.c_void_p]
        library.memfit_evaluator_free.restype = None
        pointer = library.memfit_evaluator_new(self._flat.struct)
        if pointer is None:
            raise MemoryError("no memory for the evaluator")
        weakref.finalize(self, library.memfit_evaluator_free, pointer)
        self._call = library.memfit_evaluate
        self._call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
        self._call.restype = ctypes.c_int64
        self._pointer = ctypes.c_void_p(pointer)
        self._results = (ctypes.c_int64 * (len(Outcome.__slots__) + 1))()
        self._results_pointer = ctypes.c_void_p(ctypes.addressof(self._results))
        self._lock = threading.Lock()
        # The array of the last call, and where it lies: finding that out costs as much as a small network.
        self._states: States | None = None
        self._states_pointer = ctypes.c_void_p()

    def evaluate(self, states: States, budget_bytes: int | None = None) -> Outcome:
        limit = _limit(budget_bytes)
        with self._lock:
            self._run(states, limit, None)
            return Outcome(*self._results[:-1])

    def instructions(self, states: States, budget_bytes: int | None = None) -> tuple[Instruction, ...]:
        limit = _limit(budget_bytes)
        out = np.empty((self._flat.struct.max_instructions, 3), dtype=np.int32)
        with self._lock:
            self._run(states, limit, out.ctypes.data)
            count = self._results[-1]
        tiers = self.problem.tiers
        return tuple(_MAKERS[kind](number, tiers, tier) for kind, number, tier in out[:count].tolist())

    def _run(self, states: States, limit_bytes: int, instructions: int | None) -> None:
        if states is not self._states:
            self._point_at(states)
        wrong = self._call(self._pointer, self._states_pointer, limit_bytes, self._results_pointer, instructions)
        if wrong >= 0:
            raise self._bad_state(wrong, int(states[wrong]))

    def _point_at(self, states: States) -> None:
        self._check_length(states)
        if (
            isinstance(states, np.ndarray)
            and states.dtype == np.int8
            and states.ndim == 1
            and states.flags.c_contiguous
        ):
            array = states
        else:
            self._check_values(np.asarray(states))
            array = np.array(states, dtype=np.int8)
        # A list can change in place without its copy knowing, so what is remembered is the array.
        self._states = array
        self._states_pointer = ctypes.c_void_p(array.ctypes.data)


# -- The problem as C sees it -----------------------------------------------------------------------------------------

_LISTS = (
    "touches",
    "rerun_touches",
    "source_touches",
    "rerun_source_touches",
    "makes",
    "rerun_makes",
    "made",
    "writers",
)
_COUNTS = (
    "num_ops",
    "num_forward",
    "num_storages",
    "num_tiers",
    "num_channels",
    "num_handings",
    "num_tangents",
    "max_length",
    "max_instructions",
)
_ARRAYS = {
    "op_ps": np.int64,
    "rerun_ps": np.int64,
    "workspace_bytes": np.int64,
    "storage_bytes": np.int64,
    "is_recomputable": np.uint8,
    "is_present": np.uint8,
    "tangents": np.int32,
    "handing_storages": np.int32,
    "handing_ready_ops": np.int32,
    "handing_source_storages": np.int32,
    "handing_bytes": np.int64,
    "send_ps": np.int64,
    "fetch_ps": np.int64,
    "send_channels": np.int32,
    "fetch_channels": np.int32,
}


class _CProblem(ctypes.Structure):
    """struct Problem of native/evaluator.h, field for field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _COUNTS),
        *((f"{name}_{part}", ctypes.c_void_p) for name in _LISTS for part in ("starts", "items")),
        *((name, ctypes.c_void_p) for name in _ARRAYS),
    ]


class _Flat:
    """Holds the arrays that the struct points to."""

    def __init__(self, problem: Problem) -> None:
        step, reruns = problem.step, problem.reruns
        num_storages = len(step.storage_bytes)
        self.struct = _CProblem()
        self._alive: list[npt.NDArray[Any]] = []

        writers = [reruns.writers.get(storage, ()) for storage in range(num_storages)]
        made = [tuple(dict.fromkeys(step.values[v].storage for v in op.made)) for op in step.ops]
        # Much of what ops touch is parameters: they are left out where nothing is asked about them.
        passing = {storage for storage, stays in enumerate(problem.stays) if not stays}
        sources = {handing.source_storage for handing in problem.handings}
        lists: tuple[Sequence[Sequence[int]], ...] = (
            _only(reruns.touches, passing),
            _only(reruns.rerun_touches, passing),
            _only(reruns.touches, sources),
            _only(reruns.rerun_touches, sources),
            reruns.makes,
            reruns.rerun_makes,
            made,
            writers,
        )
        for name, rows in zip(_LISTS, lists, strict=True):
            self._point(f"{name}_starts", np.cumsum([0, *map(len, rows)]), np.int32)
            self._point(f"{name}_items", [item for row in rows for item in row], np.int32)

        links = [problem.costs.links[tier] for tier in problem.tiers]
        channels = sorted({name for link in links for name in (link.send_channel, link.fetch_channel)})
        arrays: dict[str, Iterable[int]] = {
            "op_ps": problem.op_ps,
            "rerun_ps": problem.rerun_ps,
            "workspace_bytes": problem.workspace_bytes,
            "storage_bytes": step.storage_bytes,
            "is_recomputable": [storage in reruns.recomputable for storage in range(num_storages)],
            "is_present": problem.is_present,
            "tangents": problem.tangents,
            "handing_storages": [handing.storage for handing in problem.handings],
            "handing_ready_ops": [handing.ready_op for handing in problem.handings],
            "handing_source_storages": [handing.source_storage for handing in problem.handings],
            "handing_bytes": problem.step.addition_bytes,
            "send_ps": [link.send_ps(size) for link in links for size in step.storage_bytes],
            "fetch_ps": [link.fetch_ps(size) for link in links for size in step.storage_bytes],
            "send_channels": [channels.index(link.send_channel) for link in links],
            "fetch_channels": [channels.index(link.fetch_channel) for link in links],
        }
        for name, numbers in arrays.items():
            self._point(name, numbers, _ARRAYS[name])

        times_again = _times_again(problem)
        max_length = problem.num_ops + sum(times_again)
        # A re-run drops copies of what it makes; besides, each storage is freed twice, sent and fetched at most.
        max_frees = sum(times * len(reruns.makes[op]) for op, times in enumerate(times_again)) + 2 * num_storages
        counts = {
            "num_ops": problem.num_ops,
            "num_forward": problem.num_forward,
            "num_storages": num_storages,
            "num_tiers": len(problem.tiers),
            "num_channels": len(channels),
            "num_handings": len(problem.handings),
            "num_tangents": len(problem.tangents),
            "max_length": max_length,
            "max_instructions": max_length + max_frees + 4 * num_storages + len(problem.handings) + 1,
        }
        for name, number in counts.items():
            setattr(self.struct, name, number)

    def _point(self, name: str, numbers: Iterable[int], dtype: Any) -> None:
        array = np.ascontiguousarray(numbers, dtype=dtype)
        self._alive.append(array)
        setattr(self.struct, name, array.ctypes.data)


def _only(lists: Iterable[Iterable[int]], wanted: set[int]) -> list[list[int]]:
    return [[number for number in numbers if number in wanted] for numbers in lists]


def _times_again(problem: Problem) -> list[int]:
    """How often each forward op can run again: once for each storage it makes or writes, as bursts leave them whole."""
    times = [0] * problem.num_forward
    for ops in problem.reruns.writers.values():
        for op in ops:
            times[op] += 1
    return times


def _fits_int64(problem: Problem) -> bool:
    """True if no sum of times or bytes can wrap around in C, where Python would just go on."""
    times_again, sizes = _times_again(problem), problem.step.storage_bytes
    links = problem.costs.links.values()
    transfers_ps = sum(link.send_ps(size) + link.fetch_ps(size) for link in links for size in sizes)
    reruns_ps = sum(times * op_ps for times, op_ps in zip(times_again, problem.rerun_ps, strict=False))
    # A re-run may hold a second copy of what is here.
    most_bytes = 2 * sum(sizes) + max(problem.workspace_bytes, default=0)
    most_excess_bytes = most_bytes * (problem.num_ops + sum(times_again))
    return max(transfers_ps + reruns_ps + sum(problem.op_ps), most_excess_bytes) < _NO_LIMIT


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
