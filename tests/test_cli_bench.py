"""`memfit bench`: what it prints, and what it refuses."""

from __future__ import annotations

import json

import pytest

from memfit.cli.main import main

WANTED = {"network", "batch", "regular_elements", "optimal_elements", "published_cut", "cut", "solve_s"}


def test_checkpoint_search_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "checkpoint-search", "--networks", "alexnet,resnet18,nin", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["network"] for row in rows] == ["alexnet", "resnet18", "nin"]
    assert all(row.keys() >= WANTED for row in rows)
    alexnet, resnet, nin = rows
    assert (alexnet["batch"], alexnet["regular_elements"], alexnet["optimal_elements"]) == (1024, 604897280, 279248896)
    assert alexnet["published_cut"] == 0.34 and alexnet["cut"] == pytest.approx(0.5384, abs=1e-4)
    assert (resnet["batch"], resnet["published_cut"]) == (256, 0.35)
    assert nin["published_cut"] is None and 0 < nin["cut"] < 1  # not in their table; the zoo's own batch
    assert all(row["solve_s"] >= 0 for row in rows)


def test_another_batch_has_no_published_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "checkpoint-search", "--networks", "vgg16", "--batch", "2", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["batch"], row["published_cut"]) == (2, None)
    assert row["regular_elements"] * 32 == 965_509_120


def test_table_has_theirs_beside_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "checkpoint-search", "--networks", "vgg16, nin"]) == 0
    header, _, vgg, nin, *_ = capsys.readouterr().out.splitlines()
    assert header.split()[:5] == ["network", "batch", "vertices", "regular", "optimal"]
    assert "3.60 GiB" in vgg and "50.8%" in vgg and "31%" in vgg and "5,136" in vgg
    assert nin.startswith("nin") and "128" in nin


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["bench", "checkpoints"], "invalid choice: 'checkpoints' (choose from"),
        (["bench"], "name a benchmark. Known benchmarks: checkpoint-search, vdnn, overlap"),
        (["bench", "vdnn", "--no-real"], "unrecognized arguments: --no-real"),
        (["bench", "checkpoint-search", "--networks", "alexnet,vgg61"], "there is no network 'vgg61'"),
        (["bench", "checkpoint-search", "--networks", ","], "names no network"),
    ],
)
def test_errors_are_one_clear_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and said in shown.err and shown.err.count("\n") == 1
    assert main([*argv, "--json"]) == 1
    assert said in json.loads(capsys.readouterr().out)["error"]
