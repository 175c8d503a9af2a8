"""Overhead over budget: what each policy makes of several budgets, and what no plan can be better than."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memfit.capture.step import Step
from memfit.cost.costs import PS_PER_S, Costs
from memfit.errors import BadOption, MemfitError
from memfit.plan.budget import Budget
from memfit.plan.planner import Planned, plan_step, whole_certificate
from memfit.plan.policies.auto import proven_at
from memfit.plan.policies.registry import POLICIES, policy_named

AUTO = "auto"


@dataclass(frozen=True)
class Point:
    """What one policy makes of one budget.

    Attributes:
        budget: as it was asked for, such as "40%".
        peak_bytes, step_ps, overhead: None if the policy makes no plan here; `error` then says why.
        plan_s: how long planning took.
    """

    policy: str
    budget: int | str
    budget_bytes: int
    fits: bool = False
    peak_bytes: int | None = None
    step_ps: int | None = None
    overhead: float | None = None
    plan_s: float | None = None
    note: str = ""
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "budget": self.budget,
            "budget_bytes": self.budget_bytes,
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "step_s": None if self.step_ps is None else self.step_ps / PS_PER_S,
            "overhead": self.overhead,
            "plan_s": self.plan_s,
            "note": self.note,
            "error": self.error,
        }


@dataclass(frozen=True)
class Limit:
    """What is proven about all plans within one budget.

    Attributes:
        share: what it leaves for activations, of what the keep plan's need.
        lower_bound_overhead: no plan has less; None if no plan fits, which `certificate` proves.
    """

    budget: int | str
    budget_bytes: int
    share: float
    lower_bound_overhead: float | None
    certificate: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "budget": self.budget,
            "budget_bytes": self.budget_bytes,
            "share": self.share,
            "lower_bound_overhead": self.lower_bound_overhead,
            "certificate": self.certificate,
        }


@dataclass(frozen=True)
class Frontier:
    """All points of one step on one device; limits and points are in the order of budgets, the smallest first."""

    policies: tuple[str, ...]
    limits: tuple[Limit, ...]
    points: tuple[Point, ...]
    keep_step_s: float
    keep_peak_bytes: int
    keep_activation_bytes: int
    fixed_bytes: int

    def of(self, policy: str) -> list[Point]:
        """The points of one policy, the smallest budget first."""
        return [point for point in self.points if point.policy == policy]

    def to_dict(self) -> dict[str, Any]:
        return {
            "keep_step_s": self.keep_step_s,
            "keep_peak_bytes": self.keep_peak_bytes,
            "keep_activation_bytes": self.keep_activation_bytes,
            "fixed_bytes": self.fixed_bytes,
            "budgets": [limit.to_dict() for limit in self.limits],
            "rows": [point.to_dict() for point in self.points],
        }


def exact_policies() -> tuple[str, ...]:
    """Every policy whose plans can be run and change no gradient, `auto` first."""
    found = (name for name, policy in POLICIES.items() if policy.decide is not None and not policy.is_lossy)
    return tuple(sorted(found, key=lambda name: name != AUTO))


def policies_asked_for(text: str | None) -> tuple[str, ...]:
    """The names in `--policies P,Q`, each runnable and lossless; all there are if the option was not given."""
    if text is None:
        return exact_policies()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise BadOption(f"--policies {text!r} names no policy. Separate names by commas")
    for name in names:
        policy = policy_named(name)
        why = "changes gradients" if policy.is_lossy else "is an account and no plan" if policy.decide is None else ""
        if why:
            raise BadOption(
                f"--policies: '{name}' {why}. What is compared here can be run and is exact: "
                f"{', '.join(exact_policies())}"
            )
    return names


def budgets_asked_for(text: str) -> tuple[Budget, ...]:
    """The budgets in `--budgets 25%,4GiB`."""
    parts = [part for part in text.split(",") if part.strip()]
    if not parts:
        raise BadOption(f"--budgets {text!r} names no budget. Write such as 25%,40%,6GiB")
    return tuple(dict.fromkeys(Budget.parse(part) for part in parts))


def frontier(
    step: Step,
    costs: Costs,
    *,
    budgets: Sequence[Budget],
    policies: Sequence[str],
    optimizer: str = "none",
    progress: Callable[[str], None] = lambda text: None,
) -> Frontier:
    """Plan the step for every budget by every policy; a policy that cannot plan here is a point with its reason.

    Smaller budgets come first: `auto` starts from the plans it found for them.
    """
    keep = plan_step(step, costs, optimizer=optimizer)
    resolved = {budget: _in_bytes(budget, keep) for budget in budgets}
    ascending = sorted(resolved, key=resolved.__getitem__)
    limits: list[Limit] = []
    points: list[Point] = []
    for budget in ascending:
        num_bytes, auto = resolved[budget], None
        for policy in policies:
            say = f"{budget.text}, {policy}"
            progress(say)
            try:
                planned = plan_step(
                    step,
                    costs,
                    policy=policy,
                    budget=Budget(num_bytes=num_bytes),
                    optimizer=optimizer,
                    progress=lambda text: progress(f"{say}: {text}"),
                )
            except MemfitError as error:
                points.append(Point(policy, budget.text, num_bytes, error=str(error)))
                continue
            points.append(_point(planned, budget, num_bytes))
            auto = planned if policy == AUTO else auto
        progress(f"{budget.text}, the bound")
        limits.append(_limit(budget, num_bytes, keep, costs, auto))
    return Frontier(
        policies=tuple(policies),
        limits=tuple(limits),
        points=tuple(points),
        keep_step_s=keep.keep.step_s,
        keep_peak_bytes=keep.keep_peak_bytes,
        keep_activation_bytes=keep.keep_activation_bytes,
        fixed_bytes=keep.fixed_bytes,
    )


def _in_bytes(budget: Budget, keep: Planned) -> int:
    return budget.resolve(fixed_bytes=keep.fixed_bytes, activation_bytes=keep.keep_activation_bytes)


def _point(planned: Planned, budget: Budget, num_bytes: int) -> Point:
    return Point(
        policy=planned.policy,
        budget=budget.text,
        budget_bytes=num_bytes,
        fits=planned.fits,
        peak_bytes=planned.peak_bytes,
        step_ps=planned.simulated.step_ps,
        overhead=planned.overhead,
        plan_s=planned.plan_s,
        note=planned.note,
    )


def _limit(budget: Budget, num_bytes: int, keep: Planned, costs: Costs, auto: Planned | None) -> Limit:
    """What the plan of `auto` brings along, or the same without a plan."""
    share = (num_bytes - keep.fixed_bytes) / keep.keep_activation_bytes if keep.keep_activation_bytes else 0.0
    if auto is not None:
        return Limit(budget.text, num_bytes, share, auto.lower_bound_overhead, auto.certificate)
    bound = proven_at(keep.step, costs, max(num_bytes - keep.optimizer_bytes, 0))
    least_s = None if bound.over_ps is None else (bound.keep_ps + bound.over_ps) / PS_PER_S
    certificate = "" if bound.certificate is None else bound.certificate.describe()
    certificate = whole_certificate(certificate, state_bytes=keep.optimizer_bytes)
    return Limit(budget.text, num_bytes, share, replace(keep, bound_s=least_s).lower_bound_overhead, certificate)
