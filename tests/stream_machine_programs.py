"""Random programs for the stream machine: kernels that read, write and let go, among sends and fetches.

Every kernel compares what it reads with what it must read, at the moment the machine runs it, and computes from what is
really there. The programs follow the rules that any user of several streams must follow, and no rules about copies:
those are the tier's affair.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from stream_machine import Moments, SimulatedDevice, SimulatedStream, StreamMachine

from memfit.tiers.host import HostParcel, HostTier
from memfit.tiers.tier import TierRefused

ACTIONS = {
    "make": 4,
    "mix": 5,
    "update": 3,
    "drop": 3,
    "send": 6,
    "sent": 4,
    "fetch": 5,
    "fetched": 5,
    "abandon": 2,
    "switch": 2,
}


@dataclass(eq=False)
class _Value:
    tensor: torch.Tensor
    expected: np.ndarray
    device: SimulatedDevice
    owner: SimulatedStream  # the stream that was current when it was made, or fetched
    is_frozen: bool = False  # somebody else looks at its memory
    guests: set[SimulatedStream] = field(default_factory=set)  # other streams that have used it


@dataclass(eq=False)
class _Trip:
    parcel: HostParcel
    expected: np.ndarray
    device: SimulatedDevice
    is_frozen: bool
    owner: SimulatedStream | None = None  # once it is being fetched


@dataclass
class RandomProgram:
    """Actions by chance, on values whose right bytes are known."""

    tier: HostTier
    machine: StreamMachine
    seed: int
    done: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.values: list[_Value] = []
        self.trips: list[_Trip] = []
        self.device = self.machine.devices[0]

    def run(self, num_actions: int) -> None:
        names, weights = list(ACTIONS), list(ACTIONS.values())
        for _ in range(num_actions):
            self.device = self.chance.choice(self.machine.devices)
            action = self.chance.choices(names, weights)[0]
            if getattr(self, f"_{action}")():
                self.done[action] += 1
        self._end()

    def _make(self) -> bool:
        if len(self.values) > 12:
            return False
        size = self.chance.choice([16, 48, 64, 100, 128, 250, 400])
        value = _Value(self.device.empty(size), self._bytes(size), self.device, self.device.current)
        raw, expected = self.machine.raw(value.tensor), value.expected

        def write() -> None:
            raw[:] = expected

        self.machine.compute(self.device, write)
        self.values.append(value)
        return True

    def _mix(self) -> bool:
        """A new value from two others."""
        here = [value for value in self.values if value.device is self.device]
        if not here or len(self.values) > 12:
            return False
        left, right = self.chance.choice(here), self.chance.choice(here)
        size = max(len(left.expected), len(right.expected))
        expected = _mixed(left.expected, right.expected)
        made = _Value(self.device.empty(size), expected, self.device, self.device.current)
        into, raw_left, raw_right = (self.machine.raw(v.tensor) for v in (made, left, right))
        expected_left, expected_right = left.expected, right.expected

        def mix() -> None:
            self._compare(raw_left, expected_left)
            self._compare(raw_right, expected_right)
            into[:] = _mixed(raw_left, raw_right)

        self._compute(mix, left, right)
        self.values.append(made)
        return True

    def _update(self) -> bool:
        """Write over a value in place."""
        here = [value for value in self.values if value.device is self.device and not value.is_frozen]
        if not here:
            return False
        value = self.chance.choice(here)
        raw, before, key = self.machine.raw(value.tensor), value.expected, self._bytes(len(value.expected))
        value.expected = before ^ key

        def update() -> None:
            self._compare(raw, before)
            raw[:] = raw ^ key

        self._compute(update, value)
        return True

    def _drop(self) -> bool:
        here = [value for value in self.values if value.device is self.device]
        if not here:
            return False
        value = self.chance.choice(here)
        self._let_go(value)
        return True

    def _send(self) -> bool:
        # Storages belong to the stream that is current when they are sent.
        here = [
            value
            for value in self.values
            if value.device is self.device and not value.is_frozen and value.owner is self.device.current
        ]
        if not here:
            return False
        value = self.chance.choice(here)
        try:
            parcel = self.tier.send(value.tensor, "a value")
        except TierRefused:  # the host's memory is full: the value stays
            self.done["refused"] += 1
            return False
        value.is_frozen = self.chance.random() < 0.2
        self.trips.append(_Trip(parcel, value.expected, self.device, value.is_frozen))
        if not value.is_frozen:  # as generated code does: the tier alone holds it now
            self.values.remove(value)
        return True

    def _sent(self) -> bool:
        trip = self._some_trip(is_fetched=False)
        if trip is not None:
            trip.parcel.sent()
        return trip is not None

    def _fetch(self) -> bool:
        trip = self._some_trip(is_fetched=False)
        if trip is not None:
            self._begin_fetch(trip)
        return trip is not None

    def _fetched(self) -> bool:
        trip = self._some_trip(is_fetched=True)
        if trip is None:
            return False
        self._end_fetch(trip)
        return True

    def _abandon(self) -> bool:
        """Nobody will want a parcel; at times one says so, at times it is only let go of."""
        if not self.trips:
            return False
        trip = self.trips.pop(self.chance.randrange(len(self.trips)))
        if self.chance.random() < 0.5:
            trip.parcel.release()
        return True

    def _switch(self) -> bool:
        """Go on on another compute stream, which first waits for this one: so users of streams must do."""
        others = [stream for stream in self.device.compute_streams if stream is not self.device.current]
        if not others:
            return False
        other = self.chance.choice(others)
        other.wait_event(self.device.current.record_event())
        self.device.current = other
        return True

    def _end(self) -> None:
        """Bring most of what is away back, look at all that is here, and let go of everything."""
        self.chance.shuffle(self.trips)
        for trip in [trip for trip in self.trips if self.chance.random() < 0.9]:
            if trip.owner is None:
                self._begin_fetch(trip)
            self._end_fetch(trip)
        self.trips.clear()
        for value in list(self.values):
            raw, expected = self.machine.raw(value.tensor), value.expected
            self.device = value.device
            self._compute(lambda raw=raw, expected=expected: self._compare(raw, expected), value)
        for value in list(self.values):
            self._let_go(value)

    def _compute(self, do: Callable[[], None], *operands: _Value) -> None:
        for operand in operands:
            if operand.owner is not self.device.current:
                operand.guests.add(self.device.current)
        self.machine.compute(self.device, do)

    def _begin_fetch(self, trip: _Trip) -> None:
        trip.owner = trip.device.current
        trip.parcel.fetch()

    def _end_fetch(self, trip: _Trip) -> None:
        assert trip.owner is not None
        self.trips.remove(trip)
        self.values.append(_Value(trip.parcel.fetched(), trip.expected, trip.device, trip.owner, trip.is_frozen))

    def _let_go(self, value: _Value) -> None:
        """Drop a value; a block that another stream has used must wait for that stream, as users must see to."""
        for stream in sorted(value.guests, key=value.device.streams.index):
            value.owner.wait_event(stream.record_event())
        self.values.remove(value)

    def _some_trip(self, is_fetched: bool) -> _Trip | None:
        here = [trip for trip in self.trips if trip.device is self.device and (trip.owner is not None) == is_fetched]
        return self.chance.choice(here) if here else None

    def _bytes(self, size: int) -> np.ndarray:
        return np.frombuffer(self.chance.randbytes(size), dtype=np.uint8)

    def _compare(self, found: np.ndarray, expected: np.ndarray) -> None:
        if not np.array_equal(found, expected):
            self.machine.wrong.append(f"{np.count_nonzero(found != expected)} of {len(found)} bytes are wrong")


def _mixed(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    size = max(len(left), len(right))
    return np.resize(left, size) + np.uint8(3) * np.resize(right, size)


@dataclass(frozen=True)
class Outcome:
    """What one program under one choice of moments came to."""

    wrong: list[str]
    done: Counter[str]
    num_left_bytes: int  # device memory that somebody still holds
    num_away_bytes: int  # host memory likewise
    num_in_flight_bytes: int


def run_program(tier_type: type[HostTier], moments: Moments, seed: int, *, num_actions: int = 80) -> Outcome:
    """One random program on a machine whose shape is by chance too."""
    chance = random.Random(seed)
    machine = StreamMachine(
        moments,
        num_devices=chance.choice([1, 2]),
        num_compute_streams=chance.choice([1, 2]),
        unmaps_early=chance.random() < 0.5,
    )
    limit_bytes = chance.choice([1000, 2500, 1 << 20])
    tier = tier_type(
        limit_bytes=limit_bytes, max_in_flight_bytes=chance.choice([0, 300, 1 << 20]), accelerators=machine
    )
    tier.reserve(chance.choice([64, 960]))
    program = RandomProgram(tier, machine, seed)
    program.run(num_actions)
    machine.finish()
    capacity_bytes = tier.pool.total_bytes
    return Outcome(
        machine.wrong, program.done, machine.used_bytes, capacity_bytes - tier.pool.free_bytes, tier.in_flight_bytes
    )
