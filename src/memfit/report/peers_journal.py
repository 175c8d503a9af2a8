"""What processes answered in a comparison of peers, line by line in a file: hours of measuring can be taken up again.

Answers hold for the machine, the torch and the memfit that gave them, so a file that was begun with others is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from memfit.cost.price_cache import machine
from memfit.errors import BadOption
from memfit.json_folder import sources_digest
from memfit.report.peers_process import ArmFailed, Case, Workers

_FORMAT = "memfit bench peers"


class Journal:
    """Asks workers as they would be asked themselves, but for what the file has an answer to.

    The same question can be asked twice and have two answers: first steps find workspaces larger than planned, and the
    next plan knows them. So answers to one question are given out in the order in which they were written.
    """

    def __init__(self, workers: Workers, file: TextIO, known: dict[str, deque[dict[str, Any]]]) -> None:
        self._workers = workers
        self._file = file
        self._known = known
        self._num_known = 0
        self._num_measured = 0

    def to_dict(self) -> dict[str, Any]:
        """How many answers are from the file as it was found, and how many are new."""
        return {"file": self._file.name, "num_known": self._num_known, "num_measured": self._num_measured}

    def ask(self, task: str, case: Case, **request: Any) -> dict[str, Any]:
        """What a process answered, now or when the file was written; raises ArmFailed, likewise."""
        question = _text(self._workers.asked(task, case, **request))
        if answers := self._known.get(question):
            self._num_known += 1
            return _given(answers.popleft())
        start_s = time.monotonic()
        try:
            entry: dict[str, Any] = {"answer": self._workers.ask(task, case, **request)}
        except ArmFailed as failure:
            entry = {"failure": str(failure)}
        entry = {"question": json.loads(question), **entry, "took_s": round(time.monotonic() - start_s, 1)}
        # On disk before the next question: what was measured is not lost, whatever ends this process.
        self._file.write(_text(entry) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._num_measured += 1
        return _given(entry)


@contextlib.contextmanager
def journal(path: Path, workers: Workers) -> Iterator[Journal]:
    """The journal in that file, which is made if it is not there; raises BadOption if it is not ours to go on with."""
    try:
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise BadOption(f"--journal {path}: {error.strerror}. Name a file that can be written") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadOption(f"--journal {path}: another process writes to it. Wait for it, or name another") from None
        yield Journal(workers, file, _read(path, file))


def _read(path: Path, file: TextIO) -> dict[str, deque[dict[str, Any]]]:
    """The answers in the file, which is begun if it is empty. A last line without an end was not written whole."""
    file.seek(0)
    written = file.read()
    whole = written[: written.rfind("\n") + 1]
    if whole != written and not _is_beginning(written):
        raise _not_ours(path)
    if whole != written:
        file.truncate(len(whole.encode()))
    head = {"format": _FORMAT, "memfit": sources_digest("."), "machine": machine()}
    lines = whole.splitlines()
    if not lines:
        file.write(_text(head) + "\n")
        return {}
    try:
        found, *entries = [json.loads(line) for line in lines]
        is_ours = found["format"] == _FORMAT
        known: dict[str, deque[dict[str, Any]]] = defaultdict(deque)
        for entry in entries:
            known[_text(entry["question"])].append(entry)
            is_ours = is_ours and ("answer" in entry or "failure" in entry)
    except (ValueError, TypeError, KeyError):
        is_ours = False
    if not is_ours:
        raise _not_ours(path)
    if found != json.loads(_text(head)):
        others = [name for name in ("memfit", "machine") if found.get(name) != json.loads(_text(head[name]))]
        raise BadOption(
            f"--journal {path}: what is in it was measured with another {' and another '.join(others)} than this. "
            "Name a new file"
        )
    return known


def _is_beginning(written: str) -> bool:
    """True if that can be what is left of a journal whose last line was cut off, even if that is its first."""
    start = '{"format": ' + _text(_FORMAT)
    return written.startswith(start) or start.startswith(written)


def _not_ours(path: Path) -> BadOption:
    return BadOption(f"--journal {path}: that is no journal of memfit bench peers, or it is damaged. Name a new file")


def _given(entry: dict[str, Any]) -> dict[str, Any]:
    if "failure" in entry:
        raise ArmFailed(entry["failure"])
    answer: dict[str, Any] = entry["answer"]
    return answer


def _text(content: Any) -> str:
    """In one line, the same for the same content: names are in order."""
    return json.dumps(content, sort_keys=True)
