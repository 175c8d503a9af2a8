"""The variables of the cut programs of one Step, and the rows that hold at every instant.

Items are the storages that are worth a decision, and behind them the codes they may have. Columns, in this order: how
much of each item is here; how much of it is away in each tier; whether each op is run again; whether each storage is
encoded at all; waiting before the instant and after it; the ways of the instant's op.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from memfit.plan.bound.account import Account
from memfit.plan.bound.linear import Floats, Rows

_TINY_SHARE = 1e-4
"""Storages below this share of all that the forward half makes cost nothing here, and are there when wanted."""
_TIME_UNITS = 10_000  # in the time of the keep plan: solvers like numbers around one

Indices = npt.NDArray[np.int64]


class Columns:
    """Where each variable is, what is known about each item, and the rows that do not depend on the instant."""

    def __init__(self, account: Account) -> None:
        self.account = account
        reruns = account.reruns
        self.storages = _worth_deciding(account)
        self.item_of = {storage: item for item, storage in enumerate(self.storages)}
        self.codes = [code for code in account.codings.codes if code.storage in self.item_of]
        self.coded = sorted({code.storage for code in self.codes})
        self.tiers = sorted(account.costs.links)
        self.ops = sorted({op for s in self.storages if s in reruns.recomputable for op in reruns.writers[s]})
        self.num_items = len(self.storages) + len(self.codes)
        self.again_at = self.num_items * (1 + len(self.tiers))
        self.column_of_op = {op: self.again_at + number for number, op in enumerate(self.ops)}
        self.coded_at = self.again_at + len(self.ops)
        self.column_of_coded = {storage: self.coded_at + number for number, storage in enumerate(self.coded)}
        self.before_at = self.coded_at + len(self.coded)
        self.after_at = self.before_at + 1
        self.ways_at = self.after_at + 1
        self.width = self.ways_at + max((len(ways) for ways in account.ways), default=1)
        self.unit_ps = max(account.keep_ps, 1) / _TIME_UNITS
        self._describe_items()
        self._collect_rows()
        self._price()

    def away(self, item: int, tier: int) -> int:
        return self.num_items * (1 + tier) + item

    @property
    def all_away(self) -> slice:
        """The columns of what is away, tier by tier."""
        return slice(self.num_items, self.again_at)

    def code_item(self, number: int) -> int:
        return len(self.storages) + number

    def _describe_items(self) -> None:
        account, step, storages, codes = self.account, self.account.step, self.storages, self.codes
        of_item = [*storages, *(code.storage for code in codes)]
        self.size = np.array(
            [*(float(account.size[s]) for s in storages), *(float(code.num_bytes) for code in codes)], dtype=np.float64
        )
        links = [account.costs.links[tier] for tier in self.tiers]
        sizes = [int(b) for b in self.size]
        self.send = [np.array([link.send_ps(b) for b in sizes]) / self.unit_ps for link in links]
        self.fetch = [np.array([link.fetch_ps(b) for b in sizes]) / self.unit_ps for link in links]
        self.send_drag = np.array([link.send_drag_ps(b) for link in links for b in sizes]) / self.unit_ps
        self.fetch_drag = np.array([link.fetch_drag_ps(b) for link in links for b in sizes]) / self.unit_ps
        self.is_code = np.arange(self.num_items) >= len(storages)
        self.born = np.array([step.storage[s].maker or 0 for s in of_item], dtype=np.int64)
        self.last_forward = np.array([account.last_forward[s] for s in of_item], dtype=np.int64)
        uses, never = account.backward_uses, account.num_ops
        self.last_use = np.array(
            [*((uses[s] or [-1])[-1] for s in storages), *(code.last_use for code in codes)], dtype=np.int64
        )
        self.held_to = np.array(
            [*((uses[s] or [-1])[-1] for s in storages), *(code.held_to for code in codes)], dtype=np.int64
        )
        self.overwritten = np.array(
            [*(account.overwritten.get(s, never) for s in storages), *(never for _ in codes)], dtype=np.int64
        )
        # A copy out may begin once nothing writes any more, and for a code once it is made.
        self.ready = np.array(
            [*(account.reruns.writers[s][-1] for s in storages), *(account.last_forward[c.storage] for c in codes)],
            dtype=np.int64,
        )
        self.can_be_sent = np.array(
            [*(s in account.can_be_sent for s in storages), *(bool(self.tiers) and c.can_be_sent for c in codes)],
            dtype=bool,
        )

        # The first and the last op that codes of a storage serve; all of the step where other codes may change that.
        self.served: dict[int, tuple[int, int]] = {}
        for code in codes:
            first, last = self.served.get(code.storage, (never, -1))
            known = (0, never) if code.first_use is None else (code.first_use, code.last_use)
            self.served[code.storage] = (min(first, known[0]), max(last, known[1]))

    def _collect_rows(self) -> None:
        """What is needed is held in some form; what is run again has what it reads; codes are only of what is coded.

        A storage that is encoded is not sent as it is, and its codes are held, here or away, until they are read for
        the last time: there are no other decisions.
        """
        rows, reruns = Rows(), self.account.reruns
        needs: list[tuple[int, int]] = []  # row, item: it binds as long as the item is to be used
        sources: list[tuple[int, int]] = []  # row, item: it binds once the item has been made
        stored: list[tuple[int, int]] = []  # row, code: it binds from the code's making to its end
        codes_of: dict[int, list[int]] = {}
        for number, code in enumerate(self.codes):
            codes_of.setdefault(code.storage, []).append(number)
        for item, storage in enumerate(self.storages):
            for held in self._held_or_made(item):
                if storage not in codes_of:
                    needs.append((rows.add(*held), item))
                for number in codes_of.get(storage, ()):
                    needs.append((rows.add(*held, *self._code_held(number)), self.code_item(number)))
        for op in self.ops:
            again = self.column_of_op[op]
            for item in (self.item_of[s] for s in reruns.rerun_touches[op] if s in self.item_of):
                for held in self._held_or_made(item):
                    terms = dict(held)
                    terms[again] = terms.get(again, 0.0) + 1  # one that works in place is among its own makers
                    sources.append((rows.add(*terms.items()), item))
        for number, code in enumerate(self.codes):
            held, encoded = self._code_held(number), self.column_of_coded[code.storage]
            rows.add(*((column, 1.0) for column, _ in held), (encoded, -1.0))
            if code.first_use is not None:  # else others may use it up sooner
                stored.append((rows.add(*held, (encoded, 1.0)), self.code_item(number)))
        self._one_of = []
        for storage, encoded in self.column_of_coded.items() if self.tiers else ():
            item = self.item_of[storage]
            away = ((self.away(item, tier), 1.0) for tier in range(len(self.tiers)))
            self._one_of.append(rows.add(*away, (encoded, 1.0)))
        self.rows = rows.matrix(self.width)
        self._needs, self._needed = _columns_of(needs)
        self._sources, self._sourced = _columns_of(sources)
        self._stored, self._code_stored = _columns_of(stored)

    def _held_or_made(self, item: int) -> list[list[tuple[int, float]]]:
        """`-(here + away + again)`, once for each op that makes it again: all of them must."""
        storage, reruns = self.storages[item], self.account.reruns
        held = [(item, -1.0), *((self.away(item, tier), -1.0) for tier in range(len(self.tiers)))]
        if storage not in reruns.recomputable:
            return [held]
        return [[*held, (self.column_of_op[op], -1.0)] for op in reruns.writers[storage]]

    def _code_held(self, number: int) -> list[tuple[int, float]]:
        item = self.code_item(number)
        away = [(self.away(item, tier), -1.0) for tier in range(len(self.tiers))]
        return [(item, -1.0), *away]

    def limits(self, op: int) -> Floats:
        """The right-hand sides of the rows at the instant of that op."""
        found = np.zeros(self.rows.shape[0])
        found[self._one_of] = 1.0
        is_stored = (self.last_forward[self._code_stored] < op) & (self.held_to[self._code_stored] >= op)
        found[self._stored] = np.where(is_stored, 0.0, 1.0)
        is_needed = (self.born[self._needed] <= op) & (self.last_use[self._needed] >= op)
        found[self._needs] = np.where(is_needed, -1.0, 0.0)
        # What is not made yet will be, for the first time: nobody has to hold it, or to make it again for that.
        found[self._sources] = np.where(self.born[self._sourced] > op, 1.0, 0.0)
        return found

    def _price(self) -> None:
        account, codings = self.account, self.account.codings
        self.objective = np.zeros(self.width)
        self.encoding = np.zeros(self.width)  # what making codes adds to the forward half
        self.longer = np.zeros(self.width)  # what reading them may add to the backward half
        for code in self.codes:
            self.encoding[self.column_of_coded[code.storage]] += code.encode_ps / self.unit_ps
        for storage, column in self.column_of_coded.items():
            self.objective[column] = codings.added_ps[storage] / self.unit_ps
            self.longer[column] = codings.longer_ps[storage] / self.unit_ps
        self.objective[self.all_away] = self.send_drag + self.fetch_drag
        self.objective[[self.before_at, self.after_at]] = 1.0
        # What is in use in the forward half besides the items.
        change = np.zeros(account.num_ops + 1, dtype=np.int64)
        for storage, last in account.last_forward.items():
            if storage not in self.item_of and last >= 0:
                change[account.step.storage[storage].maker or 0] += account.size[storage]
                change[last + 1] -= account.size[storage]
        self.other_bytes = account.given_bytes + np.cumsum(change)[:-1]


def _worth_deciding(account: Account) -> list[int]:
    """What backward uses of the forward half, and what that could be made from; tiny storages aside."""
    reruns, size = account.reruns, account.size
    least_bytes = max(_TINY_SHARE * sum(int(size[s]) for s in reruns.owned), 1)
    wanted = [s for s, uses in account.backward_uses.items() if uses and size[s] >= least_bytes]
    found = set(wanted)
    while wanted:
        storage = wanted.pop()
        for op in reruns.writers[storage] if storage in reruns.recomputable else ():
            for source in reruns.rerun_touches[op]:
                if source in reruns.writers and source not in found and size[source] >= least_bytes:
                    found.add(source)
                    wanted.append(source)
    return sorted(found)


def _columns_of(pairs: list[tuple[int, int]]) -> tuple[Indices, Indices]:
    both = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]
