"""An accelerator that is the CPU: kernels run when they are called, copies as late as anybody can bear.

For programs that memfit generates, whose tensors are the CPU's own. The compute stream is the host itself, so what it
waits for is done then and there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from memfit.tiers.streams import PinnedBlock


class LateEvent:
    def __init__(self, stream: LateStream | None = None) -> None:
        self.stream = stream  # None: passed

    def query(self) -> bool:
        return self.stream is None

    def synchronize(self) -> None:
        self.pass_now()

    def pass_now(self) -> None:
        while self.stream is not None:
            self.stream.queue.popleft()()


class LateStream:
    """Does nothing until somebody needs it."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], None]] = deque()

    def record_event(self) -> LateEvent:
        event = LateEvent(self)

        def passes() -> None:
            event.stream = None

        self.queue.append(passes)
        return event

    def wait_event(self, event: LateEvent) -> None:
        self.queue.append(event.pass_now)


class HostStream:
    """The host's own order."""

    def record_event(self) -> LateEvent:
        return LateEvent()

    def wait_event(self, event: LateEvent) -> None:
        event.pass_now()


class CpuAccelerators:
    """The CPU as one device, with counts of what was copied."""

    unmaps_early = False

    def __init__(self) -> None:
        self.out_stream, self.in_stream, self.compute = LateStream(), LateStream(), HostStream()
        self.out_bytes = self.in_bytes = 0

    def device_of(self, tensor: torch.Tensor, name: str) -> CpuAccelerators:
        return self

    def pinned(self, num_bytes: int) -> PinnedBlock:
        return PinnedBlock(torch.full((num_bytes,), 0x5A, dtype=torch.uint8), num_bytes, lambda: None)

    def current_stream(self) -> HostStream:
        return self.compute

    def empty(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xA5, dtype=torch.uint8)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        if stream is self.out_stream:
            self.out_bytes += source.numel()
        else:
            self.in_bytes += source.numel()
        stream.queue.append(lambda: destination.copy_(source))
