"""`memfit demo`: training within a limit on the process, for real once, and what is said when a part of it fails."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from memfit.cli import demo
from memfit.cli.main import main
from memfit.report import limited
from memfit.report.limited import LimitedTraining, Trained

# Much to keep and little to compute: what keeping needs is far above what a process takes besides.
NETWORK = """
import torch
from torch import nn

def deep(batch=4):
    layers = [nn.BatchNorm1d(256), *(nn.Tanh() for _ in range(40))]
    return nn.Sequential(*layers), torch.randn(batch, 256, 4096), lambda y: y.square().sum() / 1000

def tiny():
    return nn.Linear(4, 2), torch.randn(3, 4), lambda y: y.sum()
"""
OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
LOSSES = tuple(loss.hex() for loss in (3.5, 2.25, 1.125, 1.0))
PLAN = {
    "policy": "auto",
    "note": "12 plans tried",
    "decisions": {"keep": {"count": 3, "bytes": 2 << 20}, "recompute": {"count": 2, "bytes": 9 << 20}},
    "budget_bytes": 300 << 20,
    "peak_bytes": 290 << 20,
    "keep_peak_bytes": 600 << 20,
    "overhead": 0.031,
    "lower_bound_overhead": 0.029,
    "plan_s": 0.5,
    "num_fallbacks": 0,
}
EAGER = Trained(250 << 20, 700 << 20, LOSSES, (1.5, 1.1, 1.0, 1.2), weights="abc")
LIMITED = Trained(250 << 20, 0, (), (), error=OUT_OF_MEMORY, is_out_of_memory=True)
FITTED = Trained(250 << 20, 440 << 20, LOSSES, (9.0, 1.3, 1.2, 1.1), weights="abc", plan=PLAN)
STORY = LimitedTraining("net", 8, 64, 4, 455 << 20, 300 << 20, EAGER, LIMITED, FITTED)


on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of processes are Linux's")


@pytest.fixture(autouse=True)
def networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo_networks.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "demo_networks", raising=False)


@pytest.mark.slow
@on_linux
def test_eager_runs_out_of_memory_and_memfit_trains(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["demo", "--network", "demo_networks:deep", "--batch", "3", "--steps", "3", "--threads", "1", "--json"]
    code = main(argv)
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert code == 0 and found["holds"], (found["failures"], shown.err)
    assert "can't allocate memory" in found["eager_limited"]["error"] and not found["eager_limited"]["losses"]
    assert found["memfit_limited"]["losses_hex"] == found["eager"]["losses_hex"]
    assert found["memfit_limited"]["weights_sha256"] == found["eager"]["weights_sha256"]
    assert len(set(found["eager"]["losses_hex"])) > 1, "the weights are trained"
    assert found["allowance_bytes"] < 0.66 * found["eager"]["peak_bytes"]
    assert found["budget_bytes"] < found["allowance_bytes"]
    assert 0 < found["memfit_limited"]["peak_bytes"] < 0.75 * found["eager"]["peak_bytes"]
    assert found["plan"]["peak_bytes"] <= found["budget_bytes"] < found["plan"]["keep_peak_bytes"]
    assert sum(row["count"] for row in found["plan"]["decisions"].values()) > 40
    assert found["time_ratio"] > 0
    for name in ("eager", "memfit_limited"):
        rest = found[name]["between_steps"]
        # The batch; weights, gradients and statistics; the number of batches so far.
        assert rest["tensor_bytes"] == 4 * 3 * 256 * 4096 + 4 * 6 * 256 + 8
        assert rest["tensor_bytes"] <= rest["resident_bytes"] <= found[name]["peak_bytes"]
        assert 0 < rest["data_bytes"] < found["allowance_bytes"]


@on_linux
def test_the_limit_is_real() -> None:
    request = {"network": "demo_networks:deep", "batch": 3, "image": None, "steps": 1, "seed": 0, "threads": 1}
    refused = limited._train(request | {"allowance_bytes": 64 << 20, "fit": None})
    assert refused.is_out_of_memory and "DefaultCPUAllocator: can't allocate memory" in (refused.error or "")
    assert refused.losses == () and refused.baseline_bytes > 0


@on_linux
def test_a_network_too_small_to_limit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(limited, "_train", lambda request: dataclasses.replace(EAGER, peak_bytes=100 << 20))
    assert main(["demo", "--network", "demo_networks:tiny"]) == 1
    said = capsys.readouterr().err
    assert "demo_networks:tiny needs 104,857,600 bytes in eager; 65% of that is less than the" in said
    assert "Take a larger batch, image or network" in said


@on_linux
def test_all_three_get_what_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def train(request: dict[str, Any]) -> Trained:
        asked.append(request)
        return (EAGER, LIMITED, FITTED, FITTED)[len(asked) - 1]

    monkeypatch.setattr(limited, "_train", train)
    found = limited.train_limited("net", batch=8, image=64, steps=4, share=0.65, threads=2)
    assert not found.failures and (found.eager, found.eager_limited, found.fitted) == (EAGER, LIMITED, FITTED)
    allowance = int(0.65 * EAGER.peak_bytes)
    assert [request["allowance_bytes"] for request in asked] == [None, allowance, None, allowance]
    assert [request["fit"] for request in asked] == [None, None, *[{"budget": found.budget_bytes}] * 2]
    assert asked.pop(2)["steps"] == 1, "what ops cost is measured without the limit"
    assert 0 < found.budget_bytes < allowance == found.allowance_bytes
    same = {"network": "net", "batch": 8, "image": 64, "steps": 4, "seed": 0, "threads": 2}
    assert all(request | same == request for request in asked)


def test_the_story_for_people(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "train_limited", lambda *args, **options: STORY)
    assert main(["demo"]) == 0
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines() if line.startswith(("eager, ", "memfit, "))]
    assert rows[0][:6] == ["eager,", "no", "limit", "700.0", "MiB", "1.100"]
    assert rows[1][:6] == ["eager,", "limited", "out", "of", "memory", "none"]
    assert rows[2][2:6] == ["440.0", "MiB", "1.150", "s"] and rows[2][6:] == rows[0][7:]
    assert rows[0][7:] == ["3.500000", "2.250000", "1.125000", "1.000000"]
    assert OUT_OF_MEMORY in text and "that is 65% of what eager needs" in text
    assert "policy auto: planned peak 290.0 MiB of everything, where keeping all needs 600.0 MiB" in text
    assert "no plan is below +2.9%" in text
    assert any(line.split() == ["recompute", "2", "9.0", "MiB"] for line in text.splitlines())
    assert "at 1.05 times eager's time: all 4 losses and the weights in the end are eager's, bit for bit" in text


def test_times_of_a_busy_machine_are_no_ratio(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "train_limited", lambda *args, **options: dataclasses.replace(STORY, busy_share=1.5))
    assert main(["demo"]) == 0
    text = capsys.readouterr().out
    assert "The machine was 150% busy with other things before: these times say little." in text
    assert "times eager's time" not in text and "bit for bit" in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"eager_limited": EAGER}, "eager trains within the limit too"),
        (
            {"eager_limited": dataclasses.replace(LIMITED, error="a bug", is_out_of_memory=False)},
            "fails, but not for want of memory: a bug",
        ),
        ({"fitted": dataclasses.replace(FITTED, error="DoesNotFit", losses=())}, "memfit does not train within"),
        (
            {"fitted": dataclasses.replace(FITTED, losses=(*LOSSES[:3], "0x1.0000000000001p+0"))},
            "losses of memfit DIFFER",
        ),
        ({"fitted": dataclasses.replace(FITTED, weights="abd")}, "weights after training with memfit DIFFER"),
        ({"eager": dataclasses.replace(EAGER, error="a bug")}, "eager fails even without a limit: a bug"),
    ],
)
def test_what_fails_is_said(
    changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    story = dataclasses.replace(STORY, **changes)
    assert not STORY.failures and any(said in failure for failure in story.failures)
    monkeypatch.setattr(demo, "train_limited", lambda *args, **options: story)
    assert main(["demo"]) == 1
    shown = capsys.readouterr()
    assert said in shown.err and "bit for bit" not in shown.out
    assert main(["demo", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["holds"] is False and any(said in failure for failure in found["failures"])


def test_a_process_that_dies_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "_PIN", "import os, sys; print('gone', file=sys.stderr, flush=True); os._exit(7)")
    found = limited.train_limited("demo_networks:tiny", batch=None, image=None, steps=1, share=0.5)
    assert "eager fails even without a limit: the process ended with code 7: gone" in found.failures
    assert any("not for want of memory" in failure for failure in found.failures)
