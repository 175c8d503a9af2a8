"""auto: for every storage the best of keeping, recomputing, offloading and encoding it, within the budget.

Says how good that is: beside the plan stands a proven lower bound on the time of any plan of the same choices.
"""

from __future__ import annotations

import sys
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
_WORTH_A_SEARCH = 0.01
"""The tight form is searched where nothing fits, or where by its bound it may be that share of the step faster."""

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
        return MixPlanner(form, self.costs, lossless_codes(form, self.costs), asks_offloading=False)

    def plan(self, budget_bytes: int, effort: Effort) -> tuple[Mix, Step]:
        """The best mix within the budget, and the form of the step that it is for."""
        kept = self.plain.kept(budget_bytes)
        if kept is not None:
            return self._known_or(kept)
        # The first plan before anything else: making the other form takes as long as finding that.
        begun = self.plain.begin(budget_bytes, effort)
        if self.tight is None:
            mix = self.plain.reordered(self.plain.insist(self.plain.finish(begun), effort), effort)
            fits = mix.plan.peak_bytes <= budget_bytes
            return replace(mix, bound=self.plain.refined(mix.bound, mix.plan.step_ps) if fits else mix.bound), self.step

        def searched(form: MixPlanner, seeds: list[Judged]) -> Mix:
            if form is not self.plain:
                kept = form.kept(budget_bytes, bounds[form])
                return kept or form.finish(form.begin(budget_bytes, effort, seeds=seeds), bounds[form])
            for seed in seeds:
                begun.offer_decisions(seed.decisions, "the plan with ops that hold less")
            return form.finish(begun, bounds[form])

        tell("how good a plan can be")
        bounds = {form: form.bounds.at(budget_bytes) for form in (self.plain, self.tight)}
        # The form that can be the faster one first: what it finds may prove that the other cannot be better.
        first, second = sorted(bounds, key=lambda form: (_least_ps(bounds[form]), form is self.tight))
        mixes = {first: (mix := searched(first, []))}
        # Single policies are asked about the plain form, and none may be faster, not even by little.
        worth_ps = int(_WORTH_A_SEARCH * mix.bound.keep_ps) if second is self.tight else 0
        if mix.plan.peak_bytes > budget_bytes or _least_ps(bounds[second]) < mix.plan.step_ps - worth_ps:
            tell("with ops that hold less" if second is self.tight else "with ops as they are")
            mixes[second] = searched(second, [mix.plan])
        num_evaluations = begun.num_evaluations + (mixes[self.tight].num_evaluations if self.tight in mixes else 0)
        for form, tried in mixes.items():
            if all(found.plan.peak_bytes > budget_bytes for found in mixes.values()):
                mixes[form] = form.insist(tried, effort)
            mixes[form] = form.reordered(mixes[form], effort)
            num_evaluations += mixes[form].num_evaluations - tried.num_evaluations
        # Of a form that was not searched, plans of smaller budgets may be known.
        known = {form: form.judged.best(budget_bytes) or form.judged.smallest() for form in (first, second)}
        plans = {form: plan for form, plan in known.items() if plan is not None}
        chosen = min(plans, key=lambda form: (*_rank(plans[form], budget_bytes), form is second))
        best = plans[chosen]
        if best.peak_bytes <= budget_bytes:
            bounds = {form: form.refined(bound, best.step_ps) for form, bound in bounds.items()}
        whole = Mix(
            best,
            _weaker(bounds[self.plain], bounds[self.tight]),
            num_evaluations,
            any(found.is_cut_short for found in mixes.values()),
        )
        return whole, chosen.step

    def _known_or(self, kept: Mix) -> tuple[Mix, Step]:
        """Everything kept, or a plan of a smaller budget where that is faster: codes can make a step shorter."""
        best, best_form, bound = kept.plan, self.plain, kept.bound
        # Its other form is not made for that: if it was not before, there is no plan of it.
        tight: MixPlanner | None = self.__dict__.get("tight")
        for form in (self.plain,) if tight is None else (self.plain, tight):
            known = form.judged.best(bound.budget_bytes)
            if known is not None and known.step_ps < best.step_ps:
                best, best_form = known, form
        if best_form is not self.plain:
            bound = _weaker(bound, best_form.bounds.at(bound.budget_bytes))
        return replace(kept, plan=best, bound=bound), best_form.step


def _least_ps(bound: Bound) -> int:
    """What any plan of that form takes at least; more than any of the other where none fits."""
    return sys.maxsize if bound.over_ps is None else bound.keep_ps + bound.over_ps


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
    if not mix.num_evaluations:
        note = "everything fits; the plan of a smaller budget takes less time than keeping it"
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


def proven_at(step: Step, costs: Costs, budget_bytes: int) -> Bound:
    """What is proven of all plans within the budget, of either form of the step; none is made for it."""
    forms = _forms(step, costs)
    plain = forms.plain.bounds.at(budget_bytes)
    return plain if forms.tight is None else _weaker(plain, forms.tight.bounds.at(budget_bytes))


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
