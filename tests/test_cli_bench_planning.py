"""`memfit bench planning`: a small network for real, and the verdicts and powers of made-up rows."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from memfit.cli.benchmarks.planning import NETWORKS
from memfit.cli.main import main
from memfit.errors import MemfitError
from memfit.plan.budget import Budget
from memfit.plan.planner import plan_step
from memfit.report.deep_network import DeepNetwork
from memfit.report.planning_cost import AT_MOST_S, PlanningCost, exponent, growths, planning_cost
from memfit.report.planning_worker import watch

ROW = PlanningCost(
    network="resnet50",
    num_ops=468,
    num_storages=300,
    capture_s=1.0,
    prepare_s=0.25,
    first_plan_s=0.5,
    plan_s=4.0,
    plan_cpu_s=3.5,
    num_evaluations=60_000,
    note="60,000 plans tried; the best is by auto",
    fits=True,
    overhead=0.02,
    lower_bound_overhead=0.01,
    growth_bytes=50 << 20,
    peak_resident_bytes=500 << 20,
)


def row(network: str = "resnet50", **changed: Any) -> PlanningCost:
    return dataclasses.replace(ROW, network=network, **changed)


def bench(*argv: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["bench", "planning", *argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_small_network_for_real(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    code, found = bench("--networks", " gpt2:1,", "--budget", "80%", capsys=capsys)
    assert (found["benchmark"], found["device"], found["budget"]) == ("planning", "v100-16gb", "80%")
    (line,) = found["rows"]
    assert line["network"] == "gpt2:1" and line["num_ops"] > line["num_storages"] > 50
    assert line["fits"] and 0 < line["first_plan_s"] <= line["plan_s"]
    assert line["after_capture_s"] == pytest.approx(line["prepare_s"] + line["plan_s"])
    assert line["capture_s"] > 0 and line["plan_cpu_s"] > 0 and line["prepare_s"] > 0
    assert line["num_evaluations"] > 0 and f"{line['num_evaluations']:,} plans tried" in line["note"]
    assert line["lower_bound_overhead"] <= line["overhead"] + 1e-9
    assert 0 < line["growth_bytes"] < line["peak_resident_bytes"]
    assert line["peak_resident_bytes"] > 100 << 20, "torch alone takes more: this is of the whole process"
    assert found["growths"] == [], "one depth shows no growth"
    # How fast this machine is today is no matter of a test; that verdict and exit code agree is.
    assert (found["broken"], found["holds"], code) == (line["broken"], not line["broken"], int(bool(line["broken"])))
    assert not {"plans", "steps"} & {path.name for path in tmp_path.iterdir()}, "something was kept on disk"


def test_the_first_plan_is_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def planned_slowly(*args: Any, **options: Any) -> Any:
        found = plan_step(*args, **options)
        return dataclasses.replace(found, plan_s=1e6)

    monkeypatch.setattr("memfit.report.planning_worker.plan_step", planned_slowly)
    within = watch(DeepNetwork.parse("alexnet"), "v100-16gb", Budget.parse("70%"))
    assert within.plan_s == 1e6 and within.first_plan_s is not None and within.first_plan_s < 1e5
    # Nobody searches where everything fits, nor finds anything where nothing does.
    assert watch(DeepNetwork.parse("alexnet"), "v100-16gb", Budget.parse("16GiB")).first_plan_s == 1e6
    nothing = watch(DeepNetwork.parse("alexnet"), "v100-16gb", Budget.parse("1MiB"))
    assert (nothing.fits, nothing.first_plan_s) == (False, None)


def test_depths() -> None:
    assert DeepNetwork.parse("gpt2") == DeepNetwork.parse("gpt2:12") == DeepNetwork("gpt2", 12)
    names = ("gpt2:12", "gpt2:48", "resnet50")
    assert [str(DeepNetwork.parse(name)) for name in names] == [
        "gpt2",
        "gpt2:48",
        "resnet50",
    ]
    steps = [DeepNetwork.parse(text).captured()[0] for text in ("gpt2:1", "gpt2:2")]
    blocks = [{op.path.split(".")[1] for op in step.ops if op.path.startswith("blocks.")} for step in steps]
    assert blocks == [{"0"}, {"0", "1"}]
    assert [step.name for step in steps] == ["gpt2:1", "gpt2:2"]


def test_limits_are_of_networks_that_are_planned() -> None:
    planned = {str(DeepNetwork.parse(text)) for text in NETWORKS.split(",")}
    assert planned >= AT_MOST_S.keys() and len(planned) == 8


@pytest.mark.parametrize(
    ("cost", "said"),
    [
        (row(), None),
        (row(plan_s=4.8), "resnet50: planned 5.05 s after capture, at most 5 s"),
        (row("gpt2", plan_s=4.8), "gpt2: planned 5.05 s after capture, at most 5 s"),
        (row("gpt2:48", plan_s=29.0), None),
        (row("gpt2:48", plan_s=31.0), "gpt2:48: planned 31.25 s after capture, at most 30 s"),
        (row("densenet201", plan_s=31.0), "densenet201: planned 31.25 s after capture, at most 30 s"),
        (row("vgg16", plan_s=99.0), None),
        (row("vgg16", first_plan_s=1.9), "vgg16: a first plan 2.15 s after capture, at most 2 s"),
        (row("vgg16", first_plan_s=None, fits=False), None),
        (row("vgg16", peak_resident_bytes=1025 << 20), "vgg16: 1,025 MiB resident while planning, at most 1,024 MiB"),
    ],
)
def test_a_broken_limit_is_named_and_ends_with_code_1(
    cost: PlanningCost, said: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = iter([row("vgg11"), cost])
    monkeypatch.setattr("memfit.cli.benchmarks.planning.planning_cost", lambda network, **options: next(rows))
    code, found = bench("--networks", f"vgg11,{cost.network}", capsys=capsys)
    broken = [] if said is None else [said]
    assert (code, found["broken"], found["holds"]) == (len(broken), broken, not broken)
    assert [line["broken"] for line in found["rows"]] == [[], broken]


def test_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = {
        "gpt2:6": row("gpt2:6", num_ops=100, plan_s=1.0, plan_cpu_s=0.5, growth_bytes=1 << 20),
        "gpt2:24": row(
            "gpt2:24", num_ops=400, plan_s=8.0, plan_cpu_s=2.0, growth_bytes=2 << 20, peak_resident_bytes=2 << 30
        ),
        "nin": row("nin", fits=False, first_plan_s=None, num_evaluations=None, lower_bound_overhead=None),
    }
    monkeypatch.setattr("memfit.cli.benchmarks.planning.planning_cost", lambda network, **options: made[str(network)])
    monkeypatch.setattr("os.getloadavg", lambda: (100.0, 0.0, 0.0))
    assert main(["bench", "planning", "--networks", ",".join(made)]) == 1
    header, _, small, large, misfit, _, growth, busy, verdict, broken = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["network", "ops", "storages"]
    assert small.split()[:3] == ["gpt2:6", "100", "300"] and small.endswith("yes")
    assert large.endswith("2.00 GiB  NO") and "+2.00%  +1.00%" in large
    assert "none" in misfit and "does not fit" in misfit
    assert growth == (
        "gpt2 at 2 depths: seconds of planning grow like ops ** 1.50 (of CPU: 1.00), memory like ops ** 0.50"
    )
    assert "the machine was busy" in busy
    assert verdict == "within all limits: NO, 1 broken"
    assert broken == "  gpt2:24: 2,048 MiB resident while planning, at most 1,024 MiB"


def test_powers() -> None:
    sizes = [100, 200, 800]
    assert exponent(sizes, [5 * size**1.7 for size in sizes]) == pytest.approx(1.7)
    assert exponent(sizes, [3.0] * 3) == pytest.approx(0.0)
    # By hand: logs to base 2 of (1, 2, 4) and (1, 4, 4) are (0, 1, 2) and (0, 2, 2): slope 2 / 2.
    assert exponent([1, 2, 4], [1, 4, 4]) == pytest.approx(1.0)
    assert exponent(sizes, [1, 0, 2]) is None


def test_growth_is_of_one_network_at_several_depths() -> None:
    rows = [
        row("resnet50", plan_s=100.0),
        row("gpt2", num_ops=10, plan_s=1.0, plan_cpu_s=1.0, growth_bytes=7),
        row("gpt2:24", num_ops=20, plan_s=4.0, plan_cpu_s=2.0, growth_bytes=7),
        row("resnet101", num_ops=1_000),
    ]
    (found,) = growths(rows)
    assert (found.network, found.num_rows) == ("gpt2", 2)
    assert found.exponent_s == pytest.approx(2.0) and found.exponent_cpu_s == pytest.approx(1.0)
    assert found.exponent_bytes == pytest.approx(0.0)
    assert growths(rows[:2]) == () and growths([rows[1], rows[1]]) == (), "the same depth twice is one"
    (flat,) = growths([rows[1], dataclasses.replace(rows[2], growth_bytes=0)])
    assert flat.exponent_bytes is None and flat.exponent_s == pytest.approx(2.0)


def test_what_goes_wrong_in_the_process_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def done(code: int, out: str, errors: str = "") -> None:
        answer = subprocess.CompletedProcess[str]([], code, out, errors)
        monkeypatch.setattr("memfit.report.planning_cost.subprocess.run", lambda *args, **options: answer)

    network = DeepNetwork("alexnet")
    done(0, json.dumps(dataclasses.asdict(ROW)))
    assert planning_cost(network, device="v100-16gb", budget="40%") == ROW
    done(0, json.dumps({"error": "no such link", "kind": "BadOption"}))
    with pytest.raises(MemfitError, match=r"^planning alexnet fails: BadOption: no such link$"):
        planning_cost(network, device="v100-16gb", budget="40%")
    done(-9, "", "Traceback\nMemoryError: too much\n")
    with pytest.raises(MemfitError, match="plans alexnet ended with code -9: MemoryError: too much"):
        planning_cost(network, device="v100-16gb", budget="40%")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--networks", "vgg61"), "there is no network 'vgg61' in the zoo"),
        (("--networks", " , "), "names no network"),
        (("--networks", "gpt2:0"), "'gpt2:0': after the colon goes the number of layers, a whole number from 1 up"),
        (("--networks", "gpt2:x"), "'gpt2:x': after the colon goes the number of layers"),
        (("--networks", "gpt2:"), "'gpt2:': after the colon goes the number of layers"),
        (("--networks", "gpt2:-3"), "'gpt2:-3': after the colon goes the number of layers"),
        (("--networks", "resnet50:3"), "'resnet50:3': before the colon goes a network of the zoo"),
        (("--networks", "my.module:make"), "whose number of layers can be chosen (gpt2)"),
        (("--budget", "much"), "budget='much': not a size"),
        (("--budget", "0%"), "must be more than zero"),
        (("--device", "abacus"), "abacus"),
        (("--device", "here"), "ops would have to be run to be priced"),
    ],
)
def test_what_is_refused(
    argv: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_process(network: DeepNetwork, **options: Any) -> PlanningCost:
        raise AssertionError(f"{network} is planned before all options are checked")

    monkeypatch.setattr("memfit.cli.benchmarks.planning.planning_cost", no_process)
    code, found = bench(*argv, capsys=capsys)
    assert code == 1 and said in found["error"]
