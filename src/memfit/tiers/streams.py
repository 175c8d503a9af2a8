"""What the host tier asks of an accelerator: streams, events, copies, and host memory that copies need not wait for.

`Stream` and `Event` are written so that torch.Stream and torch.Event are theirs as they are. Everything else goes
through `Device` and `Accelerators`, so that the tests can run the very code of the tier on a machine of their own,
one that does each piece of work at the worst moment its ordering allows.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from memfit.errors import UnsupportedUse

# Pinned for every device of the process, not only for the one that is current now.
_HOST_REGISTER_PORTABLE = 1


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """True if the work before that point is done."""

    def synchronize(self) -> None:
        """Hold the host until it is. Only for giving pinned memory back."""


class Stream(Protocol):
    """Work that is done in the order in which it was queued. Two handles of one stream are equal."""

    def __hash__(self) -> int: ...

    def record_event(self) -> Any:
        """An event at the end of what is queued so far."""

    def wait_event(self, event: Any) -> None:
        """Do nothing queued from here on before the event has passed; the host goes on."""


class Device(Protocol):
    """One accelerator with two streams of its own for copies, since links carry both ways at once."""

    @property
    def out_stream(self) -> Stream: ...

    @property
    def in_stream(self) -> Stream: ...

    @property
    def unmaps_early(self) -> bool:
        """True if memory may leave the device once its own stream is done, though a copy still reads it elsewhere."""

    def current_stream(self) -> Stream:
        """The stream on which the caller computes and allocates."""

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Bytes on the device. The block is free for the current stream once what it has queued so far is done."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Queue a copy on the stream. Neither tensor is held."""


@dataclass(frozen=True)
class PinnedBlock:
    """Host memory that a device reads and writes by itself."""

    memory: torch.Tensor  # flat, of bytes
    taken_bytes: int  # what the machine gave for it
    unpin: Callable[[], None]  # only once no copy touches it


class Accelerators(Protocol):
    """The devices of this process."""

    def device_of(self, tensor: torch.Tensor, name: str) -> Device:
        """The device on which a tensor is."""

    def pinned(self, num_bytes: int) -> PinnedBlock:
        """Pin that much host memory, or raise a RuntimeError."""


class TorchDevice:
    """A device of torch.accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.out_stream: torch.Stream = torch.Stream(device)
        self.in_stream: torch.Stream = torch.Stream(device)

    @property
    def unmaps_early(self) -> bool:
        # torch's native allocator frees with cudaFree, which waits for the whole device; expandable segments and the
        # asynchronous allocator wait for one stream. Of other kinds of devices we do not know.
        if self._device.type != "cuda" or torch.cuda.get_allocator_backend() != "native":
            return True
        settings = (os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
        return any("expandable_segments:true" in setting.replace(" ", "").lower() for setting in settings)

    def current_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)

    def empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        # A torch.Stream notes on itself which stream to go back to, so two threads, or an entry within an entry,
        # would send each other to the wrong one (pytorch#176560). A handle of one's own has notes of its own.
        handle = torch.Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )
        with handle:
            destination.copy_(source, non_blocking=True)


class TorchAccelerators:
    """The devices that torch.accelerator knows; each gets its streams when it is first met."""

    def __init__(self) -> None:
        self._devices: dict[torch.device, TorchDevice] = {}
        self._lock = threading.Lock()

    def device_of(self, tensor: torch.Tensor, name: str) -> Device:
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or tensor.device.type != accelerator.type:
            raise UnsupportedUse(
                f"the host tier was given {name or 'a tensor'} on {tensor.device}, and serves "
                f"{accelerator.type if accelerator else 'accelerators, of which there is none'}. "
                "Plan with tier 'disk' for tensors that are in host memory already"
            )
        with self._lock:
            if tensor.device not in self._devices:
                self._devices[tensor.device] = TorchDevice(tensor.device)
            return self._devices[tensor.device]

    def pinned(self, num_bytes: int) -> PinnedBlock:
        if torch.cuda.is_available():
            return _registered(num_bytes)
        # torch's own allocator of pinned memory takes powers of two.
        memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return PinnedBlock(memory, 1 << max(num_bytes - 1, 0).bit_length(), _nothing)


def host_is_offered() -> bool:
    """True if this machine has an accelerator whose memory is not the host's own."""
    if not torch.accelerator.is_available():
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type != "mps"


def _registered(num_bytes: int) -> PinnedBlock:
    """Pin pages of our own: torch.empty(pin_memory=True) would round 20 GiB up to 32."""
    taken_bytes = -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    area = mmap.mmap(-1, taken_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # After a fork, as data loaders do, the first write here would move this process to a copy of the page, while the
    # device went on with the old one.
    area.madvise(mmap.MADV_DONTFORK)
    memory = torch.frombuffer(area, dtype=torch.uint8)
    address = memory.data_ptr()
    runtime: Any = torch.cuda.cudart()
    try:
        torch.cuda.check_error(runtime.cudaHostRegister(address, taken_bytes, _HOST_REGISTER_PORTABLE))
    except RuntimeError:
        # CUDA keeps the failure on record and would blame the next launch for it.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        raise

    def unpin() -> None:
        torch.cuda.check_error(runtime.cudaHostUnregister(address))

    return PinnedBlock(memory, taken_bytes, unpin)


def _nothing() -> None:
    pass
