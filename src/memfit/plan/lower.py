"""Turn decisions into a Program: where each op runs again, each storage goes and comes back, each gradient is given.

Three passes, each a plain walk, because the native evaluator does the same in C (native/lower.c), instruction for
instruction:

1. `_recompute`: walk the backward ops; in front of one whose operand was dropped, re-run what makes it, and before
   that what makes its operands, in forward order. What a decision lets drop again is gone when that happens next.
2. `_Lives`: the bytes at every op, when each storage is used for the last time in each of its lives, and when
   gradients can be given.
3. `_Emitter`: write the instructions out. A send starts after the last forward use, and its bytes are released at the
   first op after its end, or before that if an op would not fit otherwise. Fetches are planned as sends in reversed
   time: each starts as late as it can and still be there for its first use, or for the op that it is to be back by, or
   later if it would not fit; compute waits for it where it is used. What compute loses to a transfer counts where that
   begins. Storages that come with Moments travel at those instead; C has none of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from memfit.capture.step import Step
from memfit.cost.costs import Costs, free_of_charge
from memfit.plan.decisions import Decisions, Moments, Offload
from memfit.plan.encode import encode_step
from memfit.plan.problem import AWAY, DROP, Problem
from memfit.plan.program import (
    Boundary,
    FetchStart,
    FetchWait,
    Free,
    Give,
    Instruction,
    Program,
    Run,
    SendStart,
    SendWait,
)

_NO_LIMIT = 1 << 62


def lower(step: Step, decisions: Decisions, costs: Costs, *, budget_bytes: int | None = None) -> Program:
    """The Program that carries out the decisions: every op in the step's order, everything else where it costs least.

    The budget decides where compute waits for transfers to end; a Program that cannot be within it is made all the
    same, and its peak says so.
    """
    encoded = encode_step(step, decisions, costs.picked)
    problem = Problem.of(encoded.step, costs.following(step, encoded.step))
    states = problem.states(encoded.decisions)
    moments = {s: d.when for s, d in encoded.decisions.items() if isinstance(d, Offload) and d.when is not None}
    return lower_states(problem, states, budget_bytes=budget_bytes, moments=moments)


def lower_keep(step: Step) -> Program:
    """Run every op once, in order; free every storage right after its last use; hand gradients over when eager does."""
    return lower(step, {}, free_of_charge(step))


def lower_states(
    problem: Problem,
    states: Sequence[int],
    *,
    budget_bytes: int | None = None,
    moments: Mapping[int, Moments] = MappingProxyType({}),
) -> Program:
    """The same for decisions that are numbers already."""
    schedule = _recompute(problem, states)
    lives = _Lives.of(problem, states, schedule)
    limit = _NO_LIMIT if budget_bytes is None else budget_bytes
    return Program(problem.step, tuple(_Emitter(problem, states, schedule, lives, limit, moments).instructions()))


def choose_ways(
    problem: Problem, states: Sequence[int], *, budget_bytes: int | None = None, first_ways: Iterable[int] = ()
) -> dict[int, str]:
    """For each op that can be computed in several ways and has none picked: the one to take under these states.

    It is the fastest whose workspace fits wherever the op runs beside what must be there, transfers that linger aside;
    if none does, the one with the least workspace. An op is computed in one way whenever it runs. `first_ways` says for
    each of these ops how many of its fastest ways are not to be taken: a slower one may leave room for transfers.
    """
    schedule = _recompute(problem, states)
    needs = _Lives.of(problem, states, schedule).needs
    limit = _NO_LIMIT if budget_bytes is None else budget_bytes
    room: dict[int, int] = {}
    for op, need_bytes in zip(schedule.ops, needs, strict=True):
        left = limit - (need_bytes - problem.workspace_bytes[op])
        room[op] = min(room.get(op, left), left)
    first = dict(zip(problem.ways, first_ways, strict=False))
    offered = {op: ways[first.get(op, 0) :] for op, ways in problem.ways.items()}
    return {
        op: next((way.name for way in ways if way.cost.workspace_bytes <= room[op]), ways[-1].name)
        for op, ways in offered.items()
    }


@dataclass
class _Schedule:
    """The ops in the order they run; forward ops first, then backward ops with re-runs between them."""

    ops: list[int]
    again: list[bool]
    remade: list[tuple[int, ...]]  # of each re-run: the storages that live on


def _recompute(problem: Problem, states: Sequence[int]) -> _Schedule:
    """Put re-runs in front of the backward ops that need them."""
    reruns, num_forward = problem.reruns, problem.num_forward
    schedule = _Schedule(list(range(num_forward)), [False] * num_forward, [()] * num_forward)
    missing = [(state == DROP or state < 0) and s in reruns.recomputable for s, state in enumerate(states)]
    held_from = {storage: -state for storage, state in enumerate(states) if state < 0}
    passing: set[int] = set()  # made again, but not to be held: dropped when the next thing is, or when it will be held
    for op in range(num_forward, problem.num_ops):
        burst: set[int] = set()
        wanted: set[int] = set()
        for storage in [s for s in passing if op >= held_from[s]]:
            missing[storage] = True
            passing.remove(storage)
        stack = [storage for storage in reruns.touches[op] if missing[storage]]
        if stack:
            for storage in passing - {*reruns.touches[op]}:
                missing[storage] = True
            passing &= {*reruns.touches[op]}
        while stack:
            storage = stack.pop()
            if storage in wanted:
                continue
            wanted.add(storage)
            for writer in reruns.writers[storage]:
                if writer not in burst:
                    burst.add(writer)
                    stack += [s for s in reruns.rerun_touches[writer] if missing[s]]
        for again in sorted(burst):
            # What is whole after this burst lives on, asked for or not.
            whole = [s for s in reruns.rerun_makes[again] if missing[s] and all(w in burst for w in reruns.writers[s])]
            schedule.ops.append(again)
            schedule.again.append(True)
            schedule.remade.append(tuple(whole))
        for again in sorted(burst):
            for storage in reruns.rerun_makes[again]:
                if missing[storage] and all(w in burst for w in reruns.writers[storage]):
                    missing[storage] = False
                    if op < held_from.get(storage, 0):
                        passing.add(storage)
        schedule.ops.append(op)
        schedule.again.append(False)
        schedule.remade.append(())
    return schedule


@dataclass
class _Lives:
    """Bytes at every position of the schedule, and what begins and ends there."""

    needs: list[int] = field(default_factory=list)  # bytes while the op runs, lingering transfers aside
    frees: list[list[int]] = field(default_factory=list)  # right after the op
    frees_before: list[list[int]] = field(default_factory=list)  # right before it, after gradients are given
    gives: list[list[int]] = field(default_factory=list)
    sends: list[list[int]] = field(default_factory=list)  # right after the op
    fetched: list[list[int]] = field(default_factory=list)  # used here for the first time since they were sent
    due: list[list[int]] = field(default_factory=list)  # the same where they are to be back before that

    @classmethod
    def of(cls, problem: Problem, states: Sequence[int], schedule: _Schedule) -> _Lives:
        length = len(schedule.ops)
        lives = cls(
            [0] * length,
            [[] for _ in range(length)],
            [[] for _ in range(length + 1)],
            [[] for _ in range(length + 1)],
            [[] for _ in range(length)],
            [[] for _ in range(length)],
            [[] for _ in range(length)],
        )
        touched = [_touched(problem, schedule, k) for k in range(length)]
        given_at = lives._give(problem, schedule, touched)
        lives._end(problem, states, schedule, touched, given_at)
        lives._count(problem, schedule)
        return lives

    def _give(self, problem: Problem, schedule: _Schedule, touched: list[tuple[int, ...]]) -> dict[int, int]:
        """Find the earliest position for each gradient: whole, in eager's order, its source not read any more."""
        position = {op: k for k, op in enumerate(schedule.ops) if not schedule.again[k]}
        last_touch = {storage: k for k, storages in enumerate(touched) for storage in storages}
        given_at: dict[int, int] = {}
        earliest = problem.num_forward
        for index, handing in enumerate(problem.handings):
            if handing.ready_op >= 0:
                earliest = max(earliest, position[handing.ready_op] + 1)
            if handing.source_storage >= 0:
                # A hook on the finished gradient may write to the parameter.
                earliest = max(earliest, last_touch.get(handing.source_storage, -1) + 1)
            if index == len(problem.handings) - 1:
                earliest = len(schedule.ops)  # what is left is there for its effects, and runs before backward is over
            self.gives[earliest].append(index)
            given_at[handing.storage] = earliest
        return given_at

    def _end(
        self,
        problem: Problem,
        states: Sequence[int],
        schedule: _Schedule,
        touched: list[tuple[int, ...]],
        given_at: dict[int, int],
    ) -> None:
        """Walk back in time: what is met for the first time in one of its lives ends there."""
        num_forward = problem.num_forward
        position = {op: k for k, op in enumerate(schedule.ops) if not schedule.again[k]}
        sooner: list[list[int]] = [[] for _ in schedule.ops]
        in_use = [False] * len(problem.step.storage_bytes)
        first_use: dict[int, int] = {}  # of storages that are away
        for k in reversed(range(len(schedule.ops))):
            for storage in touched[k]:
                if states[storage] >= AWAY and not problem.stays[storage]:
                    if k >= num_forward:
                        first_use[storage] = k
                    elif storage in first_use:
                        self.sends[k].append(storage)
                        used_at, back_by = first_use.pop(storage), problem.back_by(states[storage])
                        self.fetched[used_at].append(storage)
                        due_at = min(used_at, position[max(back_by, num_forward)] if back_by else used_at)
                        (self.due if due_at == used_at else sooner)[due_at].append(storage)
                        in_use[storage] = True  # it ends here, by being sent
                if problem.stays[storage] or in_use[storage]:
                    continue
                in_use[storage] = True
                if given_at.get(storage, -1) > k:
                    self.frees_before[given_at[storage]].append(storage)
                else:
                    self.frees[k].append(storage)
            for storage in schedule.remade[k]:
                in_use[storage] = False
        for lists in (self.frees, self.frees_before, self.sends, self.fetched, self.due, sooner):
            for storages in lists:
                storages.sort()
        # What is used there is fetched after what only has to be back by then.
        self.due = [first + second for first, second in zip(sooner, self.due, strict=True)]

    def _count(self, problem: Problem, schedule: _Schedule) -> None:
        """Add up the bytes at every op."""
        size, makes, rerun_makes = problem.step.storage_bytes, problem.reruns.makes, problem.reruns.rerun_makes
        live = sum(size[s] for s in range(len(size)) if problem.is_present[s])
        for k, op in enumerate(schedule.ops):
            if k == problem.num_forward:
                live += sum(size[s] for s in problem.tangents)
            live -= sum(size[s] for s in self.frees_before[k])
            live += sum(size[s] for s in self.due[k])
            discarded = 0
            if schedule.again[k]:
                live += sum(size[s] for s in schedule.remade[k])
                discarded = sum(size[s] for s in rerun_makes[op] if s not in schedule.remade[k])
            else:
                live += sum(size[s] for s in makes[op])
            self.needs[k] = live + discarded + problem.workspace_bytes[op]
            live -= sum(size[s] for s in self.frees[k]) + sum(size[s] for s in self.sends[k])


def _touched(problem: Problem, schedule: _Schedule, k: int) -> tuple[int, ...]:
    """The storages that the op at this position uses."""
    op = schedule.ops[k]
    if not schedule.again[k]:
        return problem.reruns.touches[op]
    return (*problem.reruns.rerun_touches[op], *schedule.remade[k])


@dataclass
class _Timetable:
    """The Moments of storages that have them: what is due in front of which position of the schedule."""

    storages: frozenset[int]
    staying: frozenset[int]  # nobody waits for them to leave
    send: dict[int, list[int]]
    sent: dict[int, list[int]]
    fetch: dict[int, list[int]]
    fetched: dict[int, list[int]]
    ends_ps: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, moments: Mapping[int, Moments], problem: Problem, schedule: _Schedule, lives: _Lives) -> _Timetable:
        staying = frozenset(storage for storage, when in moments.items() if when.sent is None)
        found = cls(frozenset(moments), staying, {}, {}, {}, {})
        if not moments:
            return found
        position = {op: k for k, op in enumerate(schedule.ops) if not schedule.again[k]}
        first_use = {s: k for k, storages in enumerate(lives.fetched) for s in storages}
        for storage, when in sorted(moments.items(), key=lambda item: (item[1].send, item[0])):
            if storage not in first_use:
                continue  # nothing in the backward half reads it: it is dropped, not sent
            found.send.setdefault(when.send, []).append(storage)
            if when.sent is not None:
                found.sent.setdefault(when.sent, []).append(storage)
        for storage, when in sorted(moments.items(), key=lambda item: (item[1].fetched, item[0])):
            if storage in first_use:
                # A re-run may need it before the op that the policy had in mind.
                fetch, fetched = (min(position[op], first_use[storage]) for op in (when.fetch, when.fetched))
                found.fetch.setdefault(fetch, []).append(storage)
                found.fetched.setdefault(fetched, []).append(storage)
        return found


@dataclass
class _Transfer:
    """A storage on its way, and when that ends."""

    storage: int
    end_ps: int


class _Emitter:
    """Writes the instructions, keeping a clock of compute and of every channel."""

    def __init__(
        self,
        problem: Problem,
        states: Sequence[int],
        schedule: _Schedule,
        lives: _Lives,
        limit_bytes: int,
        moments: Mapping[int, Moments],
    ) -> None:
        self.problem = problem
        self.schedule = schedule
        self.lives = lives
        self.limit_bytes = limit_bytes
        self.timetable = _Timetable.of(moments, problem, schedule, lives)
        self.links = {tier: problem.costs.links[tier] for tier in problem.tiers}
        self.tier_of = {s: problem.tier_of(state) for s, state in enumerate(states) if state >= AWAY}
        self.clock_ps = 0
        self.free_ps: dict[str, int] = {}
        self.is_here = list(problem.is_present)
        self.out: list[Instruction] = []

    def instructions(self) -> list[Instruction]:
        self._forward()
        self.out.append(Boundary())
        self._backward(self._fetches())
        return self.out

    def _forward(self) -> None:
        lingering: list[_Transfer] = []
        timed = self.timetable
        for k in range(self.problem.num_forward):
            self._end_sends(k)
            for transfer in self._released(lingering, self.lives.needs[k]):
                self.out.append(SendWait(transfer.storage))
            for storage in timed.send.get(k, ()):
                self._send(storage)
            self._end_sends(k)
            self.out.append(Run(k))
            self.clock_ps += self.problem.op_ps[k]
            for storage in self.problem.reruns.makes[k]:
                self.is_here[storage] = True
            self._free(self.lives.frees[k])
            lingering += [self._send(s) for s in self.lives.sends[k] if s not in timed.storages]
        for storage in timed.send.get(self.problem.num_forward, ()):
            self._send(storage)
        self._end_sends(self.problem.num_forward)
        self.out += [SendWait(transfer.storage) for transfer in lingering]

    def _send(self, storage: int) -> _Transfer:
        tier = self.tier_of[storage]
        self.out.append(SendStart(storage, tier))
        # From the boundary on, which is when we ask; what nobody waits for has not left.
        self.is_here[storage] = storage in self.timetable.staying
        link = self.links[tier]
        duration_ps = link.send_ps(self.problem.step.storage_bytes[storage])
        transfer = self._transfer(storage, link.send_channel, duration_ps)
        self.clock_ps += link.send_drag_ps(self.problem.step.storage_bytes[storage])
        self.timetable.ends_ps[storage] = transfer.end_ps
        return transfer

    def _end_sends(self, k: int) -> None:
        """Wait for the sends that are due at this position and under way."""
        for storage in self.timetable.sent.get(k, ()):
            if (end_ps := self.timetable.ends_ps.pop(storage, None)) is not None:
                self.clock_ps = max(self.clock_ps, end_ps)
                self.out.append(SendWait(storage))

    def _fetches(self) -> list[list[int]]:
        """Run the backward half in reversed time: which fetches start in front of which position."""
        length, num_forward = len(self.schedule.ops), self.problem.num_forward
        starts: list[list[int]] = [[] for _ in range(length + 1)]
        lingering: list[_Transfer] = []
        self.clock_ps = 0
        self.free_ps = {}
        for k in reversed(range(num_forward, length)):
            for transfer in self._released(lingering, self.lives.needs[k]):
                starts[k + 1].insert(0, transfer.storage)
            prices_ps = self.problem.rerun_ps if self.schedule.again[k] else self.problem.op_ps
            self.clock_ps += prices_ps[self.schedule.ops[k]]
            for storage in reversed([s for s in self.lives.due[k] if s not in self.timetable.storages]):
                link = self.links[self.tier_of[storage]]
                duration_ps = link.fetch_ps(self.problem.step.storage_bytes[storage])
                lingering.append(self._transfer(storage, link.fetch_channel, duration_ps))
                self.clock_ps += link.fetch_drag_ps(self.problem.step.storage_bytes[storage])
        for transfer in lingering:
            starts[num_forward].insert(0, transfer.storage)
        return starts

    def _backward(self, starts: list[list[int]]) -> None:
        makes, rerun_makes = self.problem.reruns.makes, self.problem.reruns.rerun_makes
        for k in range(self.problem.num_forward, len(self.schedule.ops) + 1):
            self.out += [Give(gradient) for gradient in self.lives.gives[k]]
            self._free(self.lives.frees_before[k])
            for storage in (*starts[k], *self.timetable.fetch.get(k, ())):
                self.out.append(FetchStart(storage, self.tier_of[storage]))
                self.is_here[storage] = True
            if k == len(self.schedule.ops):
                break
            waited = [s for s in self.lives.fetched[k] if s not in self.timetable.storages]
            self.out += [FetchWait(storage) for storage in (*waited, *self.timetable.fetched.get(k, ()))]
            op, again = self.schedule.ops[k], self.schedule.again[k]
            self.out.append(Run(op, again))
            ended = list(self.lives.frees[k])
            if again:
                # A second copy of what is here already is dropped with the call; of what is not here, by us.
                kept = self.schedule.remade[k]
                ended += [s for s in rerun_makes[op] if s not in kept and not self.is_here[s]]
            for storage in self.schedule.remade[k] if again else makes[op]:
                self.is_here[storage] = True
            self._free(sorted(ended))

    def _free(self, storages: Sequence[int]) -> None:
        for storage in storages:
            self.out.append(Free(storage))
            self.is_here[storage] = False

    def _released(self, lingering: list[_Transfer], need_bytes: int) -> list[_Transfer]:
        """Take out the transfers that have ended by now, and wait for as many more as the next op needs gone."""
        size = self.problem.step.storage_bytes
        released: list[_Transfer] = [t for t in lingering if t.end_ps <= self.clock_ps]
        lingering[:] = [t for t in lingering if t.end_ps > self.clock_ps]
        held = sum(size[t.storage] for t in lingering)
        while lingering and need_bytes + held > self.limit_bytes:
            transfer = min(lingering, key=lambda t: t.end_ps)
            self.clock_ps = max(self.clock_ps, transfer.end_ps)
            lingering.remove(transfer)
            held -= size[transfer.storage]
            released.append(transfer)
        return released

    def _transfer(self, storage: int, channel: str, duration_ps: int) -> _Transfer:
        start_ps = max(self.clock_ps, self.free_ps.get(channel, 0))
        self.free_ps[channel] = start_ps + duration_ps
        return _Transfer(storage, start_ps + duration_ps)
