"""What follows from the fates of some storages, whatever becomes of the others: bytes, parcels, and ops run again.

[Note: in front of which op]
A missing storage is made again in front of the first backward op that uses it, or earlier: in front of one that uses
something else that is missing and made from it, or by the same op. Which of these there are depends on fates too. Where
no other is left, it is known what is there besides while its makers run again; else the best of all places is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from memfit.plan.bound.account import Account, Numbers
from memfit.plan.bound.fates import Fate, Kind, Parcel


@dataclass(frozen=True)
class Again:
    """An op that is run again.

    Attributes:
        times: how often, at least.
        room_bytes: what there is for its workspace, at most, where it is run again for the first time.
        latest: the op in front of which that is, at the latest.
        is_there: whether it is there for sure.
        last: the op in front of which it is run again for the last time, at the latest.
    """

    op: int
    times: int
    room_bytes: int
    latest: int
    is_there: bool
    last: int


@dataclass(frozen=True)
class Consequences:
    """What all plans have in common in which some storages have these fates.

    Attributes:
        held_bytes: what is there while each op runs, without its workspace and without parcels before they are used.
        code_ps: what the codes add that are decided about.
        drag_ps: what compute loses to the parcels as they are sent, and as they are fetched.
    """

    held_bytes: Numbers
    parcels: tuple[Parcel, ...]
    again: tuple[Again, ...]
    code_ps: int
    drag_ps: tuple[int, int]


class Inference:
    """From fates to what follows, for one step and budget."""

    def __init__(self, account: Account, budget_bytes: int) -> None:
        self.account, self.budget_bytes = account, budget_bytes
        reruns = account.reruns
        self._sooner: dict[tuple[Parcel, int], Parcel] = {}
        self._made_with: dict[int, set[int]] = {}  # or from it
        for storage in reruns.recomputable:
            for writer in reruns.writers[storage]:
                for other in {*reruns.rerun_touches[writer], *reruns.rerun_makes[writer]} - {storage}:
                    self._made_with.setdefault(other, set()).add(storage)
        # Whether a code serves an op instead does not matter here: it may not.
        self._uses: dict[int, list[int]] = {}
        for op in range(account.num_forward, account.num_ops):
            for storage in reruns.touches[op]:
                self._uses.setdefault(storage, []).append(op)

    def of(self, fates: Mapping[int, Fate]) -> Consequences:
        """What follows from these fates, by storage."""
        account = self.account
        latest = self._latest(fates)
        held = account.present_bytes.copy()
        for fate in fates.values():
            held += fate.more_bytes
        for storage, op in latest.items():
            uses = account.backward_uses[storage]
            if fates[storage].kind is Kind.ONCE and op < uses[0]:
                self._hold(held, storage, op, uses[0])
        parcels = {s: fate.parcel for s, fate in fates.items() if fate.parcel is not None}
        for source, op in self._sources(fates, latest).items():
            uses = account.backward_uses[source]
            if fates[source].kind is Kind.SENT and op < parcels[source].first_use:
                if uses:
                    self._hold(held, source, op, uses[0])
                parcels[source] = self._wanted(parcels[source], op)
            elif fates[source].kind is Kind.KEPT and not uses:
                self._hold(held, source, account.last_forward[source] + 1, account.num_forward)
        sends, fetches = (sum(fate.drag_ps[side] for fate in fates.values()) for side in (0, 1))
        return Consequences(
            held,
            tuple(parcels.values()),
            tuple(self._again(fates, latest)),
            sum(fate.code_ps for fate in fates.values()),
            (sends, fetches),
        )

    def _wanted(self, parcel: Parcel, op: int) -> Parcel:
        """The same parcel, wanted sooner: the same object for the same question."""
        if (parcel, op) not in self._sooner:
            self._sooner[parcel, op] = replace(parcel, first_use=op)
        return self._sooner[parcel, op]

    def _hold(self, held: Numbers, storage: int, start: int, stop: int) -> None:
        """It is here all the while, which goes beyond what its fate says."""
        there = self.account.present_bytes_of(storage)[start:stop]
        held[start:stop] += np.maximum(int(self.account.size[storage]) - there, 0)

    def _latest(self, fates: Mapping[int, Fate]) -> dict[int, int]:
        """For each storage that has to be made again the op in front of which it has been, at the latest."""
        account, reruns = self.account, self.account.reruns
        made = (Kind.ONCE, Kind.OFTEN)
        found = {s: account.backward_uses[s][0] for s, fate in fates.items() if fate.kind in made}
        waiting = list(found)
        while waiting:
            storage = waiting.pop()
            for writer in reruns.writers[storage]:
                for source in reruns.rerun_touches[writer]:
                    if source == storage or source not in fates or not fates[source].is_missing:
                        continue
                    if found.get(source, account.num_ops) > found[storage]:
                        found[source] = found[storage]
                        waiting.append(source)
        return found

    def _sources(self, fates: Mapping[int, Fate], latest: Mapping[int, int]) -> dict[int, int]:
        """For each storage that is here and read by ops that run again, in front of which op, at the latest."""
        reruns = self.account.reruns
        found: dict[int, int] = {}
        for storage, op in latest.items():
            for writer in reruns.writers[storage]:
                for source in reruns.rerun_touches[writer]:
                    if source in fates and source not in latest:
                        found[source] = min(op, found.get(source, op))
        return found

    def _again(self, fates: Mapping[int, Fate], latest: Mapping[int, int]) -> list[Again]:
        account, reruns = self.account, self.account.reruns
        gaps = account.gap_bytes.copy()
        for fate in fates.values():
            gaps += fate.gap_bytes
        found: dict[int, Again] = {}
        for storage, at_latest in latest.items():
            fronts = [at_latest, *(op for op in self._triggers(storage, fates) if op < at_latest)]
            is_often = fates[storage].kind is Kind.OFTEN
            last = account.backward_uses[storage][-1] if is_often else at_latest
            for writer in reruns.writers[storage]:
                touched = {*reruns.rerun_touches[writer], *reruns.rerun_makes[writer], storage}
                there = touched & account.last_forward.keys()
                known = [fates[s].gap_bytes for s in there if s in fates]
                besides = [int(gaps[op]) - sum(int(gap[op]) for gap in known) for op in fronts]
                room = self.budget_bytes - sum(int(account.size[s]) for s in there) - min(besides)
                again = Again(writer, 2 if is_often else 1, room, at_latest, len(fronts) == 1, last)
                found[writer] = _both(found[writer], again) if writer in found else again
        return list(found.values())

    def _triggers(self, storage: int, fates: Mapping[int, Fate]) -> set[int]:
        """The backward ops in front of which it may be made again, for its own sake or with something else."""
        found: set[int] = set(self._uses.get(storage, ()))
        seen, waiting = {storage}, [storage]
        while waiting:
            for made in self._made_with.get(waiting.pop(), set()) - seen:
                fate = fates.get(made)
                if fate is not None and not fate.is_missing:
                    continue
                seen.add(made)
                waiting.append(made)
                if fate is None or fate.kind not in (Kind.ENCODED, Kind.CODE_SENT):  # whose codes serve instead
                    found.update(self._uses.get(made, ()))
        return found


def _both(one: Again, other: Again) -> Again:
    """An op that makes two storages again: at once, or one after the other."""
    return Again(
        one.op,
        max(one.times, other.times),
        min(one.room_bytes, other.room_bytes),
        max(one.latest, other.latest),
        one.is_there and other.is_there and one.latest == other.latest,
        max(one.last, other.last),
    )
