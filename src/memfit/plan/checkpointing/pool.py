"""A pool of plans of one policy, each with its true peak and time: the best that fits is taken.

The pool does not depend on the budget, so a larger budget never gets a slower plan, nor one with a smaller peak.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from memfit.capture.step import Step
from memfit.cost.costs import Costs
from memfit.plan.decisions import Decision, Decisions
from memfit.plan.evaluate import Evaluator
from memfit.plan.problem import Problem


def remembered(build: Callable[[Step, Costs], Pool]) -> Callable[[Step, Costs], Pool]:
    """Keep the last pool that was built: the next budget for the same step and prices asks for the same one."""
    last: list[tuple[Step, Costs, Pool]] = []

    @functools.wraps(build)
    def pool_of(step: Step, costs: Costs) -> Pool:
        if not last or last[0][0] is not step or last[0][1] is not costs:
            last[:] = [(step, costs, build(step, costs))]
        return last[0][2]

    return pool_of


@dataclass(frozen=True)
class Entry:
    """One plan of the pool."""

    decisions: Mapping[int, Decision]
    peak_bytes: int
    step_ps: int


@dataclass
class Pool:
    """Plans of one step at one list of prices."""

    problem: Problem
    evaluator: Evaluator
    entries: list[Entry] = field(default_factory=list)

    @classmethod
    def of(cls, step: Step, costs: Costs) -> Pool:
        problem = Problem.of(step, costs)
        return cls(problem, Evaluator.of(problem))

    def add(self, decisions: Decisions) -> Entry:
        """Evaluate the decisions and take them in."""
        outcome = self.evaluator.evaluate(self.problem.states(decisions))
        entry = Entry(dict(decisions), outcome.peak_bytes, outcome.step_ps)
        self.entries.append(entry)
        return entry

    def best(self, budget_bytes: int | None) -> Entry:
        """The fastest that fits; of equals the smallest. Without a budget, or if none fits, the smallest of all."""
        smallest = min(self.entries, key=lambda e: (e.peak_bytes, e.step_ps))
        if budget_bytes is None:
            return smallest
        fitting = [entry for entry in self.entries if entry.peak_bytes <= budget_bytes]
        return min(fitting, key=lambda e: (e.step_ps, e.peak_bytes), default=smallest)
