"""Run a Program on paper: when each instruction begins and ends, what every channel does, where compute waits.

Compute runs instructions in order. A send or a fetch joins the queue of its channel and goes on by itself; waiting for
it stalls compute until it has ended. What compute loses to a transfer beside it (Link.send_drag) is counted where the
transfer is asked for. The bytes are those of the ledger, so a storage that is sent counts until its SendWait, and one
that is fetched from its FetchStart.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from memfit.cost.costs import PS_PER_S, Costs
from memfit.plan.ledger import KINDS, Entry, Ledger
from memfit.plan.program import FetchStart, FetchWait, Give, Program, Run, SendStart, SendWait

COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Interval:
    """A stretch of work on one channel: an op (by index) or a storage on its way."""

    start_ps: int
    end_ps: int
    what: int


@dataclass(frozen=True, slots=True)
class Stall:
    """Compute waits: for a send to free its memory, or for a fetch to bring its data."""

    start_ps: int
    end_ps: int
    cause: str  # "memory" or "data"
    storage: int
    instruction: int


@dataclass(frozen=True)
class Timeline:
    """A simulated step.

    Attributes:
        ledger: the bytes at every instruction, by kind, workspaces included.
        starts_ps, ends_ps: when each instruction begins and ends on the compute channel.
        busy: for each channel its intervals, in order.
        stalls: where compute waited, why and for which storage.
        drag_ps: what compute lost to transfers beside it.
    """

    ledger: Ledger
    starts_ps: tuple[int, ...]
    ends_ps: tuple[int, ...]
    busy: dict[str, tuple[Interval, ...]]
    stalls: tuple[Stall, ...]
    drag_ps: int = 0

    @property
    def program(self) -> Program:
        return self.ledger.program

    @property
    def peak_bytes(self) -> int:
        return self.ledger.peak_bytes

    @cached_property
    def step_ps(self) -> int:
        """When the last instruction ends, and the last transfer."""
        return max(self.ends_ps[-1], *(i[-1].end_ps for i in self.busy.values() if i), 0) if self.ends_ps else 0

    @property
    def step_s(self) -> float:
        return self.step_ps / PS_PER_S

    @property
    def stall_ps(self) -> int:
        return sum(stall.end_ps - stall.start_ps for stall in self.stalls)

    @cached_property
    def average_bytes(self) -> int:
        """The mean over time; an instruction that takes no time does not count."""
        held = sum(
            entry.total_bytes * (end - start)
            for entry, start, end in zip(self.held, self.starts_ps, self.ends_ps, strict=True)
        )
        return held // max(self.ends_ps[-1], 1) if self.ends_ps else 0

    @cached_property
    def held(self) -> list[Entry]:
        """For each instruction the bytes while it takes time: a SendWait holds its storage until the end."""
        entries = self.ledger.entries
        return [
            entries[k - 1] if k and isinstance(entry.instruction, SendWait) else entry
            for k, entry in enumerate(entries)
        ]

    def excess_bytes(self, budget_bytes: int) -> tuple[int, int]:
        """How far ops and handings-over are above the budget: the most, and the sum over all of them."""
        above = [
            entry.total_bytes - budget_bytes
            for entry in self.ledger.entries
            if isinstance(entry.instruction, (Run, Give)) and entry.total_bytes > budget_bytes
        ]
        return max(above, default=0), sum(above)

    def profile(self) -> list[tuple[float, dict[str, int]]]:
        """Bytes over time by kind: a point each time an op begins, in seconds."""
        points = []
        for entry, start_ps in zip(self.ledger.entries, self.starts_ps, strict=True):
            if isinstance(entry.instruction, Run):
                by_kind = {kind.value: size for kind, size in zip(KINDS, entry.bytes, strict=True)}
                points.append((start_ps / PS_PER_S, by_kind | {"workspace": entry.workspace_bytes}))
        return points


def simulate(program: Program, costs: Costs) -> Timeline:
    """The timeline of a Program at these costs."""
    step = program.step
    prices = costs.of(step)
    clock_ps = drag_ps = 0
    free_ps: dict[str, int] = {}
    ends_of: dict[int, int] = {}
    leaving: set[int] = set()
    busy: dict[str, list[Interval]] = {COMPUTE: []}
    stalls: list[Stall] = []
    starts: list[int] = []
    ends: list[int] = []

    def transfer(storage: int, channel: str, duration_ps: int) -> None:
        start_ps = max(clock_ps, free_ps.get(channel, 0))
        free_ps[channel] = ends_of[storage] = start_ps + duration_ps
        busy.setdefault(channel, []).append(Interval(start_ps, start_ps + duration_ps, storage))

    def call_off(storage: int, channel: str) -> None:
        """It has not left, and is taken back: its copy stops where it is."""
        ends_of[storage] = clock_ps
        busy[channel] = [
            Interval(i.start_ps, min(i.end_ps, clock_ps), i.what) if i.what == storage else i
            for i in busy[channel]
            if i.what != storage or i.start_ps < clock_ps
        ]
        free_ps[channel] = max((i.end_ps for i in busy[channel]), default=0)

    for index, instruction in enumerate(program.instructions):
        starts.append(clock_ps)
        match instruction:
            case Run(op, again):
                duration_ps = prices[op].again_ps if again else prices[op].time_ps
                busy[COMPUTE].append(Interval(clock_ps, clock_ps + duration_ps, op))
                clock_ps += duration_ps
            case SendStart(storage, tier):
                link = costs.link(tier)
                transfer(storage, link.send_channel, link.send_ps(step.storage_bytes[storage]))
                clock_ps += link.send_drag_ps(step.storage_bytes[storage])
                drag_ps += link.send_drag_ps(step.storage_bytes[storage])
                leaving.add(storage)
            case FetchStart(storage, tier):
                link = costs.link(tier)
                if storage in leaving:
                    call_off(storage, link.send_channel)
                else:
                    transfer(storage, link.fetch_channel, link.fetch_ps(step.storage_bytes[storage]))
                    clock_ps += link.fetch_drag_ps(step.storage_bytes[storage])
                    drag_ps += link.fetch_drag_ps(step.storage_bytes[storage])
            case SendWait(storage) | FetchWait(storage):
                leaving.discard(storage)
                if ends_of[storage] > clock_ps:
                    cause = "memory" if isinstance(instruction, SendWait) else "data"
                    stalls.append(Stall(clock_ps, ends_of[storage], cause, storage, index))
                    clock_ps = ends_of[storage]
            case _:
                pass
        ends.append(clock_ps)
    ledger = Ledger.of(program, [price.workspace_bytes for price in prices])
    by_channel = {channel: tuple(work) for channel, work in busy.items()}
    return Timeline(ledger, tuple(starts), tuple(ends), by_channel, tuple(stalls), drag_ps)
