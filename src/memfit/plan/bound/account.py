"""What holds for every plan of a Step: the bytes that must be there while an op runs, the time that each op must take.

[Note: what must be there]
While an op runs for the first time:
- what the step was given, from the start; tangents from the boundary to their last use;
- what the step hands out, and what the backward half makes, from its making on; the latter to its last use;
- of what the forward half makes for itself: in the forward half all that a later forward op uses, since nothing is
  dropped, sent away for good or made again before that; what the op uses; what backward has written over; and what is
  still to be used and can neither be sent, nor made again, nor encoded.
All that is more than that is a choice, and is left to cut.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memfit.capture.step import Step
from memfit.cost.costs import Costs, OpCost
from memfit.plan.bound.codings import Codings
from memfit.plan.decisions import Decisions
from memfit.plan.rerun import Reruns, tangent_storages

Numbers = npt.NDArray[np.int64]


class Stretch(NamedTuple):
    """So many bytes are there while the ops from `start` to the one before `stop` run."""

    start: int
    stop: int
    num_bytes: int


@dataclass(frozen=True)
class Account:
    """A step, its prices and the codes that may be used, as far as no decision changes them."""

    step: Step
    costs: Costs
    codes: Decisions

    @cached_property
    def reruns(self) -> Reruns:
        return Reruns(self.step)

    @property
    def num_ops(self) -> int:
        return len(self.step.ops)

    @property
    def num_forward(self) -> int:
        return self.step.num_forward

    # -- time ---------------------------------------------------------------------------------------------------------

    @cached_property
    def prices(self) -> Sequence[OpCost]:
        return self.costs.of(self.step)

    @cached_property
    def keep_ps(self) -> int:
        """What the keep plan takes: every op once."""
        return sum(price.time_ps for price in self.prices)

    @cached_property
    def ways(self) -> tuple[tuple[OpCost, ...], ...]:
        """For each op what it costs by each of its ways, the one in the price list first."""
        found = [[price] for price in self.prices]
        choices = self.costs.choices(self.step)
        # Of those that are run again in another form, the price list knows how to put the two together.
        in_two_forms = {index: ways for index, ways in choices.items() if self.step.ops[index].again}
        for name in sorted({name for ways in in_two_forms.values() for name in ways}):
            picked = {index: name for index, ways in in_two_forms.items() if name in ways}
            prices = self.costs.picking(picked).of(self.step)
            for index in picked:
                found[index].append(prices[index])
        for index, ways in choices.items():
            if index not in in_two_forms:
                found[index] += ways.values()
        return tuple(tuple(dict.fromkeys(ways)) for ways in found)

    def ways_within(self, op: int, budget_bytes: int) -> tuple[OpCost, ...]:
        """The ways whose workspace has room beside what must be there; all of them if none has, or nobody can say."""
        if op in self.unsure:
            return self.ways[op]
        room = budget_bytes - int(self.present_bytes[op])
        return tuple(way for way in self.ways[op] if way.workspace_bytes <= room) or self.ways[op]

    @cached_property
    def fastest_ps(self) -> list[int]:
        return [min(way.time_ps for way in ways) for ways in self.ways]

    def least_ps(self, budget_bytes: int) -> list[int]:
        """For each op the least that it takes in any plan within the budget."""
        return [
            self.fastest_ps[op] if len(ways) == 1 else min(w.time_ps for w in self.ways_within(op, budget_bytes))
            for op, ways in enumerate(self.ways)
        ]

    @cached_property
    def unsure(self) -> frozenset[int]:
        """Ops that codes may put another call in place of."""
        return self.codings.gone.union(*(code.on_code for code in self.codings.codes))

    # -- bytes --------------------------------------------------------------------------------------------------------

    @cached_property
    def size(self) -> Numbers:
        return np.array(self.step.storage_bytes, dtype=np.int64)

    @cached_property
    def codings(self) -> Codings:
        return Codings.of(self.step, self.costs, self.codes, self.reruns, self.fastest_ps)

    @cached_property
    def backward_uses(self) -> dict[int, list[int]]:
        """For each storage of the forward half the backward ops that use it, whichever codes there are."""
        found: dict[int, list[int]] = {storage: [] for storage in self.reruns.owned}
        for op in range(self.num_forward, self.num_ops):
            for storage in self.codings.touches[op]:
                if storage in found:
                    found[storage].append(op)
        return found

    @cached_property
    def last_forward(self) -> dict[int, int]:
        """For each storage that the forward half makes for itself the last forward op that uses it.

        Whichever codes there are: -1 for one that may not be made at all.
        """
        found = dict.fromkeys(self.reruns.owned, -1)
        for op in range(self.num_forward):
            for storage in self.codings.touches[op]:
                if storage in found:
                    found[storage] = op
        return found

    @cached_property
    def overwritten(self) -> dict[int, int]:
        """For each of them that backward writes to the first op that does."""
        found: dict[int, int] = {}
        for op in range(self.num_forward, self.num_ops):
            for storage in self.step.ops[op].writes:
                if storage in self.last_forward:
                    found.setdefault(storage, op)
        return found

    @cached_property
    def can_be_sent(self) -> frozenset[int]:
        if not self.costs.links:
            return frozenset()
        return frozenset(s for s in self.reruns.owned if not self.reruns.why_not_offload(s))

    def _given_stretches(self) -> Iterator[Stretch]:
        """When there is what, of all that the forward half does not make for itself."""
        step, owned = self.step, set(self.reruns.owned)
        tangents = tangent_storages(step)
        stays = {step.values[v].storage for v in step.outputs}
        stays |= {step.values[gradient.value].storage for gradient in step.first_parts}
        last = {s: op for op, touched in enumerate(self.codings.touches) for s in touched}
        for storage in step.storages:
            if storage.id in owned:
                continue
            start = storage.maker or 0
            if storage.id in tangents:
                start = self.num_forward
            stop = last.get(storage.id, start - 1) + 1
            if storage.id in stays or (storage.maker is None and storage.id not in tangents):
                stop = self.num_ops
            yield Stretch(start, stop, storage.bytes)

    @cached_property
    def given_bytes(self) -> Numbers:
        """While each op runs, the bytes of all that the forward half does not make for itself."""
        return self.added_up(self._given_stretches())

    @cached_property
    def gap_bytes(self) -> Numbers:
        """The same in front of each op, after the one before it."""
        stretches = self._given_stretches()
        return self.added_up(Stretch(start + 1, stop, num_bytes) for start, stop, num_bytes in stretches)

    @cached_property
    def present_bytes(self) -> Numbers:
        """While each op runs, the bytes that must be there in every plan; its workspace comes on top."""
        present = self.given_bytes + self.added_up(
            stretch for storage in self.backward_uses for stretch in self._stretches(storage)
        )
        present[list(self.codings.gone)] = 0  # there may be no such op
        return present

    def present_bytes_of(self, storage: int) -> Numbers:
        """The part that one storage has in it, of those that the forward half makes for itself."""
        return self.added_up(self._stretches(storage))

    def _stretches(self, storage: int) -> Iterator[Stretch]:
        """When how much of a storage of the forward half must be there, in whatever form."""
        uses, size, maker = self.backward_uses[storage], int(self.size[storage]), self.step.storage[storage].maker
        assert maker is not None
        last_forward, last = self.last_forward[storage], uses[-1] if uses else -1
        yield Stretch(maker, last_forward + 1, size)
        written = self.overwritten.get(storage, self.num_ops)
        yield Stretch(written, last + 1, size)
        rest = 0  # what stays of it between the forward half and that writing
        if storage not in self.can_be_sent and storage not in self.reruns.recomputable:
            rest = min(self._staying_code_bytes.get(storage, size), size)
        yield Stretch(max(last_forward, maker) + 1, min(last + 1, written), rest)
        for op in uses:
            if op < written:
                yield Stretch(op, op + 1, max(min(size, self._served_bytes.get((op, storage), size)) - rest, 0))

    @cached_property
    def _staying_code_bytes(self) -> dict[int, int]:
        """By storage the bytes of those of its codes that cannot be sent."""
        found: dict[int, int] = {}
        for code in self.codings.codes:
            is_sent = code.can_be_sent and bool(self.costs.links)
            found[code.storage] = found.get(code.storage, 0) + (0 if is_sent else code.num_bytes)
        return found

    @cached_property
    def _served_bytes(self) -> dict[tuple[int, int], int]:
        """By op and storage the bytes of the code that the op can read instead."""
        return {(op, code.storage): code.num_bytes for code in self.codings.codes for op in code.on_code}

    def added_up(self, stretches: Iterable[Stretch]) -> Numbers:
        """The bytes of all of them while each op runs."""
        change = np.zeros(self.num_ops + 1, dtype=np.int64)
        for start, stop, num_bytes in stretches:
            if start < stop:
                change[start] += num_bytes
                change[stop] -= num_bytes
        return np.cumsum(change)[:-1]

    @cached_property
    def keep_bytes(self) -> Numbers:
        """While each op runs, the bytes of the keep plan, workspace included."""
        owned = [self.step.storage[storage] for storage in self.reruns.owned]
        kept = self.added_up(
            Stretch(s.maker or 0, ((s.last_forward if s.last_backward is None else s.last_backward) or 0) + 1, s.bytes)
            for s in owned
        )
        workspaces = np.array([price.workspace_bytes for price in self.prices], dtype=np.int64)
        return self.given_bytes + kept + workspaces

    @cached_property
    def needed_bytes(self) -> Numbers:
        """While each op runs, the bytes that must be there, its smallest workspace included."""
        smallest = [min(way.workspace_bytes for way in ways) for ways in self.ways]
        found = self.present_bytes + np.array(smallest, dtype=np.int64)
        found[list(self.codings.gone)] = 0
        for code in self.codings.codes:
            for op in code.on_code:
                found[op] = self.present_bytes[op]  # the kernel on the code has a workspace of its own: none
        return found

    def instants(self) -> Iterator[int]:
        """The ops that run in every plan."""
        return (op for op in range(self.num_ops) if op not in self.codings.gone)
