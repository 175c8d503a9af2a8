"""A fitted model whose tensors are on disk when things go wrong: it says what, trains on, and leaves nothing behind."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
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
from memfit.tiers.disk import DiskSettings, DiskTier
from memfit.tiers.registry import TIERS
from memfit.tiers.tier import TierRefused, TransferFailed


def everything(step: Any, costs: Costs, budget: int | None) -> Decisions:
    reruns = Reruns(step)
    return {s: Offload("disk") for s in reruns.owned if not reruns.why_not_offload(s)}


@pytest.fixture
def tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DiskTier]:
    """The disk tier of this test alone, and a policy that puts everything there."""
    made = DiskTier(DiskSettings(directory=str(tmp_path / "spill")))
    monkeypatch.setitem(TIERS, "disk", made)
    monkeypatch.setitem(POLICIES, "all-to-disk", Policy("all-to-disk", "everything", everything))
    yield made
    made.close()
    assert os.listdir(tmp_path / "spill") == [] if (tmp_path / "spill").exists() else True


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 256)
        self.second = nn.Linear(256, 256)
        self.last = nn.Linear(256, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.sigmoid(self.second(torch.tanh(self.first(x)))))


BATCH = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model(BATCH).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_as_ever(model: nn.Module, tier: DiskTier) -> None:
    """It trains like eager, and then nothing is on disk."""
    assert all(map(torch.equal, gradients(model), gradients(Net())))
    gc.collect()
    assert tier.away_bytes == 0


def test_a_backward_that_is_never_called(tier: DiskTier) -> None:
    model = memfit.fit(Net(), policy="all-to-disk")
    for _ in range(20):
        model(BATCH)
        gc.collect()
        assert tier.away_bytes == 0
    size = tier.file_bytes
    outputs = [model(BATCH) for _ in range(3)]  # three steps under way at once
    assert tier.away_bytes > 0
    outputs[1].square().sum().backward()
    del outputs
    assert_as_ever(model, tier)
    assert tier.file_bytes <= 4 * size


def test_an_exception_between_forward_and_backward(tier: DiskTier) -> None:
    model = memfit.fit(Net(), policy="all-to-disk")

    def step() -> None:
        loss = model(BATCH).square().sum()
        raise ZeroDivisionError(str(loss.requires_grad))

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            step()
    assert_as_ever(model, tier)


@pytest.mark.parametrize("where", ["first", "second", "last"])
def test_control_c_in_the_middle_of_backward(tier: DiskTier, where: str) -> None:
    model = memfit.fit(Net(), policy="all-to-disk")

    def interrupt(gradient: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    handle = model.get_submodule(where).weight.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(BATCH).square().sum().backward()
    handle.remove()
    assert_as_ever(model, tier)


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_a_failing_disk_is_blamed_by_name(tier: DiskTier, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    model = memfit.fit(Net(), policy="all-to-disk")
    assert_as_ever(model, tier)
    before = [p.clone() for p in model.parameters()]

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, broken)
        with pytest.raises(TransferFailed) as caught:
            gradients(model)
    assert re.search(r"made by aten\.addmm\.default in module '(first|second)', 32,768 bytes", str(caught.value))
    assert os.strerror(errno.EIO) in str(caught.value)
    assert all(map(torch.equal, model.parameters(), before))
    del caught
    assert_as_ever(model, tier)


def test_a_plan_that_the_tier_has_no_room_for_is_refused_before_it_runs(tier: DiskTier) -> None:
    tier.configure(DiskSettings(directory=tier.settings.directory, limit_bytes=1000))
    model = memfit.fit(Net(), policy="all-to-disk")
    with pytest.raises(TierRefused, match=r"the plan puts [\d,]+ bytes on disk at once.*may take 1,000"):
        model(BATCH)
    assert tier.file_bytes == 0 and all(p.grad is None for p in model.parameters())
    tier.configure(DiskSettings(directory=tier.settings.directory))
    assert_as_ever(model, tier)


def test_checksums_are_on_in_debug_and_find_a_flipped_byte(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    model = memfit.fit(Net(), policy="all-to-disk", debug=True)
    assert_as_ever(model, tier)
    assert tier.settings.checksums
    real = os.preadv

    def flipped(file: int, buffers: list[Any], offset: int, *rest: Any) -> int:
        num_bytes = real(file, buffers, offset, *rest)
        buffers[0][5000] ^= 1
        return num_bytes

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", flipped)
        with pytest.raises(TransferFailed, match="made by aten"):
            gradients(model)
    assert_as_ever(model, tier)


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_data_loader_that_forks_between_forward_and_backward(tier: DiskTier) -> None:
    model = memfit.fit(Net(), policy="all-to-disk")
    model.zero_grad()
    loss = model(BATCH).square().sum()
    loader = torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    assert [batch[0, 0].item() for batch in loader] == [0.0, 2.0]
    loss.backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, found, gradients(Net())))
    assert_as_ever(model, tier)


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import torch, memfit
from test_offload_faults import BATCH, Net, everything
from memfit.plan.policies.policy import Policy
from memfit.plan.policies.registry import POLICIES
POLICIES["all-to-disk"] = Policy("all-to-disk", "", everything)
model = memfit.fit(Net(), policy="all-to-disk")
loss = model(BATCH).square().sum()
print("away", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_killed_in_the_middle_of_a_step_leaves_no_file(tmp_path: Path) -> None:
    source = KILLED.format(tests=str(Path(__file__).parent))
    environment = os.environ | {"MEMFIT_SPILL_DIR": str(tmp_path / "spill")}
    done = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL and "away" in done.stdout, done.stderr
    assert os.listdir(tmp_path / "spill") == []
