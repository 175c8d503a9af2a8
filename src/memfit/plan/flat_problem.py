"""A Problem as C sees it: one struct of counts and pointers, and the arrays behind them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.plan.problem import Problem

NO_LIMIT = 1 << 62
"""More bytes and picoseconds than anything has; two of it are still a number in C."""

_MOST_POSITIONS = 1 << 20  # of programs that recompute over and over; a longer one takes Python minutes

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
    "num_choices",
    "max_length",
    "max_rerun_made",
)
_WAYS = ("choice_ops", "way_starts", "way_ps", "way_rerun_ps", "way_workspace_bytes", "first_ways")
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
    "handing_last_ops": np.int32,
    "handing_bytes": np.int64,
    "send_ps": np.int64,
    "fetch_ps": np.int64,
    "send_drag_ps": np.int64,
    "fetch_drag_ps": np.int64,
    "send_channels": np.int32,
    "fetch_channels": np.int32,
}


class _CProblem(ctypes.Structure):
    """struct Problem of native/evaluator.h, field for field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _COUNTS),
        *((f"{name}_{part}", ctypes.c_void_p) for name in _LISTS for part in ("starts", "items")),
        *((name, ctypes.c_void_p) for name in (*_ARRAYS, *_WAYS)),
    ]


class FlatProblem:
    """The arrays that the struct points to, by the name of its field. All structs of a problem share them."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        step, reruns = problem.step, problem.reruns
        num_storages = len(step.storage_bytes)
        writers = [reruns.writers.get(storage, ()) for storage in range(num_storages)]
        made = [tuple(dict.fromkeys(step.values[v].storage for v in op.made)) for op in step.ops]
        # Much of what ops touch is parameters: they are left out where nothing is asked about them.
        passing = {storage for storage, stays in enumerate(problem.stays) if not stays}
        sources = {handing.source_storage for handing in problem.handings}
        last_op = {storage: op for op, storages in enumerate(reruns.touches) for storage in storages}
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
            self._lay(f"{name}_starts", np.cumsum([0, *map(len, rows)]), np.int32)
            self._lay(f"{name}_items", [item for row in rows for item in row], np.int32)

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
            "handing_last_ops": [last_op.get(handing.source_storage, -1) for handing in problem.handings],
            "handing_bytes": problem.step.addition_bytes,
            "send_ps": [link.send_ps(size) for link in links for size in step.storage_bytes],
            "fetch_ps": [link.fetch_ps(size) for link in links for size in step.storage_bytes],
            "send_drag_ps": [link.send_drag_ps(size) for link in links for size in step.storage_bytes],
            "fetch_drag_ps": [link.fetch_drag_ps(size) for link in links for size in step.storage_bytes],
            "send_channels": [channels.index(link.send_channel) for link in links],
            "fetch_channels": [channels.index(link.fetch_channel) for link in links],
        }
        for name, numbers in arrays.items():
            self._lay(name, numbers, _ARRAYS[name])
        self._counts = {
            "num_ops": problem.num_ops,
            "num_forward": problem.num_forward,
            "num_storages": num_storages,
            "num_tiers": len(problem.tiers),
            "num_channels": len(channels),
            "num_handings": len(problem.handings),
            "num_tangents": len(problem.tangents),
        }

    def struct(self, *, first_ways: npt.NDArray[np.int32] | None = None, growth: int = 1) -> ctypes.Structure:
        """One for C to copy.

        With `first_ways` ops that can be computed in several ways are left for C to decide, which reads them where they
        lie: for each such op a number less than that of its ways. `growth` is how many times more room there is for
        re-runs than plans need that make everything again at most once.
        """
        problem = self.problem
        choices = {} if first_ways is None else problem.ways
        if first_ways is not None and choices and "choice_ops" not in self.arrays:
            ways = [way.cost for offered in choices.values() for way in offered]
            self._lay("choice_ops", list(choices), np.int32)
            self._lay("way_starts", np.cumsum([0, *map(len, choices.values())]), np.int32)
            self._lay("way_ps", [cost.time_ps for cost in ways], np.int64)
            self._lay("way_rerun_ps", [cost.again_ps for cost in ways], np.int64)
            self._lay("way_workspace_bytes", [cost.workspace_bytes for cost in ways], np.int64)
            self._lay("first_ways", first_ways, np.int32)
        max_rerun_made = sum(n * len(problem.reruns.makes[op]) for op, n in enumerate(_times_again(problem)))
        counts = self._counts | {
            "num_choices": len(choices),
            "max_length": growth * _once_again_length(problem),
            "max_rerun_made": growth * max_rerun_made,
        }
        return _CProblem(**counts, **{name: array.ctypes.data for name, array in self.arrays.items()})

    def _lay(self, name: str, numbers: Iterable[int], dtype: Any) -> None:
        self.arrays[name] = np.ascontiguousarray(numbers, dtype=dtype)


def _only(lists: Iterable[Iterable[int]], wanted: set[int]) -> list[list[int]]:
    return [[number for number in numbers if number in wanted] for numbers in lists]


def _times_again(problem: Problem) -> list[int]:
    """How often each forward op can run again: once for each storage it makes or writes, as bursts leave them whole."""
    times = [0] * problem.num_forward
    for ops in problem.reruns.writers.values():
        for op in ops:
            times[op] += 1
    return times


def _once_again_length(problem: Problem) -> int:
    return problem.num_ops + sum(_times_again(problem))


def largest_growth(problem: Problem, *, choose_ways: bool = False) -> int:
    """The most room that C may have: no sum of times or bytes can wrap around, where Python would just go on.

    Zero if that is not certain even of plans that make everything again at most once.
    """
    op_ps, rerun_ps, workspace_bytes = [*problem.op_ps], [*problem.rerun_ps], [*problem.workspace_bytes]
    for op, ways in problem.ways.items() if choose_ways else ():
        op_ps[op] = max(way.cost.time_ps for way in ways)
        rerun_ps[op] = max(way.cost.again_ps for way in ways)
        workspace_bytes[op] = max(way.cost.workspace_bytes for way in ways)
    sizes, links = problem.step.storage_bytes, problem.costs.links.values()
    # Twice: compute loses no more to a transfer than that takes.
    transfers_ps = 2 * sum(link.send_ps(size) + link.fetch_ps(size) for link in links for size in sizes)
    left_ps = NO_LIMIT - 1 - transfers_ps - sum(op_ps)
    # A re-run may hold a second copy of what is here.
    most_bytes = 2 * sum(sizes) + max(workspace_bytes, default=0)
    length = _once_again_length(problem)
    longest_by_time = left_ps // max([1, *rerun_ps])
    longest_by_bytes = (NO_LIMIT - 1) // max(1, most_bytes) - len(problem.handings)
    longest = min(longest_by_time, longest_by_bytes, max(length, _MOST_POSITIONS))
    return max(0, longest // max(1, length))
