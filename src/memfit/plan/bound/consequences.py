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
from memfit.plan.bound.fates import Fate, Kind, Parcel, Place


@dataclass(frozen=True)
class Again:
    """An op that is run again.

    Attributes:
        times: how often, at least.
        room_bytes: what there is for its workspace, at most, where it is run again for the first time.
        latest: the op in front of which that is, at the latest.
        is_there: whether it is there for sure.
        first, last: the ops in front of which it is run again for the first time, at the earliest, and for the last
            time, at the latest.
    """

    op: int
    times: int
    room_bytes: int
    latest: int
    is_there: bool
    first: int
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
        self._sooner: dict[tuple[Parcel, Place], Parcel] = {}
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
        sooner: dict[int, Place] = {}  # those that are used and fetched before that
        for source, place in self._sources(fates, latest).items():
            uses = account.backward_uses[source]
            if fates[source].kind is Kind.SENT and place < parcels[source].wanted:
                if uses:
                    sooner[source] = place
                    self._hold(held, source, place[0], uses[0])
                parcels[source] = self._wanted(parcels[source], place)
            elif fates[source].kind is Kind.KEPT and not uses:
                self._hold(held, source, account.last_forward[source] + 1, account.num_forward)
        sends, fetches = (sum(fate.drag_ps[side] for fate in fates.values()) for side in (0, 1))
        return Consequences(
            held,
            tuple(parcels.values()),
            tuple(self._again(fates, latest, sooner)),
            sum(fate.code_ps for fate in fates.values()),
            (sends, fetches),
        )

    def _wanted(self, parcel: Parcel, place: Place) -> Parcel:
        """The same parcel, wanted sooner: the same object for the same question."""
        if (parcel, place) not in self._sooner:
            self._sooner[parcel, place] = replace(parcel, wanted=place)
        return self._sooner[parcel, place]

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

    def _sources(self, fates: Mapping[int, Fate], latest: Mapping[int, int]) -> dict[int, Place]:
        """For each storage that is here and read by ops that run again the place of the first, at the latest."""
        reruns = self.account.reruns
        found: dict[int, Place] = {}
        for storage, op in latest.items():
            for writer in reruns.writers[storage]:
                for source in reruns.rerun_touches[writer]:
                    if source in fates and source not in latest:
                        found[source] = min((op, writer), found.get(source, (op, writer)))
        return found

    def _again(self, fates: Mapping[int, Fate], latest: Mapping[int, int], sooner: Mapping[int, Place]) -> list[Again]:
        account, reruns = self.account, self.account.reruns
        gap_of = {storage: fate.gap_bytes for storage, fate in fates.items()}
        for storage, place in sooner.items():
            gap_of[storage] = gap_of[storage].copy()
            gap_of[storage][place[0] + 1 : account.backward_uses[storage][0] + 1] = account.size[storage]
        gaps = account.gap_bytes.copy()
        for gap in gap_of.values():
            gaps += gap
        found: dict[int, Again] = {}
        for storage, at_latest in latest.items():
            fronts = [at_latest, *(op for op in self._triggers(storage, fates) if op < at_latest)]
            is_often = fates[storage].kind is Kind.OFTEN
            last = account.backward_uses[storage][-1] if is_often else at_latest
            for writer in reruns.writers[storage]:
                touched = {*reruns.rerun_touches[writer], *reruns.rerun_makes[writer], storage}
                there = touched & account.last_forward.keys()
                known = [gap_of[s] for s in there if s in fates]
                besides = [int(gaps[op]) - sum(int(gap[op]) for gap in known) for op in fronts]
                if len(fronts) == 1:  # what was fetched for one that is run again in front of the same op
                    before = ((at_latest, 0), (at_latest, writer))
                    fetched = [s for s, place in sooner.items() if before[0] <= place < before[1] and s not in there]
                    besides[0] += sum(int(account.size[s]) for s in fetched)
                room = self.budget_bytes - sum(int(account.size[s]) for s in there) - min(besides)
                again = Again(writer, 2 if is_often else 1, room, at_latest, len(fronts) == 1, min(fronts), last)
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
        min(one.first, other.first),
        max(one.last, other.last),
    )
