"""What every tier promises: whole storages go out and come back, or stay where they are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memfit.tiers.disk import DiskSettings, DiskTier
from memfit.tiers.null import NullTier
from memfit.tiers.registry import TIERS
from memfit.tiers.tier import Tier
from memfit.torch_internals import StorageWatch


@pytest.fixture(params=["null", "disk", "disk, checksums"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    if request.param == "null":
        yield NullTier()
        return
    tier = DiskTier(DiskSettings(directory=str(tmp_path), checksums="checksums" in request.param))
    yield tier
    tier.close()


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def view_on(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=like.dtype)
    return empty.set_(whole.untyped_storage(), like.storage_offset(), like.shape, like.stride())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_storage_comes_back_whole_and_views_can_be_rebuilt_on_it(tier: Tier, dtype: torch.dtype) -> None:
    base = numbers(40, 30, 20, dtype=dtype)
    view = base[3:17].transpose(0, 2)
    expected, layout = view.clone(), view[:]
    parcel = tier.send(view, "a view")
    parcel.sent()
    flat = parcel.fetch()
    assert flat.dtype is torch.uint8 and flat.shape == (base.untyped_storage().nbytes(),)
    whole = parcel.fetched()
    assert whole.data_ptr() == flat.data_ptr()
    assert whole.data_ptr() != base.data_ptr()
    assert torch.equal(view_on(whole, layout), expected)


def test_the_storage_is_let_go_at_sent_and_the_copy_at_the_reader(tier: Tier) -> None:
    tensor = numbers(100_000)
    watch = StorageWatch(tensor)
    parcel = tier.send(tensor)
    del tensor
    assert watch.is_alive, "the parcel holds it until it is sent"
    parcel.sent()
    assert not watch.is_alive
    watch = StorageWatch(parcel.fetch())
    assert watch.is_alive
    back = parcel.fetched()
    assert watch.is_alive
    del back
    assert not watch.is_alive, "the parcel holds nothing any more"


def test_fetched_before_it_was_sent_it_is_used_where_it_is(tier: Tier) -> None:
    tensor = numbers(100_000)
    watch = StorageWatch(tensor)
    parcel = tier.send(tensor)
    assert parcel.fetch().data_ptr() == tensor.data_ptr()
    back = parcel.fetched()
    assert back.data_ptr() == tensor.data_ptr() and torch.equal(back.view(torch.float32), tensor)
    del tensor, back
    assert not watch.is_alive


@pytest.mark.parametrize("stage", ["sending", "away", "fetching", "back", "stayed"])
def test_a_parcel_can_be_released_anywhere_and_twice(tier: Tier, stage: str) -> None:
    tensor = numbers(100_000)
    parcel = tier.send(tensor)
    if stage in ("away", "fetching", "back"):
        parcel.sent()
    if stage in ("fetching", "back", "stayed"):
        parcel.fetch()
    if stage == "back":
        parcel.fetched()
    parcel.release()
    parcel.release()
    with pytest.raises(AssertionError):
        parcel.fetched()
    if isinstance(tier, DiskTier):
        tier.close()  # ends what is in flight
    watch = StorageWatch(tensor)
    del tensor
    assert not watch.is_alive


def test_parcels_out_of_order_are_refused(tier: Tier) -> None:
    parcel = tier.send(numbers(10))
    parcel.sent()
    with pytest.raises(AssertionError):
        parcel.sent()
    parcel.fetch()
    with pytest.raises(AssertionError):
        parcel.sent()
    parcel.fetched()
    with pytest.raises(AssertionError):
        parcel.fetched()


def test_empty_storages_travel_too(tier: Tier) -> None:
    parcel = tier.send(torch.empty(0, 5))
    parcel.sent()
    parcel.fetch()
    assert parcel.fetched().numel() == 0


def test_importing_memfit_makes_no_file_folder_or_thread(tmp_path: Path) -> None:
    assert isinstance(TIERS["disk"], DiskTier)
    source = (
        "import threading, memfit\n"
        "from memfit.tiers.registry import TIERS\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "TIERS['disk'].reserve(0)\n"
        "assert TIERS['disk'].is_direct is None and TIERS['disk'].file_bytes == 0\n"
    )
    spill = tmp_path / "spill"
    environment = {"MEMFIT_SPILL_DIR": str(spill), "PATH": "", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", source], check=True, env=environment)
    assert not spill.exists()
