"""The options of fit(): a budget, a policy by name, rewrites to leave out."""

from __future__ import annotations

from dataclasses import dataclass, field

from memfit.capture.rewrites import check_names
from memfit.errors import BadOption
from memfit.plan.budget import Budget
from memfit.plan.policies.registry import POLICIES, RUNNABLE, policy_named, require_permission


@dataclass(frozen=True)
class Options:
    """How a model is fitted."""

    budget: Budget | None = None
    policy: str = "keep"
    without: frozenset[str] = field(default=frozenset())
    max_captures: int = 8
    debug: bool = False
    measure_s: float = 60.0
    allow_lossy: bool = False
    strict: bool = False

    @property
    def asks_costs(self) -> bool:
        """True if planning needs seconds and workspaces, which are then measured."""
        return self.budget is not None or policy_named(self.policy).asks_costs

    def __post_init__(self) -> None:
        chosen = policy_named(self.policy)
        require_permission(chosen, allow_lossy=self.allow_lossy)
        if self.allow_lossy and not chosen.is_lossy:
            raise BadOption(f"allow_lossy=True: policy={self.policy!r} loses nothing. Leave it out")
        if chosen.decide is None:
            raise BadOption(
                f"policy={self.policy!r} is an account to compare with, and cannot be run. "
                f"Policies that can: {', '.join(RUNNABLE)}"
            )
        check_names(self.without)
        if self.max_captures < 1:
            raise BadOption(f"max_captures={self.max_captures}: must be at least 1")
        if not self.measure_s >= 0:
            raise BadOption(f"measure_s={self.measure_s}: give seconds from 0 (estimate everything) up")
        if self.strict and self.budget is None:
            raise BadOption("strict=True: there is no budget that a step could exceed. Give one, or leave it out")


def policy_or_default(policy: str | None, budget: Budget | None) -> str:
    """The policy that was named; None: with a budget the one that mixes all techniques, without one nothing is done."""
    if policy is not None:
        return policy
    return "auto" if budget is not None and "auto" in POLICIES else "keep"
