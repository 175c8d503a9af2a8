"""Hold the first steps of a fitted model against what was predicted, and correct workspaces that were too small.

One line is logged after the third timed step of each capture. How far the process grows is read in the first. If that
is more than predicted, the next step is observed op by op, and what an op was seen to hold goes into the cache of
costs, where later plans find it. If that step needed more than the budget, there is an Excess: run/revision.py plans
the call again with it. A step that needed more than predicted but not more than the budget keeps its plan: it is within
the promise, and another plan could only be slower.

[Note: two readings]
The growth of a process counts what malloc holds in reserve: freed blocks of up to 32 MiB are kept, and capture and
planning leave holes. That was 10 to 50 % more than small networks need, and no plan can change it. So the first
reading, which costs nothing, only says that all is well, or that it may not be. In the step that is observed, malloc
gives back what it can before each op: that is the step's own growth (132.6 MiB where the plan said 132.3 and the first
reading 201.9, resnet50 at 4 x 96 x 96), and what the budget is held against.

[Note: whose growth]
It is that of the whole process between the beginning of forward and the end of backward: what the caller computes
between the two counts (the loss), and so does what other threads do meanwhile. The budget is for the whole step, so
that is as it should be. Where a second call begins before the first one's backward has ended, the growth of one cannot
be told, and is read in a later step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memfit.cost.costs import HERE, PS_PER_S, Costs
from memfit.cost.profile import overpriced, underestimated
from memfit.cost.signature import signature
from memfit.plan.simulate import Timeline
from memfit.resident import CannotMeasure, high_water_bytes, reset_high_water, resident_bytes, trim
from memfit.run.codegen import Observer
from memfit.run.nodes import StepWatch
from memfit.run.observe import Transients

log = logging.getLogger("memfit")

_NUM_STEPS = 3  # the first grows the process, the others are timed
NUM_WATCHED = _NUM_STEPS + 1
"""Steps that are not like all others: those, and one that may be observed op by op."""
_MAX_BEGUN = 4 * _NUM_STEPS  # calls whose backward never comes, or comes late, must not be watched for ever
_MAX_GIVEN_UP = 3
_TOLERANCE, _SLACK_BYTES = 0.05, 8 << 20
_FASTER, _LEAST_STEP_S = 0.6, 0.05
"""A step of some length that takes less than that share of its ops' prices: these are of a busy machine."""
_NOISE_BYTES = 1 << 20  # pages, and Python's own objects
_PARTS = ("in the forward half", "between the halves, where the caller computes the loss", "in the backward half")


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


@dataclass(frozen=True)
class Correction:
    """An op that was seen to hold more than its price says, beyond its operands and results."""

    signature: str
    target: str
    path: str
    workspace_bytes: int

    def __str__(self) -> str:
        return f"{self.target} in '{self.path or '(root)'}' to {self.workspace_bytes:,} bytes"


@dataclass(frozen=True)
class Excess:
    """A step that needed more than the budget, all included.

    Attributes:
        predicted_bytes, measured_bytes: the peak by the plan, and as the process grew.
        where: in which part of the step the process was largest, in words.
        corrections: the ops that were found to blame, if any.
    """

    predicted_bytes: int
    measured_bytes: int
    budget_bytes: int
    where: str
    corrections: tuple[Correction, ...] = ()

    @property
    def unforeseen_bytes(self) -> int:
        """By how much the plan was wrong."""
        return self.measured_bytes - self.predicted_bytes

    def __str__(self) -> str:
        return (
            f"the step needed {self.measured_bytes:,} bytes, the plan said {self.predicted_bytes:,} and the budget is "
            f"{self.budget_bytes:,}; the process was largest {self.where}"
        )


class Feedback:
    """Watches the first steps of one compiled call.

    Args:
        timeline, costs: what the call was predicted to do, and by which prices.
        path: whose call it is, for people.
        budget_bytes: all that the step may need; None if nobody set a limit.
        reads_growth: False where the resident set of the process says nothing, as for tensors on an accelerator.
        strict: raise where growth cannot be read, rather than do without.
    """

    def __init__(
        self,
        timeline: Timeline,
        costs: Costs,
        path: str,
        *,
        budget_bytes: int | None = None,
        reads_growth: bool = True,
        strict: bool = False,
    ) -> None:
        self.timeline = timeline
        self.costs = costs
        self.path = path
        self.measured: Measured | None = None
        self.excess: Excess | None = None
        self.plan_again: Callable[[Excess], Any] | None = None  # the way back to who planned this call
        self.wants_observation = False
        self._budget_bytes = budget_bytes
        self._reads_growth = reads_growth
        self._strict = strict
        self._seconds: list[float] = []
        self._growth_bytes: int | None = None
        self._num_begun = 0
        self._reading: _Stopwatch | None = None
        self._observation: _Observation | None = None
        self._corrections: dict[int, Correction] = {}
        self._num_given_up = 0

    @property
    def is_settled(self) -> bool:
        """True once nothing more is watched and nothing is to be done about it."""
        is_busy = self.excess is not None or self.wants_observation or self._observation is not None
        return self._is_done and not is_busy

    @property
    def _is_done(self) -> bool:
        return len(self._seconds) >= _NUM_STEPS or self._num_begun >= _MAX_BEGUN

    def accept(self) -> None:
        """Let the excess be: it was taken care of, or nothing can be done about it."""
        self.excess = None

    def watch(self) -> StepWatch | None:
        """A stopwatch for the next step, while there is still something to learn."""
        if self._observation is not None:
            if not self._observation.has_begun:
                return self._observation
            self._observation.num_waited += 1
            if self._observation.num_waited > _MAX_BEGUN:  # its backward will not come
                self._give_up_observing()
        if self._is_done:
            return None
        self._num_begun += 1
        watch = _Stopwatch(self._took, reads_growth=self._reads_growth and self._growth_bytes is None)
        if self._reading is not None:
            self._reading.is_alone = watch.is_alone = False
        if watch.reads_growth:
            self._reading = watch
            watch.can_do_without = not self._strict
        return watch

    def _give_up_observing(self) -> None:
        """Have another step observed instead, a few times at most."""
        self._observation = None
        self._num_given_up += 1
        self.wants_observation = self._num_given_up < _MAX_GIVEN_UP
        if not self.wants_observation:
            log.warning(
                "%s may need more than was planned, and no step that was looked at closely came to its end: call "
                "backward() on the loss of every training step, or under torch.no_grad() what needs none",
                self.path,
            )

    def observe(self, sources: list[Any]) -> Observer | None:
        """An observer for one step, if its workspaces are in doubt."""
        if not self.wants_observation:
            return None
        self.wants_observation = False
        program = self.timeline.program
        prices = self.costs.of(program.step)

        def tell(op: int, held_bytes: int) -> None:
            if held_bytes > prices[op].workspace_bytes + _NOISE_BYTES:
                self._correct(op, held_bytes)

        try:
            observer = Transients(program, tell)
        except CannotMeasure:
            return None
        self._observation = _Observation(observer, self._observed)
        return observer

    def _took(self, watch: _Stopwatch) -> None:
        self._seconds.append(watch.seconds)
        if watch is self._reading:
            self._reading = None
        if watch.is_alone and watch.growth_bytes is not None and self._growth_bytes is None:
            self._growth_bytes = watch.growth_bytes
            self._judge(watch.growth_bytes)
        if len(self._seconds) == _NUM_STEPS:
            self.measured = Measured(
                self.timeline.ledger.growth_bytes,
                self._growth_bytes,
                self.timeline.step_s,
                min(self._seconds[1:]),
                len(self._corrections),
            )
            log.info("%s: %s", self.path, self.measured.line)
            self._doubt_prices(self.measured)

    def _doubt_prices(self, measured: Measured) -> None:
        """Where a step is much faster than the prices of its ops say, have them measured again the next time.

        Only ops that were measured count, each once: what is waited for or run again, or only estimated, may be wrong
        for other reasons.
        """
        if self.costs.device != HERE:
            return
        prices = self.costs.of(self.timeline.program.step)
        priced_s = sum(price.time_ps for price in prices if not price.is_estimated) / PS_PER_S
        if priced_s < _LEAST_STEP_S or measured.step_s >= _FASTER * priced_s:
            return
        overpriced(self.costs)
        log.warning(
            "%s: a step takes %.3f s, and by the prices of its ops it would be %.3f: they were measured while the "
            "machine was busy, and the plan weighed them against each other. They are forgotten. Let memfit measure "
            "them again for a better plan: call memfit.fit again when the machine is quiet",
            self.path,
            measured.step_s,
            priced_s,
        )

    def _judge(self, grown_bytes: int) -> None:
        """Hold the first reading against the plan and the budget: is there reason to look closer?"""
        ledger = self.timeline.ledger
        unforeseen_bytes = grown_bytes - ledger.growth_bytes
        # Libraries set themselves up in a process's first steps: a little is no reason, unless it is beyond the budget.
        is_over = unforeseen_bytes > _NOISE_BYTES and self._is_over_budget(grown_bytes)
        if is_over or unforeseen_bytes > max(_SLACK_BYTES, ledger.growth_bytes * _TOLERANCE):
            self.wants_observation = True
            log.info(
                "%s grew by %.1f MiB, the plan said %.1f. The next step is observed op by op",
                self.path,
                grown_bytes / 2**20,
                ledger.growth_bytes / 2**20,
            )

    def _is_over_budget(self, grown_bytes: int) -> bool:
        return self._budget_bytes is not None and self.timeline.ledger.base_bytes + grown_bytes > self._budget_bytes

    def _observed(self, growths_bytes: list[int]) -> None:
        """The observed step is over: what it needed, part by part."""
        self._observation = None
        ledger, grown_bytes = self.timeline.ledger, max(growths_bytes)
        self._growth_bytes = grown_bytes
        unforeseen_bytes = grown_bytes - ledger.growth_bytes
        if unforeseen_bytes <= _NOISE_BYTES or not self._is_over_budget(grown_bytes):
            log.info(
                "%s needs %.1f MiB besides what malloc holds in reserve, the plan said %.1f",
                self.path,
                grown_bytes / 2**20,
                ledger.growth_bytes / 2**20,
            )
            return
        assert self._budget_bytes is not None
        self.excess = Excess(
            ledger.peak_bytes,
            ledger.base_bytes + grown_bytes,
            self._budget_bytes,
            _PARTS[growths_bytes.index(grown_bytes)],
            tuple(self._corrections.values()),
        )

    def _correct(self, op: int, held_bytes: int) -> None:
        step = self.timeline.program.step
        known = step.ops[op]
        before = self._corrections.get(op)
        if before is not None and before.workspace_bytes >= held_bytes:  # it was run again, and held less
            return
        found = Correction(signature(step, known), known.target, known.path, held_bytes)
        self._corrections[op] = found
        underestimated(found.signature, held_bytes)
        log.info("workspace of %s in '%s' corrected to %s bytes", known.target, known.path, f"{held_bytes:,}")


class _Observation:
    """The step that is observed, from its beginning to its end: how far the process grew in each part of it.

    The observer sees the instructions of both halves. What happens between them is read here, and so is a backward half
    for other tangents, which is not observed.
    """

    def __init__(self, observer: Transients, tell: Callable[[list[int]], None]) -> None:
        self.has_begun = False
        self.num_waited = 0
        self._observer = observer
        self._tell = tell
        self._growths_bytes: list[int] = []

    def begin(self) -> None:
        self.has_begun = True

    def pause(self) -> None:
        self._end_part()

    def resume(self) -> None:
        self._end_part()

    def end(self) -> None:
        self._end_part()
        self._tell(self._growths_bytes)

    def _end_part(self) -> None:
        self._observer.look()
        self._growths_bytes.append(self._observer.growth_bytes)
        self._observer.growth_bytes = 0
        self._observer.go_on()


class _Stopwatch:
    """Seconds of both halves of one call, and how far the process grew until its end."""

    def __init__(self, tell: Callable[[_Stopwatch], None], *, reads_growth: bool) -> None:
        self.reads_growth = reads_growth
        self.can_do_without = True
        self.is_alone = True
        self.seconds = 0.0
        self.growth_bytes: int | None = None
        self._tell = tell
        self._before_bytes: int | None = None
        self._since_s = 0.0

    def begin(self) -> None:
        if self.reads_growth:
            try:
                trim()
                reset_high_water()
                self._before_bytes = resident_bytes()
            except CannotMeasure:
                if not self.can_do_without:
                    raise
        self._since_s = time.perf_counter()

    def pause(self) -> None:
        self.seconds += time.perf_counter() - self._since_s

    def resume(self) -> None:
        self._since_s = time.perf_counter()

    def end(self) -> None:
        self.pause()
        if self._before_bytes is not None:
            self.growth_bytes = high_water_bytes() - self._before_bytes
        self._tell(self)
