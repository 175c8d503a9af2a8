"""The classic mistakes of offloading code, each planted in the host tier by itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from memfit.tiers.host import HostParcel, HostTier
from memfit.tiers.pinned_pool import Fence, HostRange, PinnedPool
from memfit.tiers.streams import Device, Stream


class NoWaitBeforeLettingGo(HostTier):
    """The storage goes as soon as its copy is queued."""

    def _before_letting_go(self, home: Stream, fence: Fence) -> None:
        pass


class BufferOnCopyStream(HostTier):
    """The buffer of a fetch is allocated on the stream that fills it (pytorch#106360)."""

    def _buffer(self, device: Any, num_bytes: int) -> torch.Tensor:
        return device.in_stream.arena.allocate(num_bytes)


class NoWaitForFormerUsers(HostTier):
    """The copy in does not wait for what is still queued on the buffer's block."""

    def _copy_in(self, device: Device, home: Stream, whole: torch.Tensor, host: torch.Tensor, out: Fence) -> Fence:
        device.in_stream.wait_event(out.event)
        device.copy(whole, host, device.in_stream)
        return self._fence(device.in_stream)


class RangeReusedInFlight(HostTier):
    """A pinned range is written again while a copy still reads it."""

    def _copy_out(
        self, device: Device, home: Stream, host: torch.Tensor, whole: torch.Tensor, fences: Iterable[Fence]
    ) -> Fence:
        return super()._copy_out(device, home, host, whole, ())


class OneFenceOfMany(HostTier):
    """Of the copies that touch a range made of several, only one is waited for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.pool = _ForgetfulPool(self._accelerators.pinned, limit_bytes=self.pool.limit_bytes)


class _ForgetfulPool(PinnedPool):
    def take(self, num_bytes: int, name: str) -> tuple[HostRange, tuple[Fence, ...]]:
        place, fences = super().take(num_bytes, name)
        return place, fences[-1:]


class OutEventTooEarly(HostTier):
    """The event of a copy out is recorded before the copy."""

    def _copy_out(
        self, device: Device, home: Stream, host: torch.Tensor, whole: torch.Tensor, fences: Iterable[Fence]
    ) -> Fence:
        for fence in fences:
            device.out_stream.wait_event(fence.event)
        device.out_stream.wait_event(home.record_event())
        early = self._fence(device.out_stream)
        device.copy(host, whole, device.out_stream)
        return early


class InEventTooEarly(HostTier):
    """The event of a copy in is recorded before the copy."""

    def _copy_in(self, device: Device, home: Stream, whole: torch.Tensor, host: torch.Tensor, out: Fence) -> Fence:
        device.in_stream.wait_event(out.event)
        device.in_stream.wait_event(home.record_event())
        early = self._fence(device.in_stream)
        device.copy(whole, host, device.in_stream)
        return early


class NoWaitForMaker(HostTier):
    """The copy out does not wait for the kernel that makes the storage."""

    def _copy_out(
        self, device: Device, home: Stream, host: torch.Tensor, whole: torch.Tensor, fences: Iterable[Fence]
    ) -> Fence:
        for fence in fences:
            device.out_stream.wait_event(fence.event)
        device.copy(host, whole, device.out_stream)
        return self._fence(device.out_stream)


class NoWaitForCopyOut(HostTier):
    """The copy in does not wait for the copy out; compute has, but perhaps on another stream."""

    def _copy_in(self, device: Device, home: Stream, whole: torch.Tensor, host: torch.Tensor, out: Fence) -> Fence:
        device.in_stream.wait_event(home.record_event())
        device.copy(whole, host, device.in_stream)
        return self._fence(device.in_stream)


class NoWaitBeforeReading(HostTier):
    """What is fetched is read at once."""

    def _before_reading(self, reader: Stream, fence: Fence) -> None:
        pass


class WaitOnReaderOnly(HostTier):
    """Lets go behind the stream that is current, though the block belongs to another."""

    def _before_letting_go(self, home: Any, fence: Fence) -> None:
        home.device.current.wait_event(fence.event)


class AbandonedAtOnce(HostTier):
    """A parcel that nobody wants lets go of its buffer under the copy in."""

    def send(self, tensor: torch.Tensor, name: str = "") -> HostParcel:
        parcel = super().send(tensor, name)
        parcel.__class__ = _HastyParcel
        return parcel


class _HastyParcel(HostParcel):
    def release(self) -> None:
        self._buffer = None
        super().release()


class AbandonedRangeAtOnce(HostTier):
    """A parcel that nobody wants gives its range back under the copy out."""

    def send(self, tensor: torch.Tensor, name: str = "") -> HostParcel:
        parcel = super().send(tensor, name)
        parcel.__class__ = _UnfencedParcel
        return parcel


class _UnfencedParcel(HostParcel):
    def release(self) -> None:
        place, self._place = self._place, None
        super().release()
        if place is not None:
            self._tier.pool.give_back(place, [])


class HostWaits(HostTier):
    """Lets go after holding the host: right, but slow."""

    def _before_letting_go(self, home: Stream, fence: Fence) -> None:
        fence.event.synchronize()


class ForgottenAtOnce(HostTier):
    """A copy out that nobody wants is left to read what it likes, also where memory may leave the device."""

    def _before_forgetting(self, departure: Any) -> None:
        pass


MISTAKES = [
    NoWaitBeforeLettingGo,
    BufferOnCopyStream,
    NoWaitForFormerUsers,
    RangeReusedInFlight,
    OneFenceOfMany,
    OutEventTooEarly,
    InEventTooEarly,
    NoWaitForMaker,
    NoWaitForCopyOut,
    NoWaitBeforeReading,
    WaitOnReaderOnly,
    AbandonedAtOnce,
    AbandonedRangeAtOnce,
    ForgottenAtOnce,
]
