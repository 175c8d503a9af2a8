"""The command line: what each command prints, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from memfit import zoo
from memfit.cli import main as cli
from memfit.cli import run as run_file
from memfit.cli.main import main
from memfit.cli.screen import mebibytes, seconds
from memfit.plan.options import Options
from memfit.report.comparison import Comparison, compare_network

NETWORK = """
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

class Net(nn.Module):
    def __init__(self, wrong=False, prints=False):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)
        self.wrong = wrong

    def forward(self, x):
        print("forward prints")
        y = self.head(self.norm(self.conv(x)).relu().mean((2, 3)))
        return y * 2 if self.wrong and isinstance(x, FakeTensor) else y

def make(batch=2, image=16):
    print("making prints")
    return Net(), torch.randn(batch, 3, image, image), lambda y: y.square().sum()

def without_loss(batch=2, image=16):
    return Net(), {"x": torch.randn(batch, 3, image, image)}

def wrong():
    return Net(wrong=True), torch.randn(2, 3, 8, 8)

def broken():
    raise ZeroDivisionError("a bug in the network")
"""


@pytest.fixture(autouse=True)
def networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cli_networks.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "cli_networks", raising=False)


Run = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command with --json: its exit code, the object on stdout, the text on stderr."""

    def run(*argv: str) -> tuple[int, Any, str]:
        code = main([*argv, "--json"])
        said = capsys.readouterr()
        return code, json.loads(said.out), said.err

    return run


def memfit(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "memfit", *argv], capture_output=True, text=True, check=False)


def test_zoo(run_json: Run, capsys: pytest.CaptureFixture[str]) -> None:
    code, found, _ = run_json("zoo")
    assert code == 0
    assert [row["name"] for row in found["networks"]] == list(zoo.names())
    vgg = next(row for row in found["networks"] if row["name"] == "vgg16")
    assert (vgg["batch"], vgg["image"], vgg["parameters"]) == (64, 224, 138_357_544)
    assert "Simonyan" in vgg["source"]
    assert main(["zoo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "batch", "image", "parameters", "source"]
    assert any(line.split()[:4] == ["vgg16", "64", "224", "138,357,544"] for line in lines)


def test_capture(run_json: Run) -> None:
    code, found, _ = run_json("capture", "cli_networks:make", "--batch", "4")
    assert code == 0
    assert found["ops"] == found["forward_ops"] + found["backward_ops"]
    assert found["parameter_bytes"] >= 4 * (8 * 27 + 8 + 16 + 45)
    assert found["gradient_bytes"] == 4 * (8 * 27 + 8 + 16 + 45)
    assert found["input_bytes"] == 4 * 4 * 3 * 16 * 16
    assert found["ledger_peak_bytes"] > found["ledger_growth_bytes"] > found["gradient_bytes"]
    largest = found["largest_saved"][0]
    assert largest["bytes"] == 4 * 4 * 8 * 16 * 16
    assert largest["module"] == "conv" and "cli_networks.py:" in largest["source"]
    assert found["capture_s"] > 0 and found["rss_bytes"] > 2**20 and len(found["digest"]) == 16


def test_capture_without_the_loss(run_json: Run) -> None:
    _, with_loss, _ = run_json("capture", "cli_networks:make")
    _, without, _ = run_json("capture", "cli_networks:make", "--no-loss")
    assert without["ops"] < with_loss["ops"]


def test_capture_table(run_json: Run, capsys: pytest.CaptureFixture[str]) -> None:
    _, found, _ = run_json("capture", "cli_networks:make", "--table", "2")
    assert len(found["table"].splitlines()) == 6, "header, rule, two ops, how many more, the step"
    assert main(["capture", "cli_networks:make", "--table"]) == 0
    text = capsys.readouterr().out
    assert "aten.convolution.default" in text and "aten.convolution_backward" in text and "more ops" not in text
    assert "largest saved" in text and "saved for backward" in text


def test_capture_refuses_devices_that_are_not_there(run_json: Run) -> None:
    code, found, _ = run_json("capture", "cli_networks:make", "--device", "nowhere")
    assert (code, found["error"]) == (1, "device 'nowhere': no such device. Try cpu")
    if not torch.cuda.is_available():
        code, found, _ = run_json("capture", "cli_networks:make", "--device", "cuda")
        assert code == 1 and found["error"].startswith("device 'cuda': not supported by torch")


@pytest.mark.slow
def test_capture_of_a_network_too_large_to_run() -> None:
    done = memfit("capture", "vgg416", "--batch", "32", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["rss_bytes"] < 2**30
    assert found["saved_bytes"] > 40 * 2**30
    assert found["gradient_bytes"] == 4 * 577_894_184


def test_verify(run_json: Run, capsys: pytest.CaptureFixture[str]) -> None:
    code, found, _ = run_json("verify", "cli_networks:make", "--steps", "2", "--threads", "1", "--seed", "3")
    assert code == 0
    assert found["exact"] is True and found["steps"] == 2 and found["first_difference"] is None
    assert found["network"] == "cli_networks:make" and found["policy"] == "keep" and found["threads"] == 1
    assert main(["verify", "cli_networks:without_loss", "--batch", "3", "--image", "8"]) == 0
    assert "cli_networks:without_loss: exact: 3 steps," in capsys.readouterr().out


def test_verify_of_a_network_that_differs(run_json: Run, capsys: pytest.CaptureFixture[str]) -> None:
    code, found, _ = run_json("verify", "cli_networks:wrong")
    assert code == 1
    assert found["exact"] is False and found["first_difference"]["kind"] == "loss"
    assert main(["verify", "cli_networks:wrong"]) == 1
    assert "not exact: 1 step," in capsys.readouterr().out


def test_run(run_json: Run) -> None:
    code, found, _ = run_json("run", "cli_networks:make", "--batch", "16", "--steps", "2", "--threads", "1")
    assert code == 0
    assert found["exact"] is True and found["verdict"]["steps"] == 4
    assert (found["network"], found["batch"], found["image"]) == ("cli_networks:make", 16, None)
    assert (found["policy"], found["steps"], found["threads"]) == ("keep", 2, 1)
    assert found["torch"] == torch.__version__
    for name in ("ledger_peak_bytes", "ledger_growth_bytes", "step_s", "eager_step_s", "time_ratio", "capture_s"):
        assert found[name] > 0, name
    for name in ("peak_bytes", "eager_peak_bytes", "activation_peak_bytes", "eager_activation_peak_bytes"):
        assert found[name] >= 0, name
    assert {"peak_ratio", "activation_peak_ratio"} <= found.keys()


@pytest.mark.parametrize("excess_bytes", [0, 1])
def test_run_says_whether_the_step_was_within_its_budget(
    excess_bytes: int, run_json: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def within(network: str, *, options: Options, **others: Any) -> Comparison:
        found = compare_network(network, **others)
        assert found.within_budget is None and options.budget is not None
        return replace(found, budget_bytes=found.needed_bytes - excess_bytes)

    monkeypatch.setattr(run_file, "compare_network", within)
    argv = ("run", "cli_networks:make", "--steps", "1", "--threads", "1", "--budget", "1GiB")
    code, found, _ = run_json(*argv)
    assert code == excess_bytes and found["exact"] is True
    assert found["within_budget"] is (not excess_bytes)
    assert found["needed_bytes"] == found["base_bytes"] + found["peak_bytes"] == found["budget_bytes"] + excess_bytes
    assert main(list(argv)) == excess_bytes
    said = capsys.readouterr().out.splitlines()
    expected = "ABOVE THE BUDGET: the step needed " if excess_bytes else "within the budget: the step needed "
    assert any(line.startswith(expected) and "parameters, gradients and inputs included" in line for line in said)


def test_does_not_fit(run_json: Run) -> None:
    for command in ("run", "verify"):
        code, found, err = run_json(command, "cli_networks:make", "--budget", "1KiB")
        assert code == 2
        assert found["kind"] == "DoesNotFit" and "the budget is 1,024" in found["error"]
        said = err.splitlines()[-1]
        assert "memfit: error: policy 'auto' needs" in said and "No plan fits: while " in said


def test_errors(run_json: Run) -> None:
    code, found, err = run_json("capture", "vgg61")
    assert code == 1
    assert found["kind"] == "UnknownNetwork" and "'vgg16'" in found["error"]
    assert err.startswith("memfit: error: there is no network 'vgg61'") and err.count("\n") == 1
    code, found, _ = run_json("verify", "cli_networks:make", "--without", "magic", "more")
    assert (code, found["kind"]) == (1, "BadOption")
    code, found, _ = run_json("run", "cli_networks:make", "--budget", "many")
    assert (code, found["kind"]) == (1, "BadOption") and "not a size" in found["error"]


def test_an_error_that_is_not_ours_shows_its_traceback(run_json: Run) -> None:
    code, found, err = run_json("verify", "cli_networks:broken")
    assert (code, found) == (1, {"error": "a bug in the network", "kind": "ZeroDivisionError"})
    assert "Traceback" in err and "def broken" not in err and "cli_networks.py" in err


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ((), "the following arguments are required: COMMAND (see `memfit --help`)"),
        (("fly",), "invalid choice: 'fly'"),
        (("verify",), "the following arguments are required: NET (see `memfit verify --help`)"),
        (("run", "vgg16", "--batch", "0"), "argument --batch: '0' is not a whole number from 1 up"),
        (("run", "vgg16", "--batch", "two"), "argument --batch: 'two' is not a whole number from 1 up"),
        (("zoo", "--fast"), "unrecognized arguments: --fast"),
    ],
)
def test_wrong_usage_is_an_error_and_not_2(argv: tuple[str, ...], text: str, run_json: Run) -> None:
    code, found, err = run_json(*argv)
    assert (code, found["kind"]) == (1, "BadUsage")
    assert text in found["error"] and err.startswith("memfit: error: ")


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("memfit ")
    for argv in (["--help"], *([name, "--help"] for name in ("zoo", "capture", "frontier", "verify", "run", "demo"))):
        assert main(argv) == 0
        assert "usage: memfit" in capsys.readouterr().out


def test_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.zoo, "run", interrupt)
    assert main(["zoo"]) == 130
    assert capsys.readouterr().err == "memfit: interrupted\n"


def test_nobody_reads_on() -> None:
    script = f"set -o pipefail; {sys.executable} -m memfit zoo | true"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode in (0, 141), "0 if all was written before the reader left"


def test_units() -> None:
    assert (mebibytes(1536 * 1024), mebibytes(3 * 2**30)) == ("1.5 MiB", "3.00 GiB")
    assert (seconds(0.6134), seconds(41.23)) == ("0.613 s", "41.2 s")
