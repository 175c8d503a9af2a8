"""The host tier's promises: bounded, counted, made once, and usable after whatever goes wrong."""

from __future__ import annotations

import contextlib
import gc
import mmap
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from equivalence import assert_same_as_eager
from stream_machine import Moments, StreamMachine
from stream_machine_cpu import CpuAccelerators
from test_exact_zoo import small

from memfit.errors import UnsupportedUse
from memfit.plan.decisions import Offload
from memfit.plan.policies.policy import Policy
from memfit.plan.policies.registry import POLICIES
from memfit.plan.rerun import Reruns
from memfit.tiers.host import HostParcel, HostTier
from memfit.tiers.pinned_pool import PinnedPool
from memfit.tiers.registry import TIERS
from memfit.tiers.streams import TorchAccelerators, TorchDevice, host_is_offered
from memfit.tiers.tier import TierRefused, TransferFailed

KINDS = Moments.all_kinds(7)
LATEST = KINDS[1]
SIZES = (400, 64, 250, 100, 128, 16)

has_accelerator = pytest.mark.skipif(not host_is_offered(), reason="needs an accelerator")


def made(machine: StreamMachine, size: int, number: int) -> torch.Tensor:
    """A tensor that a kernel fills."""
    tensor = machine.devices[0].empty(size)
    raw = machine.raw(tensor)

    def fill() -> None:
        raw[:] = number

    machine.compute(machine.devices[0], fill)
    return tensor


def expect(machine: StreamMachine, tensor: torch.Tensor, number: int) -> None:
    """Queue a kernel that minds what it reads."""
    raw = machine.raw(tensor)

    def look() -> None:
        if not (raw == number).all():
            machine.wrong.append(f"{raw[:8]} where {number} was expected")

    machine.compute(machine.devices[0], look)


def forward(tier: HostTier, machine: StreamMachine, step: int, sizes: tuple[int, ...] = SIZES) -> list[HostParcel]:
    """Make and send one storage for each layer, as generated code does; each is let go of two layers later."""
    parcels: list[HostParcel] = []
    for layer, size in enumerate(sizes):
        parcels.append(tier.send(made(machine, size, (step + layer) % 200), f"layer {layer}"))
        if layer >= 2:
            parcels[layer - 2].sent()
    for parcel in parcels[-2:]:
        parcel.sent()
    return parcels


def backward(machine: StreamMachine, parcels: list[HostParcel], step: int) -> None:
    """Bring them back one layer ahead, and read them."""
    parcels[-1].fetch()
    for layer in reversed(range(len(parcels))):
        if layer:
            parcels[layer - 1].fetch()
        expect(machine, parcels.pop().fetched(), (step + layer) % 200)


# --- bounded, counted, made once -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_two_hundred_steps_pin_memory_once_at_the_size_that_was_reserved(kind: Moments) -> None:
    machine = StreamMachine(kind)
    tier = HostTier(limit_bytes=1 << 20, accelerators=machine)
    tier.reserve(sum(SIZES))
    held_bytes = machine.pinned_bytes
    assert sum(SIZES) <= held_bytes < sum(SIZES) + 65 * 1024
    for step in range(200):
        backward(machine, forward(tier, machine, step), step)
        assert machine.used_bytes == 0, "the host holds nothing between steps"
    machine.finish()
    assert not machine.wrong
    assert (tier.pool.num_pinned, machine.pinned_bytes) == (1, held_bytes)
    assert tier.pool.free_bytes == tier.pool.total_bytes


def test_an_exact_limit_is_enough_whatever_the_sizes() -> None:
    sizes = (64, 640, 128, 1280)
    machine = StreamMachine(LATEST)
    tier = HostTier(limit_bytes=sum(sizes), accelerators=machine)
    tier.reserve(sum(sizes))
    for step in range(20):
        backward(machine, forward(tier, machine, step, sizes), step)
    machine.finish()
    assert not machine.wrong and machine.pinned_bytes == sum(sizes)


def test_without_a_reservation_the_first_step_pins_what_all_the_others_use() -> None:
    machine = StreamMachine(LATEST)
    tier = HostTier(limit_bytes=1 << 20, accelerators=machine)
    backward(machine, forward(tier, machine, 0), 0)
    pinned = tier.pool.num_pinned
    assert pinned == len(SIZES)
    for step in range(1, 20):
        backward(machine, forward(tier, machine, step), step)
    machine.finish()
    assert not machine.wrong and tier.pool.num_pinned == pinned


def test_a_larger_reservation_takes_the_place_of_a_smaller_one() -> None:
    machine = StreamMachine(LATEST)
    tier = HostTier(limit_bytes=400_000, accelerators=machine)
    tier.reserve(sum(SIZES))
    backward(machine, forward(tier, machine, 0), 0)
    machine.may_hold_host = True  # between steps it may
    tier.reserve(300_000)
    assert 300_000 <= machine.pinned_bytes <= 400_000
    tier.reserve(1000)
    assert tier.pool.num_pinned == 2
    machine.may_hold_host = False
    parcels = forward(tier, machine, 1)
    tier.reserve(330_000)  # while bytes are away, beside what is there
    backward(machine, parcels, 1)
    machine.finish()
    assert not machine.wrong


def test_pinned_memory_is_given_back_behind_its_last_copy() -> None:
    machine = StreamMachine(LATEST)
    tier = HostTier(limit_bytes=1 << 20, accelerators=machine)
    parcel = tier.send(made(machine, 64, 1))
    machine.may_hold_host = True
    del tier, parcel
    assert machine.pinned_bytes == 0
    assert not machine.wrong, "not unpinned under the copy"


@pytest.mark.parametrize("most_bytes", [0, 500, 800, 1 << 20])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_no_more_is_in_flight_than_was_allowed(kind: Moments, most_bytes: int) -> None:
    """Nobody says `sent`, and under some moments not a byte is copied before the host is done."""
    machine = StreamMachine(kind)
    tier = HostTier(limit_bytes=1 << 20, max_in_flight_bytes=most_bytes, accelerators=machine)
    parcels = []
    for layer in range(30):
        parcels.append(tier.send(made(machine, 400, layer)))
        assert tier.in_flight_bytes <= max(most_bytes, 400)
    # One more is made before the oldest is let go of.
    assert machine.devices[0].current.arena.peak_bytes <= min(max(most_bytes, 400) + 400, 30 * 400)
    for layer, parcel in reversed(list(enumerate(parcels))):
        parcel.fetch()
        expect(machine, parcel.fetched(), layer)
    machine.finish()
    assert not machine.wrong


def test_each_device_has_its_own_bound() -> None:
    machine = StreamMachine(LATEST, num_devices=2)
    tier = HostTier(limit_bytes=1 << 20, max_in_flight_bytes=500, accelerators=machine)
    parcels = [tier.send(device.empty(400)) for device in machine.devices]
    assert tier.in_flight_bytes == 800
    machine.finish()
    del parcels


def test_a_whole_storage_travels_whatever_looks_at_it() -> None:
    machine = StreamMachine(LATEST)
    tier = HostTier(limit_bytes=1 << 20, accelerators=machine)
    parcel = tier.send(made(machine, 240, 3).view(torch.float32)[10:20].view(2, 5).t())
    parcel.sent()
    assert parcel.fetch().shape == (240,)
    back = parcel.fetched()
    assert back.dtype is torch.uint8
    expect(machine, back, 3)
    machine.finish()
    assert not machine.wrong


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_host_budget_that_is_too_small_is_refused_and_the_tier_serves_on() -> None:
    machine = StreamMachine(LATEST)
    tier = HostTier(limit_bytes=1024, accelerators=machine)
    with pytest.raises(TierRefused, match=r"a whole step, 5,056 bytes: it may hold 1,024 .* has 0.*Raise its limit_b"):
        tier.reserve(5000)
    kept = tier.send(made(machine, 400, 1), "conv1")
    with pytest.raises(TierRefused, match=r"no room for conv2, 704 bytes: .* has 448, of which 0 are free.*disk"):
        tier.send(made(machine, 700, 2), "conv2")
    other = tier.send(made(machine, 500, 3), "conv3")
    backward(machine, [kept], 1)
    backward(machine, [other], 3)
    machine.finish()
    assert not machine.wrong and machine.used_bytes == 0
    assert tier.pool.free_bytes == tier.pool.total_bytes


def test_memory_that_cannot_be_pinned_is_used_as_it_is_with_one_warning() -> None:
    machine = StreamMachine(LATEST, can_pin=False)
    tier = HostTier(limit_bytes=1 << 20, accelerators=machine)
    with pytest.warns(RuntimeWarning, match=r"could not pin .* \(no memory may be pinned here\); .* pageable") as seen:
        tier.reserve(100)
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            backward(machine, forward(tier, machine, step), step)  # more than was reserved: it takes more
    machine.finish()
    assert not machine.wrong
    assert machine.num_blocking_copies == 2 * 3 * len(SIZES), "such copies hold the host, as drivers do"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="here memory can be pinned")
def test_without_an_accelerator_nothing_can_be_pinned_and_nothing_is_offered() -> None:
    assert not host_is_offered()
    pool = PinnedPool(TorchAccelerators().pinned, limit_bytes=1 << 20)
    with pytest.warns(RuntimeWarning, match="could not pin 1,024 bytes"):
        place, fences = pool.take(1000, "conv1")
    assert not fences and len(pool.memory(place, 1000)) == 1000
    with pytest.raises(UnsupportedUse, match=r"given conv1 on cpu, .* there is none\. Plan with tier 'disk'"):
        HostTier().send(torch.zeros(3), "conv1")


@pytest.mark.parametrize("when", ["leaving", "away", "arriving"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_step_that_is_given_up_leaves_nothing_and_the_next_is_right(kind: Moments, when: str) -> None:
    """Backward is never called, or somebody's code raised: parcels are let go of wherever they are."""
    machine = StreamMachine(kind)
    tier = HostTier(limit_bytes=sum(SIZES) + 400, accelerators=machine)
    for step in range(10):
        parcels = [tier.send(made(machine, size, step)) for size in SIZES]
        if when != "leaving":
            for parcel in parcels:
                parcel.sent()
        if when == "arriving":
            for parcel in parcels:
                parcel.fetch()
        if step == 5:
            cycle: list[Any] = [parcels]
            cycle.append(cycle)
            del parcel, parcels, cycle
            gc.collect()
        else:
            del parcels
            parcel = None
        assert machine.used_bytes == tier.in_flight_bytes == 0
        backward(machine, forward(tier, machine, step), step)
    machine.finish()
    assert not machine.wrong
    assert tier.pool.free_bytes == tier.pool.total_bytes


class _Broken(Exception):
    pass


@contextlib.contextmanager
def broken_copies(monkeypatch: pytest.MonkeyPatch, machine: StreamMachine, error: BaseException) -> Iterator[None]:
    """The machine queues copies and then raises."""
    device = machine.devices[0]
    copy = device.copy

    def fails(*args: Any) -> None:
        copy(*args)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(device, "copy", fails)
        yield


@pytest.mark.parametrize("kind", KINDS[:4], ids=lambda kind: kind.name)
def test_a_copy_that_fails_names_its_tensor_and_spoils_nothing(kind: Moments, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = StreamMachine(kind)
    tier = HostTier(limit_bytes=sum(SIZES) + 400, accelerators=machine)
    bus_error = RuntimeError("bus error")
    sent = pytest.raises(TransferFailed, match=r"conv1, 400 bytes, cannot be sent to host memory: bus error")
    fetched = pytest.raises(TransferFailed, match=r"conv1, 400 bytes, cannot be fetched from host memory: bus error")
    with broken_copies(monkeypatch, machine, bus_error), sent:
        tier.send(made(machine, 400, 1), "conv1")
    parcel = tier.send(made(machine, 400, 2), "conv1")
    parcel.sent()
    with broken_copies(monkeypatch, machine, bus_error), fetched:
        parcel.fetch()
    with broken_copies(monkeypatch, machine, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        parcel.fetch()
    with monkeypatch.context() as patch:
        patch.setattr(machine.devices[0], "empty", lambda num_bytes: (_ for _ in ()).throw(_Broken))
        with pytest.raises(_Broken):  # as torch.OutOfMemoryError, which passes as it is
            parcel.fetch()
    backward(machine, [parcel], 2)  # the bytes were away all the time
    del parcel, sent, fetched, bus_error
    gc.collect()  # tracebacks hold the frames that hold the tensors
    backward(machine, forward(tier, machine, 3), 3)
    machine.finish()
    assert not machine.wrong and machine.used_bytes == 0
    assert tier.pool.free_bytes == tier.pool.total_bytes


def test_what_is_over_says_so() -> None:
    machine = StreamMachine(LATEST)
    tier = HostTier(limit_bytes=1 << 20, accelerators=machine)
    parcel = tier.send(made(machine, 64, 1), "conv1")
    with pytest.raises(AssertionError, match="conv1, 64 bytes was read without a fetch"):
        parcel.fetched()
    parcel.release()
    parcel.release()
    parcel.sent()
    with pytest.raises(AssertionError, match="conv1, 64 bytes was fetched twice, or after its release"):
        parcel.fetch()
    machine.finish()
    assert tier.pool.free_bytes == tier.pool.total_bytes


# --- programs that memfit generates ----------------------------------------------------------------------------------


@pytest.mark.parametrize("most_bytes", [0, 1 << 30])
@pytest.mark.parametrize("name", ["resnet18"])
def test_training_with_everything_offloaded_matches_eager(
    name: str, most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels run as they are called, copies as late as they can: bit for bit eager's."""
    device = CpuAccelerators()
    tier = HostTier(limit_bytes=1 << 30, max_in_flight_bytes=most_bytes, accelerators=device)

    def decide(step: Any, costs: Any, budget: Any) -> dict[int, Offload]:
        reruns = Reruns(step)
        return {storage: Offload("host") for storage in reruns.owned if not reruns.why_not_offload(storage)}

    monkeypatch.setitem(POLICIES, "host-all", Policy("host-all", "everything goes to the host", decide))
    monkeypatch.setitem(TIERS, "host", tier)
    model, inputs, _ = small(name)
    assert_same_as_eager(model, inputs, batch=2, other_batch=None, steps=3, policy="host-all")
    assert device.out_bytes == device.in_bytes > 0
    assert tier.in_flight_bytes == 0 and tier.pool.free_bytes == tier.pool.total_bytes


# --- torch's side ----------------------------------------------------------------------------------------------------


def test_a_copy_runs_on_its_stream_through_a_handle_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch.Stream that is entered twice at once does not find its way back."""
    entered: list[Any] = []

    class Handle:
        def __init__(
            self, device: Any = None, *, stream_id: int = 5, device_index: int = 1, device_type: int = 2
        ) -> None:
            self.stream_id, self.device_index, self.device_type = stream_id, device_index, device_type

        def __enter__(self) -> None:
            entered.append(self)

        def __exit__(self, *_: object) -> None:
            entered.append(None)

    monkeypatch.setattr(torch, "Stream", Handle)
    device = TorchDevice(torch.device("cpu"))
    stream: Any = device.out_stream
    target = torch.zeros(3, dtype=torch.uint8)
    device.copy(target, torch.ones(3, dtype=torch.uint8), stream)
    handle, left = entered
    assert left is None and handle is not stream and target.sum() == 3
    assert (handle.stream_id, handle.device_index, handle.device_type) == (5, 1, 2)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """CUDA's runtime, as far as pinning goes."""
    calls: list[tuple[Any, ...]] = []
    seen = SimpleNamespace(
        calls=calls,
        result=0,
        cudaHostRegister=lambda *args: calls.append(("register", *args)) or seen.result,
        cudaHostUnregister=lambda *args: calls.append(("unregister", *args)) or 0,
    )

    def check_error(result: int) -> None:
        if result:
            raise RuntimeError(f"CUDA error {result}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: seen)
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    return seen


def test_cuda_memory_is_pinned_at_its_exact_size_and_is_not_for_children(runtime: SimpleNamespace) -> None:
    block = TorchAccelerators().pinned(5 * mmap.PAGESIZE + 1)
    address = block.memory.data_ptr()
    assert block.taken_bytes == len(block.memory) == 6 * mmap.PAGESIZE, "not the next power of two"
    assert address % mmap.PAGESIZE == 0
    flags = re.search(rf"^{address:x}-.*?^VmFlags: (.*?)$", Path("/proc/self/smaps").read_text(), re.M | re.S)
    assert flags is not None and "dc" in flags[1].split(), "a fork would copy it"
    block.unpin()
    assert runtime.calls == [("register", address, 6 * mmap.PAGESIZE, 1), ("unregister", address)]


def test_cuda_memory_that_cannot_be_registered_is_used_as_it_is(
    runtime: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.result = 2
    monkeypatch.setattr(torch, "zeros", lambda *_, device: runtime.calls.append(("launch", device)))
    pool = PinnedPool(TorchAccelerators().pinned, limit_bytes=1 << 20)
    with pytest.warns(RuntimeWarning, match="CUDA error 2"):
        pool.reserve(1000)
    assert pool.total_bytes >= 1000
    assert [call[0] for call in runtime.calls] == ["register", "launch"], "the failure is taken off CUDA's record"


@has_accelerator
def test_on_a_real_accelerator_steps_are_exact_and_never_hold_the_host() -> None:
    device = torch.accelerator.current_accelerator()
    tier = HostTier()
    shapes = [(1 << 20,), (300, 700), (17, 3, 5), (1 << 22,)]
    tier.reserve(sum(4 * torch.Size(shape).numel() for shape in shapes))
    if device is not None and device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for _ in range(50):
            parcels = []
            for shape in shapes:
                tensor = torch.randn(shape, device=device)
                parcels.append((tier.send(tensor), tensor.double().sum()))
                del tensor
                torch.full((1 << 20,), float("nan"), device=device)  # takes what is let go of too early
            for parcel, _total in parcels:
                parcel.sent()
            for parcel, total in reversed(parcels):
                parcel.fetch()
                pairs.append((parcel.fetched().view(torch.float32).double().sum(), total))
    finally:
        if device is not None and device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    torch.accelerator.synchronize()
    assert all(torch.equal(back, total) for back, total in pairs)
    assert tier.pool.num_pinned == 1 and tier.pool.free_bytes == tier.pool.total_bytes
