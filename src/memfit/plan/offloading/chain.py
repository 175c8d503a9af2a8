"""A chain of stages whose saved bytes may be sent away, and what it costs to send those of some of them.

The model of Beaumont, Eyraud-Dubois and Shilova, "Optimal GPU-CPU offloading strategies for deep neural network
training" (2020), as far as we know it. Compute runs F_1 .. F_L, then B_L .. B_1, nothing twice. What a stage saves is
there from the start of its forward to the end of its backward, or it is sent in between:

- a send starts when the stage's forward has ended, and its bytes are released when all of them have arrived;
- a fetch holds all its bytes from when it starts, and ends before the stage's backward starts;
- one send at a time, one fetch at a time, both beside compute, which waits for memory or for data. That is idle time.

One rule is ours, since `plan/lower.py` has it: every send ends before the first backward, and no fetch starts before.
The two halves then share nothing but the choice of stages.

[Note: reversed time] A backward half read from its end is a forward half: B_1 .. B_L, the saved bytes of a stage
appear with its backward, and a fetch is a send after it. So there is one `Half`, and all solvers are written for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from memfit.errors import BadOption

PS_PER_S = 10**12


@dataclass(frozen=True, slots=True)
class Stage:
    """One link of a chain.

    Attributes:
        forward_ps, backward_ps: how long each takes.
        saved_bytes: what its backward reads, and its forward is the last to read before; sent whole, or not at all.
        forward_transient_bytes, backward_transient_bytes: what each needs beside it, for as long as it runs.
        is_convolution: asked only by vDNN's rules, and by starts for a search.
    """

    forward_ps: int
    backward_ps: int
    saved_bytes: int
    forward_transient_bytes: int = 0
    backward_transient_bytes: int = 0
    is_convolution: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 0:
                raise BadOption(f"a stage with {field.name}={getattr(self, field.name)} makes no sense")


@dataclass(frozen=True)
class Chain:
    """Stages in forward order, the bytes there are for them, and the link.

    Attributes:
        limit_bytes: what is here at all times (parameters, inputs) is taken off before.
        fetch_bytes_per_s: None says as fast as sends.
        latency_ps: added to every transfer.
    """

    stages: tuple[Stage, ...]
    limit_bytes: int
    send_bytes_per_s: int
    fetch_bytes_per_s: int | None = None
    latency_ps: int = 0

    def __post_init__(self) -> None:
        if not self.stages:
            raise BadOption("a chain has at least one stage")
        for name in ("send_bytes_per_s", "fetch_bytes_per_s"):
            speed = getattr(self, name)
            if speed is not None and speed <= 0:
                raise BadOption(f"{name}={speed}: a link moves at least one byte per second")
        for name in ("limit_bytes", "latency_ps"):
            if getattr(self, name) < 0:
                raise BadOption(f"{name}={getattr(self, name)} makes no sense")

    @property
    def work_ps(self) -> int:
        """Every forward and backward, without waiting."""
        return sum(stage.forward_ps + stage.backward_ps for stage in self.stages)

    @property
    def floor_bytes(self) -> int:
        """The least limit that can be kept, by sending all: what a stage saves and needs is here when it runs."""
        return max(
            stage.saved_bytes + max(stage.forward_transient_bytes, stage.backward_transient_bytes)
            for stage in self.stages
        )

    @cached_property
    def halves(self) -> tuple[Half, Half]:
        """Forward, and backward in reversed time."""
        fetch_bytes_per_s = self.fetch_bytes_per_s or self.send_bytes_per_s
        return (
            self._half([(s.forward_ps, s.forward_transient_bytes) for s in self.stages], self.send_bytes_per_s),
            self._half([(s.backward_ps, s.backward_transient_bytes) for s in self.stages], fetch_bytes_per_s),
        )

    def _half(self, runs: Sequence[tuple[int, int]], bytes_per_s: int) -> Half:
        return Half(
            durations_ps=tuple(duration for duration, _ in runs),
            transient_bytes=tuple(transient for _, transient in runs),
            saved_bytes=tuple(stage.saved_bytes for stage in self.stages),
            limit_bytes=self.limit_bytes,
            bytes_per_s=bytes_per_s,
            latency_ps=self.latency_ps,
        )


class Transfer(NamedTuple):
    """The saved bytes of a stage on their way."""

    stage: int
    start_ps: int
    end_ps: int


@dataclass(frozen=True)
class Half:
    """One direction of a chain, told as if it were the forward one."""

    durations_ps: tuple[int, ...]
    transient_bytes: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    limit_bytes: int
    bytes_per_s: int
    latency_ps: int

    @cached_property
    def transfer_ps(self) -> tuple[int, ...]:
        """How long the saved bytes of each stage are on their way, to the next whole picosecond."""
        return tuple(-(-size * PS_PER_S // self.bytes_per_s) + self.latency_ps for size in self.saved_bytes)

    @cached_property
    def excess_bytes(self) -> tuple[int, ...]:
        """Of each stage the bytes that must have left before it runs; not positive where none must."""
        sums = accumulate(self.saved_bytes)
        return tuple(
            total + transient - self.limit_bytes for total, transient in zip(sums, self.transient_bytes, strict=True)
        )

    def run(self, away: Collection[int]) -> HalfRun | None:
        """Send the saved bytes of these stages, in order; every send and every stage as early as it can.

        No other timing of sends in that order is faster, since whatever ends earlier lets all else start earlier. None
        says that a stage never fits, because too much is kept.
        """
        starts_ps: list[int] = []
        transfers: list[Transfer] = []
        now_ps = held_bytes = peak_bytes = num_released = 0
        for stage, (duration_ps, size) in enumerate(zip(self.durations_ps, self.saved_bytes, strict=True)):
            need_bytes = size + self.transient_bytes[stage]
            while num_released < len(transfers):
                transfer = transfers[num_released]
                if transfer.end_ps > now_ps:
                    if held_bytes + need_bytes <= self.limit_bytes:
                        break
                    now_ps = transfer.end_ps
                held_bytes -= self.saved_bytes[transfer.stage]
                num_released += 1
            if held_bytes + need_bytes > self.limit_bytes:
                return None
            peak_bytes = max(peak_bytes, held_bytes + need_bytes)
            starts_ps.append(now_ps)
            now_ps += duration_ps
            held_bytes += size
            if stage in away:
                start_ps = max(now_ps, transfers[-1].end_ps) if transfers else now_ps
                transfers.append(Transfer(stage, start_ps, start_ps + self.transfer_ps[stage]))
        end_ps = max(now_ps, transfers[-1].end_ps) if transfers else now_ps
        return HalfRun(tuple(starts_ps), tuple(transfers), end_ps, peak_bytes, end_ps - sum(self.durations_ps))


class HalfRun(NamedTuple):
    """When everything happens in a half, counted from its start."""

    starts_ps: tuple[int, ...]
    transfers: tuple[Transfer, ...]
    end_ps: int
    peak_bytes: int
    idle_ps: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """A whole step: when every stage starts, and every transfer starts and ends.

    Attributes:
        away: the stages whose saved bytes are sent.
        forward_starts_ps, backward_starts_ps: by stage.
        sends, fetches: in the order they happen.
        peak_bytes: by the rules it was made with.
        idle_ps: how long compute waits in all.
    """

    away: tuple[int, ...]
    forward_starts_ps: tuple[int, ...]
    backward_starts_ps: tuple[int, ...]
    sends: tuple[Transfer, ...]
    fetches: tuple[Transfer, ...]
    peak_bytes: int
    idle_ps: int


def evaluate(chain: Chain, away: Collection[int]) -> Schedule | None:
    """The fastest schedule that sends these stages in forward order and fetches them in backward order.

    None if it does not fit. That order is the one `plan/lower.py` uses. Another may be faster, since bytes are released
    only when all of them have arrived, and which order is best is hard even for a given choice.
    """
    if out_of_range := sorted(stage for stage in away if not 0 <= stage < len(chain.stages)):
        raise BadOption(f"stages {out_of_range} cannot be sent: the chain has 0 to {len(chain.stages) - 1}")
    forward, backward = (half.run(away) for half in chain.halves)
    if forward is None or backward is None:
        return None
    end_ps = forward.end_ps + backward.end_ps
    return Schedule(
        away=tuple(sorted(away)),
        forward_starts_ps=forward.starts_ps,
        backward_starts_ps=tuple(
            end_ps - start_ps - stage.backward_ps
            for start_ps, stage in zip(backward.starts_ps, chain.stages, strict=True)
        ),
        sends=forward.transfers,
        fetches=tuple(
            Transfer(stage, end_ps - later_ps, end_ps - earlier_ps)
            for stage, earlier_ps, later_ps in reversed(backward.transfers)
        ),
        peak_bytes=max(forward.peak_bytes, backward.peak_bytes),
        idle_ps=forward.idle_ps + backward.idle_ps,
    )
