"""`memfit devices`, `memfit plan` and `memfit compare`: what they print, what they refuse, and their exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memfit.cli import target as target_module
from memfit.cli.main import main
from memfit.cli.sketch import HEIGHT, WIDTH, sketch
from memfit.cli.target import Target
from memfit.cost.costs import PS_PER_S, Costs, free_of_charge
from memfit.cost.devices import device, devices, load_device
from memfit.cost.roofline import roofline
from memfit.plan.plan import Plan, WrongPlan
from memfit.plan.planner import plan_step
from memfit.plan.policies.registry import POLICIES
from memfit.plan.simulate import Timeline

NETWORK = """
import torch
from torch import nn

def make(batch=8, image=32):
    print("making prints")
    body = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    head = [nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)]
    return nn.Sequential(*body, *head), torch.randn(batch, 3, image, image), lambda y: y.square().sum()
"""
NET = "plan_networks:make"
PARAMETERS = 3 * 16 * 9 + 16 + 32 + 16 * 16 * 9 + 16 + 16 * 5 + 5
TITAN = ("--device", "titan-x")
EXACT = [name for name, policy in POLICIES.items() if not policy.is_lossy]


@pytest.fixture(autouse=True)
def networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plan_networks.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "plan_networks", raising=False)
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))


Run = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command with --json: its exit code, the object on stdout, the text on stderr."""

    def run(*argv: str) -> tuple[int, Any, str]:
        code = main([*argv, "--json"])
        said = capsys.readouterr()
        return code, json.loads(said.out), said.err

    return run


def text_of(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert main(list(argv)) == code
    return capsys.readouterr().out


# ---- memfit devices


def test_devices(run_json: Run, capsys: pytest.CaptureFixture[str]) -> None:
    code, found, _ = run_json("devices")
    assert code == 0
    assert [row["name"] for row in found["devices"]] == [d.name for d in devices()]
    for row in found["devices"]:
        assert all(figure["source"] and figure["unit"] for figure in row["figures"].values()), row["name"]
    titan = found["devices"][0]
    assert titan["name"] == "titan-x" and titan["memory_bytes"] == 12 * 2**30 and titan["flops_per_s"] == 7e12
    assert titan["figures"]["bandwidth"] == {
        "value": 336e9,
        "unit": "bytes/s",
        "source": device("titan-x").sources["bandwidth"],
    }
    text = text_of(capsys, "devices")
    header = ["name", "memory", "fp32", "fp16", "bf16", "bandwidth", "link", "title"]
    assert text.splitlines()[0].split() == header
    assert "titan-x" in text and "12.8 GB/s" in text and "convolution 0.75" in text


def test_one_device(run_json: Run, capsys: pytest.CaptureFixture[str]) -> None:
    code, found, _ = run_json("devices", "t4")
    assert code == 0 and [row["name"] for row in found["devices"]] == ["t4"] and "toml" not in found["devices"][0]
    text = text_of(capsys, "devices", "t4")
    for key, source in device("t4").sources.items():
        assert key in text and source in text
    assert "320 GB/s" in text and "5 us" in text and "16 GiB" in text
    assert "mine" in text_of(capsys, "devices", "name=mine,memory=4GiB,flops=1e12,bandwidth=100GB/s,link=10GB/s")


def test_a_device_as_toml_is_that_device(tmp_path: Path, run_json: Run, capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(capsys, "devices", "titan-x", "--toml")
    assert tomllib.loads(text)["flops"]["value"] == 7e12
    (tmp_path / "card.toml").write_text(text)
    assert load_device("card.toml") == device("titan-x")
    _, found, _ = run_json("devices", "titan-x", "--toml")
    assert found["devices"][0]["toml"] == text


def test_devices_refused(run_json: Run) -> None:
    for argv, text in (
        (("titan-y",), "there is no device 'titan-y' in the catalogue. Did you mean 'titan-x'?"),
        (("--toml",), "--toml prints one device"),
        (("here",), "'here' is this machine"),
        (("missing.toml",), "there is no such file"),
    ):
        code, found, err = run_json("devices", *argv)
        assert (code, found["kind"]) == (1, "BadOption") and text in found["error"] and text in err


# ---- memfit plan


def test_plan(run_json: Run) -> None:
    code, found, err = run_json("plan", NET, *TITAN, "--optimizer", "adam")
    assert code == 0 and err == "making prints\n"
    assert (found["network"], found["batch"], found["image"]) == (NET, None, None)
    assert (found["device"], found["policy"], found["optimizer"]) == ("titan-x", "keep", "adam")
    assert found["fits"] is True and found["saved"] is None and found["budget"] is None
    assert found["budget_bytes"] == 12 * 2**30
    assert found["budget_fixed_bytes"] + found["budget_activation_bytes"] == found["budget_bytes"]
    assert found["fixed_bytes"] == found["budget_fixed_bytes"]
    assert found["optimizer_bytes"] == found["parts"]["optimizer"] == 2 * 4 * PARAMETERS
    # Parameters, gradients, two states for each; images; statistics of the batch norm and its counter.
    assert found["fixed_bytes"] == pytest.approx(4 * 4 * PARAMETERS + 4 * 8 * 3 * 32 * 32, abs=300)
    assert sum(found["parts"].values()) == found["peak_bytes"] == found["keep_peak_bytes"]
    assert found["fixed_bytes"] < found["average_bytes"] < found["peak_bytes"]
    assert found["peak_bytes"] <= found["fixed_bytes"] + found["keep_activation_bytes"]
    assert found["step_s"] == found["keep_step_s"] > 0 and found["overhead"] == found["stall_s"] == 0
    assert found["plan_s"] > 0 and found["capture_s"] > 0 and found["rss_bytes"] > 2**20 and len(found["digest"]) == 16
    assert found["layer_input_bytes"] == {
        "convolution": 4 * 8 * (3 * 32**2 + 16 * 16**2),
        "pooling": 4 * 8 * 16 * 32**2,
    }
    assert found["workspace"] == "fastest" and found["workspace_bytes"] > 0
    assert list(found["decisions"]) == ["keep"]
    assert found["decisions"]["keep"]["count"] >= len(found["largest"]) > 3
    assert found["decisions"]["keep"]["bytes"] >= sum(row["bytes"] for row in found["largest"])
    assert found["largest"][0]["bytes"] == 4 * 8 * 16 * 32 * 32 and found["largest"][0]["decision"] == "keep"
    costs = found["costs"]
    assert "titan-x" in costs["source"] and costs["num_estimated"] == costs["num_signatures"] > 10
    assert any("convolutions: fastest algorithm" in note for note in costs["notes"])
    assert "smallest_budget_bytes" not in found and "error" not in found


def test_plan_without_workspaces(run_json: Run) -> None:
    argv = ("plan", NET, "--batch", "64", "--image", "64", *TITAN)
    _, fastest, _ = run_json(*argv)
    _, none, _ = run_json(*argv, "--workspace", "none")
    assert (none["workspace"], none["workspace_bytes"]) == ("none", 0)
    assert none["peak_bytes"] <= fastest["peak_bytes"] and none["step_s"] > fastest["step_s"]
    assert any("convolutions: without workspace" in note for note in none["costs"]["notes"])


def test_plan_in_text(capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(capsys, "plan", NET, *TITAN, "--budget", "150%", "--rows", "3")
    lines = text.splitlines()
    for name in ("budget", "no plan can change", "for activations", "peak", "step", "workspaces", "costs", "digest"):
        assert any(line.strip().startswith(name) for line in lines), name
    assert "convolutions: fastest algorithm" in text and "saved as" not in text
    header = next(k for k, line in enumerate(lines) if line.split()[:1] == ["largest"])
    assert lines[header].split() == ["largest", "tensor", "made", "by", "module", "decision"]
    assert lines[header + 5] == "", "three rows"
    assert all(line.endswith("keep") for line in lines[header + 2 : header + 5])
    arrow = lines[header + 6].split()
    assert "v" in (arrow[0], arrow[-1]) and "peak" in arrow
    assert sum("|" in line for line in lines) == HEIGHT
    assert "forward" in lines[-2] and "backward" in lines[-2]


def test_a_plan_that_does_not_fit_is_shown_all_the_same(run_json: Run, capsys: pytest.CaptureFixture[str]) -> None:
    code, found, err = run_json("plan", NET, *TITAN, "--budget", "10%", "--save", "plan.json")
    assert code == 2
    assert found["fits"] is False and found["kind"] == "DoesNotFit" and found["budget"] == "10%"
    assert found["smallest_budget_bytes"] == found["peak_bytes"] > found["budget_bytes"]
    assert found["budget_activation_bytes"] == int(0.1 * found["keep_activation_bytes"])
    assert found["obstacle"] == found["peak_at"] and found["obstacle"] in found["error"]
    assert err.splitlines()[-1].startswith("memfit: error: policy 'auto' needs ")
    assert found["lower_bound_overhead"] is None and found["certificate"] in found["error"]
    assert found["saved"] is None and not Path("plan.json").exists()
    # Of a budget that the optimizer's state leaves no room in, the proof says that this is there too.
    code, found, _ = run_json("plan", NET, *TITAN, "--budget", "1KiB", "--optimizer", "adam")
    assert code == 2 and found["optimizer_bytes"] > 0
    assert found["certificate"].endswith(f", beside {found['optimizer_bytes']:,} bytes of the optimizer's state")
    text = text_of(capsys, "plan", NET, *TITAN, "--budget", "1KiB", code=2)
    assert "NO" in text and "nothing: " in text and "budget |----" not in text.splitlines()[-4]


def test_without_a_budget_the_memory_of_the_device_is_the_limit(run_json: Run) -> None:
    small = "name=small,memory=300KiB,flops=1e12,bandwidth=100GB/s,link=10GB/s"
    code, found, _ = run_json("plan", NET, "--device", small)
    assert (code, found["fits"], found["budget_bytes"], found["budget"]) == (2, False, 300 * 1024, None)
    assert found["device"] == "small"


def test_plan_for_a_device_from_a_file(tmp_path: Path, run_json: Run) -> None:
    (tmp_path / "card.toml").write_text('memory = "2GiB"\nflops = 1e12\nbandwidth = "100GB/s"\nlink = "10GB/s"\n')
    code, found, _ = run_json("plan", NET, "--device", "./card.toml")
    assert (code, found["device"], found["budget_bytes"]) == (0, "card", 2 * 2**30)
    (tmp_path / "card.toml").write_text("memory = ")
    code, found, _ = run_json("plan", NET, "--device", "./card.toml")
    assert (code, found["kind"]) == (1, "BadOption") and "not TOML" in found["error"]


@pytest.mark.parametrize(
    ("argv", "kind", "text"),
    [
        (("--device", "titan-y"), "BadOption", "there is no device 'titan-y'"),
        ((*TITAN, "--policy", "magic"), "BadOption", "policy='magic': unknown. Known policies: keep"),
        ((*TITAN, "--optimizer", "lion"), "BadUsage", "invalid choice: 'lion'"),
        ((*TITAN, "--workspace", "huge"), "BadUsage", "invalid choice: 'huge'"),
        ((*TITAN, "--budget", "0"), "BadOption", "budget='0': must be more than zero bytes"),
        ((*TITAN, "--budget", "0%"), "BadOption", "budget='0%': must be more than zero"),
        ((*TITAN, "--budget", "abc"), "BadOption", "budget='abc': not a size"),
        ((*TITAN, "--cap", "5"), "BadOption", "--cap 5: nothing is measured for 'titan-x'"),
        ((*TITAN, "--cap", "-1"), "BadUsage", "'-1' is not a number of seconds from 0 up"),
        (("--workspace", "none"), "BadOption", "their workspaces are measured"),
    ],
)
def test_wrong_options(argv: tuple[str, ...], kind: str, text: str, run_json: Run) -> None:
    for command in ("plan", "compare"):
        code, found, err = run_json(command, NET, *argv)
        assert (code, found["kind"]) == (1, kind), command
        assert text in found["error"] and err.startswith("memfit: error: ") and "making" not in err


# ---- --save


def test_a_saved_plan_loads(run_json: Run) -> None:
    code, found, _ = run_json("plan", NET, *TITAN, "--save", "plan.json")
    assert (code, found["saved"]) == (0, "plan.json")
    text = Path("plan.json").read_text()
    step = Target.capture(NET, batch=None, image=None).rewritten
    plan = Plan.from_json(text, step, device="titan-x")
    assert (plan.policy, plan.peak_bytes, plan.step.digest) == ("keep", found["peak_bytes"], found["digest"])
    with pytest.raises(WrongPlan, match="Plan again"):
        Plan.from_json(text, Target.capture(NET, batch=3, image=None).rewritten, device="titan-x")
    assert sorted(path.name for path in Path().iterdir() if "plan.json" in path.name) == ["plan.json"]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("--save", "nowhere/plan.json"), "--save nowhere/plan.json: cannot be written: No such file or directory"),
        (("--save", "."), "--save .: is there, and is no file"),
        (("--save", "/dev/null"), "--save /dev/null: is there, and is no file"),
        (("--save", "plan.json", "--policy", "network-wide"), "there is no plan to save"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_first(argv: tuple[str, ...], text: str, run_json: Run) -> None:
    code, found, err = run_json("plan", NET, *TITAN, *argv)
    assert (code, found["kind"]) == (1, "BadOption") and text in found["error"]
    assert "making" not in err, "before anything is captured"


def test_a_failed_plan_leaves_the_old_file(run_json: Run) -> None:
    Path("plan.json").write_text("old")
    code, _, _ = run_json("plan", "plan_networks:missing", *TITAN, "--save", "plan.json")
    assert code == 1 and Path("plan.json").read_text() == "old"
    assert not list(Path().glob(".plan.json*"))


# ---- The cases of the papers.


def test_vgg16_on_titan_x_as_frameworks_of_2016_held_it(run_json: Run, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("plan", "vgg16", "--batch", "256", *TITAN, "--policy", "network-wide")
    code, found, _ = run_json(*argv)
    assert code == 2 and found["fits"] is False
    assert found["peak_bytes"] == pytest.approx(28e9, rel=0.1), "vDNN, MICRO 2016, figure 1: 28 GB"
    assert (found["batch"], found["image"]) == (256, 224)
    assert sum(found["parts"].values()) == found["peak_bytes"] == found["average_bytes"]
    assert found["decisions"].keys() == {"keep"} and found["overhead"] == 0
    text = text_of(capsys, *argv, code=2)
    assert "is an account and no plan" in text and "feature maps" in text and "workspace up to" in text


def test_resnet50_fits_a_v100(run_json: Run) -> None:
    code, found, _ = run_json("plan", "resnet50", "--batch", "64", "--device", "v100-16gb", "--policy", "keep")
    assert code == 0 and found["fits"] is True
    assert 3 * 2**30 < found["peak_bytes"] < 8 * 2**30 and 0.05 < found["step_s"] < 1


def test_gpt2_fits_the_smallest_budget_that_it_names(run_json: Run) -> None:
    argv = ("plan", "gpt2", "--batch", "8", "--device", "rtx-4090", "--policy", "keep", "--budget")
    code, found, _ = run_json(*argv, "50%")
    assert code == 2 and found["fits"] is False
    smallest = found["smallest_budget_bytes"]
    code, again, _ = run_json(*argv, str(smallest))
    assert (code, again["fits"], again["peak_bytes"], again["budget_bytes"]) == (0, True, smallest, smallest)


@pytest.mark.slow
def test_planning_a_network_too_large_to_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "memfit", "plan", "vgg416", "--batch", "32", *TITAN, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    found = json.loads(done.stdout)
    assert found["rss_bytes"] < 1.5 * 2**30 and found["peak_bytes"] > 40 * 2**30


# ---- This machine.


@pytest.mark.slow
def test_plan_here(run_json: Run) -> None:
    code, found, _ = run_json("plan", NET, "--cap", "3", "--batch", "2", "--image", "8", "--threads", "1")
    assert code == 0
    assert (found["device"], found["workspace"], found["batch"], found["image"]) == ("here", "measured", 2, 8)
    assert found["step_s"] > 0 and found["budget_bytes"] > 2**30


def test_the_cap_is_shared_by_all_that_is_measured(run_json: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    caps = []

    def measure(step: Any, *, cap_s: float, **_: object) -> Costs:
        caps.append(cap_s)
        return free_of_charge(step)

    monkeypatch.setattr(target_module, "measure", measure)
    code, found, _ = run_json("compare", NET, "--cap", "7")
    assert code == 0 and found["device"] == "here"
    assert caps[0] == 7 and 0 <= caps[1] < 7 and len(caps) == 2, "what the first took is gone"
    assert [row["budget_bytes"] for row in found["rows"]] == [None] * len(EXACT), "this machine's memory is not known"


# ---- memfit compare


def test_compare(run_json: Run, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("compare", NET, *TITAN, "--optimizer", "sgd", "--budget", "10%,1GiB")
    code, found, _ = run_json(*argv)
    assert code == 0 and "error" not in found
    assert [(row["budget"], row["policy"]) for row in found["rows"]] == [
        (budget, policy) for budget in ("10%", 2**30) for policy in EXACT
    ]
    assert (found["network"], found["device"], found["optimizer"]) == (NET, "titan-x", "sgd")
    assert found["rss_bytes"] > 2**20 and found["costs"]["notes"]
    by_key = {(row["budget"], row["policy"]): row for row in found["rows"]}
    assert by_key["10%", "keep"]["fits"] is False and by_key[2**30, "keep"]["fits"] is True
    assert by_key["10%", "keep"]["budget_bytes"] == by_key["10%", "network-wide"]["budget_bytes"]
    assert by_key[2**30, "network-wide"]["peak_bytes"] > by_key[2**30, "keep"]["peak_bytes"] == found["keep_peak_bytes"]
    for row in found["rows"]:
        assert row["plan_s"] > 0 and row["step_s"] > 0 and row["average_bytes"] > 0
        # Ops that read codes read less than those that read tensors.
        assert row["overhead"] >= (-0.01 if row["policy"] == "gist-lossless" else 0)
    lines = text_of(capsys, *argv).splitlines()
    table = next(k for k, line in enumerate(lines) if line.split()[:2] == ["budget", "policy"])
    assert len(lines) == table + 2 + len(found["rows"])
    assert "10%" in lines[table + 2] and "NO" in lines[table + 2]
    assert any("convolutions: fastest algorithm" in line for line in lines)


def test_compare_with_lossy_policies_where_they_are_allowed(run_json: Run) -> None:
    _, found, _ = run_json("compare", NET, *TITAN, "--allow-lossy")
    assert [row["policy"] for row in found["rows"]] == list(POLICIES)
    _, found, _ = run_json("compare", NET, *TITAN, "--allow-lossy", "--policy", "keep,gist-lossy:fp8,gist-lossy:int4")
    assert [row["policy"] for row in found["rows"]] == ["keep", "gist-lossy:fp8", "gist-lossy:int4"]
    average = [row["average_bytes"] for row in found["rows"]]
    assert average[0] > average[1] > average[2]
    code, found, _ = run_json("compare", NET, *TITAN, "--policy", "keep,gist-lossy")
    assert code == 1 and "--allow-lossy" in found["error"]
    code, found, _ = run_json("compare", NET, *TITAN, "--policy", "keep", "--allow-lossy")
    assert code == 1 and "none of 'keep' loses anything" in found["error"]


def test_plan_with_a_format(run_json: Run) -> None:
    code, found, _ = run_json("plan", NET, *TITAN, "--policy", "gist-lossy", "--format", "fp10", "--allow-lossy")
    assert code == 0 and found["policy"] == "gist-lossy:fp10"
    assert any(name.startswith(("encode:fp10", "encode:sparse-fp10")) for name in found["decisions"])
    code, found, _ = run_json("plan", NET, *TITAN, "--policy", "gist-lossy")
    assert code == 1 and "--allow-lossy" in found["error"]
    code, found, _ = run_json("plan", NET, *TITAN, "--allow-lossy")
    assert code == 1 and "policy 'keep' loses nothing" in found["error"]
    code, found, _ = run_json("plan", NET, *TITAN, "--format", "fp8")
    assert code == 1 and "policy 'keep' stores nothing in a format" in found["error"]


def test_compare_agrees_with_plan(run_json: Run) -> None:
    _, compared, _ = run_json("compare", NET, *TITAN)
    for row in compared["rows"]:
        _, planned, _ = run_json("plan", NET, *TITAN, "--policy", row["policy"])
        for key in ("fits", "budget_bytes", "peak_bytes", "average_bytes", "step_s", "overhead", "stall_s"):
            assert row[key] == planned[key], (row["policy"], key)


def test_compare_where_nothing_fits(run_json: Run) -> None:
    code, found, err = run_json("compare", NET, *TITAN, "--budget", "1KiB,2KiB", "--policy", "keep")
    assert (code, found["kind"], len(found["rows"])) == (2, "DoesNotFit", 2)
    assert f"at least {found['keep_peak_bytes']:,} bytes" in found["error"] and "the largest budget is 2,048" in err


def test_a_policy_that_fails_does_not_hide_the_others(
    run_json: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from memfit.cli import compare
    from memfit.errors import MemfitError

    def failing(step: Any, costs: Any, *, policy: str = "keep", **options: Any) -> Any:
        if policy == "network-wide":
            raise MemfitError("device 'titan-x' has no tier 'tape'")
        return plan_step(step, costs, policy=policy, **options)

    monkeypatch.setattr(compare, "plan_step", failing)
    code, found, _ = run_json("compare", NET, *TITAN)
    row = next(row for row in found["rows"] if row["policy"] == "network-wide")
    assert code == 0 and row["fits"] is False and row["error"] == "device 'titan-x' has no tier 'tape'"
    assert "network-wide: device 'titan-x' has no tier 'tape'" in text_of(capsys, "compare", NET, *TITAN)


# ---- The sketch.


@pytest.fixture
def timeline() -> Timeline:
    step = Target.capture(NET, batch=None, image=None).rewritten
    found = plan_step(step, roofline(step, device("titan-x"))).timeline
    assert found is not None
    return found


def test_sketch_has_its_shape(timeline: Timeline) -> None:
    lines = sketch(timeline, budget_bytes=timeline.peak_bytes)
    assert len(lines) == 1 + HEIGHT + 1 + 1 + 1, "the peak, the rows, the axis, the halves, the legend"
    assert all(len(line) <= 80 for line in lines)
    rows = [line.partition("|")[2].ljust(WIDTH) for line in lines[1 : 1 + HEIGHT]]
    assert all(len(row) == WIDTH for row in rows)
    assert not set("".join(rows)) - set(" -:░▁▂▃▄▅▆▇█")
    # The arrow points at a column that is full to the top, and no other is before it.
    axis = lines[1 + HEIGHT].index("+") + 1
    peak = lines[0].index("v ") - axis if "v " in lines[0] else len(lines[0]) - 1 - axis
    assert rows[0][peak] == "█" and rows[0].index("█") == peak
    # Nothing floats: below anything filled, all is filled.
    for column in range(WIDTH):
        filled = "".join(row[column] for row in rows).replace(":", " ").replace("-", " ")
        assert " " not in filled.lstrip(" ")
    boundary = lines[1 + HEIGHT].index("+", axis) - axis
    boundary_s = timeline.starts_ps[timeline.program.boundary] / PS_PER_S
    assert boundary == int(WIDTH * boundary_s / timeline.step_s)


def test_sketch_draws_the_budget_where_it_is(timeline: Timeline) -> None:
    peak = timeline.peak_bytes
    for share, row in ((0.5, 6), (1.0, 0), (1 / 12, 11)):
        lines = sketch(timeline, budget_bytes=int(peak * share))
        marked = [k for k, line in enumerate(lines[1 : 1 + HEIGHT]) if line.lstrip().startswith("budget |")]
        assert marked == [row], share
    assert not any("budget |" in line for line in sketch(timeline))
    far = sketch(timeline, budget_bytes=100 * peak)
    assert "far above the picture" in far[-1] and not any("budget |" in line for line in far)


def test_sketch_of_any_size(timeline: Timeline) -> None:
    for width, height in ((1, 1), (7, 3), (200, 40)):
        lines = sketch(timeline, budget_bytes=timeline.peak_bytes // 2, width=width, height=height)
        assert sum("|" in line for line in lines) == height
    assert "peak 1.0" in sketch(timeline, always_bytes=2**30)[0]


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("devices", "plan", "compare"):
        assert f"usage: memfit {name}" in text_of(capsys, name, "--help")
