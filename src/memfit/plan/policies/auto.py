"""auto: for every storage the best of keeping, recomputing, offloading and encoding it, within the budget.

Says how good that is: beside the plan stands a proven lower bound on the time of any plan of the same choices.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from functools import cached_property

from memfit.capture.rewrites.proof import PROOFS, AssumedProofs, Proofs
from memfit.capture.rewrites.tight import tighten
from memfit.capture.step import Step
from memfit.cost.costs import HERE, Costs
from memfit.plan.auto.judged import Judged
from memfit.plan.auto.planner import Mix, MixPlanner
from memfit.plan.auto.search import Effort
from memfit.plan.bound.bound import Bound
from memfit.plan.policies.gist import lossless_codes
from memfit.plan.policies.policy import Decided, Policy
from memfit.plan.progress import tell

EFFORT = Effort()

_TIGHT_SHARE = 4
"""Ops that touch more than that part of what the largest does are made to hold less, where the budget needs it."""
_NEEDS_TIGHT = 0.01
"""It does where nothing fits, or where the tight form may be that share of the step faster."""

_lock = threading.Lock()
_last: list[Forms] = []


@dataclass(frozen=True)
class Forms:
    """The planners of a step, and of its form that holds less, where that is priced."""

    step: Step
    costs: Costs

    @cached_property
    def plain(self) -> MixPlanner:
        return MixPlanner(self.step, self.costs, lossless_codes(self.step, self.costs))

    @cached_property
    def tight(self) -> MixPlanner | None:
        sizes = self.step.storage_bytes
        largest = max((sum(sizes[s] for s in touched) for touched in self.plain.plain.reruns.touches), default=0)
        form = tighten(self.step, above_bytes=largest // _TIGHT_SHARE, proofs=_proofs(self.costs))
        if form is self.step or not self.costs.covers(form):
            return None
        return MixPlanner(form, self.costs, lossless_codes(form, self.costs))

    def plan(self, budget_bytes: int, effort: Effort) -> tuple[Mix, Step]:
        """The best mix within the budget, and the form of the step that it is for."""
        mix = self.plain.plan(budget_bytes, effort)
        fits = mix.plan.peak_bytes <= budget_bytes
        if (fits and mix.plan.found_by == "keep") or self.tight is None:
            return replace(mix, bound=self.plain.refined(mix.bound, mix.plan.step_ps) if fits else mix.bound), self.step
        bound = self.tight.bounds.at(budget_bytes)
        near_ps = mix.plan.step_ps - int(_NEEDS_TIGHT * mix.bound.keep_ps)
        known = self.tight.judged.best(budget_bytes)
        if not fits or (bound.over_ps is not None and bound.keep_ps + bound.over_ps < near_ps):
            tell("with ops that hold less")
            found = self.tight.plan(budget_bytes, effort, seeds=[mix.plan])
            mix = replace(mix, num_evaluations=mix.num_evaluations + found.num_evaluations)
            bound, known = found.bound, found.plan
        plain_rank, best = _rank(mix.plan, budget_bytes), mix.plan
        is_better = known is not None and _rank(known, budget_bytes) < plain_rank
        if is_better:
            assert known is not None
            best = known
        proven = [mix.bound, bound]
        if best.peak_bytes <= budget_bytes:
            proven = [f.refined(b, best.step_ps) for f, b in zip((self.plain, self.tight), proven, strict=True)]
        return replace(mix, plan=best, bound=_weaker(*proven)), self.tight.step if is_better else self.step


def _rank(plan: Judged, budget_bytes: int) -> tuple[int, int]:
    """Of plans that fit the fastest comes first, then the smallest of the others."""
    return max(plan.peak_bytes - budget_bytes, 0), plan.step_ps


def _weaker(plain: Bound, tight: Bound) -> Bound:
    """What is proven of both forms: a plan of either may be as fast as its own bound says."""
    if plain.over_ps is None or tight.over_ps is None:
        return tight if plain.over_ps is None else plain
    return min(plain, tight, key=lambda bound: bound.keep_ps + (bound.over_ps or 0))


def decide(step: Step, costs: Costs, budget_bytes: int | None) -> Decided:
    """The fastest mix that fits; without a limit, everything is kept."""
    if budget_bytes is None:
        return Decided({}, costs, "no budget, and the device's memory is not known: everything is kept")
    mix, form = _forms(step, costs).plan(budget_bytes, EFFORT)
    plan, bound = mix.plan, mix.bound
    note = f"{mix.num_evaluations:,} plans tried; the best is by {plan.found_by}"
    if mix.is_cut_short:
        note += "; the clock ended the search"
    if form is not step:
        note += f"; with ops that hold less ({', '.join(name for name in form.rewrites if '>' in name)})"
    elif plan.found_by == "keep" and plan.peak_bytes <= budget_bytes:
        note = "everything fits: nothing is done"
    return Decided(
        plan.decisions,
        costs.picking(plan.picked) if plan.picked else costs,
        note,
        step=None if form is step else form,
        room_bytes=plan.room_bytes,
        bound_ps=None if bound.over_ps is None else bound.keep_ps + bound.over_ps,
        certificate="" if bound.certificate is None else bound.certificate.describe(),
    )


def _proofs(costs: Costs) -> Proofs:
    """Whether ops give the same bits is tested on this machine; of others it is taken to be so."""
    return PROOFS if costs.device == HERE else AssumedProofs()


def _forms(step: Step, costs: Costs) -> Forms:
    """Those of the last call, if that was for the same step and prices: smaller budgets help with larger ones."""
    with _lock:
        if not _last or _last[0].step is not step or _last[0].costs is not costs:
            _last[:] = [Forms(step, costs)]
        return _last[0]


AUTO = Policy(
    "auto",
    "the best mix of keeping, recomputing, offloading and encoding within the budget, with a proof of how good it is",
    decide,
    asks_costs=True,
    fills_device=True,
    asks_densities=True,
    asks_ways=True,
)
