"""A Step and its Costs as numbers only: what the lowering walks, in Python and in C alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from memfit.capture.step import Step
from memfit.cost.costs import Costs, OpCost
from memfit.errors import BadOption
from memfit.plan.decisions import Decisions, Keep, Moments, Offload, Recompute
from memfit.plan.rerun import Reruns, tangent_storages

KEEP, DROP, AWAY = 0, 1, 2
"""The three states of a storage between the halves; from AWAY on it is AWAY + the number of the tier, and for one that
is to be back by an op before its first use, that op's number times that of all tiers (see Offload).

A negative state is DROP too: made again for an op before the number -state, it is dropped once more (see Recompute).
"""


@dataclass(frozen=True)
class Handing:
    """One gradient to give: after which op it is whole, and whose storage may change once it is given."""

    storage: int
    ready_op: int  # -1: from the start
    source_storage: int  # -1: more parts of the same gradient are to come


@dataclass(frozen=True, slots=True)
class Way:
    """One of the ways in which an op can be computed."""

    name: str
    cost: OpCost


@dataclass(frozen=True)
class Problem:
    """Ops, storages and gradients by number. Storages have the step's own numbers."""

    step: Step
    costs: Costs
    tiers: tuple[str, ...]

    @classmethod
    def of(cls, step: Step, costs: Costs) -> Problem:
        return cls(step, costs, tuple(sorted(costs.links)))

    @cached_property
    def reruns(self) -> Reruns:
        return Reruns(self.step)

    @property
    def num_ops(self) -> int:
        return len(self.step.ops)

    @property
    def num_forward(self) -> int:
        return self.step.num_forward

    @cached_property
    def op_ps(self) -> list[int]:
        return [cost.time_ps for cost in self._op_costs]

    @cached_property
    def rerun_ps(self) -> list[int]:
        """For each op how long it takes when it is run again."""
        return [cost.again_ps for cost in self._op_costs]

    @cached_property
    def workspace_bytes(self) -> list[int]:
        return [cost.workspace_bytes for cost in self._op_costs]

    @cached_property
    def _op_costs(self) -> Sequence[OpCost]:
        return self.costs.of(self.step)

    @cached_property
    def ways(self) -> dict[int, tuple[Way, ...]]:
        """For each op that can be computed in several ways, none of them picked yet: those that are worth having.

        The fastest comes first, and each needs less workspace than the one before it.
        """
        costs, step = self.costs, self.step
        choices = {op: tuple(ways) for op, ways in costs.choices(step).items() if op not in costs.picked}
        found: dict[int, list[Way]] = {op: [] for op in choices}
        for number in range(max(map(len, choices.values()), default=0)):
            names = {op: ways[number] for op, ways in choices.items() if number < len(ways)}
            prices = costs.picking({**costs.picked, **names}).of(step)  # it knows how ops that run again differ
            for op, name in names.items():
                found[op].append(Way(name, prices[op]))
        return {op: _worth_having(ways) for op, ways in found.items()}

    def picking(self, names: Mapping[int, str]) -> Problem:
        """The same problem with these ops computed these ways."""
        picked = replace(self, costs=self.costs.picking({**self.costs.picked, **names}))
        picked.__dict__["reruns"] = self.reruns  # they know nothing of costs
        return picked

    @cached_property
    def is_present(self) -> list[bool]:
        """Storages that are there before the step."""
        tangents = tangent_storages(self.step)
        return [s in self.reruns.sources and s not in tangents for s in range(len(self.step.storage_bytes))]

    @cached_property
    def tangents(self) -> list[int]:
        return sorted(tangent_storages(self.step))

    @cached_property
    def stays(self) -> list[bool]:
        """Storages that are never freed: the caller owns what it gave and what it is given.

        Tangents are ours once autograd has handed them over, and a later part of a gradient is gone once it has been
        added to the first.
        """
        step = self.step
        found = {step.values[v].storage for v in step.outputs}
        found |= {step.values[g.value].storage for g in step.first_parts}
        return [s in found or self.is_present[s] for s in range(len(step.storage_bytes))]

    @cached_property
    def handings(self) -> list[Handing]:
        """The gradients in eager's order."""
        step = self.step
        last_write = {storage: index for index, op in enumerate(step.ops) for storage in op.writes}
        last_part = {gradient.of: index for index, gradient in enumerate(step.gradients)}
        found = []
        for index, gradient in enumerate(step.gradients):
            storage = step.values[gradient.value].storage
            # Its storage may still be written through a view after the value is made.
            ready = max(step.maker_of.get(gradient.value, -1), last_write.get(storage, -1))
            source = step.values[gradient.of].storage if last_part[gradient.of] == index else -1
            found.append(Handing(storage, ready, source))
        return found

    def default_states(self) -> list[int]:
        """Keep what backward reads and what cannot be made again; drop the rest."""
        states = [KEEP] * len(self.step.storage_bytes)
        for storage in self.reruns.recomputable:
            if self.step.storage[storage].first_backward is None:
                states[storage] = DROP
        return states

    def states(self, decisions: Decisions) -> list[int]:
        """The decisions as one number per storage; raises for one that cannot be carried out."""
        states = self.default_states()
        for storage, decision in decisions.items():
            if not 0 <= storage < len(states):
                raise BadOption(f"storage {storage}: the step has storages 0 to {len(states) - 1}")
            match decision:
                case Keep():
                    why, state = "", KEEP
                case Recompute(held_from):
                    why, state = (
                        self.reruns.why_not_recompute(storage),
                        DROP if held_from <= 0 else -min(held_from, self.num_ops),
                    )
                case Offload(tier, when, back_by):
                    self.costs.link(tier)
                    why, state = self.reruns.why_not_offload(storage), self.away_state(tier, back_by)
                    why = why or ("" if when is None else self._why_not_then(storage, when))
                    why = why or self._why_not_back_by(back_by, when)
                case _:
                    raise BadOption(f"storage {storage}: write {decision} into the step first (plan/encode.py)")
            if why:
                raise BadOption(f"{self.describe(storage)} cannot be decided to {decision}: {why}")
            states[storage] = state
        return states

    def away_state(self, tier: str, back_by: int = 0) -> int:
        """The state of a storage that is away in that tier, and back by that op."""
        return AWAY + self.tiers.index(tier) + len(self.tiers) * back_by

    def tier_of(self, state: int) -> str:
        return self.tiers[(state - AWAY) % len(self.tiers)]

    def back_by(self, state: int) -> int:
        """By which op a storage of that state is back; 0 if for its first use."""
        return (state - AWAY) // len(self.tiers)

    def _why_not_back_by(self, back_by: int, when: Moments | None) -> str:
        if not back_by:
            return ""
        if when is not None:
            return "its moments say when it is fetched"
        if not self.num_forward <= back_by < self.num_ops:
            return f"it is back by one of the backward ops, {self.num_forward} to {self.num_ops - 1}"
        return ""

    def _why_not_then(self, storage: int, when: Moments) -> str:
        """What is wrong with these moments for it, or nothing."""
        life = self.step.storage[storage]
        last_write, last_forward = self.reruns.writers[storage][-1], life.last_forward
        first_backward = self.num_ops - 1 if life.first_backward is None else life.first_backward
        assert last_forward is not None
        if not last_write < when.send <= (self.num_forward if when.sent is None else when.sent):
            return f"op {last_write} writes it, so its sending begins after that, and before it is waited for"
        if when.sent is not None and not last_forward < when.sent <= self.num_forward:
            return f"op {last_forward} reads it, so it is sent by an op after that, or at the end, {self.num_forward}"
        if not self.num_forward <= when.fetch <= when.fetched <= first_backward:
            return f"it is fetched from op {self.num_forward} on, and is there for op {first_backward}"
        return ""

    def describe(self, storage: int) -> str:
        """One storage for people: its number, bytes, maker and module."""
        step = self.step
        known = step.storage.get(storage)
        if known is None:
            return f"storage {storage}"
        text = f"storage {storage} ({known.bytes:,} bytes"
        if known.maker is not None:
            op = step.ops[known.maker]
            text += f", made by {op.target} in module '{op.path or '(root)'}'"
        return text + ")"


def _worth_having(ways: list[Way]) -> tuple[Way, ...]:
    """The fastest, and then whatever needs less workspace than all that are faster."""
    found: list[Way] = []
    for way in sorted(ways, key=lambda w: (w.cost.time_ps, w.cost.workspace_bytes, w.cost.again_ps, w.name)):
        if not found or way.cost.workspace_bytes < found[-1].cost.workspace_bytes:
            found.append(way)
    return tuple(found)
