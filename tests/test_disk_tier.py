"""The disk tier: every alignment, size and mode comes back bit for bit, in a file that does not grow."""

from __future__ import annotations

import errno
import gc
import itertools
import logging
import mmap
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from memfit.errors import BadOption
from memfit.resident import resident_bytes
from memfit.tiers import spill, spill_file
from memfit.tiers.disk import DiskSettings, DiskTier
from memfit.tiers.pages import empty_pages
from memfit.tiers.room import Range, Room
from memfit.tiers.tier import Parcel, TierRefused

MIB = 2**20


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., DiskTier]]:
    tiers: list[DiskTier] = []

    def make(**options: Any) -> DiskTier:
        tiers.append(DiskTier(DiskSettings(**{"directory": str(tmp_path), **options})))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


def at_offset(offset: int, num_bytes: int, seed: int = 0) -> tuple[torch.Tensor, mmap.mmap]:
    """A storage that begins so far into a page, and the pages around it."""
    pages = mmap.mmap(-1, (offset + num_bytes) // 4096 * 4096 + 4096)
    pages[:] = random.Random(seed).randbytes(len(pages))
    return torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes, offset=offset), pages


def back(parcel: Parcel) -> torch.Tensor:
    parcel.sent()
    parcel.fetch()
    return parcel.fetched()


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("direct", [None, False])
def test_any_alignment_and_size_comes_back_at_the_same_place_in_its_page(
    make: Callable[..., DiskTier],
    monkeypatch: pytest.MonkeyPatch,
    direct: bool | None,
    num_threads: int,
    checksums: bool,
) -> None:
    monkeypatch.setattr(spill, "REQUEST_BYTES", 3 * 4096)  # so that small tensors take several requests
    tier = make(direct=direct, num_threads=num_threads, checksums=checksums)
    for offset in (0, 1, 64, 4095):
        for num_bytes in (1, 63, 4095, 4096, 4097, 3 * 4096, 100_003):
            tensor, pages = at_offset(offset, num_bytes, seed=num_bytes)
            expected, around = tensor.clone(), pages[:]
            found = back(tier.send(tensor))
            assert torch.equal(found, expected), (offset, num_bytes)
            assert found.data_ptr() % 4096 == offset
            assert pages[:] == around, "only read"
            used = -(-(offset + num_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
            assert used - num_bytes <= tier.buffer_bytes(num_bytes) < 2 * max(4096, mmap.PAGESIZE)
    assert tier.away_bytes == 0


def test_neighbours_in_the_edge_pages_may_change_while_a_tensor_is_written(make: Callable[..., DiskTier]) -> None:
    tier = make(checksums=True)
    tensor, pages = at_offset(100, 50_000)
    expected, stop = tensor.clone(), threading.Event()

    def scribble() -> None:
        while not stop.is_set():
            pages[:100] = os.urandom(100)
            pages[50_100:50_200] = os.urandom(100)

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        for _ in range(50):
            assert torch.equal(back(tier.send(tensor)), expected)
    finally:
        stop.set()
        thread.join()


def test_the_file_has_no_name_and_nobody_else_can_read_it(make: Callable[..., DiskTier], tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    tier = make(directory=str(folder))
    parcel = tier.send(torch.ones(1000))
    assert tier._spill is not None
    status = os.fstat(tier._spill.file._file)
    assert status.st_nlink == 0 and stat.S_IMODE(status.st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and not list(folder.iterdir())
    assert torch.equal(back(parcel).view(torch.float32), torch.ones(1000))


def test_file_systems_without_nameless_files_get_one_that_is_unlinked_at_once(
    make: Callable[..., DiskTier], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    tier = make()
    tensor = torch.randn(5000)
    parcel = tier.send(tensor)
    assert not list(tmp_path.iterdir())
    assert torch.equal(back(parcel).view(torch.float32), tensor)
    assert tier._spill is not None and os.fstat(tier._spill.file._file).st_nlink == 0


def test_the_folder_is_the_one_named_then_the_environments_then_the_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MEMFIT_SPILL_DIR", raising=False)
    assert spill_file.spill_directory() == tmp_path / "cache" / f"spill-{os.getuid()}"
    monkeypatch.setenv("MEMFIT_SPILL_DIR", "/elsewhere")
    assert spill_file.spill_directory() == Path("/elsewhere")
    assert spill_file.spill_directory("/named") == Path("/named")


def refuse_to_switch(file: int, on: bool) -> bool:
    return not on


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="direct requests are Linux's")
def test_a_file_system_that_refuses_direct_requests_is_used_through_the_page_cache(
    make: Callable[..., DiskTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill_file, "_set_direct", refuse_to_switch)
    tier = make()
    tensor = torch.randn(50_000)
    assert torch.equal(back(tier.send(tensor)).view(torch.float32), tensor)
    assert tier.is_direct is False
    with pytest.raises(TierRefused, match=r"takes no direct requests. Set direct=None"):
        make(direct=True).send(tensor)


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="direct requests are Linux's")
@pytest.mark.parametrize("num_threads", [1, 2])
def test_refused_at_the_first_write_it_falls_back_and_says_so_once(
    make: Callable[..., DiskTier], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, num_threads: int
) -> None:
    import fcntl

    real, refused = os.pwrite, []

    def refuse(file: int, data: Any, start: int) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(start)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(file, data, start)

    monkeypatch.setattr(os, "pwrite", refuse)
    monkeypatch.setattr(spill, "REQUEST_BYTES", 4096)
    tier = make(num_threads=num_threads)
    tier.reserve(1)
    if not tier.is_direct:
        pytest.skip("this file system refuses by itself")
    tensor = torch.randn(50_000)
    with caplog.at_level(logging.INFO, logger="memfit"):
        assert torch.equal(back(tier.send(tensor)).view(torch.float32), tensor)
    assert refused and tier.is_direct is False
    assert 1 <= sum("goes through the page cache" in r.getMessage() for r in caplog.records) <= num_threads


def test_a_folder_in_memory_is_refused_unless_somebody_asked_for_it(
    make: Callable[..., DiskTier], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spill_file, "_file_system", lambda directory: "tmpfs")
    monkeypatch.delenv("MEMFIT_SPILL_DIR", raising=False)
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(TierRefused, match=r"is tmpfs, a file system in memory: .* Name a folder on a disk"):
        make(directory=None).send(torch.ones(1))
    for _ in range(2):
        assert back(make().send(torch.ones(1000))).numel() == 4000
    assert sum("is tmpfs" in r.getMessage() for r in caplog.records if r.levelno == logging.WARNING) == 1


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="there is no /dev/shm")
def test_file_systems_in_memory_are_recognised(tmp_path: Path) -> None:
    assert spill_file._file_system(Path("/dev/shm")) == "tmpfs"


def test_reserve_sets_the_space_aside_at_once(make: Callable[..., DiskTier]) -> None:
    tier = make()
    tier.reserve(8 * MIB)
    assert tier._spill is not None and tier.file_bytes >= 8 * MIB
    status = os.fstat(tier._spill.file._file)
    assert status.st_size >= 8 * MIB and status.st_blocks * 512 >= 8 * MIB
    before = tier.file_bytes
    parcels = [tier.send(torch.zeros(MIB // 4)) for _ in range(8)]
    tier.reserve(4 * MIB)
    assert tier.file_bytes == before, "what was reserved is enough, edges included"
    assert [bool(back(parcel).any()) for parcel in parcels] == [False] * 8


def test_more_than_the_disk_has_is_refused_before_the_plan(make: Callable[..., DiskTier]) -> None:
    tier = make()
    with pytest.raises(TierRefused, match=r"puts 1,152,921,504,606,846,976 bytes on disk at once, and .* has no room"):
        tier.reserve(2**60)
    tier.reserve(1000)
    assert torch.equal(back(tier.send(torch.arange(9))).view(torch.int64), torch.arange(9))


def test_the_limit_is_in_bytes_of_tensors(make: Callable[..., DiskTier]) -> None:
    tier = make(limit_bytes=10_000)
    with pytest.raises(TierRefused, match=r"puts 10,001 bytes on disk at once, and the disk tier may take 10,000"):
        tier.reserve(10_001)
    tier.reserve(10_000)
    parcels = [tier.send(torch.zeros(1000, dtype=torch.uint8)) for _ in range(10)]
    name = "input of aten.relu in module 'features.3'"
    with pytest.raises(TierRefused) as caught:
        tier.send(torch.zeros(1, dtype=torch.uint8), name)
    assert str(caught.value).startswith(
        f"no room for {name}, 1 bytes: the disk tier may take 10,000 bytes, of which 10,000 are taken. Raise limit"
    )
    parcels.pop()
    tier.send(torch.zeros(1000, dtype=torch.uint8))


def test_traffic_counts_what_went_and_came(make: Callable[..., DiskTier]) -> None:
    tier = make()
    sizes = (1000, 5000, 64)
    parcels = [tier.send(torch.zeros(size, dtype=torch.uint8)) for size in sizes]
    for parcel in parcels:
        parcel.sent()
    assert (tier.traffic.bytes_out, tier.traffic.bytes_in, tier.away_bytes) == (6064, 0, 6064)
    for parcel in parcels:
        parcel.fetch()
        parcel.fetched()
    assert (tier.traffic.bytes_out, tier.traffic.bytes_in, tier.away_bytes) == (6064, 6064, 0)


def test_waiting_is_counted_and_sending_does_not_wait(
    make: Callable[..., DiskTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, go = os.pwrite, threading.Event()

    def held_up(file: int, data: Any, start: int) -> int:
        go.wait()
        return real(file, data, start)

    monkeypatch.setattr(os, "pwrite", held_up)
    tier = make()
    parcel = tier.send(torch.ones(100))
    assert tier.traffic.waited_s == 0
    threading.Timer(0.2, go.set).start()
    parcel.sent()
    assert 0.1 < tier.traffic.waited_s < 60


def test_settings_change_between_steps_only(make: Callable[..., DiskTier], tmp_path: Path) -> None:
    tier = make()
    parcel = tier.send(torch.ones(100))
    tier.configure(DiskSettings(directory=str(tmp_path), checksums=True))
    with pytest.raises(BadOption, match="400 bytes are away in this one"):
        tier.configure(DiskSettings(directory=str(tmp_path / "other")))
    assert torch.equal(back(parcel).view(torch.float32), torch.ones(100))
    tier.configure(DiskSettings(directory=str(tmp_path / "other"), num_threads=2))
    assert torch.equal(back(tier.send(torch.ones(100))).view(torch.float32), torch.ones(100))
    assert (tmp_path / "other").is_dir()
    with pytest.raises(BadOption, match="at least one thread"):
        DiskSettings(num_threads=0)
    with pytest.raises(BadOption, match="not negative"):
        DiskSettings(limit_bytes=-1)


def test_two_hundred_rounds_leave_nothing_behind(make: Callable[..., DiskTier]) -> None:
    tier = make(num_threads=2, checksums=True)
    tensors = [torch.randn(size) for size in (300_000, 50_000, 1_000_000, 7)]

    def step() -> None:
        parcels = [tier.send(tensor.clone()) for tensor in tensors]
        for parcel in parcels:
            parcel.sent()
        for tensor, parcel in zip(reversed(tensors), reversed(parcels), strict=True):
            parcel.fetch()
            assert torch.equal(parcel.fetched().view(torch.float32), tensor)

    def held() -> tuple[int, int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count(), tier.file_bytes

    for _ in range(20):
        step()
    gc.collect()
    before, resident = held(), resident_bytes()
    for _ in range(200):
        step()
    gc.collect()
    assert held() == before
    assert resident_bytes() - resident < 2 * MIB, "one leaked tensor in each round would be 1 GB"
    assert tier._spill is not None and os.fstat(tier._spill.file._file).st_size == tier.file_bytes
    assert tier.traffic.bytes_in == tier.traffic.bytes_out == 220 * 4 * sum(t.numel() for t in tensors)


def test_what_comes_back_is_private_memory_that_returns_with_its_reader(make: Callable[..., DiskTier]) -> None:
    tier = make()
    parcel = tier.send(torch.ones(16 * MIB // 4))
    parcel.sent()
    gc.collect()
    before = resident_bytes()
    parcel.fetch()
    found = parcel.fetched()
    assert resident_bytes() - before > 14 * MIB
    address = found.data_ptr()
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    (mode,) = [m for r, m, *_ in lines if int(r.split("-")[0], 16) <= address < int(r.split("-")[1], 16)]
    assert mode == "rw-p"
    del found, parcel
    assert resident_bytes() - before < MIB


def test_tensors_of_other_devices_are_refused(make: Callable[..., DiskTier]) -> None:
    with pytest.raises(TierRefused, match="takes tensors from the CPU's memory, not from meta"):
        make().send(torch.empty(10, device="meta"), "x")


def test_tiers_that_nobody_holds_give_back_file_and_threads(tmp_path: Path) -> None:
    def held() -> tuple[int, set[threading.Thread]]:
        return len(os.listdir("/proc/self/fd")), {t for t in threading.enumerate() if t.name.startswith("memfit-disk")}

    gc.collect()
    num_files, threads = held()
    tier = DiskTier(DiskSettings(directory=str(tmp_path)))
    parcel = tier.send(torch.ones(10))
    parcel.sent()
    (ours,) = held()[1] - threads
    del tier
    assert back_after_sent(parcel).numel() == 40, "the parcel keeps what it needs"
    del parcel
    ours.join(timeout=10)
    assert held() == (num_files, threads)


def back_after_sent(parcel: Parcel) -> torch.Tensor:
    parcel.fetch()
    return parcel.fetched()


@settings(deadline=None, max_examples=150, phases=[Phase.explicit, Phase.generate])
@given(st.lists(st.one_of(st.integers(1, 40), st.floats(0, 1, exclude_max=True)), max_size=60))
def test_room_never_gives_a_byte_out_twice_nor_grows_without_need(actions: list[int | float]) -> None:
    """An integer takes so many units, a fraction gives back one of those that are out."""
    room, out, most = Room(), [], 0
    for action in actions:
        if isinstance(action, float):
            if out:
                room.give_back(out.pop(int(action * len(out))))
        else:
            if room.take(room.free_bytes + 1) is not None:
                raise AssertionError("more than there is")
            most = max(most, sum(r.num_bytes for ranges in out for r in ranges) + action)
            room.grow(most)
            taken = room.take(action)
            assert taken is not None, "scattered holes are enough"
            assert sum(r.num_bytes for r in taken) == action
            out.append(taken)
        given_out = sorted((r.start, r.end) for ranges in out for r in ranges)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(given_out))
        assert not given_out or given_out[-1][1] <= room.capacity_bytes
        assert room.free_bytes == room.capacity_bytes - sum(end - start for start, end in given_out)
    for ranges in out:
        room.give_back(ranges)
    whole = room.take(room.capacity_bytes)
    assert whole in ((), (Range(0, room.capacity_bytes),)), "holes that touch are one"


@settings(deadline=None, max_examples=40, phases=[Phase.explicit, Phase.generate])
@given(st.integers(0, 2**32), st.integers(1, 2), st.booleans(), st.booleans())
def test_any_order_of_what_a_program_may_do_brings_back_the_right_bytes(
    tmp_path_factory: pytest.TempPathFactory, seed: int, num_threads: int, checksums: bool, direct: bool
) -> None:
    rng = random.Random(seed)
    folder = str(tmp_path_factory.getbasetemp() / "orders")
    options = DiskSettings(
        directory=folder, num_threads=num_threads, checksums=checksums, direct=None if direct else False
    )
    tier = DiskTier(options)
    parcels: list[tuple[str, Parcel, torch.Tensor]] = []
    for _ in range(60):
        index = rng.randrange(len(parcels) + 1)
        if index == len(parcels):
            tensor, _ = at_offset(rng.randrange(4096), rng.choice([1, 500, 5000, 60_000]), seed=rng.randrange(99))
            parcels.append(("sending", tier.send(tensor), tensor.clone()))
        else:
            stage, parcel, expected = parcels.pop(index)
            if rng.random() < 0.1:
                if rng.random() < 0.5:
                    parcel.release()
                continue
            if stage == "sending" and rng.random() < 0.7:
                parcel.sent()
                parcels.append(("away", parcel, expected))
            elif stage in ("sending", "away"):
                parcel.fetch()
                parcels.append(("fetching", parcel, expected))
            else:
                assert torch.equal(parcel.fetched(), expected)
    for stage, parcel, expected in parcels:
        if stage != "fetching":
            parcel.fetch()
        assert torch.equal(parcel.fetched(), expected)
    parcel = None
    end = time.monotonic() + 30
    while tier.away_bytes:  # what was dropped in flight
        assert time.monotonic() < end
    tier.close()


def test_empty_pages_begin_where_they_are_told() -> None:
    pages = empty_pages(10_000, 17)
    assert pages.numel() == 10_000 and pages.data_ptr() % 4096 == 17 and pages.storage_offset() == 0


def run(source: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True, timeout=120)


def test_a_real_limit_of_the_system_on_files(tmp_path: Path) -> None:
    done = run(
        """
import resource, torch
from memfit.tiers.registry import TIERS
from memfit.tiers.tier import TierRefused
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000_000, 30_000_000))
tier = TIERS['disk']
for ask in (lambda: tier.reserve(40_000_000), lambda: tier.send(torch.zeros(10_000_000), 'the weights')):
    try:
        ask()
    except TierRefused as error:
        print(error)
parcel = tier.send(torch.arange(1_000_000))
parcel.sent()
parcel.fetch()
assert torch.equal(parcel.fetched().view(torch.int64), torch.arange(1_000_000))
""",
        MEMFIT_SPILL_DIR=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("the plan puts 40,000,000 bytes on disk at once, and") and "File too large" in first
    assert second.startswith("no room for the weights, 40,000,000 bytes, in") and "File too large" in second
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tmpfile", [True, False])
def test_a_killed_process_leaves_no_file(tmp_path: Path, tmpfile: bool) -> None:
    source = f"""
import errno, os, signal, torch
real = os.open
def old_system(path, flags, *rest, **options):
    if flags & os.O_TMPFILE == os.O_TMPFILE:
        raise OSError(errno.EOPNOTSUPP, 'Operation not supported')
    return real(path, flags, *rest, **options)
if not {tmpfile}:
    os.open = old_system
from memfit.tiers.registry import TIERS
parcels = [TIERS['disk'].send(torch.ones(1_000_000)) for _ in range(4)]
parcels[0].sent()
print(TIERS['disk'].file_bytes, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = run(source, MEMFIT_SPILL_DIR=str(tmp_path / "spill"))
    assert done.returncode == -signal.SIGKILL and int(done.stdout) > 4_000_000, done.stderr
    assert (tmp_path / "spill").is_dir() and not list((tmp_path / "spill").iterdir())


def test_a_process_that_ends_with_transfers_in_flight_ends_in_peace(tmp_path: Path) -> None:
    source = """
import torch
from memfit.tiers.registry import TIERS
parcels = [TIERS['disk'].send(torch.ones(4_000_000)) for _ in range(4)]
"""
    done = run(source, MEMFIT_SPILL_DIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(tmp_path.iterdir())
