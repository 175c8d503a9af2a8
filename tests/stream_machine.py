"""A machine with streams, events and a caching allocator, on CPU memory, that is as unkind as the rules allow.

It is what `memfit.tiers.streams` asks for, so the host tier runs on it unchanged. The host queues work; the machine
does it at a moment of its own choosing (`Moments`) within what the rules promise, and no more than these:

- work of one stream is done in order; streams know nothing of each other but through events;
- an event passes when the work queued before it on its stream is done; a stream that waits for one stands still;
- kernels and copies have addresses, not tensors: what the host lets go of stays in use by what is queued;
- a block that the host lets go of goes at once to the free list of the stream it was made on, without a look at what
  is queued anywhere, and is handed out first to the next who asks on that stream. Neighbours grow together.

That last is torch's caching allocator without record_stream. The next owner may write as its first piece of work, so
the machine queues such a write, of poison, on the block's stream the moment the host lets go: right for whoever was
ordered before that point of that stream, and ruin for everybody else.

Copies are done in two halves, with room for other streams between them. Where a device `unmaps_early`, a copy that
touches what was let go of since it was queued is a fault, whether or not anybody reads the result.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from memfit.tiers.streams import PinnedBlock

ARENA_BYTES = 1 << 16
ROUND_BYTES = 16


class HostHeldStill(AssertionError):
    """The tier made the host wait for the device."""


@dataclass(frozen=True)
class Moments:
    """When work is done: how readily each kind of stream works while the host is busy, and who goes first at the end.

    A readiness of 1 is at once, 0 is not before the host is finished, and between them the seed decides.
    """

    name: str
    readiness: dict[str, float]
    last: tuple[str, ...] = ()  # kinds that work only when nobody else can
    seed: int = 0

    @classmethod
    def all_kinds(cls, seed: int) -> list[Moments]:
        """Earliest, latest, each kind of stream behind or ahead of the others, and at random."""
        kinds = ("compute", "out", "in")
        found = [
            cls("earliest", dict.fromkeys(kinds, 1.0), seed=seed),
            cls("latest", dict.fromkeys(kinds, 0.0), seed=seed),
        ]
        for kind in kinds:
            others = tuple(other for other in kinds if other != kind)
            found.append(cls(f"{kind} behind", {kind: 0.0} | dict.fromkeys(others, 1.0), (kind,), seed))
            found.append(cls(f"{kind} ahead", {kind: 1.0} | dict.fromkeys(others, 0.0), others, seed))
        chance = random.Random(seed)
        found += [cls(f"random {n}", {k: chance.random() ** 2 for k in kinds}, seed=seed + n) for n in range(4)]
        return found


class SimulatedEvent:
    def __init__(self, machine: StreamMachine) -> None:
        self._machine = machine
        self.has_passed = False

    def query(self) -> bool:
        self._machine.work()
        return self.has_passed

    def synchronize(self) -> None:
        self._machine.hold_host(lambda: self.has_passed)


@dataclass(eq=False)
class _Work:
    do: Callable[[], None] = lambda: None
    waits_for: SimulatedEvent | None = None


@dataclass(eq=False)
class SimulatedStream:
    """Work in order."""

    machine: StreamMachine
    kind: str
    device: SimulatedDevice
    queue: deque[_Work] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.arena = _Arena(self)

    def record_event(self) -> SimulatedEvent:
        event = SimulatedEvent(self.machine)

        def passes() -> None:
            event.has_passed = True

        self.add(_Work(passes))
        return event

    def wait_event(self, event: SimulatedEvent) -> None:
        self.add(_Work(waits_for=event))

    def add(self, work: _Work) -> None:
        self.queue.append(work)
        self.machine.work()

    @property
    def can_work(self) -> bool:
        return bool(self.queue) and (self.queue[0].waits_for is None or self.queue[0].waits_for.has_passed)

    def work_once(self) -> None:
        self.queue.popleft().do()


@dataclass
class _Piece:
    start: int
    size: int
    let_go_at: int


class _Arena:
    """The memory of one stream, and its free list."""

    def __init__(self, stream: SimulatedStream) -> None:
        self.stream = stream
        self.memory = np.full(ARENA_BYTES, 0xA5, dtype=np.uint8)
        self.address = self.memory.ctypes.data
        self.pieces = [_Piece(0, ARENA_BYTES, 0)]
        self.ruined_at = np.zeros(ARENA_BYTES // ROUND_BYTES, dtype=np.int64)  # by the clock of the host
        self.used_bytes = 0
        self.peak_bytes = 0

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """The block let go of last that is large enough: the most dangerous one."""
        size = -(-max(num_bytes, 1) // ROUND_BYTES) * ROUND_BYTES
        piece = max((p for p in self.pieces if p.size >= size), key=lambda p: (p.let_go_at, -p.size))
        start = piece.start
        piece.start, piece.size = piece.start + size, piece.size - size
        if not piece.size:
            self.pieces.remove(piece)
        self.used_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        owner = self.memory[start : start + num_bytes]  # an array of its own: it lives as long as the tensor's storage
        weakref.finalize(owner, self._let_go, start, size).atexit = False
        return torch.from_numpy(owner)

    def was_let_go_since(self, moment: int, start: int, num_bytes: int) -> bool:
        """True if the device has passed the point at which a part of these bytes was let go of, after the moment."""
        return bool((self.ruined_at[start // ROUND_BYTES : -(-(start + num_bytes) // ROUND_BYTES)] > moment).any())

    def _let_go(self, start: int, size: int) -> None:
        now = self.stream.machine.tick()
        self.used_bytes -= size
        raw, poison = self.memory[start : start + size], np.uint8(0x80 | now % 127)

        def ruin() -> None:
            raw[:] = poison
            self.ruined_at[start // ROUND_BYTES : (start + size) // ROUND_BYTES] = now

        merged = _Piece(start, size, now)
        for piece in list(self.pieces):
            if piece.start + piece.size == merged.start:
                merged.start, merged.size = piece.start, piece.size + merged.size
                self.pieces.remove(piece)
            elif merged.start + merged.size == piece.start:
                merged.size += piece.size
                self.pieces.remove(piece)
        self.pieces.append(merged)
        self.stream.add(_Work(ruin))


class SimulatedDevice:
    """One accelerator: a compute stream or two, and the tier's streams for copies."""

    def __init__(self, machine: StreamMachine, num_compute_streams: int, unmaps_early: bool) -> None:
        self.machine = machine
        self.unmaps_early = unmaps_early
        self.compute_streams = [SimulatedStream(machine, "compute", self) for _ in range(num_compute_streams)]
        self.out_stream = SimulatedStream(machine, "out", self)
        self.in_stream = SimulatedStream(machine, "in", self)
        self.current = self.compute_streams[0]

    @property
    def streams(self) -> list[SimulatedStream]:
        return [*self.compute_streams, self.out_stream, self.in_stream]

    def current_stream(self) -> SimulatedStream:
        return self.current

    def empty(self, num_bytes: int) -> torch.Tensor:
        return self.current.arena.allocate(num_bytes)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        self.machine.copy(destination, source, stream)


class StreamMachine:
    """Devices, their streams, and pinned memory."""

    def __init__(
        self,
        moments: Moments,
        *,
        num_devices: int = 1,
        num_compute_streams: int = 1,
        can_pin: bool = True,
        unmaps_early: bool = False,
    ) -> None:
        self.moments = moments
        self.can_pin = can_pin
        self.wrong: list[str] = []
        self.may_hold_host = False
        self.num_blocking_copies = 0
        self.pinned_bytes = 0
        self._is_working = False
        self._clock = 0
        self._chance = random.Random(moments.seed)
        self._pinned: dict[int, np.ndarray] = {}
        self._touched: dict[int, int] = {}  # queued halves of copies by address of pinned memory
        self.devices = [SimulatedDevice(self, num_compute_streams, unmaps_early) for _ in range(num_devices)]
        self._streams = [stream for device in self.devices for stream in device.streams]

    # - what the tier asks for

    def device_of(self, tensor: torch.Tensor, name: str) -> SimulatedDevice:
        arena = self._arena_at(tensor)
        assert arena is not None, f"{name} is not a tensor of this machine"
        return arena.stream.device

    def pinned(self, num_bytes: int) -> PinnedBlock:
        if not self.can_pin:
            raise RuntimeError("no memory may be pinned here")
        memory = np.full(num_bytes, 0x5A, dtype=np.uint8)
        address = memory.ctypes.data
        self._pinned[address] = memory
        self.pinned_bytes += num_bytes

        def unpin() -> None:
            if self._touched.get(address):
                self.wrong.append("memory was unpinned under a copy")
            self.pinned_bytes -= num_bytes
            del self._pinned[address]

        return PinnedBlock(torch.from_numpy(memory), num_bytes, unpin)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: SimulatedStream) -> None:
        into, out_of = self.raw(destination), self.raw(source)
        half = len(into) // 2
        touched = [a for t in (destination, source) if (a := self._pinned_at(t)) is not None]
        now = self.tick()
        arenas = [(arena, t.data_ptr(), len(into)) for t in (destination, source) if (arena := self._arena_at(t))]
        blocks = [(arena, address - arena.address, size) for arena, address, size in arenas]
        for part in (slice(None, half), slice(half, None)):

            def do(part: slice = part) -> None:
                for arena, start, size in blocks:
                    if stream.device.unmaps_early and arena.was_let_go_since(now, start, size):
                        self.wrong.append("a copy touched memory that may have left the device")
                into[part] = out_of[part]
                for address in touched:
                    self._touched[address] -= 1

            for address in touched:
                self._touched[address] = self._touched.get(address, 0) + 1
            stream.add(_Work(do))
        if not touched:  # memory that is not pinned: the driver holds the host until the copy is done
            self.num_blocking_copies += 1
            done = stream.record_event()
            self._work_until(lambda: done.has_passed)

    # - what programs ask for

    def compute(self, device: SimulatedDevice, do: Callable[[], None]) -> None:
        """Queue a kernel on the current stream. `do` must have addresses (`raw`), not tensors."""
        device.current.add(_Work(do))

    def raw(self, tensor: torch.Tensor) -> np.ndarray:
        """The bytes at a tensor's address, without a hold on it."""
        start, size = tensor.data_ptr(), tensor.numel()
        arena, pinned = self._arena_at(tensor), self._pinned_at(tensor)
        if arena is not None:
            return arena.memory[start - arena.address : start - arena.address + size]
        if pinned is not None:
            return self._pinned[pinned][start - pinned : start - pinned + size]
        return tensor.numpy()

    def hold_host(self, until: Callable[[], bool]) -> None:
        if not until() and not self.may_hold_host:
            raise HostHeldStill("the host was made to wait for the device")
        self._work_until(until)

    def finish(self) -> None:
        """Do all that is queued."""
        self._work_until(lambda: not any(stream.queue for stream in self._streams))

    @property
    def used_bytes(self) -> int:
        return sum(stream.arena.used_bytes for stream in self._streams)

    def work(self) -> None:
        """The host has done something: maybe some work is done now."""
        if self._is_working:  # the garbage collector let go of something meanwhile
            return
        self._is_working = True
        readiness, chance = self.moments.readiness, self._chance
        going = [stream for stream in self._streams if readiness[stream.kind] > 0]
        while going:
            chance.shuffle(going)
            still = []
            for stream in going:
                if stream.can_work and chance.random() < readiness[stream.kind]:
                    stream.work_once()
                    still.append(stream)
            # One that stands still may go on once another has worked, but only if it is always ready.
            going = [s for s in going if s in still or readiness[s.kind] == 1.0] if still else []
        self._is_working = False

    def _work_until(self, done: Callable[[], bool]) -> None:
        while not done():
            able = [stream for stream in self._streams if stream.can_work]
            if not able:
                raise AssertionError(f"streams wait for each other: {self._standing(self._streams)}")
            first = [stream for stream in able if stream.kind not in self.moments.last]
            self._chance.choice(first or able).work_once()

    def _standing(self, streams: Iterable[SimulatedStream]) -> str:
        return ", ".join(f"{stream.kind} has {len(stream.queue)} to do" for stream in streams if stream.queue)

    def tick(self) -> int:
        self._clock += 1
        return self._clock

    def _arena_at(self, tensor: torch.Tensor) -> _Arena | None:
        start = tensor.data_ptr()
        arenas = (stream.arena for stream in self._streams)
        return next((arena for arena in arenas if 0 <= start - arena.address < ARENA_BYTES), None)

    def _pinned_at(self, tensor: torch.Tensor) -> int | None:
        start = tensor.data_ptr()
        return next((a for a, memory in self._pinned.items() if 0 <= start - a < len(memory)), None)
