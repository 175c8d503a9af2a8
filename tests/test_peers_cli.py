"""`memfit bench peers`: its options, its JSON and its tables, on made-up measurements; and once for real."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from memfit.cli.benchmarks import peers as bench_peers
from memfit.cli.screen import Screen
from memfit.errors import BadOption
from memfit.report.peers import Comparison, Contest, PeerPeak, Row
from memfit.report.peers_duel import Duel
from memfit.report.peers_process import Case
from memfit.report.peers_setting import Peer, Setting
from memfit.report.peers_trial import Trial

MIB = 2**20
_WRONG = {
    "cosine": 0.2,
    "relative_norm": 0.93,
    "worst": "blocks.3",
    "worst_relative_norm": 1.2,
    "worst_cosine": 0.1,
}


def run(*argv: str, is_json: bool = True) -> tuple[int, str]:
    """The exit code and what was printed."""
    parser = argparse.ArgumentParser()
    bench_peers.add_arguments(parser)
    out = io.StringIO()
    code = bench_peers.run(parser.parse_args(argv), Screen(json=is_json, out=out))
    return code, out.getvalue()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Contest, list[str], tuple[float, ...]]]:
    """What would have been measured; nothing is."""
    found: list[tuple[Contest, list[str], tuple[float, ...]]] = []

    def compare(contest: Contest, peers: Sequence[Peer], shares: Sequence[float]) -> Comparison:
        found.append((contest, [peer.name for peer in peers], tuple(shares)))
        return comparison(contest.case, shares)

    monkeypatch.setattr(Contest, "compare", compare)
    return found


def comparison(case: Case, shares: Sequence[float], **auto: Any) -> Comparison:
    exact = Trial(1.05, 1.04, 1.06, 1.05, 1.0, 5, 9, (), None, None)
    wrong = Trial(1.2, 1.1, 1.3, 1.2, 1.0, 5, 9, ("gradient", "rng"), "step 1", _WRONG, _WRONG, True)

    def row(peer: str, share: float, **figures: Any) -> Row:
        setting = Setting(peer)
        return Row(
            *(case.network, case.batch, case.image, share, int(100 * share) * MIB, 100 * MIB, peer),
            **{
                "is_ours": peer == "auto",
                "setting": setting,
                "peak_bytes": 120 * MIB,
                "activation_peak_bytes": 39 * MIB,
                "within": True,
                "trial": exact,
                "tried": (PeerPeak(setting, 120 * MIB, 39 * MIB, 1.0),),
                **figures,
            },
        )

    rows = [row("eager", 1.0, activation_peak_bytes=100 * MIB)]
    for share in shares:
        rows += [
            row("compile-aot-eager", share, trial=wrong, duel=Duel(0.875, 0.8, 0.9, 0.875, 1.0, 8)),
            row("compile-inductor", share, setting=None, trial=None, within=False, note="InvalidCxxCompiler: none"),
            row("auto", share, **{"within_budget": True, **auto}),
        ]
    smallest = {
        "budget_bytes": 10**9,
        "activation_bytes": 30 * MIB,
        "keep_activation_bytes": 90 * MIB,
        "reason": "30 MiB at aten.mm",
        "proven_bytes": 9 * 10**8,
        "proof": "no plan needs less than 900,000,000 bytes",
    }
    return Comparison(case, tuple(rows), smallest)


def test_defaults(asked: list[Any]) -> None:
    code, text = run()
    assert code == 0
    cases = {contest.case.network: (contest.case, shares) for contest, _, shares in asked}
    assert list(cases) == ["vgg16_bn", "resnet50", "densenet121", "unet", "gpt2"]
    assert cases["resnet50"] == (Case("resnet50", 8, 224), (0.5, 0.4)) and cases["unet"][1] == (0.5,)
    assert asked[0][1] == [
        *("eager", "checkpoint", "compile-aot-eager", "compile-inductor"),
        *("checkpoint-search", "rotor", "overlap", "gist-lossless", "auto"),
    ]
    found = json.loads(text)
    assert found["benchmark"] == "peers" and found["machine"]["threads"] > 0
    assert len(found["verdicts"]) == 6 and all(verdict["holds"] for verdict in found["verdicts"])
    assert found["verdicts"][0]["failed"] == ["compile-inductor"]
    assert found["verdicts"][0]["inexact"] == ["compile-aot-eager"]
    (wrong, *_) = (row for row in found["rows"] if row["peer"] == "compile-aot-eager")
    assert wrong["exact"] is False and wrong["trial"]["own_loss_is_same"] is True
    assert wrong["duel"]["time_ratio"] == 0.875
    assert wrong["tried"][0]["activation_peak_bytes"] == 39 * MIB
    assert found["smallest"][0]["network"] == "vgg16_bn" and found["smallest"][0]["proven_bytes"] == 9 * 10**8


def test_with_channels_last_all_arms_have_it(asked: list[Any]) -> None:
    assert json.loads(run("--channels-last")[1])["channels_last"] is True
    assert [contest.case.network for contest, _, _ in asked] == ["vgg16_bn", "resnet50", "densenet121", "unet"]
    assert all(contest.case.channels_last for contest, _, _ in asked)
    assert json.loads(run("--networks", "unet")[1])["channels_last"] is False
    tables = run("--networks", "unet", "--channels-last", is_json=False)[1]
    assert "unet, batch 2, image 256, channels last\n" in tables


def test_each_network_is_told_of_as_soon_as_it_is_done(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    run("--networks", "unet,gpt2", "--share", "50%")
    row = "eager 1.050 (100%), compile-aot-eager 1.200~ (50%), compile-inductor failed (50%), auto 1.050 (50%)"
    assert capsys.readouterr().err == f"memfit: unet: {row}\nmemfit: gpt2: {row}\n"


def test_options_reach_what_is_measured(asked: list[Any]) -> None:
    options = ("--share", "60%, 40%", "--steps", "2", "--timeout", "7", "--threads", "1", "--seed", "3")
    sizes = ("--networks", "unet,vgg11", "--batch", "unet=2", "--image", "32")
    run(*options, *sizes, "--peers", "auto,compile-inductor", "--memory-budgets", "0.3,0.6", "--sweep", "all")
    (unet, names, shares), (vgg11, _, _) = asked
    assert names == ["eager", "auto", "compile-inductor"] and shares == (0.6, 0.4)
    assert unet.case == Case("unet", 2, 32) and vgg11.case == Case("vgg11", 64, 32)
    workers = unet.workers
    assert (workers.steps, workers.timeout_s, workers.threads, workers.seed) == (2, 7.0, 1, 3)
    assert (unet.memory_budgets, unet.sweep) == ((0.3, 0.6), "all")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--peers", "auto,rotors"), "--peers rotors: unknown. Known peers: eager, checkpoint"),
        (("--peers", ","), "names no peer"),
        (("--networks", "unet,unit"), "there is no network 'unit'"),
        (("--share", "6GiB"), "give per cent of eager's activation peak"),
        (("--share", "120%"), "at most 100%"),
        (("--share", "50%,"), "give per cent"),
        (("--batch", "resnet50=eight"), "--batch: 'eight' is not a whole number from 1 up"),
        (("--batch", "0"), "--batch: '0' is not a whole number"),
        (("--networks", "unet", "--batch", "resnet50=8"), "'resnet50' is not among the networks: unet"),
        (("--networks", "unet", "--image", "17"), "unet needs an image side that divides by 16, not 17"),
        (
            ("--peers", "auto", "--sweep", "all"),
            "--sweep: without effect where neither torch.compile nor checkpoint is among the peers",
        ),
        (("--peers", "auto", "--memory-budgets", "0.5"), "--memory-budgets: without effect"),
        (("--memory-budgets", "0.5,2"), "give numbers from 0 to 1"),
        (("--memory-budgets", "half"), "give numbers from 0 to 1"),
        (("--networks", "unet,gpt2", "--channels-last"), "--channels-last: gpt2 takes no images. Leave it out"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_measured(
    argv: tuple[str, ...], message: str, asked: list[Any]
) -> None:
    with pytest.raises((BadOption, ValueError), match=message.replace("(", r"\(")):
        run(*argv)
    assert asked == []


def test_the_tables(asked: list[Any]) -> None:
    code, text = run("--networks", "resnet50", is_json=False)
    assert code == 0
    assert "resnet50, batch 8, image 224" in text and "39.0 MiB" in text and "1.040-1.060" in text
    assert "auto over it" in text and "0.875" in text
    assert "NO: gradient, rng" in text and "compile-inductor at 50%: InvalidCxxCompiler: none" in text
    assert "off by 9.3e-01 of their length, 'blocks.3' by 1.2e+00" in text
    unfolded = " ".join(text.split())
    assert "at a loss of the same bits, by 9.3e-01: what backward draws again" in unfolded
    assert "1,000,000,000 bytes in all" in unfolded and "30 MiB at aten.mm" in unfolded
    assert "no plan needs less than 900,000,000 bytes" in unfolded


@pytest.mark.parametrize(
    ("auto", "code"),
    [
        ({}, 0),
        ({"within": False}, 1),
        ({"trial": Trial(1.05, 1.0, 1.1, 1.0, 1.0, 5, 9, ("buffer",), "step 1", None)}, 1),
        ({"trial": None, "within": False, "within_budget": None, "setting": None, "note": "timed out"}, 1),
        ({"trial": Trial(1.5, 1.4, 1.6, 1.5, 1.0, 5, 9, (), None, None)}, 0),
    ],
)
def test_the_exit_code_is_about_bits_and_bytes(
    auto: dict[str, Any], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Contest, "compare", lambda contest, peers, shares: comparison(contest.case, shares, **auto))
    assert run("--networks", "unet")[0] == code


def test_without_eager_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(contest: Contest, peers: Any, shares: Any) -> Comparison:
        eager = replace(comparison(contest.case, shares).rows[0], trial=None, setting=None, note="timed out")
        return Comparison(contest.case, (eager,))

    monkeypatch.setattr(Contest, "compare", failed)
    code, text = run("--networks", "unet")
    assert code == 1 and json.loads(text)["verdicts"] == []


@pytest.mark.slow
def test_every_arm_for_real() -> None:
    """But for inductor, which compiles for minutes."""
    peers = ("checkpoint", "compile-aot-eager", "checkpoint-search", "rotor", "overlap", "gist-lossless", "auto")
    sizes = ("--batch", "4", "--image", "96", "--steps", "2", "--share", "70%", "--memory-budgets", "0.5")
    code, text = run("--networks", "resnet50", *sizes, "--peers", ",".join(peers))
    found = json.loads(text)
    rows = {row["peer"]: row for row in found["rows"]}
    assert code == 0 and set(rows) == {"eager", *peers}
    for name in ("eager", "checkpoint-search", "rotor", "overlap", "gist-lossless", "auto"):
        assert rows[name]["exact"], rows[name]
    assert rows["checkpoint"]["trial"]["different"] == ["buffer"]
    assert found["smallest"][0]["proven_bytes"] > 0
