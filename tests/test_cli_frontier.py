"""`memfit frontier`: what it prints, draws and refuses."""

from __future__ import annotations

import builtins
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import memfit
from memfit.capture.rewrites import rewrite
from memfit.capture.rewrites.proof import AssumedProofs
from memfit.capture.rewrites.tight import tighten
from memfit.cli.frontier import rates
from memfit.cli.main import main
from memfit.cli.target import Pricing
from memfit.cost.costs import Costs, Link
from memfit.cost.devices import device
from memfit.cost.roofline import roofline
from memfit.plan.bound import floor
from memfit.plan.budget import Budget
from memfit.plan.policies.gist import lossless_codes
from memfit.plan.policies.registry import POLICIES
from memfit.report.frontier import Frontier, Limit, Point, exact_policies, frontier
from memfit.report.frontier_plot import plot

NETWORK = """
import torch
from torch import nn

def make(batch=4, image=16):
    layers = []
    for channels in (3, 8, 8, 8):
        layers += [nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * image * image, 5))
    return model, torch.randn(batch, 3, image, image), lambda y: y.square().mean()
"""
NET = ("frontier_networks:make", "--batch", "64", "--device", "v100-16gb")


@pytest.fixture(autouse=True)
def networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "frontier_networks.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "frontier_networks", raising=False)


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, Any]:
    code = main(["frontier", *argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_rates_say_what_compute_loses() -> None:
    pricing = SimpleNamespace(device=None)
    quiet, busy = Link("disk", "d", "d", 2e9, 3e9), Link("disk", "d", "d", 2e9, 3e9, 0.0, 0.25, 0.5)
    texts = [rates(Costs("here", {}, {"disk": link}), cast(Pricing, pricing)) for link in (quiet, busy)]
    assert texts[0].endswith("disk link 2 GB/s out, 3 back")
    assert texts[1].endswith("disk link 2 GB/s out, 3 back (25% and 50% of that time lost to compute)")


def test_every_exact_policy_and_the_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "frontier.svg"
    code, found = run_json(capsys, *NET, "--budgets", "90%,45%,70%", "--plot", str(file))
    assert code == 0 and found["plot"] == str(file)
    drawn = file.read_text()
    assert "v100-16gb" in drawn and "15.7 TFLOPS" in drawn and "<!-- auto -->" in drawn and "<!-- rotor -->" in drawn
    assert [limit["budget"] for limit in found["budgets"]] == ["45%", "70%", "90%"], "the smallest comes first"
    assert {row["policy"] for row in found["rows"]} == set(exact_policies()) == set(found["policies"])
    assert "gist-lossy" not in found["policies"] and "network-wide" not in found["policies"]
    assert found["policies"][0] == "auto" and found["device"] == "v100-16gb"
    assert "15.7 TFLOPS" in found["rates"] and "12.6" in found["rates"]
    bound = {limit["budget_bytes"]: limit["lower_bound_overhead"] for limit in found["budgets"]}
    for row in found["rows"]:
        if row["fits"]:
            assert row["peak_bytes"] <= row["budget_bytes"] and row["overhead"] >= bound[row["budget_bytes"]] - 1e-9
        assert (row["overhead"] is None) == (row["error"] is not None)
    auto = [row for row in found["rows"] if row["policy"] == "auto"]
    assert [row["fits"] for row in auto] == [True] * 3
    overheads = [row["overhead"] for row in auto]
    assert overheads == sorted(overheads, reverse=True) and overheads[0] > 0
    for ours in auto:
        for row in found["rows"]:
            if row["fits"] and row["budget"] == ours["budget"]:
                assert ours["step_s"] <= row["step_s"], row["policy"]


def test_policies_without_auto_still_have_a_bound(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, *NET, "--budgets", "60%", "--policies", "rotor, keep,rotor")
    assert code == 0 and found["policies"] == ["rotor", "keep"]
    (limit,) = found["budgets"]
    rotor, keep = found["rows"]
    assert rotor["fits"] and not keep["fits"] and keep["overhead"] == 0
    assert limit["share"] == pytest.approx(0.6, abs=1e-3) and 0 <= limit["lower_bound_overhead"] <= rotor["overhead"]


def test_the_optimizer_counts(capsys: pytest.CaptureFixture[str]) -> None:
    _, none = run_json(capsys, *NET, "--budgets", "60%", "--policies", "keep")
    _, adam = run_json(capsys, *NET, "--budgets", "60%", "--policies", "keep", "--optimizer", "adam")
    state_bytes = adam["fixed_bytes"] - none["fixed_bytes"]
    assert state_bytes > 0
    assert adam["budgets"][0]["budget_bytes"] - none["budgets"][0]["budget_bytes"] == state_bytes
    assert adam["budgets"][0]["lower_bound_overhead"] == none["budgets"][0]["lower_bound_overhead"]


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frontier", *NET, "--budgets", "1%,60%", "--policies", "auto,keep"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("policy "))
    table = {line.split()[0]: line.split() for line in lines[first:] if line and not line.startswith("auto less")}
    assert table["policy"] == ["policy", "1%", "60%", "planned", "in"]
    assert table["bound"][1:3] == ["none", "fits"] and table["bound"][3].endswith("%")
    assert table["auto"][1] == "-" and table["auto"][2].startswith("+") and table["keep"][1:3] == ["-", "-"]
    assert any(line.startswith("auto less the bound, in points: 60% ") for line in lines)
    assert any(line.startswith("1%: no plan fits: while ") for line in lines)


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, *NET, "--budgets", "1KiB,2KiB", "--policies", "auto,rotor")
    assert code == 2 and found["kind"] == "DoesNotFit"
    assert found["error"].startswith("nothing fits 2,048 bytes, the largest of these budgets. No plan does: while ")
    assert "Give a budget of at least that, or a smaller batch" in found["error"]


@pytest.mark.parametrize("name", ["frontier.svg", "frontier.PNG"])
def test_the_plot(name: str, tmp_path: Path) -> None:
    limits = (Limit("10%", 10, 0.1, None, "no plan fits"), Limit("40%", 40, 0.4, 0.05), Limit("80%", 80, 0.8, -0.01))
    points = (
        *(Point("auto", limit.budget, limit.budget_bytes, True, 9, 9, 0.06) for limit in limits[1:]),
        *(Point("vdnn-all", limit.budget, limit.budget_bytes, True, 9, 9, 4.2) for limit in limits[1:]),
        *(Point("new", limit.budget, limit.budget_bytes, True, 9, 9, 0.3) for limit in limits[2:]),
        *(Point("keep", limit.budget, limit.budget_bytes, False, 99, 9, 0.0) for limit in limits),
        *(Point("rotor", limit.budget, limit.budget_bytes, error="no link") for limit in limits),
    )
    found = Frontier(("auto", "vdnn-all", "new", "keep", "rotor"), limits, points, 1.0, 100, 95, 5)
    file = tmp_path / name
    plot(found, file, title="net on a card", subtitle="15.7 TFLOPS")
    content = file.read_bytes()
    if name.endswith("PNG"):
        assert content.startswith(b"\x89PNG") and len(content) > 10_000
        return
    # matplotlib writes text as outlines, with the text itself in a comment beside them.
    text = content.decode()
    said = (
        "auto",
        "vdnn-all",
        "new",
        "bound: no plan is below",
        "proven: no plan fits",
        "net on a card",
        "15.7 TFLOPS",
    )
    assert all(f"<!-- {words} -->" in text for words in said)
    assert "<!-- 400 % -->" not in text and "<!-- 500 % -->" in text, "the axis has a decade for what costs most"
    assert "fits nowhere:" in text and text.count("<!--   keep -->") + text.count("keep") >= 1


def test_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real: Callable[..., Any] = builtins.__import__

    def lacking(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError("No module named 'matplotlib'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", lacking)
    code, found = run_json(capsys, *NET, "--plot", str(tmp_path / "x.svg"))
    assert (code, found["kind"]) == (1, "BadOption")
    assert "--plot needs matplotlib" in found["error"] and "Install memfit[cli]" in found["error"]
    # Whoever draws nothing does not need it.
    assert main(["frontier", *NET, "--budgets", "60%", "--policies", "keep,rotor"]) == 0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--plot", "x.pdf"), "--plot x.pdf: name a file that ends in .svg or .png"),
        (("--plot", "nowhere/x.svg"), "--plot nowhere/x.svg: there is no folder "),
        (("--plot", "folder.svg"), "--plot folder.svg: is there, and is no file"),
        (("--budgets", ","), "--budgets ',' names no budget. Write such as 25%,40%,6GiB"),
        (("--budgets", "40%,lots"), "budget='lots': not a size"),
        (("--policies", " ,"), "--policies ' ,' names no policy"),
        (("--policies", "magic"), "policy='magic': unknown"),
        (("--policies", "gist-lossy"), "--policies: 'gist-lossy' changes gradients. What is compared here"),
        (("--policies", "network-wide"), "--policies: 'network-wide' is an account and no plan."),
        (("--workspace", "none", "--device", "here"), "--workspace none: on this machine torch chooses"),
    ],
)
def test_what_is_refused(argv: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder.svg").mkdir()
    code, found = run_json(capsys, *NET, *argv)
    assert (code, found["kind"]) == (1, "BadOption")
    assert said in found["error"]


def test_exact_policies_are_all_that_run_and_lose_nothing() -> None:
    assert set(exact_policies()) == {n for n, p in POLICIES.items() if p.decide is not None and not p.is_lossy}


def test_what_is_proven_does_not_depend_on_who_plans() -> None:
    """Within a budget that only ops that hold less are within: it is no proof that the others are not."""
    model = nn.Sequential(nn.Linear(32, 16384), nn.BatchNorm1d(16384), nn.Linear(16384, 4))
    step = rewrite(memfit.capture(model, (torch.randn(64, 32),)))
    tight = tighten(step, proofs=AssumedProofs())
    costs = roofline(step, device("v100-16gb"), also=[tight])
    floors = [floor(form, costs, codes=lossless_codes(form, costs)).needed_bytes for form in (step, tight)]
    assert floors[1] < floors[0]
    budgets = [Budget(num_bytes=floors[0] - 1), Budget(num_bytes=floors[1] - 1)]
    limits = {policy: frontier(step, costs, budgets=budgets, policies=(policy,)).limits for policy in ("auto", "sqrt")}
    none, some = limits["sqrt"]
    assert none.lower_bound_overhead is None and none.certificate == limits["auto"][0].certificate != ""
    assert some.certificate == limits["auto"][1].certificate == ""
    assert some.lower_bound_overhead is not None and limits["auto"][1].lower_bound_overhead is not None
    assert some.lower_bound_overhead <= limits["auto"][1].lower_bound_overhead + 1e-9
