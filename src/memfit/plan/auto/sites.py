"""What can be decided: the storages that are large enough to matter, and what may become of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from memfit.plan.auto.coded import CodedStep
from memfit.plan.decisions import Decision, Encode, EncodeThenOffload, Keep, Offload, Recompute, untimed
from memfit.plan.problem import AWAY, DROP, KEEP

_LEAST_SHARE = 1e-4
"""Smaller storages are left as they are by default: all statistics and counters together are less than a per cent."""

_NUM_PLACES = 4
"""By how many first uses of other storages one may be fetched before its turn."""

_LARGE_WORKSPACE = 0.05
"""Of the budget: in which way ops with less are computed is not searched for, but follows from what has room."""


@dataclass(frozen=True, slots=True)
class Move:
    """One thing that may become of a storage.

    Attributes:
        state: of the storage itself (plan/problem.py).
        code_state: of its code; None where it is not encoded.
        decision: the same in words.
    """

    state: int
    code_state: int | None
    decision: Decision

    @property
    def is_coded(self) -> bool:
        return self.code_state is not None


@dataclass(frozen=True)
class Site:
    """A storage with its moves; the first is what happens to it unless somebody decides."""

    storage: int
    num_bytes: int
    moves: tuple[Move, ...]
    is_read: bool  # by backward
    maker: int

    def number(self, decision: Decision | None) -> int | None:
        """The number of the move that a decision asks for, however it is timed; None if there is none."""
        if decision is None:
            return 0
        nearest = Recompute() if isinstance(decision, Recompute) else untimed(decision)
        numbers = {move.decision: n for n, move in enumerate(self.moves)}
        return numbers.get(decision, numbers.get(nearest))


@dataclass(frozen=True)
class WaySite:
    """An op that may be computed in a slower way than would fit, to leave room for transfers beside it.

    Attributes:
        op: of the step with codes in it.
        choice: its place among the ops that have a choice.
        num_bytes: how much less workspace it can have.
        moves: its ways, the fastest first; a move is the first that may be taken.
    """

    op: int
    choice: int
    num_bytes: int
    moves: tuple[str, ...]


def way_sites_of(coded: CodedStep, budget_bytes: int) -> tuple[WaySite, ...]:
    """The ops whose workspace is a good part of the budget."""
    found = []
    for choice, (op, ways) in enumerate(coded.problem.ways.items()):
        num_bytes = ways[0].cost.workspace_bytes - ways[-1].cost.workspace_bytes
        if len(ways) > 1 and num_bytes >= budget_bytes * _LARGE_WORKSPACE:
            found.append(WaySite(op, choice, num_bytes, tuple(way.name for way in ways)))
    return tuple(found)


def sites_of(coded: CodedStep) -> tuple[Site, ...]:
    """The storages to decide about, in the order they are made."""
    problem, step = coded.problem, coded.step
    reruns, owned = problem.reruns, [s for s in problem.reruns.owned if s not in coded.owner_of]
    least = _LEAST_SHARE * sum(step.storage_bytes[s] for s in owned)
    found = []
    for storage in owned:
        known = step.storage[storage]
        if known.bytes < least or known.bytes == 0:
            continue
        is_read = known.first_backward is not None
        is_recomputable = storage in reruns.recomputable
        moves = [Move(KEEP, None, Keep())]
        if is_recomputable:
            moves.insert(0 if not is_read else 1, Move(DROP, None, Recompute()))
        # One that is laid out otherwise than foreseen could not be rebuilt from its bytes.
        can_travel = storage not in coded.costs.unforeseen and not reruns.why_not_offload(storage)
        if (is_read or is_recomputable) and can_travel:
            moves += [Move(AWAY + n, None, Offload(tier)) for n, tier in enumerate(problem.tiers)]
        if storage in coded.codes:
            codec = coded.codes[storage].codec
            rest = DROP if is_recomputable else KEEP
            moves.append(Move(rest, KEEP, Encode(codec)))
            moves += [Move(rest, AWAY + n, EncodeThenOffload(codec, tier)) for n, tier in enumerate(problem.tiers)]
        if len(moves) > 1:
            assert known.maker is not None
            found.append(Site(storage, known.bytes, tuple(moves), is_read, known.maker))
    return tuple(sorted(found, key=lambda site: (site.maker, site.storage)))


def sites_made_often(coded: CodedStep, sites: Sequence[Site]) -> tuple[Site, ...]:
    """The same with more moves, behind the others: storages made again are dropped in front of a use, and made anew.

    Worth a try only where nothing fits otherwise: each use more is one more that ops are run again for.
    """
    ops, values, number = coded.step.ops, coded.step.values, coded.number_of
    uses: dict[int, list[int]] = {site.storage: [] for site in sites}
    for index in range(coded.step.num_forward, len(ops)):
        for storage in {values[value].storage for value in ops[index].reads()} & uses.keys():
            uses[storage].append(index)
    found = []
    for site in sites:
        can_be_made = any(move.decision == Recompute() for move in site.moves)
        # What codes put in the place of an op has the same outputs; one that they leave no trace of is no place to be.
        held_from = [use for use in uses[site.storage] if use in number] if can_be_made else []
        more = (Move(-number[use], None, Recompute(use)) for use in held_from)
        found.append(replace(site, moves=(*site.moves, *more)))
    return tuple(found)


def sites_out_of_turn(coded: CodedStep, sites: Sequence[Site]) -> tuple[Site, ...]:
    """The same with more moves, behind the others: storages fetched before some that are needed sooner.

    That takes room, but leaves the channel to a large one when compute has most time for it. Worth a try where tensors
    are few and huge: in other steps there is always something to be fetched that fits in between.
    """
    problem, step, number = coded.problem, coded.step, coded.number_of
    first_use = {site.storage: step.storage[site.storage].first_backward for site in sites}
    places = sorted({use for use in first_use.values() if use is not None})
    found = []
    for site in sites:
        use = first_use[site.storage]
        more: list[Move] = []
        for place in [p for p in places if use is not None and p < use][-_NUM_PLACES:]:
            # Behind the op before it, as codes are written in: what is decoded for it comes between.
            if place == step.num_forward or place - 1 not in number:
                continue
            back_by = number[place - 1] + 1
            for move in site.moves:
                match move.decision:
                    case Offload(tier):
                        state = problem.away_state(tier, back_by)
                        more.append(Move(state, None, Offload(tier, back_by=place)))
                    case EncodeThenOffload(codec, tier):
                        state = problem.away_state(tier, back_by)
                        more.append(Move(move.state, state, EncodeThenOffload(codec, tier, back_by=place)))
        found.append(replace(site, moves=(*site.moves, *more)))
    return tuple(found)


def decisions_of(sites: Sequence[Site | WaySite], moves: Sequence[int]) -> dict[int, Decision]:
    """What is decided, for those storages about which something is."""
    return {
        site.storage: site.moves[n].decision
        for site, n in zip(sites, moves, strict=True)
        if n and isinstance(site, Site)
    }


def first_ways_of(sites: Sequence[Site | WaySite], moves: Sequence[int]) -> dict[int, int]:
    """By op the first of its ways that may be taken, where that is not the fastest."""
    return {site.op: n for site, n in zip(sites, moves, strict=True) if n and isinstance(site, WaySite)}


def moves_of(
    sites: Sequence[Site | WaySite], decisions: Mapping[int, Decision], ways: Mapping[int, str] = MappingProxyType({})
) -> list[int]:
    """The nearest that the search can express: moments of transfers are left out.

    `ways` is by op of the step with codes in it in which way it is computed, where that is known.
    """
    found = []
    for site in sites:
        if isinstance(site, Site):
            found.append(site.number(decisions.get(site.storage)) or 0)
        else:
            way = ways.get(site.op, site.moves[0])
            found.append(site.moves.index(way) if way in site.moves else 0)
    return found
