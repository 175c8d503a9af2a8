"""What can go wrong with a disk: an error that names the tensor and the cause, at its wait; then all goes on."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.cost.costs import Costs
from memfit.plan.decisions import Decisions, Offload
from memfit.plan.policies.policy import Policy
from memfit.plan.policies.registry import POLICIES
from memfit.plan.rerun import Reruns
from memfit.tiers import spill
from memfit.tiers.disk import DiskSettings, DiskTier
from memfit.tiers.registry import TIERS
from memfit.tiers.tier import TierRefused, TransferFailed
from memfit.torch_internals import StorageWatch

NAME = "input of aten.convolution in module 'features.3'"
WHAT = f"{NAME}, 400,000 bytes"


@pytest.fixture
def tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DiskTier]:
    monkeypatch.setattr(spill, "REQUEST_BYTES", 32 * 4096)  # four requests for each of our tensors
    tier = DiskTier(DiskSettings(directory=str(tmp_path / "spill")))
    yield tier
    tier.close()
    assert not (tmp_path / "spill").exists() or not list((tmp_path / "spill").iterdir()), "files are left"


def numbers(seed: int = 0) -> torch.Tensor:
    return torch.randn(100_000, generator=torch.Generator().manual_seed(seed))


def works(tier: DiskTier) -> None:
    """Three storages at once go and come as ever, and then nothing is away."""
    parcels = [tier.send(numbers(seed)) for seed in range(3)]
    for parcel in parcels:
        parcel.sent()
    for parcel in parcels:
        parcel.fetch()
    for seed, parcel in enumerate(parcels):
        assert torch.equal(parcel.fetched().view(torch.float32), numbers(seed))
    del parcels, parcel
    assert tier.away_bytes == 0


def fail(monkeypatch: pytest.MonkeyPatch, call: str, error: int, *, after: int = 1) -> None:
    """Let a call of the system fail from now on, after it has worked a few times."""
    real, calls = getattr(os, call), [0]

    def failing(*args: Any) -> int:
        calls[0] += 1
        if calls[0] > after:
            raise OSError(error, os.strerror(error))
        return real(*args)

    monkeypatch.setattr(os, call, failing)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_failed_write_shows_at_sent_and_the_tensor_is_still_here(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    tensor = numbers()
    with monkeypatch.context() as patch:
        fail(patch, "pwrite", error)
        parcel = tier.send(tensor, NAME)
        with pytest.raises(TransferFailed) as caught:
            parcel.sent()
    text = str(caught.value)
    assert text.startswith(f"the disk tier could not put away {WHAT}, in {tier.settings.directory}: ")
    assert os.strerror(error) in text
    assert ("bytes are free" in text and "Free some space" in text) == (error != errno.EIO)
    assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == error
    assert parcel.fetch().data_ptr() == tensor.data_ptr(), "nothing is lost"
    assert torch.equal(parcel.fetched().view(torch.float32), tensor)
    works(tier)


def test_a_failed_read_shows_at_fetched_and_can_be_tried_again(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    parcel, other = tier.send(numbers(), NAME), tier.send(numbers(1))
    parcel.sent()
    other.sent()
    with monkeypatch.context() as patch:
        fail(patch, "preadv", errno.EIO)
        watch = StorageWatch(parcel.fetch())
        with pytest.raises(TransferFailed) as caught:
            parcel.fetched()
        place = tier.settings.directory
        assert str(caught.value).startswith(
            f"the disk tier could not bring back {WHAT}, in {place}: {os.strerror(errno.EIO)}. Run the step again"
        )
    assert not watch.is_alive, "what was half filled is given back"
    other.fetch()
    assert torch.equal(other.fetched().view(torch.float32), numbers(1)), "only the parcel concerned fails"
    parcel.fetch()
    assert torch.equal(parcel.fetched().view(torch.float32), numbers())
    works(tier)


def test_buffered_writes_are_done_when_they_are_on_the_disk(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails after the page cache has taken the bytes would else be found out by nobody."""
    tier.configure(DiskSettings(directory=tier.settings.directory, direct=False))
    with monkeypatch.context() as patch:
        fail(patch, "fdatasync", errno.EIO)
        parcel = tier.send(numbers(), NAME)
        with pytest.raises(TransferFailed, match=r"could not put away input of .* Input/output error"):
            parcel.sent()
    parcel.release()
    works(tier)


def test_a_failed_transfer_keeps_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    gc.disable()  # what is kept only by a cycle is kept too long
    try:
        before = len(os.listdir("/proc/self/fd"))
        tier = DiskTier(DiskSettings(directory=str(tmp_path)))
        fail(monkeypatch, "pwrite", errno.EIO, after=0)
        parcel = tier.send(numbers())
        with contextlib.suppress(TransferFailed):
            parcel.sent()
        del tier, parcel
        until(lambda: len(os.listdir("/proc/self/fd")) == before, limit_s=5)
    finally:
        gc.enable()


def test_no_memory_to_bring_it_back_to(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    parcel = tier.send(numbers(), NAME)
    parcel.sent()
    with monkeypatch.context() as patch:

        def refuse(*args: Any, **options: Any) -> None:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

        patch.setattr("memfit.tiers.pages.mmap.mmap", refuse)
        with pytest.raises(TransferFailed, match=r"bring back input of .* there is no memory for it .* smaller memory"):
            parcel.fetch()
    parcel.fetch()
    assert torch.equal(parcel.fetched().view(torch.float32), numbers())


@pytest.mark.parametrize("direct", [None, False])
@pytest.mark.parametrize("share", [5000, 40_000, 4096])
def test_short_reads_and_writes_go_on_where_they_stopped(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, direct: bool | None, share: int
) -> None:
    tier.configure(DiskSettings(directory=tier.settings.directory, direct=direct, checksums=True))
    pwrite, preadv, calls = os.pwrite, os.preadv, [0, 0, 0]

    def short_write(file: int, data: memoryview, start: int) -> int:
        calls[0] += 1
        if calls[0] % 5 == 0:
            calls[2] += 1
            raise InterruptedError(errno.EINTR, "interrupted")
        # As a file system would: a direct request is whole blocks to the disk, whatever it then reports.
        pwrite(file, data[: -(-min(share, len(data)) // 4096) * 4096], start)
        return min(share, len(data))

    def short_read(file: int, buffers: list[memoryview], start: int) -> int:
        calls[1] += 1
        preadv(file, [buffers[0][: -(-min(share, len(buffers[0])) // 4096) * 4096]], start)
        return min(share, len(buffers[0]))

    monkeypatch.setattr(os, "pwrite", short_write)
    monkeypatch.setattr(os, "preadv", short_read)
    works(tier)
    assert calls[0] > 24 and calls[1] > 24 and calls[2] > 0


def test_a_disk_that_takes_nothing_is_not_asked_for_ever(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda file, data, start: 0)
        parcel = tier.send(numbers(), NAME)
        with pytest.raises(TransferFailed, match=r"the file system took 0 of 131,072 bytes and no more"):
            parcel.sent()
    parcel.release()
    works(tier)


def test_a_file_that_was_cut_short_is_noticed(tier: DiskTier) -> None:
    parcel = tier.send(numbers(), NAME)
    parcel.sent()
    assert tier._spill is not None
    os.ftruncate(tier._spill.file._file, 200_000)
    parcel.fetch()
    with pytest.raises(TransferFailed, match=r"could not bring back input of .* bytes and no more"):
        parcel.fetched()


@pytest.mark.parametrize("place", [0, 12_345, 399_999])
def test_a_flipped_byte_is_found_with_checksums(tier: DiskTier, place: int) -> None:
    tier.configure(DiskSettings(directory=tier.settings.directory, direct=False, checksums=True))
    parcel = tier.send(numbers(), NAME)
    parcel.sent()
    assert tier._spill is not None and parcel._lot is not None  # type: ignore[attr-defined]
    file, lot = tier._spill.file._file, parcel._lot  # type: ignore[attr-defined]
    start = lot.ranges[0].start + lot.offset + place
    good = os.pread(file, 1, start)
    os.pwrite(file, bytes([good[0] ^ 1]), start)
    parcel.fetch()
    with pytest.raises(TransferFailed) as caught:
        parcel.fetched()
    assert f"could not bring back {WHAT}" in str(caught.value)
    assert "are not those that were written (checksum)" in str(caught.value)
    os.pwrite(file, good, start)
    parcel.fetch()
    assert torch.equal(parcel.fetched().view(torch.float32), numbers())
    works(tier)


def test_a_flipped_byte_of_a_neighbour_is_nobodys_concern(tier: DiskTier) -> None:
    tier.configure(DiskSettings(directory=tier.settings.directory, direct=False, checksums=True))
    parcel = tier.send(torch.frombuffer(bytearray(9000), dtype=torch.uint8, offset=100, count=5000))
    parcel.sent()
    assert tier._spill is not None
    file, lot = tier._spill.file._file, parcel._lot  # type: ignore[attr-defined]
    assert lot.ranges[0].num_bytes > 5000
    for start in {lot.ranges[0].start, lot.ranges[0].end - 1} - {lot.ranges[0].start + lot.offset}:
        os.pwrite(file, b"\x55", start)
    parcel.fetch()
    assert not parcel.fetched().any()


def test_a_full_disk_is_refused_when_the_file_must_grow(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tier.send(numbers(5))
    with monkeypatch.context() as patch:
        patch.setattr("memfit.tiers.spill_file.SpillFile.free_bytes", lambda self: 0)
        large = torch.zeros(20_000_000, dtype=torch.uint8)
        with pytest.raises(
            TierRefused, match=r"no room for the weights, 20,000,000 bytes, in .* and 0 are free\. Free"
        ):
            tier.send(large, "the weights")
    kept.sent()
    kept.fetch()
    assert torch.equal(kept.fetched().view(torch.float32), numbers(5))
    works(tier)


def test_a_folder_that_cannot_be_made_or_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    tier = DiskTier(DiskSettings(directory=str(tmp_path / "file" / "spill")))
    with pytest.raises(TierRefused, match=r"cannot make a file in .*/file/spill: Not a directory\. Name a folder that"):
        tier.reserve(100)
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    tier = DiskTier(DiskSettings(directory=str(locked)))
    with monkeypatch.context() as patch:
        if os.access(locked, os.W_OK):  # the superuser may write everywhere

            def refuse(*args: Any, **options: Any) -> int:
                raise PermissionError(errno.EACCES, "Permission denied")

            patch.setattr(os, "open", refuse)
        with pytest.raises(TierRefused, match=r"cannot make a file in .*/locked: Permission denied\. Name a folder"):
            tier.send(torch.ones(1))
    locked.chmod(0o700)
    works(tier)
    tier.close()


def test_a_folder_removed_after_the_start(tier: DiskTier) -> None:
    parcel = tier.send(numbers())
    parcel.sent()
    assert tier.settings.directory is not None
    os.rmdir(tier.settings.directory)
    parcel.fetch()
    assert torch.equal(parcel.fetched().view(torch.float32), numbers())
    works(tier)


class Held:
    """Writes that wait to be let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
        self.begun, self.go, self.ended = threading.Event(), threading.Event(), []
        real = getattr(os, call)

        def held_up(*args: Any) -> int:
            self.begun.set()
            assert self.go.wait(60)
            moved = real(*args)
            self.ended.append(args[-1])
            return moved

        monkeypatch.setattr(os, call, held_up)


@contextlib.contextmanager
def interrupted(delay_s: float = 0.5) -> Iterator[None]:
    """Control-C, in a moment: late enough that a busy machine is waiting by then."""
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(delay_s, lambda: signal.pthread_kill(main, signal.SIGINT))
    # What a shell starts in the background ignores the signal, and Python leaves it at that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            yield
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals go to the main thread")
@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_control_c_while_waiting_leaves_the_parcel_as_it_was(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with monkeypatch.context() as patch:
        held = Held(patch, call)
        parcel = tier.send(numbers(), NAME)
        if call == "preadv":
            parcel.sent()
            parcel.fetch()
        with interrupted():
            parcel.sent() if call == "pwrite" else parcel.fetched()
        assert tier.traffic.waited_s > 0.1
        held.go.set()
        if call == "pwrite":
            parcel.sent()
            parcel.fetch()
        assert torch.equal(parcel.fetched().view(torch.float32), numbers())
    works(tier)


def test_a_parcel_nobody_holds_keeps_its_memory_until_the_write_has_ended(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = numbers()
    watch = StorageWatch(tensor)
    with monkeypatch.context() as patch:
        held = Held(patch, "pwrite")
        parcel = tier.send(tensor, NAME)
        assert held.begun.wait(60)
        del tensor, parcel
        gc.collect()
        assert watch.is_alive, "it is being written"
        assert tier.away_bytes == 400_000, "and its room is not given to anybody else"
        held.go.set()
        until(lambda: not watch.is_alive)
        until(lambda: tier.away_bytes == 0)
        assert len(held.ended) == 1, "the requests after the one in flight are left out"
    works(tier)


def test_a_parcel_collected_while_it_comes_back_ends_in_peace(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    parcel = tier.send(numbers(), NAME)
    parcel.sent()
    with monkeypatch.context() as patch:
        held = Held(patch, "preadv")
        watch = StorageWatch(parcel.fetch())
        assert held.begun.wait(60)
        del parcel
        assert watch.is_alive, "the disk writes into it"
        held.go.set()
        until(lambda: not watch.is_alive)
    works(tier)


def test_room_of_what_was_dropped_is_waited_for_rather_than_the_limit_broken(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tier.settings.directory is not None
    tier.configure(DiskSettings(directory=tier.settings.directory, limit_bytes=400_000))
    with monkeypatch.context() as patch:
        held = Held(patch, "pwrite")
        parcel = tier.send(numbers())
        assert held.begun.wait(60)
        parcel.release()
        threading.Timer(0.1, held.go.set).start()
        parcel = tier.send(numbers(1))
        parcel.sent()
        parcel.fetch()
        assert torch.equal(parcel.fetched().view(torch.float32), numbers(1))


def until(true: Callable[[], bool], limit_s: float = 30) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_steps_that_end_in_an_exception_leave_no_room_taken(tier: DiskTier) -> None:
    def step() -> None:
        parcels = [tier.send(numbers(seed)) for seed in range(3)]
        parcels[0].sent()
        raise ValueError("the user's own")

    works(tier)
    before = tier.file_bytes
    for _ in range(30):
        with pytest.raises(ValueError, match="the user's own"):
            step()
    gc.collect()
    works(tier)
    assert tier.file_bytes == before


def test_a_tier_closed_under_a_parcel_says_so_and_opens_again(tier: DiskTier) -> None:
    parcel = tier.send(numbers(), NAME)
    parcel.sent()
    tier.close()
    with pytest.raises(TransferFailed, match=r"could not bring back input of .*: the tier was closed meanwhile"):
        parcel.fetch()
    works(tier)


def test_closing_wakes_those_who_wait(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch, "pwrite")
    first, second = tier.send(numbers()), tier.send(numbers(1), NAME)
    assert held.begun.wait(60)
    threading.Timer(0.1, held.go.set).start()
    tier.close()
    with pytest.raises(TransferFailed, match=r"could not put away input of .*: the tier was closed meanwhile"):
        second.sent()
    assert torch.equal(second.fetch().view(torch.float32), numbers(1)), "it is still here"
    first.sent()


def in_child(action: Callable[[], None]) -> int:
    """The exit code of a forked child that does something: 0 if it worked."""
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            action()
            code = 0
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_file_of_its_own_and_cannot_use_its_parents(tier: DiskTier) -> None:
    away, sending = tier.send(numbers(), NAME), tier.send(numbers(1), NAME)
    away.sent()
    assert tier._spill is not None
    file = tier._spill.file._file
    inode = os.fstat(file).st_ino

    def child() -> None:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)  # so the parent's space is free when the parent ends
        with pytest.raises(TransferFailed, match=r"it was sent by process \d+, and this is a fork of it"):
            away.fetch()
        assert tier.away_bytes == 0 and tier.traffic.bytes_out == 0
        works(tier)
        assert tier._spill is not None and os.fstat(tier._spill.file._file).st_ino != inode
        sending.release()
        away.release()

    assert in_child(child) == 0
    for seed, parcel in enumerate((away, sending)):
        if parcel is sending:
            parcel.sent()
        parcel.fetch()
        assert torch.equal(parcel.fetched().view(torch.float32), numbers(seed))
    works(tier)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_no_request_is_in_flight_while_the_process_forks(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    real, inside, seen = getattr(os, call), [0], []

    def counted(*args: Any) -> int:
        inside[0] += 1
        time.sleep(0.02)
        try:
            return real(*args)
        finally:
            inside[0] -= 1

    monkeypatch.setattr(os, call, counted)
    for seed in range(10):
        parcel = tier.send(numbers(seed))
        if call == "preadv":
            parcel.sent()
            parcel.fetch()
        until(lambda: inside[0] > 0)
        pid = os.fork()
        if pid == 0:
            os._exit(inside[0])
        seen.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        if call == "pwrite":
            parcel.sent()
            parcel.fetch()
        assert torch.equal(parcel.fetched().view(torch.float32), numbers(seed))
    assert seen == [0] * 10


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_data_loader_that_forks_in_the_middle_of_a_step(tier: DiskTier) -> None:
    parcels = [tier.send(numbers(seed)) for seed in range(4)]
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    assert [batch[0, 0].item() for batch in loader] == [0.0, 2.0, 4.0, 6.0]
    for seed, parcel in enumerate(parcels):
        parcel.sent()
        parcel.fetch()
        assert torch.equal(parcel.fetched().view(torch.float32), numbers(seed))
    works(tier)


@pytest.fixture
def all_to_disk(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> str:
    """A policy that puts everything away that may be."""

    def decide(step: Any, costs: Costs, budget: int | None) -> Decisions:
        reruns = Reruns(step)
        return {s: Offload("disk") for s in reruns.owned if not reruns.why_not_offload(s)}

    monkeypatch.setitem(TIERS, "disk", tier)
    monkeypatch.setitem(POLICIES, "all-to-disk", Policy("all-to-disk", "everything", decide))
    return "all-to-disk"


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_a_model_whose_disk_fails_trains_on_when_it_works_again(
    tier: DiskTier, all_to_disk: str, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Sigmoid(), nn.Linear(512, 8))

    plain, fitted = net(), memfit.fit(net(), policy=all_to_disk)
    batch = torch.randn(32, 64)

    def step(model: nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        model(batch).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = step(plain)
    assert all(map(torch.equal, step(fitted), expected))
    assert tier.traffic.bytes_out == tier.traffic.bytes_in > 0
    with monkeypatch.context() as patch:
        fail(patch, call, errno.EIO)
        with pytest.raises(TransferFailed, match=os.strerror(errno.EIO)):
            step(fitted)
    gc.collect()
    assert tier.away_bytes == 0
    fitted(batch)  # backward never called
    assert all(map(torch.equal, step(fitted), expected))
    gc.collect()
    assert tier.away_bytes == 0
