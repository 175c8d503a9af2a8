"""The least that any plan takes longer, by going through the fates of the largest storages one after the other.

[Note: why fates]
A cut sees one instant, or a few. Where tensors are few and huge and the budget is hardly above the smallest, plans lose
time at one op after the other: a workspace that has no room here, a transfer that has no time there. All of it follows
from what becomes of a dozen storages. So these are decided one by one, the largest first, and of each set of decisions
the least is added up that all of its plans have in common (consequences.py, halves.py); storages that nothing is
decided about cost nothing and take up nothing. The set of which the least is proven is decided further, until that is
enough: every plan is in one of them.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from memfit.plan.bound.account import Account
from memfit.plan.bound.consequences import Consequences, Inference
from memfit.plan.bound.cut import Cuts
from memfit.plan.bound.fates import Fate, Fates, Kind
from memfit.plan.bound.halves import IMPOSSIBLE, Clock, Event, Half, Loose, Way

_LEAST_SHARE = 0.01
"""Of the budget: smaller storages are not decided about."""


@dataclass(frozen=True, order=True)
class _Node:
    """A set of plans, and what is proven of all of them; of equals, the one about which most is decided comes first."""

    proven_ps: float
    num_open: int
    number: int
    fates: tuple[Fate, ...] = field(compare=False, repr=False)


class Enumeration:
    """Plans of one step within one budget, told apart by the fates of their largest storages."""

    def __init__(self, cuts: Cuts) -> None:
        self.account, self.cuts, self.budget_bytes = cuts.account, cuts, cuts.budget_bytes
        account = self.account
        self._least_ps = np.array(cuts.op_ps, dtype=np.float64)
        elapsed = np.concatenate([[0.0], np.cumsum(self._least_ps)])
        self._clocks = [Clock(elapsed, account.num_forward, is_backward=side) for side in (False, True)]
        fates = Fates(account)
        self.storages = _huge(account, cuts.columns.storages, self.budget_bytes)
        self._fates = {storage: fates.of(storage) for storage in self.storages}
        self._inference = Inference(account, self.budget_bytes)
        self._coded = frozenset(cuts.columns.coded)
        self._ways = [_ways(account, op, cuts.op_ps[op]) for op in range(account.num_ops)]
        self._largest = np.array([max(way.workspace_bytes for way in ways) for ways in self._ways], dtype=np.int64)
        self._runs = np.ones(account.num_ops, dtype=bool)
        self._runs[list(account.codings.gone)] = False
        self.num_nodes = 0
        self._nodes: list[_Node] = []

    def run(self, *, target_ps: int, num_nodes: int) -> int:
        """What any plan takes longer than the time of its ops, up to the target; after so many sets at most."""
        root = self._node((), float("-inf"), target_ps)
        self._nodes = [root] if root.proven_ps < target_ps else []
        while self._nodes and self.num_nodes < num_nodes:
            node = self._nodes[0]
            if not node.num_open:
                break
            heapq.heappop(self._nodes)
            for fate in self._fates[self._next(node)]:
                child = self._node((*node.fates, fate), node.proven_ps, target_ps)
                if child.proven_ps < target_ps:
                    heapq.heappush(self._nodes, child)
        return int(np.floor(self._nodes[0].proven_ps - 1)) if self._nodes else target_ps

    def _next(self, node: _Node) -> int:
        """The storage to decide about: one that something is to be made from, or else the largest."""
        reruns, decided = self.account.reruns, {fate.storage for fate in node.fates}
        makers = (w for fate in node.fates if fate.is_missing for w in reruns.writers[fate.storage])
        sources = {source for writer in makers for source in reruns.rerun_touches[writer]}
        left = [storage for storage in self.storages if storage not in decided]
        return next((storage for storage in left if storage in sources), left[0])

    def _node(self, fates: tuple[Fate, ...], known_ps: float, limit_ps: float) -> _Node:
        self.num_nodes += 1
        proven_ps = max(self.longer_ps(fates, limit_ps), known_ps)
        return _Node(proven_ps, len(self.storages) - len(fates), self.num_nodes, fates)

    def longer_ps(self, fates: tuple[Fate, ...], limit_ps: float = IMPOSSIBLE) -> float:
        """What all plans with these fates take longer than the time of their ops, at least."""
        account = self.account
        decided = {fate.storage: fate for fate in fates}
        follows = self._inference.of(decided)
        added_ps = account.codings.added_ps
        # Codes of the others are made where that saves time.
        codes_ps = follows.code_ps + sum(min(added_ps[s], 0) for s in self._coded if s not in decided)
        left_ps = limit_ps - codes_ps
        backward_ps = self._half_ps(decided, follows, left_ps, is_backward=True)
        if backward_ps == IMPOSSIBLE:
            return IMPOSSIBLE
        forward_ps = self._half_ps(decided, follows, left_ps - backward_ps, is_backward=False)
        return codes_ps + backward_ps + forward_ps

    def _half_ps(self, decided: dict[int, Fate], follows: Consequences, limit_ps: float, *, is_backward: bool) -> float:
        clock = self._clocks[is_backward]
        events, loose = self._again(follows) if is_backward else ([], [])
        of_side = follows.drag_ps[is_backward]
        cost_ps = of_side + sum(time.duration_ps for time in loose)
        everywhere = Loose(of_side, 0, self.account.num_ops)
        codes = self._code_times(decided, is_backward=is_backward)
        half = Half(clock, follows.parcels, [*loose, everywhere, *codes], limit_ps - cost_ps)
        rooms = self.budget_bytes - follows.held_bytes
        sure = {a.op: a for a in follows.again if a.is_there}
        caps = {a.op: a.room_bytes for a in follows.again}
        crowded = self._runs & (rooms < self._largest + sum(parcel.num_bytes for parcel in follows.parcels))
        for op in np.flatnonzero(crowded).tolist():
            if (op >= self.account.num_forward) != is_backward:
                continue
            ways = tuple(way for way in self._ways[op] if way.workspace_bytes <= caps.get(op, way.workspace_bytes))
            if op in sure:  # which way it takes is decided where it runs again
                ways = tuple(way._replace(extra_ps=0.0) for way in ways[-1:])
            events.append(Event(op, op, int(rooms[op]), ways))
        return cost_ps + half.longer_ps(events)

    def _again(self, follows: Consequences) -> tuple[list[Event], list[Loose]]:
        """Ops that run again in a place that is known, and the time of those that run again somewhere."""
        events: list[Event] = []
        loose: list[Loose] = []
        for again in follows.again:
            forward_room = self.budget_bytes - int(follows.held_bytes[again.op])
            ways = [way for way in self.account.ways[again.op] if way.workspace_bytes <= again.room_bytes]
            if again.is_there:
                ways = [way for way in ways if way.workspace_bytes <= forward_room]
            if not ways:
                events.append(Event(again.op, again.latest, -1, ()))  # there is no room for it
                continue
            if not again.is_there:
                loose.append(Loose(again.times * min(w.again_ps for w in ways), again.first, again.last))
                continue
            more = again.times - 1
            loose_ps = more * min(w.again_ps for w in ways)
            if more:
                loose.append(Loose(loose_ps, again.first, again.last))
            least_ps = self._least_ps[again.op]
            offered = tuple(
                Way(w.workspace_bytes, w.again_ps, max(w.time_ps - least_ps, 0.0))
                for w in sorted(ways, key=lambda way: (way.time_ps, way.workspace_bytes))
            )
            events.append(Event(again.op, again.latest, again.room_bytes, offered))
        return events, loose

    def _code_times(self, decided: dict[int, Fate], *, is_backward: bool) -> list[Loose]:
        """What making codes or reading them may take, of storages that may be encoded."""
        account, codings = self.account, self.account.codings

        def may_be_encoded(storage: int) -> bool:
            return storage not in decided or decided[storage].kind in (Kind.ENCODED, Kind.CODE_SENT)

        if is_backward:
            served, anywhere = self.cuts.columns.served, (0, account.num_ops)
            longer = {s: ps for s, ps in codings.longer_ps.items() if ps and may_be_encoded(s)}
            return [Loose(ps, *served.get(s, anywhere), s) for s, ps in longer.items()]
        makings = [(c.encode_ps, account.last_forward[c.storage]) for c in codings.codes if may_be_encoded(c.storage)]
        return [Loose(ps, op, op) for ps, op in makings]


def _huge(account: Account, storages: list[int], budget_bytes: int) -> list[int]:
    """The storages that are decided about, the largest first; those that backward does not read come last."""
    huge = [s for s in storages if account.size[s] >= _LEAST_SHARE * budget_bytes]
    return sorted(huge, key=lambda s: (not account.backward_uses[s], -int(account.size[s]), s))


def _ways(account: Account, op: int, least_ps: int) -> tuple[Way, ...]:
    """The ways of an op, the fastest first, as far as it is known which op it is."""
    if op in account.unsure:
        return (Way(0, 0.0),)
    found: list[Way] = []
    for way in sorted(account.ways[op], key=lambda way: (way.time_ps, way.workspace_bytes)):
        if not found or way.workspace_bytes < found[-1].workspace_bytes:
            found.append(Way(way.workspace_bytes, max(way.time_ps - least_ps, 0.0)))
    return tuple(found)
