"""The journal of `memfit bench peers`: what was measured before it was ended is not measured again."""

from __future__ import annotations

import fcntl
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from memfit.cli.benchmarks import peers as bench_peers
from memfit.errors import BadOption
from memfit.report import peers_journal
from memfit.report.peers_journal import journal
from memfit.report.peers_process import ArmFailed, Case, Workers
from memfit.report.peers_setting import Setting

UNET = Case("unet", 2, 64)


@dataclass(frozen=True)
class Counting(Workers):
    """Answers with how many were asked before; fails whenever a peak is asked for."""

    log: list[str] = field(default_factory=list)

    def ask(self, task: str, case: Case, **request: Any) -> dict[str, Any]:
        self.log.append(task)
        if task == "peak":
            raise ArmFailed("its process was ended by SIGKILL")
        return {"answer_number": len(self.log), "share": 0.5}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "peers.jsonl"


def ask_all(file: Path, **options: Any) -> tuple[list[str], list[Any], dict[str, Any]]:
    """What was measured, what was answered, and what the journal says of itself."""
    workers = Counting(**options)
    found: list[Any] = []
    with journal(file, workers) as asked:
        found.append(asked.ask("trial", UNET, setting=Setting("auto", budget_bytes=7).to_dict()))
        found.append(asked.ask("budget", UNET, policy="auto", target_bytes=5))
        with pytest.raises(ArmFailed, match="ended by SIGKILL"):
            asked.ask("peak", UNET, setting=Setting("eager").to_dict())
        # The same question again: another answer, since the first steps have corrected prices.
        found.append(asked.ask("budget", UNET, policy="auto", target_bytes=5))
        return workers.log, found, asked.to_dict()


def test_answers_and_failures_are_given_again_in_their_order(file: Path) -> None:
    log, first, said = ask_all(file)
    assert log == ["trial", "budget", "peak", "budget"] and first[1] != first[2]
    assert said == {"file": str(file), "num_known": 0, "num_measured": 4}
    log, again, said = ask_all(file)
    assert log == [] and again == first
    assert said == {"file": str(file), "num_known": 4, "num_measured": 0}


def test_what_was_not_reached_is_measured(file: Path) -> None:
    _, first, _ = ask_all(file)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:3]))
    log, again, said = ask_all(file)
    assert log == ["peak", "budget"] and again[:2] == first[:2] and said["num_known"] == 2
    assert ask_all(file)[0] == []


@pytest.mark.parametrize("num_lost", [1, 5, 60])
def test_a_line_that_was_cut_off_is_measured_again(file: Path, num_lost: int) -> None:
    ask_all(file)
    file.write_text(file.read_text()[:-num_lost])
    assert ask_all(file)[0] == ["budget"]
    assert ask_all(file)[0] == []


@pytest.mark.parametrize("num_left", [0, 5, 60])
def test_a_journal_that_was_hardly_begun_is_begun_again(file: Path, num_left: int) -> None:
    ask_all(file)
    file.write_text(file.read_text()[:num_left])
    assert len(ask_all(file)[0]) == 4
    assert ask_all(file)[0] == []


@pytest.mark.parametrize("options", [{"steps": 2}, {"seed": 1}, {"threads": 1}])
def test_other_options_are_other_questions(file: Path, options: dict[str, Any]) -> None:
    ask_all(file)
    assert len(ask_all(file, **options)[0]) == 4
    assert ask_all(file, **options)[0] == [] and ask_all(file)[0] == []


def test_what_interrupts_is_no_answer(file: Path) -> None:
    class Interrupted(Workers):
        def ask(self, task: str, case: Case, **request: Any) -> dict[str, Any]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), journal(file, Interrupted()) as asked:
        asked.ask("trial", UNET)
    assert len(file.read_text().splitlines()) == 1


@pytest.mark.parametrize("name", ["machine", "memfit"])
def test_a_journal_of_another_machine_or_memfit_is_refused_and_left_alone(
    file: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_all(file)
    before = file.read_text()
    monkeypatch.setattr(peers_journal, {"machine": "machine", "memfit": "sources_digest"}[name], lambda *_: "other")
    with pytest.raises(BadOption, match=f"was measured with another {name} than this. Name a new file"):
        ask_all(file)
    assert file.read_text() == before


@pytest.mark.parametrize("content", ["my notes\n", "my notes", "{}\n", '{"format": "memfit bench peers"}\n[]\n', "[1"])
def test_another_file_is_refused_and_left_alone(file: Path, content: str) -> None:
    file.write_text(content)
    with pytest.raises(BadOption, match=r"that is no journal of memfit bench peers, or it is damaged. Name a new file"):
        ask_all(file)
    assert file.read_text() == content


def test_a_journal_in_use_or_out_of_reach_is_refused(file: Path, tmp_path: Path) -> None:
    with file.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BadOption, match=r"another process writes to it. Wait for it, or name another"):
            ask_all(file)
    with pytest.raises(BadOption, match=r"Is a directory. Name a file that can be written"):
        ask_all(tmp_path)


def test_the_option(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from test_peers_cli import run

    def ask(workers: Workers, task: str, case: Case, **request: Any) -> dict[str, Any]:
        asked.append(task)
        raise ArmFailed("no room")

    asked: list[str] = []
    monkeypatch.setattr(bench_peers.Workers, "ask", ask)
    options = ("--networks", "unet", "--peers", "eager")
    journals = [json.loads(run(*options, *more)[1])["journal"] for more in ((), *[("--journal", str(file))] * 2)]
    assert [found and (found["num_known"], found["num_measured"]) for found in journals] == [None, (0, 1), (1, 0)]
    assert asked == ["peak", "peak"]
    assert json.loads(file.read_text().splitlines()[1])["failure"] == "no room"
