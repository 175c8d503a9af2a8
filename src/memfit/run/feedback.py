"""Hold the first steps of a fitted model against what was predicted, and correct workspaces that were too small.

One line is logged after the third step of each capture. If the process grew more than predicted, one more step is
observed op by op, and what an op was seen to hold goes into the cache of costs, where the next plan finds it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from memfit.cost.costs import Costs
from memfit.cost.profile import underestimated
from memfit.cost.signature import signature
from memfit.plan.simulate import Timeline
from memfit.resident import CannotMeasure, high_water_bytes, reset_high_water, resident_bytes
from memfit.run.codegen import Observer
from memfit.run.nodes import StepWatch
from memfit.run.observe import Transients

log = logging.getLogger("memfit")

_NUM_STEPS = 3  # the first grows the process, the others are timed
NUM_WATCHED = _NUM_STEPS + 1
"""Steps that are not like all others: those, and one that may be observed op by op."""
_TOLERANCE, _SLACK_BYTES = 0.05, 8 << 20
_NOISE_BYTES = 1 << 20


@dataclass(frozen=True)
class Measured:
    """What was predicted of a step and what it did.

    Attributes:
        predicted_growth_bytes, growth_bytes: what the step adds to what was there before it, gradients included; the
            measured one is None where a process cannot read its own growth.
        predicted_step_s, step_s: forward and backward; what the caller does between them does not count.
        num_corrected: ops whose workspace was corrected upwards.
    """

    predicted_growth_bytes: int
    growth_bytes: int | None
    predicted_step_s: float
    step_s: float
    num_corrected: int = 0

    @property
    def line(self) -> str:
        """One line for the log."""
        peak = f"predicted growth {self.predicted_growth_bytes / 2**20:.1f} MiB"
        if self.growth_bytes is not None:
            ratio = self.growth_bytes / max(self.predicted_growth_bytes, 1) - 1
            peak += f", measured {self.growth_bytes / 2**20:.1f} ({ratio:+.1%})"
        ratio = self.step_s / self.predicted_step_s - 1 if self.predicted_step_s else 0.0
        return f"{peak}; predicted step {self.predicted_step_s:.3f} s, measured {self.step_s:.3f} ({ratio:+.1%})"


class Feedback:
    """Watches the first steps of one compiled call."""

    def __init__(self, timeline: Timeline, costs: Costs, path: str) -> None:
        self.timeline = timeline
        self.costs = costs
        self.path = path
        self.measured: Measured | None = None
        self._seconds: list[float] = []
        self._growth_bytes: int | None = None
        self._num_begun = 0
        self._wants_observation = False

    def watch(self) -> StepWatch | None:
        """A stopwatch for the next step, while there is still something to learn."""
        if self._num_begun >= _NUM_STEPS:
            return None
        self._num_begun += 1
        return _Stopwatch(self._took, reads_growth=self._num_begun == 1)

    def observe(self, sources: list[Any]) -> Observer | None:
        """An observer for one step, if its workspaces are in doubt."""
        if not self._wants_observation:
            return None
        self._wants_observation = False
        program, prices = self.timeline.program, self.costs.of(self.timeline.program.step)

        def tell(op: int, held_bytes: int) -> None:
            if held_bytes > prices[op].workspace_bytes + _NOISE_BYTES:
                underestimated(signature(program.step, program.step.ops[op]), held_bytes)
                self._correct(op, held_bytes)

        try:
            return Transients(program, tell)
        except CannotMeasure:
            return None

    def _took(self, seconds: float, growth_bytes: int | None) -> None:
        self._seconds.append(seconds)
        self._growth_bytes = growth_bytes if self._growth_bytes is None else self._growth_bytes
        if len(self._seconds) < _NUM_STEPS:
            return
        predicted = self.timeline.ledger.growth_bytes
        self.measured = Measured(predicted, self._growth_bytes, self.timeline.step_s, min(self._seconds[1:]))
        log.info("%s: %s", self.path, self.measured.line)
        if self._growth_bytes is not None and self._growth_bytes > predicted * (1 + _TOLERANCE) + _SLACK_BYTES:
            log.info(
                "%s grew by %.1f MiB, the plan said %.1f. The next step is observed op by op; the next plan uses "
                "what is learnt",
                self.path,
                self._growth_bytes / 2**20,
                predicted / 2**20,
            )
            self._wants_observation = True

    def _correct(self, op: int, held_bytes: int) -> None:
        known = self.timeline.program.step.ops[op]
        log.warning("workspace of %s in '%s' corrected to %s bytes", known.target, known.path, f"{held_bytes:,}")
        if self.measured is not None:
            self.measured = replace(self.measured, num_corrected=self.measured.num_corrected + 1)


class _Stopwatch:
    """Seconds of both halves of one call, and how far the process grew in them."""

    def __init__(self, tell: Callable[[float, int | None], None], *, reads_growth: bool) -> None:
        self._tell = tell
        self._reads_growth = reads_growth
        self._before_bytes: int | None = None
        self._seconds = 0.0
        self._since_s = 0.0

    def begin(self) -> None:
        if self._reads_growth:
            try:
                reset_high_water()
                self._before_bytes = resident_bytes()
            except CannotMeasure:
                self._before_bytes = None
        self._since_s = time.perf_counter()

    def pause(self) -> None:
        self._seconds += time.perf_counter() - self._since_s

    def resume(self) -> None:
        self._since_s = time.perf_counter()

    def end(self) -> None:
        self.pause()
        grown = None if self._before_bytes is None else high_water_bytes() - self._before_bytes
        self._tell(self._seconds, grown)
