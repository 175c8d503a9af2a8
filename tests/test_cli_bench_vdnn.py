"""`memfit bench vdnn` and `memfit plan --policy vdnn-*`: what they print."""

from __future__ import annotations

import json

import pytest

from memfit.cli.benchmarks.vdnn_figures import CONFIGURATIONS, Figure
from memfit.cli.main import main

POLICIES = {"none(p)", "conv(m)", "conv(p)", "all(m)", "all(p)", "dyn"}
WANTED = {"fits", "max_bytes", "average", "average_managed", "host_bytes", "throughput", "choice"}


def test_the_table_in_json_has_theirs_beside_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "vdnn", "--networks", "alexnet,vgg16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = found["rows"]
    assert [(row["network"], row["batch"]) for row in rows] == [
        ("alexnet", 128),
        *(("vgg16", n) for n in (64, 128, 256)),
    ]
    assert [row["network_wide"]["fits"] for row in rows] == [True, True, False, False]
    for row in rows:
        for account in ("policies", "published_account"):
            assert row[account].keys() == POLICIES
            assert all(figures.keys() >= WANTED for figures in row[account].values())
            none, all_ = row[account]["none(p)"], row[account]["all(m)"]
            assert none["host_bytes"] == 0 and none["throughput"] == 1 and all_["host_bytes"] > 0
            assert all_["max_bytes"] < none["max_bytes"] and all_["throughput"] < 1
            assert all_["average"]["time"] < all_["max_bytes"]
    alexnet, *_, vgg = rows
    (cut,) = alexnet["figures"]
    assert cut["published"] == 0.89 and cut["certainty"] == "A" and cut["ours"] == pytest.approx(0.89, abs=0.05)
    assert "over kernels and of managed bytes" in cut["difference"]
    memory, throughput, *_ = vgg["figures"]
    assert memory["published"] == 28e9 and memory["ours"] == vgg["network_wide"]["bytes"]
    assert throughput["published"] == 0.82 and throughput["ours"] == vgg["policies"]["dyn"]["throughput"] > 0.9
    assert vgg["policies"]["dyn"]["choice"] == "vdnn-dyn: step 3a, conv+greedy"
    assert [f["difference"] for f in vgg["figures"] if f["difference"]] == vgg["differences"]
    assert found["figures"] == found["differences"] == []  # statements on all ten, of which these are four


def test_other_networks_and_batches_stand_for_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "vdnn", "--networks", "resnet18,alexnet", "--batch", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["network"], row["batch"], row["figures"]) for row in rows] == [("resnet18", 2, []), ("alexnet", 2, [])]


def test_the_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "vdnn", "--networks", "alexnet"]) == 0
    header, _, row, *rest = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["network", "batch", "network-wide"]
    assert row.split()[:2] == ["alexnet", "128"] and "89%" in row and "none(p)" in row
    assert rest[-1].startswith("alexnet at 128: average usage cut: published 89%, ours ")


def test_the_ten_configurations_are_the_papers() -> None:
    assert [(c.network, c.batch) for c in CONFIGURATIONS] == [
        *(("alexnet", 128), ("overfeat", 128), ("googlenet", 128)),
        *(("vgg16", 64), ("vgg16", 128), ("vgg16", 256)),
        *((f"vgg{depth}", 32) for depth in (116, 216, 316, 416)),
    ]


@pytest.mark.parametrize(
    ("low", "high", "unit", "ours", "said"),
    [
        (28e9, 28e9, "GB", 27.25e9, "x: published 28.0 GB, ours 27.2 GB (-3%): y"),
        (28e9, 28e9, "GB", 28.01e9, None),  # the same as far as theirs is known
        (0.01, 0.18, "%", 0.05, None),
        (0.01, 0.18, "%", 0.2, "x: published 1% to 18%, ours 20% (+2.0 points): y"),
    ],
)
def test_figures_say_where_they_differ(low: float, high: float, unit: str, ours: float, said: str | None) -> None:
    figure = Figure("x", low, high, "A", unit, lambda row: row["ours"], "y")
    assert figure.beside({"ours": ours})["difference"] == said


def test_a_plan_says_which_way_dyn_took(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "vgg16", "--batch", "256", "--device", "titan-x", "--policy", "vdnn-dyn"]
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["choice"] == "vdnn-dyn: step 3a, conv+greedy" and found["fits"]
    assert found["decisions"].keys() == {"keep", "offload:host"} and found["overhead"] < 0.22
    assert main(argv) == 0
    assert "vdnn-dyn: step 3a, conv+greedy" in capsys.readouterr().out
    assert main([*argv, "--budget", "4GiB", "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["choice"] == "vdnn-dyn: step 1, all(m): does not fit, so nothing does" and not found["fits"]
    assert main(["plan", "alexnet", "--batch", "2", "--device", "titan-x", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["choice"] is None
