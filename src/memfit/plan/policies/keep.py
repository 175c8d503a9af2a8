"""keep: hold everything backward reads until its last use, and free it there, as PyTorch does."""

from __future__ import annotations

from memfit.capture.step import Step
from memfit.cost.costs import Costs
from memfit.plan.decisions import Decisions
from memfit.plan.policies.policy import Policy


def decide(step: Step, costs: Costs, budget_bytes: int | None) -> Decisions:
    """Nothing but the defaults."""
    return {}


KEEP = Policy("keep", "hold what backward reads, free it at its last use (PyTorch)", decide)
