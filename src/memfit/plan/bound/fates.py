"""What may become of a storage for good, and the bytes that it then has, at least, while each op runs.

[Note: fates]
A plan decides about each storage once. Kept, it is here up to its last use. Made again, it is dropped, and made anew in
front of its first use at the latest; made only once, it is here from then on. Sent, it travels once either way, and
stays when it is back. Encoded, its codes are here, or the first of them travels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np

from memfit.cost.costs import Link
from memfit.plan.bound.account import Account, Numbers, Stretch
from memfit.plan.bound.codings import Coding

Place = tuple[int, int]
"""Where an op runs in the backward half: the op that it is run again in front of, and itself; or twice itself. So
places are in the order of time: what is run again in front of an op comes in the order of its numbers, then that op."""


class Kind(Enum):
    """What becomes of a storage."""

    KEPT = "kept"
    DROPPED = "dropped"  # backward does not read it
    ONCE = "made again once"
    OFTEN = "made again more than once"
    SENT = "sent"
    ENCODED = "encoded"
    CODE_SENT = "encoded, and its code sent"


@dataclass(frozen=True, eq=False)
class Parcel:
    """Bytes that leave in the forward half and come back in the backward half.

    Attributes:
        is_code: whether it is a code of the storage, and not the storage itself.
        ready: the op after which it can leave.
        last_forward: the op after which it need not be here.
        wanted: the place in front of which it is back; of the number of ops, if that is not known.
    """

    storage: int
    is_code: bool
    num_bytes: int
    send_ps: int
    fetch_ps: int
    send_channel: str
    fetch_channel: str
    ready: int
    last_forward: int
    wanted: Place


@dataclass(frozen=True, eq=False)
class Fate:
    """One thing that may become of one storage.

    Attributes:
        more_bytes: while each op runs, what is there of it beyond what is there in every plan.
        gap_bytes: in front of each op of the backward half, after the one before it, what is there of it.
        is_missing: whether it has to be made again for whatever is made from it in the backward half.
        code_ps: what its codes add to the step.
        drag_ps: what compute loses at least while it is sent, and while it is fetched.
    """

    storage: int
    kind: Kind
    more_bytes: Numbers
    gap_bytes: Numbers
    is_missing: bool = False
    code_ps: int = 0
    parcel: Parcel | None = None
    drag_ps: tuple[int, int] = (0, 0)


class Fates:
    """The fates of storages of one step."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self._codes: dict[int, list[Coding]] = {}
        for code in account.codings.codes:
            self._codes.setdefault(code.storage, []).append(code)

    def of(self, storage: int) -> list[Fate]:
        """All that may become of it."""
        return [*self._kept_or_made(storage), *self._sent(storage), *self._encoded(storage)]

    def _kept_or_made(self, storage: int) -> Iterator[Fate]:
        account, uses = self.account, self.account.backward_uses[storage]
        can_be_made = storage in account.reruns.recomputable
        if not uses:
            yield self._fate(storage, Kind.KEPT)  # how long it is held depends on what is made from it
            if can_be_made:
                yield self._fate(storage, Kind.DROPPED, is_missing=True)
            return
        size = int(account.size[storage])
        yield self._fate(storage, Kind.KEPT, [Stretch(account.last_forward[storage] + 1, uses[-1] + 1, size)])
        if can_be_made:
            yield self._fate(storage, Kind.ONCE, [Stretch(uses[0], uses[-1] + 1, size)], is_missing=True)
            yield self._fate(storage, Kind.OFTEN, is_missing=True)

    def _sent(self, storage: int) -> Iterator[Fate]:
        account, uses, size = self.account, self.account.backward_uses[storage], int(self.account.size[storage])
        back = [Stretch(uses[0], uses[-1] + 1, size)] if uses else []
        moments = account.reruns.writers[storage][-1], account.last_forward[storage], uses[0] if uses else None
        for link in account.costs.links.values() if storage in account.can_be_sent else ():
            parcel = self._parcel(link, storage, False, size, *moments)
            yield self._fate(storage, Kind.SENT, back, parcel=parcel, drag_ps=_drag_ps(link, size))

    def _encoded(self, storage: int) -> Iterator[Fate]:
        account, codes = self.account, self._codes.get(storage, [])
        if not codes:
            return
        first, *others = codes
        size, last_forward = int(account.size[storage]), account.last_forward[storage]
        on_code = frozenset[int]().union(*(code.on_code for code in codes))
        decoded = [Stretch(op, op + 1, size) for op in account.backward_uses[storage] if op not in on_code]
        held = [Stretch(last_forward + 1, c.held_to + 1, c.num_bytes) for c in others if c.first_use is not None]
        # One that is not kept for backward's sake is dropped, if it can be.
        is_missing, code_ps = storage in account.reruns.recomputable, account.codings.added_ps[storage]
        whole, back = [], []
        if first.first_use is not None:  # else others may use it up sooner
            whole = [Stretch(last_forward + 1, first.held_to + 1, first.num_bytes)]
            back = [Stretch(first.first_use, first.held_to + 1, first.num_bytes)]
        yield self._fate(storage, Kind.ENCODED, [*held, *whole], decoded, is_missing=is_missing, code_ps=code_ps)
        for link in account.costs.links.values() if first.can_be_sent else ():
            yield self._fate(
                storage,
                Kind.CODE_SENT,
                [*held, *back],
                decoded,
                is_missing=is_missing,
                code_ps=code_ps,
                parcel=self._parcel(link, storage, True, first.num_bytes, last_forward, last_forward, first.first_use),
                drag_ps=_drag_ps(link, first.num_bytes),
            )

    def _fate(
        self,
        storage: int,
        kind: Kind,
        held: Iterable[Stretch] = (),
        decoded: Iterable[Stretch] = (),
        *,
        is_missing: bool = False,
        code_ps: int = 0,
        parcel: Parcel | None = None,
        drag_ps: tuple[int, int] = (0, 0),
    ) -> Fate:
        account, held = self.account, list(held)
        while_running = account.added_up([*held, *decoded]) - account.present_bytes_of(storage)
        between = account.added_up(Stretch(max(start, account.num_forward - 1) + 1, stop, b) for start, stop, b in held)
        return Fate(storage, kind, np.maximum(while_running, 0), between, is_missing, code_ps, parcel, drag_ps)

    def _parcel(
        self, link: Link, storage: int, is_code: bool, num_bytes: int, ready: int, last_forward: int, use: int | None
    ) -> Parcel:
        first_use = self.account.num_ops if use is None else use
        return Parcel(
            storage,
            is_code,
            num_bytes,
            link.send_ps(num_bytes),
            link.fetch_ps(num_bytes),
            link.send_channel,
            link.fetch_channel,
            ready,
            last_forward,
            (first_use, first_use),
        )


def _drag_ps(link: Link, num_bytes: int) -> tuple[int, int]:
    return link.send_drag_ps(num_bytes), link.fetch_drag_ps(num_bytes)
