"""The step cut at an instant, as a linear program: what any plan must have done before it, and must still do after it.

[Note: the cut]
Take the instant at which some op runs for the first time. Whatever a later op uses of what the forward half has made by
then is here (and counts), or away in a tier, or has been dropped and is made again later. What is made again needs what
it is made from, likewise here, away or made again. What is away was sent before the instant, and comes back after it:
the copies of each channel have no more time than that, those that are made late or wanted soon have less. So the shares
`here`, `away` and `again` of every plan obey the rows of this program, and its objective is what they add to the time
of the ops: re-runs after the instant, waiting before it and after it, codes, what compute loses to the transfers of
what is away (to others it counts as waiting), slower ways of the op with a smaller workspace. Fractions of storages and
everything that the rows do not speak of (re-runs before the instant, bytes while re-running, the order of transfers)
are in the plan's favour, so the optimum is a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_matrix, vstack

from memfit.cost.costs import OpCost
from memfit.plan.bound.account import Account
from memfit.plan.bound.columns import Columns, Indices
from memfit.plan.bound.linear import Floats, LinearProgram, Rows

_NUM_WINDOWS, _MANY_WINDOWS = 5, 40
"""For so many moments, what is made after it or wanted before it passes its channel in the time that is left."""
_MANY_COLUMNS = 600
"""Programs with more have few windows: where tensors are many and small, the moments between say little more."""
_BYTE_UNITS = 1_000  # in the budget


class Share(NamedTuple):
    """How much of a storage is here, away, dropped to be made again, and whether it is encoded."""

    here: float
    away: float
    again: float
    encoded: float


@dataclass(frozen=True)
class Carried:
    """The proof of one cut, without the rows that only it has, to be tried at others.

    Attributes:
        rows: the multipliers of the rows that hold at every instant.
        memory: that of the bytes.
        sends, fetches: those of the channels.
        reduced: what is left of the price of each variable.
    """

    rows: Floats
    memory: float
    sends: Floats
    fetches: Floats
    reduced: Floats


@dataclass(frozen=True)
class Cut:
    """The bound at one instant.

    Attributes:
        over_ps: what any plan takes beyond the time of its ops; None if no plan is within the budget.
        needed_bytes: if there is none, the bytes that any plan has there at least.
        waits_ps: how much of the optimum is waiting for channels.
        point: the variables of the optimum, if the solver has found one.
        carried: what its proof says about other instants.
    """

    op: int
    over_ps: int | None
    needed_bytes: int = 0
    waits_ps: int = 0
    point: Floats | None = field(default=None, repr=False, compare=False)
    carried: Carried | None = field(default=None, repr=False, compare=False)


class Cuts:
    """The cuts of one step at one budget."""

    def __init__(self, account: Account, columns: Columns, budget_bytes: int) -> None:
        self.account, self.columns, self.budget_bytes = account, columns, budget_bytes
        self.op_ps = account.least_ps(budget_bytes)
        self._elapsed = np.concatenate([[0], np.cumsum(np.array(self.op_ps, dtype=np.float64))]) / columns.unit_ps
        self.prices = columns.objective.copy()
        for op, column in columns.column_of_op.items():
            ways = account.ways_within(op, budget_bytes)
            self.prices[column] = min(way.again_ps for way in ways) / columns.unit_ps
        self.again = np.zeros(columns.width)
        self.again[columns.again_at : columns.coded_at] = self.prices[columns.again_at : columns.coded_at]
        coded = self.prices[list(columns.column_of_coded.values())]
        self.least_of_codes = float(np.minimum(coded, 0).sum())  # nothing else is below zero
        # In no optimum does compute wait longer than for all transfers one after the other.
        transfers = sum(float(row.sum()) for row in (*columns.send, *columns.fetch))
        self.send_rows, self.fetch_rows = self._whole_rows()
        self.most_waiting = transfers + float(self.again.sum() + np.abs(coded).sum()) + 1

    def at(self, op: int) -> Cut:
        """The bound at the instant at which this op runs for the first time."""
        account, columns = self.account, self.columns
        if int(account.needed_bytes[op]) > self.budget_bytes:
            return Cut(op, None, int(account.needed_bytes[op]))
        solved = self.program(op)[0].solve()
        if solved.is_infeasible:
            needed = self.least_bytes(op)
            # If the bytes do not say so too, the solver was wrong, and nothing is proven.
            return Cut(op, None, needed) if needed > self.budget_bytes else Cut(op, self.over_ps(float("-inf")))
        over_ps = self.over_ps(solved.proven)
        if solved.point is None or solved.multipliers is None:
            return Cut(op, over_ps)
        waits = float(solved.point[columns.before_at] + solved.point[columns.after_at])
        carried = self._carried(
            solved.multipliers[: columns.rows.shape[0]], solved.multipliers[self.num_own_rows(op) :]
        )
        return Cut(op, over_ps, 0, self._whole_ps(waits), solved.point, carried)

    def program(self, op: int) -> tuple[LinearProgram, Floats]:
        """The whole program at that instant, and what each way of the op takes longer than the fastest with room."""
        columns, ways = self.columns, self.account.ways_within(op, self.budget_bytes)
        lower, upper = self._box(op, ways)
        upper[[columns.before_at, columns.after_at]] = self.most_waiting
        memory, other_bytes = self._memory(op, ways)
        extra = np.array([way.time_ps - min(w.time_ps for w in ways) for way in ways]) / columns.unit_ps
        objective = self.prices.copy()
        objective[columns.ways_at : columns.ways_at + len(ways)] = extra
        windows, times = self._windows(op)
        unit_bytes = self.budget_bytes / _BYTE_UNITS
        program = self._program(op, objective, lower, upper).with_rows(
            np.vstack([memory / unit_bytes, *windows]),
            np.array([(self.budget_bytes - other_bytes) / unit_bytes, *times]),
        )
        return program, extra

    def num_own_rows(self, op: int) -> int:
        """How many rows of the program are neither bytes nor time."""
        return self.columns.rows.shape[0] + 1 + sum(op in code.on_code for code in self.columns.codes)

    def _carried(self, rows: Floats, others: Floats) -> Carried:
        """What holds elsewhere: multipliers of the rows of all instants, of bytes, and of whole channels."""
        columns = self.columns
        memory, windows = float(others[0]), others[1:]
        sends = windows[: len(self.send_rows)]
        fetches = windows[len(self.send_rows) : len(self.send_rows) + len(self.fetch_rows)]
        reduced = self.prices - columns.rows.T @ rows
        reduced[: columns.num_items] -= memory * columns.size / (self.budget_bytes / _BYTE_UNITS)
        for factor, row in zip((*sends, *fetches), (*self.send_rows, *self.fetch_rows), strict=True):
            reduced -= factor * row
        return Carried(rows, memory, sends, fetches, reduced)

    def estimate(self, op: int, carried: Carried) -> int:
        """What the proof of another cut proves at this op: a bound, if not the best one; takes no solving."""
        columns = self.columns
        ways = self.account.ways_within(op, self.budget_bytes)
        unit_bytes = self.budget_bytes / _BYTE_UNITS
        lower, upper = self._box(op, ways)
        upper[[columns.before_at, columns.after_at]] = self.most_waiting
        reduced = carried.reduced[: columns.ways_at]
        least = np.where(reduced > 0, reduced * lower[: columns.ways_at], reduced * upper[: columns.ways_at])
        memory, other_bytes = self._memory(op, ways)
        fastest_ps = min(way.time_ps for way in ways)
        by_way = [
            (way.time_ps - fastest_ps) / columns.unit_ps
            - carried.memory * memory[columns.ways_at + number] / unit_bytes
            for number, way in enumerate(ways)
        ]
        send_time, fetch_time = self._whole_windows(op)
        terms = carried.rows @ columns.limits(op) + carried.memory * (self.budget_bytes - other_bytes) / unit_bytes
        terms += float(carried.sends.sum()) * send_time + float(carried.fetches.sum()) * fetch_time
        found = float(terms) + float(least.sum()) + min(by_way)
        found -= 1e-9 * (abs(float(terms)) + float(np.abs(least).sum()) + 1)
        return self.over_ps(found)

    def least_bytes(self, op: int) -> int:
        """The bytes that any plan has at that instant at least, whatever time it takes."""
        needed = int(self.account.needed_bytes[op])
        if op in self.account.codings.gone:
            return 0
        ways = self.account.ways[op]
        memory, other_bytes = self._memory(op, ways)
        unit_bytes = max(float(memory.max(initial=0)), 1.0) / 100
        proven = self._program(op, memory / unit_bytes, *self._box(op, ways)).solve().proven
        if not np.isfinite(proven):
            return needed
        return max(needed, int(np.ceil(proven * unit_bytes - 0.5)) + other_bytes)

    def _program(self, op: int, objective: Floats, lower: Floats, upper: Floats) -> LinearProgram:
        """The rows that hold at the instant, but for bytes and time."""
        columns, rows = self.columns, Rows()
        for number, code in enumerate(columns.codes):
            if op in code.on_code:  # it reads the storage whole, or its code: one of them is here
                rows.add((columns.item_of[code.storage], -1.0), (columns.code_item(number), -1.0))
        rows.add(*((column, -1.0) for column in range(columns.ways_at, columns.width)))
        matrix = vstack([columns.rows, rows.matrix(columns.width)], format="csr")
        limits = np.concatenate([columns.limits(op), -np.ones(rows.num_rows)])
        return LinearProgram(objective, csr_matrix(matrix), limits, lower, upper)

    def _box(self, op: int, ways: tuple[OpCost, ...]) -> tuple[Floats, Floats]:
        """The least and the most of every variable; what must be here is."""
        account, columns, n = self.account, self.columns, self.columns.num_items
        lower, upper = np.zeros(columns.width), np.zeros(columns.width)
        in_use = (columns.born <= op) & (op <= columns.last_forward) & ~columns.is_code
        is_done = columns.last_forward < op  # forward has no more use for it
        lower[:n] = in_use | ((columns.overwritten <= op) & (op <= columns.last_use))
        on_code = {code.storage for code in columns.codes if op in code.on_code}
        if op >= account.num_forward:
            touched = [s for s in account.codings.touches[op] if s in columns.item_of and s not in on_code]
            lower[[columns.item_of[s] for s in touched]] = 1
        upper[:n] = np.maximum(in_use | is_done, lower[:n])
        for tier in range(len(columns.tiers)):
            upper[columns.away(0, tier) : columns.away(n, tier)] = is_done & columns.can_be_sent
        upper[columns.again_at : columns.before_at] = 1
        upper[columns.ways_at : columns.ways_at + len(ways)] = 1
        return lower, upper

    def _memory(self, op: int, ways: tuple[OpCost, ...]) -> tuple[Floats, int]:
        """Bytes by variable, and the bytes that are there besides."""
        columns = self.columns
        memory = np.zeros(columns.width)
        memory[: columns.num_items] = columns.size
        if op not in self.account.unsure:  # kernels that work on codes have no workspace
            memory[columns.ways_at : columns.ways_at + len(ways)] = [way.workspace_bytes for way in ways]
        return memory, int(columns.other_bytes[op])

    def _whole_windows(self, op: int) -> tuple[float, float]:
        """The time that channels have to send what is away at the instant, and to bring it back."""
        num_ops, num_forward = self.account.num_ops, self.account.num_forward
        begin = max(op + 1, num_forward)
        return float(self._elapsed[min(op, num_forward)]), float(self._elapsed[num_ops] - self._elapsed[begin])

    def _windows(self, op: int) -> tuple[list[Floats], list[float]]:
        """Rows of what each channel carries, and the time that it has for it; those of whole channels come first."""
        columns, num_ops, num_forward = self.columns, self.account.num_ops, self.account.num_forward
        send_time, fetch_time = self._whole_windows(op)
        rows = [*self.send_rows, *self.fetch_rows]
        times = [send_time] * len(self.send_rows) + [fetch_time] * len(self.fetch_rows)
        end, begin = min(op, num_forward), max(op + 1, num_forward)
        most = _NUM_WINDOWS if columns.width > _MANY_COLUMNS else _MANY_WINDOWS
        for row in self.send_rows:
            for moment in _spread(columns.ready, end, most):  # made after it: sent after it
                rows.append(row.copy())
                _leave_out(rows[-1][columns.all_away], columns.ready < moment, columns.send_drag)
                times.append(float(self._elapsed[end] - self._elapsed[moment + 1]))
        soon = self._next_uses(op) if self.fetch_rows else columns.last_use
        for row in self.fetch_rows:
            for moment in _spread(soon, num_ops, most):  # wanted by then: fetched by then
                rows.append(row.copy())
                _leave_out(rows[-1][columns.all_away], soon > moment, columns.fetch_drag)
                self._leave_out_reading(rows[-1], op, moment)
                times.append(float(self._elapsed[moment] - self._elapsed[begin]))
        return rows, times

    def _whole_rows(self) -> tuple[list[Floats], list[Floats]]:
        """For each channel the row of all that it carries out, and of all that it carries back.

        What compute loses to a transfer is time for that and all others.
        """
        columns = self.columns
        sends: list[Floats] = []
        fetches: list[Floats] = []
        for side, times, found in (("send", columns.send, sends), ("fetch", columns.fetch, fetches)):
            for tiers in self._channels(side):
                row = -columns.encoding if side == "send" else -self.again - columns.longer
                row[columns.before_at if side == "send" else columns.after_at] = -1
                row[columns.all_away] = -columns.send_drag if side == "send" else -columns.fetch_drag
                for tier in tiers:
                    row[columns.away(0, tier) : columns.away(columns.num_items, tier)] += times[tier]
                found.append(row)
        return sends, fetches

    def _channels(self, side: str) -> Iterator[list[int]]:
        """For each channel the tiers whose transfers on that side pass it."""
        links = [self.account.costs.links[tier] for tier in self.columns.tiers]
        names = [link.send_channel if side == "send" else link.fetch_channel for link in links]
        for name in dict.fromkeys(names):
            yield [tier for tier, other in enumerate(names) if other == name]

    def _leave_out_reading(self, row: Floats, op: int, moment: int) -> None:
        """Reading a code takes its time where ops are served by it: not if all of them are before or after a window."""
        columns = self.columns
        for storage, column in columns.column_of_coded.items():
            first, last = columns.served[storage]
            if last <= op or moment < first:
                row[column] = 0.0

    def _next_uses(self, op: int) -> Indices:
        """For each item the next op that uses it, as far as that is known."""
        columns, account = self.columns, self.account
        found = np.full(columns.num_items, account.num_ops, dtype=np.int64)
        for item, storage in enumerate(columns.storages):
            found[item] = next((use for use in account.backward_uses[storage] if use > op), account.num_ops)
        for number, code in enumerate(columns.codes):
            # Once an op was served, others may be by what was decoded for it.
            if code.first_use is not None and code.first_use > op:
                found[columns.code_item(number)] = code.first_use
        return found

    def shares(self, cut: Cut) -> dict[int, Share]:
        """What the optimum of a cut does with each storage that is worth a decision."""
        if cut.point is None:
            return {}
        point = cut.point
        columns, reruns = self.columns, self.account.reruns
        found = {}
        for item, storage in enumerate(columns.storages):
            away = sum(float(point[columns.away(item, tier)]) for tier in range(len(columns.tiers)))
            again = 0.0
            if storage in reruns.recomputable:
                again = min(float(point[columns.column_of_op[op]]) for op in reruns.writers[storage])
            coded = columns.column_of_coded.get(storage)
            found[storage] = Share(float(point[item]), away, again, 0.0 if coded is None else float(point[coded]))
        return found

    def over_ps(self, proven: float) -> int:
        """The bound for all plans, those that wait longer than is allowed here included."""
        least = self.least_of_codes
        return self._whole_ps(max(min(proven, self.most_waiting + least), least))

    def _whole_ps(self, value: float) -> int:
        return int(np.floor(value * self.columns.unit_ps))


def _leave_out(away: Floats, items: npt.NDArray[np.bool_], drag: Floats) -> None:
    """Take the transfers of these items out of a row of channel time; what compute may lose to them stays."""
    in_all_tiers = np.tile(items, away.size // max(items.size, 1))
    away[in_all_tiers] = -drag[in_all_tiers]


def _spread(moments: Indices, end: int, most: int) -> list[int]:
    """At most so many of the moments before the end, evenly."""
    known = np.unique(moments[moments < end])
    if not known.size:
        return []
    return sorted({int(known[i]) for i in np.linspace(0, known.size - 1, most).astype(int)})
