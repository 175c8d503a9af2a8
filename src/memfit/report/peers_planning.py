"""Find the byte budget whose plan keeps the activations of a step within a target, by planning alone.

A budget counts gradients too, and at most moments not all of them are there yet: a plan may then hold that much more of
activations. What is compared here is the activation part, so the budget is lowered until the plan's is within the
target. The smallest budget that the policy can plan for is found on the way.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from memfit import zoo
from memfit.api import fit
from memfit.capture.rewrites.tight import tighten
from memfit.capture.step import Step
from memfit.cost.costs import Costs
from memfit.cost.profile import measure
from memfit.plan.bound import floor
from memfit.plan.budget import Budget
from memfit.plan.planner import Planned, plan_step
from memfit.plan.policies.gist import lossless_codes
from memfit.plan.policies.registry import policy_named
from memfit.report.peers_setting import require_policy
from memfit.report.step_module import TrainingStep

_MAX_PLANS = 8
_MAX_STEPS_UP = 5
_AMPLE_BYTES = 2**50
# What a process holds besides tensors, as the planner itself leaves it.
_HEADROOM_BYTES, _HEADROOM_SHARE = 2 << 20, 200


@dataclass(frozen=True)
class FoundBudget:
    """A budget to fit with.

    Attributes:
        base_bytes: what is there before the step: the budget counts it, the growth of a process does not.
        activation_bytes: of the plan, as predicted.
        predicted_ratio: seconds of the plan over those of the keep plan.
        misfit: why the target cannot be met by this policy; empty if it is. The budget is then its smallest.
    """

    budget_bytes: int
    base_bytes: int
    activation_bytes: int
    predicted_ratio: float
    num_plans: int
    misfit: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class SmallestBudget:
    """The smallest budget of a policy, and what sets it.

    Attributes:
        budget_bytes: what its smallest plan needs, all included.
        activation_bytes: the part of it that a plan can change.
        keep_activation_bytes: the same of keeping everything.
        reason: what stands at its peak.
        proven_bytes, proof: no plan that keeps, recomputes, offloads or encodes needs less, and why.
    """

    budget_bytes: int
    activation_bytes: int
    keep_activation_bytes: int
    reason: str
    proven_bytes: int
    proof: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Search:
    """Plans of one network by one policy, with prices measured here."""

    def __init__(self, policy: str, network: str, **loaded: Any) -> None:
        require_policy(policy)
        self._policy = policy
        model, call = TrainingStep.of(zoo.load(network, **loaded))
        # A budget that everything fits: what is wanted are the step and its prices, as the policy would be given them.
        fit(model, policy=policy, budget=_AMPLE_BYTES)
        model(*call)
        ample = model.memfit.planned  # type: ignore[union-attr]
        assert isinstance(ample, Planned)
        self.step: Step = ample.step
        self.costs: Costs = ample.costs
        self._fixed_bytes = ample.fixed_bytes
        self._base_bytes = ample.keep.ledger.base_bytes
        self._num_plans = 0

    def budget_for(self, target_bytes: int) -> FoundBudget:
        """The budget for activations within the target, less a little headroom."""
        room_bytes = target_bytes - _HEADROOM_BYTES - target_bytes // _HEADROOM_SHARE
        budget_bytes = self._fixed_bytes + target_bytes
        while True:
            planned = self._plan(budget_bytes)
            if not planned.fits:
                return self._smallest_found(planned)
            excess_bytes = _activation_bytes(planned) - room_bytes
            if excess_bytes <= 0:
                return self._found(planned, budget_bytes, "")
            if self._num_plans >= _MAX_PLANS:
                return self._found(planned, budget_bytes, f"not within the target after {self._num_plans} plans")
            budget_bytes -= excess_bytes

    def smallest(self) -> SmallestBudget:
        """What the policy needs at least, whatever the budget."""
        planned = self._plan(1)
        costs = self._all_costs
        proven = min(
            (floor(form, costs, codes=lossless_codes(form, costs)) for form in (self.step, self._tight)),
            key=lambda found: found.needed_bytes,
        )
        return SmallestBudget(
            budget_bytes=planned.peak_bytes,
            activation_bytes=_activation_bytes(planned),
            keep_activation_bytes=planned.keep_activation_bytes,
            reason=planned.obstacle,
            proven_bytes=proven.needed_bytes,
            proof=proven.describe(),
        )

    def _smallest_found(self, too_large: Planned) -> FoundBudget:
        """The smallest budget there is a plan for: what that plan needs, or with the headroom that planning leaves."""
        asked_bytes = too_large.peak_bytes
        for _ in range(_MAX_STEPS_UP):
            planned = self._plan(asked_bytes)
            if planned.fits:
                break
            # With a little more room some policies take another way, which needs a little more again.
            needed_bytes = max(planned.peak_bytes, asked_bytes) + _HEADROOM_BYTES
            asked_bytes = -(-needed_bytes * _HEADROOM_SHARE // (_HEADROOM_SHARE - 1)) + 1
        planned.require_fit()
        return self._found(planned, asked_bytes, too_large.misfit)

    def _plan(self, budget_bytes: int) -> Planned:
        self._num_plans += 1
        planned = self._plan_by(self.costs, budget_bytes)
        if planned.fits or self._all_costs is self.costs:
            return planned
        return self._plan_by(self._all_costs, budget_bytes)

    def _plan_by(self, costs: Costs, budget_bytes: int) -> Planned:
        return plan_step(self.step, costs, policy=self._policy, budget=Budget(num_bytes=budget_bytes), headroom=True)

    @cached_property
    def _tight(self) -> Step:
        """The step with less held at its largest ops, for policies that may need it."""
        return tighten(self.step) if policy_named(self._policy).asks_ways else self.step

    @cached_property
    def _all_costs(self) -> Costs:
        """The prices of both forms, as fit() asks for them where nothing fits."""
        if self._tight is self.step:
            return self.costs
        return self.costs.extended_by(measure(self.step, ways=True, also=[self._tight]))

    def _found(self, planned: Planned, budget_bytes: int, misfit: str) -> FoundBudget:
        return FoundBudget(
            budget_bytes=budget_bytes,
            base_bytes=self._base_bytes,
            activation_bytes=_activation_bytes(planned),
            predicted_ratio=1 + planned.overhead,
            num_plans=self._num_plans,
            misfit=misfit,
        )


def _activation_bytes(planned: Planned) -> int:
    return planned.simulated.ledger.activation_bytes
