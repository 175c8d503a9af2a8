"""`memfit bench auto`: a corner of the grid for real, and the verdicts on made-up cells."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from memfit import zoo
from memfit.cli.main import main
from memfit.report.auto_grid import AIMS, Aim, Case, Cell, Gaps, Reached, cells_of, rises
from memfit.report.frontier import Frontier, Limit, Point

CASE = Case("net", 8, 64, "titan-x")


def point(policy: str, overhead: float | None, *, budget: int = 100, fits: bool = True) -> Point:
    step_ps = None if overhead is None else round(10**9 * (1 + overhead))
    return Point(policy, budget, budget, fits and overhead is not None, 90, step_ps, overhead, 0.1)


def cell(auto: float | None, *others: float, bound: float | None = 0.0, share: float = 0.5, budget: int = 100) -> Cell:
    certificate = "" if bound is not None else "no plan fits: proven"
    limit = Limit(budget, budget, share, bound, certificate)
    named = tuple(point(f"other{index}", overhead, budget=budget) for index, overhead in enumerate(others))
    return Cell(CASE, limit, point("auto", auto, budget=budget), named)


@pytest.mark.slow
def test_a_corner_of_the_grid(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "auto", "--networks", "alexnet", "--devices", "titan-x", "--budgets", "80%,50%"]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["network"], row["batch"], row["device"], row["budget"]) for row in found["rows"]] == [
        ("alexnet", 128, "titan-x", "50%"),
        ("alexnet", 128, "titan-x", "80%"),
    ]
    assert found["holds"] and not found["faults"] and not found["rises"] and found["aims"] == []
    for row in found["rows"]:
        assert row["fits"] and row["gap"] == pytest.approx(row["overhead"] - row["lower_bound_overhead"])
        assert row["others"].keys() == set(found["policies"]) - {"auto"}
        fitting = [overhead for overhead in row["others"].values() if overhead is not None]
        assert row["best_other_overhead"] == (min(fitting) if fitting else None)
        assert all(row["overhead"] <= overhead for overhead in fitting)
    assert found["gaps"]["num_cells"] == 2 and found["gaps"]["median"] <= found["gaps"]["worst"] <= 0.03
    assert found["plan_s"]["alexnet"] >= max(row["plan_s"] for row in found["rows"])


def test_the_table_and_small_sizes_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.cli.benchmarks.auto._HERE_SIZES", {"alexnet": (1, 64)})
    code = main(["bench", "auto", "--networks", "alexnet", "--devices", "here", "--budgets", "90%", "--cap", "0"])
    name, header, _, row, *rest = capsys.readouterr().out.splitlines()
    assert name == "alexnet" and header.split()[:4] == ["device", "batch", "budget", "auto"]
    assert row.split()[:3] == ["here", "1", "90%"]
    text = "\n".join(rest)
    assert (
        "never worse than a single technique: yes (of 1)" in text
        and "overhead never rises with the budget: yes" in text
    )
    assert "longest planning: alexnet" in text
    assert code == int("NO" in text)


def test_worse_than_another_is_a_fault() -> None:
    assert cell(0.01, 0.01, 0.2).faults == ()
    assert cell(0.01, 0.2).best_other is not None
    (slower,) = cell(0.02, 0.01).faults
    assert "net at 8 on titan-x within 100: 'other0' is faster by 10.0 us a step" in slower
    (misfit,) = cell(None, 0.5).faults
    assert "'other0' fits and auto does not" in misfit
    assert cell(None, bound=None).faults == (), "nothing fits, and that is proven"


def test_a_wrong_proof_is_a_fault() -> None:
    assert any("is below the bound of" in fault for fault in cell(0.01, 0.02, bound=0.015).faults)
    assert any("fits what is proven to be impossible" in fault for fault in cell(0.01, 0.02, bound=None).faults)


def test_an_error_of_auto_is_a_fault() -> None:
    failed = dataclasses.replace(cell(0.1), auto=Point("auto", 100, 100, error="no link"))
    assert failed.faults == ("net at 8 on titan-x within 100: auto makes no plan: no link",)


def test_a_rise_is_found() -> None:
    assert rises([cell(0.1, budget=10), cell(0.05, budget=20), cell(0.05, budget=30)]) == []
    assert rises([cell(None, budget=10), cell(0.05, budget=20)]) == []
    (slower,) = rises([cell(0.06, budget=20), cell(0.05, budget=10)])  # in whatever order they come
    assert slower == "net at 8 on titan-x: 10 fits at +5.000%, 20 at +6.000%"
    (lost,) = rises([cell(0.05, budget=10), cell(None, budget=20)])
    assert lost.endswith("20 does not")
    other = dataclasses.replace(cell(0.9, budget=20), case=dataclasses.replace(CASE, device="v100-16gb"))
    assert rises([cell(0.05, budget=10), other]) == [], "devices are not compared"


def test_gaps_count_from_forty_per_cent_up() -> None:
    cells = [cell(0.9, share=0.25), cell(0.004, share=0.4), cell(0.001, share=0.6), cell(0.02, share=0.8)]
    gaps = Gaps.of(cells)
    assert (gaps.num_cells, gaps.median, gaps.worst) == (3, pytest.approx(0.004), pytest.approx(0.02))
    assert gaps.worst_cell is cells[3] and gaps.holds
    assert not Gaps.of([*cells, cell(0.031)]).holds, "the worst is too far"
    assert not Gaps.of([cell(0.006), cell(0.0061), cell(0.0)]).holds, "the median is too far"
    assert Gaps.of([cell(None, bound=None)]).median is None


def test_cells_of_a_frontier() -> None:
    limits = (Limit("40%", 10, 0.4, 0.01), Limit("80%", 20, 0.8, 0.0))
    points = tuple(point(policy, 0.1, budget=budget) for budget in (10, 20) for policy in ("auto", "rotor"))
    first, second = cells_of(CASE, Frontier(("auto", "rotor"), limits, points, 1.0, 30, 25, 5))
    assert (first.limit, first.auto, first.others) == (limits[0], points[0], (points[1],))
    assert (second.limit, second.auto, second.others) == (limits[1], points[2], (points[3],))


@pytest.mark.parametrize(
    ("overhead", "bound", "verdict", "holds"),
    [
        (0.05, 0.04, "met", True),
        (0.07, 0.05, "NOT met", False),
        (0.07, 0.065, "impossible: the bound shows why", True),
        (None, None, "impossible: the bound shows why", True),
    ],
)
def test_aims(overhead: float | None, bound: float | None, verdict: str, holds: bool) -> None:
    found = cell(overhead, bound=bound)
    reached = Reached(Aim("net", 8, "40%", 0.06, "ours"), found.auto, found.limit)
    shown: dict[str, Any] = reached.to_dict()
    assert (shown["verdict"], shown["holds"], shown["aim"]) == (verdict, holds, "net at 8 in 40%")


def test_the_aims_are_of_the_zoo() -> None:
    assert len(AIMS) == 5
    for aim in AIMS:
        assert aim.network in zoo.names() and (aim.budget is None) == (aim.activation_bytes is not None)
    assert [aim.title for aim in AIMS][2] == "resnet152 at 16 in 526 MB of activations"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--networks", "vgg61"), "there is no network 'vgg61'"),
        (("--devices", "abacus"), "abacus"),
        (("--devices", ","), "names no device"),
        (("--budgets", ""), "names no budget"),
        (("--devices", "titan-x", "--cap", "5"), "--cap 5: nothing is measured but on 'here'"),
        (("--cap", "-1"), "is not a number of seconds"),
    ],
)
def test_what_is_refused(argv: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "auto", *argv, "--json"]) == 1
    assert said in json.loads(capsys.readouterr().out)["error"]
