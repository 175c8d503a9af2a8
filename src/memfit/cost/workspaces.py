"""The near end of the process that measures workspaces: starts it, asks it, and carries on when it dies."""

from __future__ import annotations

import contextlib
import json
import pickle
import subprocess
import sys
import tempfile
import threading
from typing import Any

import torch

from memfit.cost.operands import Call, CannotRunAlone
from memfit.resident import PIN

_PATIENCE_S = 300.0  # far more than any op in its place takes; a kernel that hangs must not hang the user


class Workspaces:
    """Answers one call at a time; the process is started with the first, and again after a crash."""

    def __init__(self) -> None:
        self.notes: tuple[str, ...] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._does_start = True

    def of(self, call: Call) -> int:
        """The workspace of the op, 0 where this machine does not tell; raises CannotRunAlone."""
        if self._process is None and self._does_start:
            self._start()
        if self._process is None:
            return 0
        answer = self._ask(call)
        if "cannot_run" in answer:
            raise CannotRunAlone(answer["cannot_run"])
        if "cannot_measure" in answer:
            self._note(answer["cannot_measure"])
            return 0
        return int(answer["workspace_bytes"])

    def _note(self, why: str) -> None:
        self.notes = (f"workspaces are taken to be 0: {why}",)

    def _start(self) -> None:
        source = f"{PIN}; from memfit.cost.profile_worker import main; main()"
        # -P: the current directory must not shadow torch or us.
        command = [sys.executable, "-P", "-c", source, str(torch.get_num_threads())]
        with tempfile.TemporaryFile() as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors.fileno()
            )
            if not self._line():
                errors.seek(0)
                lines = errors.read().decode(errors="replace").strip().splitlines()
                self.close()
                self._does_start = False
                self._note(f"the process that measures them did not start: {lines[-1] if lines else 'no reason given'}")

    def _ask(self, call: Call) -> dict[str, Any]:
        assert self._process is not None and self._process.stdin is not None
        line = b""
        with contextlib.suppress(BrokenPipeError):
            pickle.dump(call, self._process.stdin)
            self._process.stdin.flush()
            line = self._line()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        self.close()
        return {"cannot_run": f"the process that measures workspaces ended, or hung, in {call.target}"}

    def _line(self) -> bytes:
        """The next line the process writes; empty if it ends. If it hangs it is ended."""
        process = self._process
        assert process is not None and process.stdout is not None
        timer = threading.Timer(_PATIENCE_S, process.kill)
        timer.start()
        try:
            return process.stdout.readline()
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(BrokenPipeError):
                self._process.communicate()
            self._process = None
