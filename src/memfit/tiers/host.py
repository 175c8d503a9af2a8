"""The host tier: an accelerator's memory out to pinned RAM and back, on streams of its own.

    send      out stream: wait for what compute has queued; copy; event "out"
    sent      compute: wait for "out"; let go of the storage
    fetch     compute: allocate, event "made";  in stream: wait for "out" and "made"; copy; event "in"
    fetched   compute: wait for "in"

Every wait is a stream's; the host never holds still. What makes that right:

[Note: letting go] torch's allocator gives a block that the host has let go of to the next who asks on the stream on
which the block was made, at once, since work on one stream is done in order. Our copies are on other streams, so
nothing is let go of before the block's own stream has been told to wait for them. There is no record_stream: it would
leave the block to a poll of the allocator, so that peaks would depend on chance. Storages belong to the stream that is
current when they are sent, as all that a step makes do.

[Note: buffers of fetches] are made on the compute stream, which is where they will be let go of. The block may have had
a user whose work is still queued there, so the copy waits for an event recorded after the allocation.

[Note: in flight] Between `send` and `sent` a storage that nobody reads any more is held for its copy. That is bounded:
before one more is sent, compute waits for the oldest.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Iterable
from itertools import count

import torch

from memfit.tiers.pinned_pool import Fence, HostRange, PinnedPool
from memfit.tiers.streams import Accelerators, Device, Stream, TorchAccelerators
from memfit.tiers.tier import TransferFailed, describe, flat_bytes

DEFAULT_IN_FLIGHT_BYTES = 1 << 30


class HostTier:
    """Keeps what is sent in pinned host memory; copies overlap with compute and with each other.

    Args:
        limit_bytes: the most host memory to hold; half of the machine's if not given.
        max_in_flight_bytes: the most device memory held for copies out, on each device; a larger storage goes alone.
        accelerators: the devices; those of torch.accelerator if not given.
    """

    def __init__(
        self,
        *,
        limit_bytes: int | None = None,
        max_in_flight_bytes: int = DEFAULT_IN_FLIGHT_BYTES,
        accelerators: Accelerators | None = None,
    ) -> None:
        self.max_in_flight_bytes = max_in_flight_bytes
        self._accelerators = TorchAccelerators() if accelerators is None else accelerators
        self.pool = PinnedPool(
            self._accelerators.pinned, limit_bytes=_half_of_memory() if limit_bytes is None else limit_bytes
        )
        self._in_flight: deque[_Departure] = deque()
        self._numbers = count()
        # Forward and backward come from different threads. Only held while work is queued.
        self._lock = threading.RLock()

    @property
    def in_flight_bytes(self) -> int:
        """Device memory held for copies out, on all devices."""
        with self._lock:
            return sum(departure.num_bytes for departure in self._in_flight if departure.storage is not None)

    def reserve(self, num_bytes: int) -> None:
        """Pin so many bytes, once and at their exact size; not in the middle of a step."""
        with self._lock:
            self.pool.reserve(num_bytes)

    def send(self, tensor: torch.Tensor, name: str = "") -> HostParcel:
        """Begin to copy the whole storage behind the tensor, and hold on to it until `sent`."""
        device = self._accelerators.device_of(tensor, name)
        whole = flat_bytes(tensor)
        num_bytes = whole.numel()
        with self._lock:
            self._make_room(device, num_bytes)
            home = device.current_stream()
            place, fences = self.pool.take(num_bytes, name)
            try:
                out = self._copy_out(device, home, self.pool.memory(place, num_bytes), whole, fences)
            except BaseException as error:
                # The copy may be queued or not.
                self.pool.give_back(place, [*fences, self._fence(device.out_stream)])
                if isinstance(error, RuntimeError):
                    raise TransferFailed(
                        f"{describe(name, num_bytes)}, cannot be sent to host memory: {error}"
                    ) from error
                raise
            departure = _Departure(device, home, whole, out)
            self._in_flight.append(departure)
            return HostParcel(self, name, departure, place)

    def _copy_out(
        self, device: Device, home: Stream, host: torch.Tensor, whole: torch.Tensor, fences: Iterable[Fence]
    ) -> Fence:
        """Queue the copy out behind all that is queued at home, and behind the range's last users."""
        for fence in fences:
            device.out_stream.wait_event(fence.event)
        device.out_stream.wait_event(home.record_event())
        device.copy(host, whole, device.out_stream)
        return self._fence(device.out_stream)

    def _copy_in(self, device: Device, home: Stream, whole: torch.Tensor, host: torch.Tensor, out: Fence) -> Fence:
        """Queue the copy in behind the copy out, and behind the former users of the buffer's block."""
        device.in_stream.wait_event(out.event)
        device.in_stream.wait_event(home.record_event())
        device.copy(whole, host, device.in_stream)
        return self._fence(device.in_stream)

    def _buffer(self, device: Device, num_bytes: int) -> torch.Tensor:
        """Where to fetch to. See [Note: buffers of fetches]."""
        return device.empty(num_bytes)

    def _let_go(self, departure: _Departure) -> None:
        """Let go of a storage behind its copy. Twice does no harm."""
        if departure.storage is not None:
            self._before_letting_go(departure.home, departure.out)
            departure.storage = None

    def _before_letting_go(self, home: Stream, fence: Fence) -> None:
        """Make a block's stream wait for a copy. See [Note: letting go]."""
        home.wait_event(fence.event)

    def _before_forgetting(self, departure: _Departure) -> None:
        """Make ready to let go of a storage whose copy nobody will read: it may read what it likes, if it can."""
        if departure.device.unmaps_early:
            self._before_letting_go(departure.home, departure.out)

    def _before_reading(self, reader: Stream, fence: Fence) -> None:
        """Make the stream that reads wait for a copy in."""
        reader.wait_event(fence.event)

    def _fence(self, stream: Stream) -> Fence:
        fence = Fence(stream, next(self._numbers), stream.record_event())
        self.pool.note(fence)
        return fence

    def _make_room(self, device: Device, num_bytes: int) -> None:
        """Let go of the oldest until so many bytes more may be in flight. See [Note: in flight]."""
        self._in_flight = deque(departure for departure in self._in_flight if departure.storage is not None)
        here = deque(departure for departure in self._in_flight if departure.device is device)
        held_bytes = sum(departure.num_bytes for departure in here)
        while here and held_bytes + num_bytes > self.max_in_flight_bytes:
            oldest = here.popleft()
            self._let_go(oldest)
            held_bytes -= oldest.num_bytes


class _Departure:
    """A storage held for its copy out. Knows no tier, so that a tier nobody uses is gone at once."""

    def __init__(self, device: Device, home: Stream, storage: torch.Tensor, out: Fence) -> None:
        self.device = device
        self.home = home
        self.storage: torch.Tensor | None = storage
        self.out = out
        self.num_bytes = storage.numel()


class HostParcel:
    """One storage: leaving (held here, copy queued), away (in its range only), arriving (in its buffer), or over."""

    def __init__(self, tier: HostTier, name: str, departure: _Departure, place: HostRange) -> None:
        self.name = name
        self._tier = tier
        self._departure = departure
        self._place: HostRange | None = place  # until the copy in is queued, or nobody will want one
        self._copies = [departure.out]  # all that touch the range
        self._home: Stream | None = None  # the buffer's stream
        self._buffer: torch.Tensor | None = None
        self._arrived: Fence | None = None  # None also if the storage never left

    def sent(self) -> None:
        """Make the storage's stream wait for the copy, and let go of it."""
        with self._tier._lock:
            self._tier._let_go(self._departure)

    def fetch(self) -> torch.Tensor:
        """Begin to fill a new buffer; or, if the storage is still here, take it as it is."""
        tier, departure = self._tier, self._departure
        with tier._lock:
            if self._place is None:
                raise AssertionError(f"{self._description} was fetched twice, or after its release")
            device, home = departure.device, departure.device.current_stream()
            if departure.storage is not None and departure.home == home:
                # The copy out may read what is written here from now on; nobody will read that copy.
                self._buffer, departure.storage = departure.storage, None
                self._give_back()
                return self._buffer
            tier._let_go(departure)
            buffer = tier._buffer(device, departure.num_bytes)
            host = tier.pool.memory(self._place, departure.num_bytes)
            try:
                arrived = tier._copy_in(device, home, buffer, host, departure.out)
            except BaseException as error:
                # The copy may be queued or not. The bytes are still away.
                self._copies.append(tier._fence(device.in_stream))
                tier._before_letting_go(home, self._copies[-1])
                if isinstance(error, RuntimeError):
                    raise TransferFailed(f"{self._description}, cannot be fetched from host memory: {error}") from error
                raise
            self._copies.append(arrived)
            self._home, self._buffer, self._arrived = home, buffer, arrived
            self._give_back()
            return buffer

    def fetched(self) -> torch.Tensor:
        """Make the stream that is current wait for the copy, and hand the buffer over."""
        with self._tier._lock:
            if self._buffer is None:
                raise AssertionError(f"{self._description} was read without a fetch, or after its release")
            if self._arrived is None or self._home is None:
                self._tier._before_forgetting(self._departure)
            else:
                reader = self._departure.device.current_stream()
                self._tier._before_reading(reader, self._arrived)
                if reader != self._home:
                    self._tier._before_letting_go(self._home, self._arrived)
            buffer, self._buffer = self._buffer, None
            return buffer

    def release(self) -> None:
        """Give up what is held, here and outside, whatever is in flight; for parcels that nobody will read.

        Takes no lock and changes nothing that others change: the garbage collector may call this from anywhere.
        """
        departure = self._departure
        if self._home is not None and self._arrived is not None and self._buffer is not None:
            self._tier._before_letting_go(self._home, self._arrived)
        elif self._buffer is not None or departure.storage is not None:
            self._tier._before_forgetting(departure)
        self._buffer = departure.storage = None
        self._give_back()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.release()

    def _give_back(self) -> None:
        if self._place is not None:
            self._tier.pool.give_back(self._place, self._copies)
            self._place = None

    @property
    def _description(self) -> str:
        return describe(self.name, self._departure.num_bytes)


def _half_of_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
