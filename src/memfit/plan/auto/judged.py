"""Whole plans with their true peak and time: what the search found, and what single policies decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memfit.capture.step import Step
from memfit.cost.costs import Costs
from memfit.plan.decisions import Decision, Decisions
from memfit.plan.lower import lower
from memfit.plan.simulate import simulate


@dataclass(frozen=True)
class Judged:
    """One plan, and what the simulator says of its program.

    Attributes:
        found_by: the policy that decided, or how the search came to it.
        picked: by number of op, in which way it is computed.
        room_bytes: the limit for which the program is laid out: it decides where compute waits.
    """

    found_by: str
    decisions: Mapping[int, Decision]
    picked: Mapping[int, str]
    room_bytes: int | None
    peak_bytes: int
    step_ps: int


def judge(
    step: Step,
    costs: Costs,
    decisions: Decisions,
    *,
    found_by: str,
    room_bytes: int | None,
    picked: Mapping[int, str] | None = None,
) -> Judged:
    """Lower the decisions and run the program on paper: by the code that also makes the final plan."""
    priced = costs.picking(picked) if picked else costs
    program = lower(step, decisions, priced, budget_bytes=room_bytes)
    timeline = simulate(program, priced.following(step, program.step))
    return Judged(found_by, dict(decisions), dict(picked or {}), room_bytes, timeline.peak_bytes, timeline.step_ps)


@dataclass
class Judgements:
    """Plans of one step at one list of prices, for whatever budgets they were made."""

    plans: list[Judged] = field(default_factory=list)

    def add(self, plan: Judged) -> None:
        """Take a plan in, unless one that is there is as small and as fast."""
        if any(p.peak_bytes <= plan.peak_bytes and p.step_ps <= plan.step_ps for p in self.plans):
            return
        self.plans = [p for p in self.plans if p.peak_bytes < plan.peak_bytes or p.step_ps < plan.step_ps]
        self.plans.append(plan)

    def best(self, room_bytes: int) -> Judged | None:
        """The fastest plan that fits; of equals the smallest."""
        fitting = [plan for plan in self.plans if plan.peak_bytes <= room_bytes]
        return min(fitting, key=lambda plan: (plan.step_ps, plan.peak_bytes), default=None)

    def smallest(self) -> Judged | None:
        return min(self.plans, key=lambda plan: (plan.peak_bytes, plan.step_ps), default=None)
