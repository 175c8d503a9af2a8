"""Measure a training step: its peak in a process of its own, its time against eager's in this one.

See [Note: pinned malloc] in resident.py for why the two are never taken together.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import memfit.errors
from memfit.errors import MemfitError
from memfit.plan.options import Options
from memfit.report.arm import Arm
from memfit.report.verify import Verdict, compare
from memfit.resident import PIN, CannotMeasure, require_linux
from memfit.run.feedback import NUM_WATCHED

NUM_WARM_UP = 2


@dataclass(frozen=True)
class Peak:
    """How far one arm's process grew, in bytes; each is the most of several steps.

    Attributes:
        peak_bytes: growth in a step before which no gradient is allocated: activations, workspaces and gradients.
        accumulating_peak_bytes: growth in the micro-batch after it, whose gradients are added to those already there.
        activation_peak_bytes: as peak_bytes, but without the gradients of parameters: what a plan can change. It is
            read between one handing-over of a gradient and the next, less the gradients handed over by then.
    """

    peak_bytes: int
    accumulating_peak_bytes: int
    activation_peak_bytes: int


@dataclass(frozen=True)
class Times:
    """Seconds of forward, loss and backward, of both arms step by step in turn; each figure is a median of pairs."""

    step_s: float
    eager_step_s: float
    time_ratio: float

    @classmethod
    def of(cls, pairs: list[tuple[float, float]]) -> Times:
        """From pairs of (fitted, eager)."""
        return cls(
            step_s=statistics.median(fitted for fitted, _ in pairs),
            eager_step_s=statistics.median(eager for _, eager in pairs),
            # Paired, so that a machine that slows down for a while slows both sides of a ratio.
            time_ratio=statistics.median(fitted / eager for fitted, eager in pairs),
        )


def in_turn(pairs: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The newest of them, an even number: each arm went first as often as the other. One is better than none."""
    return pairs[len(pairs) % 2 :] or pairs


def quartiles(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """The lower and the upper quartile of the ratios whose median is Times.time_ratio."""
    ratios = [fitted / eager for fitted, eager in pairs]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return low, high


def measure_peak(
    network: str,
    *,
    batch: int | None = None,
    image: int | None = None,
    seed: int = 0,
    threads: int | None = None,
    options: Options | None = None,
    repeats: int = 2,
) -> Peak:
    """The peak of a training step of `network`, fitted with `options` or (None) in eager, in a fresh process.

    `network` is a name of the zoo or `package.module:callable`. Peaks need Linux: CannotMeasure is raised elsewhere.
    """
    require_linux()
    request = {
        "network": network,
        "batch": batch,
        "image": image,
        "seed": seed,
        "threads": threads,
        "repeats": repeats,
        "fit": None if options is None else _fit_arguments(options),
    }
    source = f"{PIN}; from memfit.report.peak_worker import main; main()"
    # -P: the current directory must not shadow torch or us. zoo.load looks there itself.
    done = subprocess.run(
        [sys.executable, "-P", "-c", source, json.dumps(request)], capture_output=True, text=True, check=False
    )
    whose = f"{'eager' if options is None else 'fitted'} {network}"
    if done.returncode != 0:
        raise CannotMeasure(f"the process that measures the peak of {whose} {_end_of(done)}")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise _as_raised(answer["kind"])(answer["error"])
    return Peak(**answer)


def measure_times(
    eager: Arm, fitted: Arm, *, steps: int, progress: Callable[[str], None] = lambda text: None
) -> tuple[Times, Verdict, float]:
    """Time `steps` training steps of both arms in turn, under this process's allocator, and compare their bits.

    Warm-up steps come first: they are compared, not timed. The last result is the seconds that capturing took, which
    is how much longer the first fitted forward pass was than the second.
    """
    pairs: list[tuple[float, float]] = []
    forwards_s: list[float] = []
    watched = fitted.fitted
    assert watched is not None
    # Feedback watches the first steps, and may observe one op by op.
    warm_up = NUM_WATCHED if watched.options.asks_costs else NUM_WARM_UP
    total = warm_up + steps
    settled_after = 0

    def after_step(step: int) -> None:
        progress(f"step {step} of {total}, both ways")
        forwards_s.append(fitted.forward_s)
        pairs.append((fitted.step_s, eager.step_s))
        nonlocal settled_after
        if not watched.is_settled:  # it may be planned again yet
            settled_after = len(pairs)

    verdict = compare(eager, fitted, steps=total, after_step=after_step, is_timed=True)
    capture_s = max(forwards_s[0] - forwards_s[1], 0.0) if len(forwards_s) > 1 else forwards_s[0]
    # Arms that differ stop early: then the time of a warm-up step is better than none.
    return Times.of(in_turn(pairs[max(warm_up, settled_after) :] or pairs[-1:])), verdict, capture_s


def _fit_arguments(options: Options) -> dict[str, Any]:
    return {
        "budget": None if options.budget is None else options.budget.text,
        "policy": options.policy,
        "without": sorted(options.without),
        "max_captures": options.max_captures,
        "allow_lossy": options.allow_lossy,
        # As this process measured: times taken under a pinned malloc are worth nothing.
        "measure_s": 0.0,
    }


def _end_of(done: subprocess.CompletedProcess[str]) -> str:
    """How a process ended, in words."""
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        memory = ": most likely the machine ran out of memory; try a smaller batch" if name == "SIGKILL" else ""
        return f"was ended by {name}{memory}"
    lines = done.stderr.strip().splitlines()
    return f"failed: {lines[-1] if lines else f'exit code {done.returncode}'}"


def _as_raised(kind: str) -> type[MemfitError]:
    """The class of an error that came from another process by name."""
    found = getattr(memfit.errors, kind, None)
    return found if isinstance(found, type) and issubclass(found, MemfitError) else MemfitError
