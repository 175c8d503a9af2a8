"""Other ways to compute an op on this machine, measured: convolutions in chunks.

A way is offered only if it gives the same bits (capture/rewrites/chunks.py), holds less than those that are as fast,
and was measured in time: one that is not offered costs nothing but a chance.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from memfit.capture.rewrites.chunks import WHOLE, chunk_counts, in_chunks, proven_counts, way_name
from memfit.capture.rewrites.proof import Proofs
from memfit.capture.step import Op, Step
from memfit.cost.costs import OpCost, picoseconds
from memfit.cost.operands import Call, CannotRunAlone
from memfit.cost.price_cache import PriceCache
from memfit.cost.signature import signature
from memfit.cost.stopwatch import Stopwatch
from memfit.cost.workspaces import Workspaces

log = logging.getLogger("memfit")

_WORTH_BYTES = 1 << 20  # a workspace below that is nobody's peak
_WORTH_SHARE = 0.8  # more chunks than these must hold less than that share of what fewer hold
_WORTH_OFFERING = 0.9  # of two ways with nearly the same workspace the slower one is no choice


class Ways:
    """What a step's ops cost in other ways.

    Attributes:
        algorithms: by signature of the op, what each way costs, by name; ops that have only one are not in it.
        by_signature: the same by signature of the calls that the ways are.
        notes: what could not be measured, and why.
    """

    def __init__(self, step: Step, cache: PriceCache, watch: Stopwatch, proofs: Proofs) -> None:
        self.step = step
        self.cache = cache
        self.watch = watch
        self.proofs = proofs
        self.algorithms: dict[str, dict[str, OpCost]] = {}
        self.by_signature: dict[str, OpCost] = {}
        self.notes: tuple[str, ...] = ()
        self._found: dict[str, tuple[Op, OpCost, dict[int, OpCost]]] = {}

    def measure(
        self,
        measured: Mapping[str, OpCost],
        end: float,
        workspaces: Workspaces,
        *,
        max_op_bytes: int | None,
        progress: Callable[[str], None],
    ) -> None:
        """Go through the ops that hold most first; from `end` on (of time.perf_counter) only by what is known."""
        candidates = self._candidates(measured, max_op_bytes)
        for number, (key, op) in enumerate(candidates):
            progress(f"measuring ways of ops: {number + 1} of {len(candidates)}")
            costs = self._in_chunks(measured[key], op, workspaces, end)
            if costs is not None:
                self._found[key] = op, measured[key], costs
        late = len(candidates) - len(self._found)
        if late:
            self.notes = (f"{late} of {len(candidates)} kinds of convolutions were not tried in chunks: no time",)

    def price(self, prices: Mapping[str, OpCost], *, call_ps: int) -> None:
        """Put what was measured beside the prices of the ops as they are; a call more takes `call_ps` at least."""
        for key, (op, whole, costs) in self._found.items():
            ways: dict[str, OpCost] = {}
            handover_ps = prices[key].time_ps - whole.time_ps  # what it makes is given away all the same
            for count, cost in costs.items():
                # In pieces it is never faster but by chance, and of many chances a planner would take the best.
                least_ps = prices[key].time_ps + count * call_ps
                ways[way_name(count)] = replace(cost, time_ps=max(cost.time_ps + handover_ps, least_ps))
                self.by_signature[signature(self.step, in_chunks(op, count))] = ways[way_name(count)]
            offered = _offered(prices[key], ways)
            if len(offered) > 1:
                self.algorithms[key] = offered

    def _candidates(self, measured: Mapping[str, OpCost], max_op_bytes: int | None) -> list[tuple[str, Op]]:
        """The kinds of ops that could hold less, the worst first."""
        found: dict[str, Op] = {}
        for op in self.step.ops:
            if chunk_counts(self.step, op):
                found.setdefault(signature(self.step, op), op)
        worth = [
            (key, op) for key, op in found.items() if key in measured and measured[key].workspace_bytes >= _WORTH_BYTES
        ]
        if max_op_bytes is not None:
            worth = [(key, op) for key, op in worth if Call.of(self.step, op).bytes <= max_op_bytes]
        return sorted(worth, key=lambda entry: measured[entry[0]].workspace_bytes, reverse=True)

    def _in_chunks(self, whole: OpCost, op: Op, workspaces: Workspaces, end: float) -> dict[int, OpCost] | None:
        """What the op costs in chunks, as far as it is worth it; None if there was no time to find out."""
        counts = chunk_counts(self.step, op)
        keys = {count: signature(self.step, in_chunks(op, count)) for count in counts}
        if time.perf_counter() >= end:
            # What was measured was proven before, so that this takes no time.
            counts = tuple(count for count in counts if self.cache.op(keys[count]) is not None)
            if not counts:
                return None
        found: dict[int, OpCost] = {}
        held = whole.workspace_bytes
        for count in proven_counts(self.step, op, counts, self.proofs):
            cost = self.cache.op(keys[count])
            if cost is None and time.perf_counter() < end:
                cost = self._measured(in_chunks(op, count), keys[count], workspaces)
            if cost is None:
                break
            found[count] = cost
            if cost.workspace_bytes > _WORTH_SHARE * held or cost.workspace_bytes < _WORTH_BYTES:
                break
            held = cost.workspace_bytes
        return found

    def _measured(self, op: Op, key: str, workspaces: Workspaces) -> OpCost | None:
        try:
            call = Call.of(self.step, op)
        except CannotRunAlone as error:
            log.info("cannot measure %s: %s", key, error)
            return None
        cost = measured_alone(call, key, workspaces, self.watch)
        if cost is None or workspaces.notes:  # a workspace that is only taken to be 0 is no reason to pick a way
            return None
        self.cache.add(key, cost)
        return self.cache.op(key)


def measured_alone(call: Call, key: str, workspaces: Workspaces, watch: Stopwatch) -> OpCost | None:
    """The cost of a call, or None if it cannot be run alone."""
    try:
        workspace_bytes = workspaces.of(call)  # first, because there a crash does no harm
        return OpCost(picoseconds(watch.op_s(call)), workspace_bytes)
    except Exception as error:  # a kernel may raise anything on operands it does not like
        log.info("cannot measure %s: %s", key, error)
        return None


def _offered(whole: OpCost, ways: Mapping[str, OpCost]) -> dict[str, OpCost]:
    """The ways that hold clearly less than all that are as fast, beside the call as it is."""
    found = {WHOLE: whole}
    for name, cost in sorted(ways.items(), key=lambda way: (way[1].time_ps, way[1].workspace_bytes)):
        if cost.workspace_bytes <= _WORTH_OFFERING * min(offered.workspace_bytes for offered in found.values()):
            found[name] = cost
    return found
