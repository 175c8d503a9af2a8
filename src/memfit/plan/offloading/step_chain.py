"""What a Step may send away, and the chain it makes of the step: from any network to the solvers on chains.

An item is a storage that the forward half makes and backward reads, so that views travel once. Items are in the order
of their last forward use. The stage of an item is the forward ops after the last use of the item before it, up to its
own last use, and in reversed time the backward ops down to its first backward use. Several items that end at one op
have a stage each, and the first of them has the op.

[Note: forks] In a chain what is read last in forward is read first in backward. In a Step it need not be. An item whose
first backward use comes earlier than its place in the order says is taken to be needed with the one before it: its
fetch ends a little early on paper. That costs a bound its proof (see step_bound.py) but no plan its legality, since
choices are judged by what they do to the Step itself (see step_timetable.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from memfit.capture.step import Step
from memfit.cost.costs import PS_PER_S, Link
from memfit.plan.ledger import Ledger
from memfit.plan.lower import lower_states
from memfit.plan.offloading.chain import Chain, Stage
from memfit.plan.problem import Problem
from memfit.plan.program import Boundary, Run


@dataclass(frozen=True, slots=True)
class Item:
    """A storage that may be sent away.

    Attributes:
        written: the last op that writes it; from then on it may be sent.
        last_forward: the last forward op that uses it; from then on it may be gone.
        first_backward: the first backward op that uses it.
        feeds_convolution: a convolution of the forward half reads it.
    """

    storage: int
    num_bytes: int
    written: int
    last_forward: int
    first_backward: int
    feeds_convolution: bool


@dataclass(frozen=True)
class Luggage:
    """The items of a step, the way they travel, and the bytes at every op while nothing is sent.

    Attributes:
        items: all that may travel, by last forward use.
        keep_bytes: for each op the bytes while it runs, and after it until the next begins.
        boundary_bytes: the most between the two halves.
    """

    problem: Problem
    tier: str
    items: tuple[Item, ...]
    keep_bytes: tuple[int, ...]
    boundary_bytes: int

    @classmethod
    def of(cls, problem: Problem, tier: str) -> Luggage:
        return cls(problem, tier, tuple(_items(problem)), *_keep_bytes(problem))

    @property
    def link(self) -> Link:
        return self.problem.costs.link(self.tier)

    @cached_property
    def worthwhile(self) -> tuple[Item, ...]:
        """The items without those that are longer in waiting than on the way, or lost among the others."""
        fastest = max(self.link.send_bytes_per_s, self.link.fetch_bytes_per_s)
        total = sum(item.num_bytes for item in self.items)
        return tuple(
            item
            for item in self.items
            if item.num_bytes > self.link.latency_s * fastest and item.num_bytes * 10_000 >= total
        )

    @cached_property
    def keep_peak_bytes(self) -> int:
        return max(self.boundary_bytes, *self.keep_bytes)

    def floor_bytes(self, items: Iterable[Item]) -> int:
        """The peak if these are gone whenever no op uses them: no timetable that sends only them needs less."""
        changes = [0] * (self.problem.num_ops + 1)
        sent_bytes = 0
        for item in items:
            changes[item.last_forward + 1] += item.num_bytes
            changes[item.first_backward] -= item.num_bytes
            sent_bytes += item.num_bytes
        gone = accumulate(changes[:-1])
        return max(
            self.boundary_bytes - sent_bytes,
            *(need - gone_bytes for need, gone_bytes in zip(self.keep_bytes, gone, strict=True)),
        )

    def chain(self, groups: Sequence[Sequence[Item]], limit_bytes: int) -> Chain:
        """The chain whose stages save these groups of items, in order; a last stage saves nothing and has the rest."""
        problem = self.problem
        num_forward, num_ops = problem.num_forward, problem.num_ops
        # How many ops of each half, the backward one reversed, are over when a group may travel.
        forward_ends = [max(item.last_forward for item in group) + 1 for group in groups]
        backward_ends = [num_ops - min(item.first_backward for item in group) for group in groups]
        forward = [0, *accumulate(forward_ends, max), num_forward]
        backward = [0, *accumulate(backward_ends, max), num_ops - num_forward]
        backward_bytes = self.keep_bytes[num_forward:][::-1]
        stages = []
        total = 0
        for group, *spans in zip([*groups, ()], pairwise(forward), pairwise(backward), strict=True):
            saved = sum(item.num_bytes for item in group)
            total += saved
            transients = [
                max((need - total for need in needs[start:end]), default=0)
                for needs, (start, end) in zip((self.keep_bytes, backward_bytes), spans, strict=True)
            ]
            durations = [
                until_ps[end] - until_ps[start] for until_ps, (start, end) in zip(self._until_ps, spans, strict=True)
            ]
            stages.append(
                Stage(
                    forward_ps=durations[0],
                    backward_ps=durations[1],
                    saved_bytes=saved,
                    forward_transient_bytes=max(0, transients[0]),
                    backward_transient_bytes=max(0, transients[1]),
                    is_convolution=any(item.feeds_convolution for item in group),
                )
            )
        send, fetch = int(self.link.send_bytes_per_s), int(self.link.fetch_bytes_per_s)
        latency_ps = round(self.link.latency_s * PS_PER_S)
        return Chain(tuple(stages), limit_bytes, max(1, send), max(1, fetch), latency_ps)

    @cached_property
    def work_ps(self) -> int:
        """The step without waiting."""
        return sum(self.problem.op_ps)

    @cached_property
    def until_backward_ps(self) -> list[int]:
        """When each backward op begins if compute never waits, and when the last one ends."""
        return list(accumulate(self.problem.op_ps[self.problem.num_forward :], initial=0))

    @cached_property
    def _until_ps(self) -> tuple[list[int], list[int]]:
        """When each op of a half begins if compute never waits; the backward half in reversed time."""
        op_ps, num_forward = self.problem.op_ps, self.problem.num_forward
        return (
            list(accumulate(op_ps[:num_forward], initial=0)),
            list(accumulate(op_ps[num_forward:][::-1], initial=0)),
        )


def grouped(items: Sequence[Item], max_groups: int) -> list[list[Item]]:
    """Neighbours together, so that there are hardly more groups than that, each of about the same bytes."""
    share = sum(item.num_bytes for item in items) / max_groups
    groups: list[list[Item]] = []
    held = share
    for item in items:
        if held >= share:
            groups.append([])
            held = 0
        groups[-1].append(item)
        held += item.num_bytes
    return groups


def _items(problem: Problem) -> list[Item]:
    step, reruns = problem.step, problem.reruns
    found = []
    for storage in reruns.owned:
        life = step.storage[storage]
        if life.first_backward is None or life.last_forward is None or reruns.why_not_offload(storage):
            continue
        feeds = any(_is_convolution(step, op) for value in life.values for op in step.readers.get(value, ()))
        found.append(
            Item(storage, life.bytes, reruns.writers[storage][-1], life.last_forward, life.first_backward, feeds)
        )
    return sorted(found, key=lambda item: (item.last_forward, item.storage))


def _is_convolution(step: Step, op: int) -> bool:
    return op < step.num_forward and step.ops[op].target.split(".")[1] in ("convolution", "_convolution")


def _keep_bytes(problem: Problem) -> tuple[tuple[int, ...], int]:
    """The bytes of the keep plan at every op, and between the halves.

    A gradient is handed over in front of an op, but before anything is fetched there: it counts with the op before.
    """
    program = lower_states(problem, problem.default_states())
    found = [0] * problem.num_ops
    boundary_bytes = 0
    op: int | None = None
    for entry in Ledger.of(program, problem.workspace_bytes).entries:
        if isinstance(entry.instruction, Run):
            op = entry.instruction.op
        elif isinstance(entry.instruction, Boundary):
            op = None
        if op is None:
            boundary_bytes = max(boundary_bytes, entry.total_bytes)
        else:
            found[op] = max(found[op], entry.total_bytes)
    return tuple(found), boundary_bytes
