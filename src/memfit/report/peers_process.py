"""Start processes for the comparison of peers, one for each thing to do, each with a limit on its time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any, Protocol

from memfit.resident import PIN, require_linux

_MAIN = "from memfit.report.peers_worker import main; main()"


class ArmFailed(Exception):
    """Something that one arm could not do, for the row that says so. Never shown as an error of memfit."""


@dataclass(frozen=True)
class Case:
    """A network at a size; None is the zoo's own. With channels_last that is how all arms have their images."""

    network: str
    batch: int | None = None
    image: int | None = None
    channels_last: bool = False


class Asked(Protocol):
    """Who answers what a contest asks."""

    def ask(self, task: str, case: Case, **request: Any) -> dict[str, Any]:
        """The answer; raises ArmFailed."""


@dataclass(frozen=True)
class Workers:
    """How processes are started.

    Attributes:
        steps: timed, in each trial.
        timeout_s: for each process.
        threads: of torch; None leaves the choice to torch.
    """

    steps: int = 5
    seed: int = 0
    threads: int | None = None
    timeout_s: float = 900.0

    def asked(self, task: str, case: Case, **request: Any) -> dict[str, Any]:
        """All that a process is told: what decides its answer, but for the machine."""
        return {
            "task": task,
            "network": case.network,
            "batch": case.batch,
            "image": case.image,
            "channels_last": case.channels_last,
            "seed": self.seed,
            "threads": self.threads,
            "steps": self.steps,
            **request,
        }

    def ask(self, task: str, case: Case, **request: Any) -> dict[str, Any]:
        """What a fresh process answers; raises ArmFailed."""
        require_linux()
        source = f"{PIN}; {_MAIN}" if task == "peak" else _MAIN
        # Messages go to a file: processes that a compiler leaves behind would hold the other end of a pipe.
        with tempfile.TemporaryFile("w+", errors="replace") as messages:
            # A session of its own, so that a compiler's processes go with it. -P: see memfit.report.measure.
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", source, json.dumps(self.asked(task, case, **request))],
                stdout=subprocess.PIPE,
                stderr=messages,
                text=True,
                start_new_session=True,
            )
            try:
                out, _ = process.communicate(timeout=self.timeout_s)
            except subprocess.TimeoutExpired:
                raise ArmFailed(f"not done after {self.timeout_s:g} s") from None
            finally:
                # Also when it is done: what it started must not run beside the next arm.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                assert process.stdout is not None
                process.stdout.close()
            messages.seek(0)
            errors = messages.read()
        return _checked(process.returncode, out, errors)


def _checked(returncode: int, out: str, errors: str) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = json.loads(out)
    except json.JSONDecodeError:
        if returncode < 0:
            name = signal.Signals(-returncode).name
            memory = ": most likely the machine ran out of memory" if name == "SIGKILL" else ""
            raise ArmFailed(f"its process was ended by {name}{memory}") from None
        lines = errors.strip().splitlines()
        raise ArmFailed(f"its process failed: {lines[-1] if lines else f'exit code {returncode}'}") from None
    if "error" in answer:
        raise ArmFailed(f"{answer['kind']}: {answer['error']}")
    return answer
