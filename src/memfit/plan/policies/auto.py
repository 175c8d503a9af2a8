"""auto: for every storage the best of keeping, recomputing, offloading and encoding it, within the budget.

Says how good that is: beside the plan stands a proven lower bound on the time of any plan of the same choices.
"""

from __future__ import annotations

from memfit.capture.rewrites.proof import PROOFS, AssumedProofs, Proofs
from memfit.capture.rewrites.tight import tighten
from memfit.capture.step import Step
from memfit.cost.costs import Costs
from memfit.plan.auto.planner import Mix, MixPlanner
from memfit.plan.auto.search import Effort
from memfit.plan.policies.gist import lossless_codes
from memfit.plan.policies.policy import Decided, Policy
from memfit.plan.progress import tell

EFFORT = Effort()

_TIGHT_SHARE = 4
"""Where nothing fits, ops that touch more than that part of the budget are made to hold less."""

_last: list[MixPlanner] = []


def decide(step: Step, costs: Costs, budget_bytes: int | None) -> Decided:
    """The fastest mix that fits; without a limit, everything is kept."""
    if budget_bytes is None:
        return Decided({}, costs, "no budget, and the device's memory is not known: everything is kept")
    mix = _planner(step, costs).plan(budget_bytes, EFFORT)
    form = step
    if mix.plan.peak_bytes > budget_bytes:
        tight = tighten(step, above_bytes=budget_bytes // _TIGHT_SHARE, proofs=_proofs(costs))
        if tight is not step and costs.covers(tight):
            tell("nothing fits yet: with ops that hold less")
            smaller = MixPlanner(tight, costs, lossless_codes(tight, costs)).plan(budget_bytes, EFFORT)
            if smaller.plan.peak_bytes < mix.plan.peak_bytes:
                form = tight
            mix = _either(mix, smaller)
    return _decided(mix, costs, None if form is step else form)


def _decided(mix: Mix, costs: Costs, form: Step | None) -> Decided:
    plan, bound = mix.plan, mix.bound
    note = f"{mix.num_evaluations:,} plans tried; the best is by {plan.found_by}"
    if mix.is_cut_short:
        note += "; the clock ended the search"
    if form is not None:
        note += f"; with ops that hold less ({', '.join(name for name in form.rewrites if '>' in name)})"
    if plan.found_by == "keep" and bound is None:
        note = "everything fits: nothing is done"
    bound_ps: int | None = plan.step_ps
    certificate = ""
    if bound is not None:
        bound_ps = None if bound.over_ps is None else bound.keep_ps + bound.over_ps
        certificate = bound.describe() if bound.is_infeasible else ""
    return Decided(
        plan.decisions,
        costs.picking(plan.picked) if plan.picked else costs,
        note,
        step=form,
        room_bytes=plan.room_bytes,
        bound_ps=bound_ps,
        certificate=certificate,
    )


def _either(plain: Mix, tight: Mix) -> Mix:
    """The smaller of two plans for two forms of a step, and what is proven of both forms."""
    plan = min(plain.plan, tight.plan, key=lambda plan: plan.peak_bytes)
    bounds = [mix.bound for mix in (plain, tight) if mix.bound is not None and mix.bound.over_ps is not None]
    bound = min(bounds, key=lambda bound: bound.keep_ps + (bound.over_ps or 0), default=tight.bound)
    tried = plain.num_evaluations + tight.num_evaluations
    return Mix(plan, bound, tried, plain.is_cut_short or tight.is_cut_short)


def _proofs(costs: Costs) -> Proofs:
    """Whether ops give the same bits is tested on this machine; of others it is taken to be so."""
    return PROOFS if costs.device == "here" else AssumedProofs()


def _planner(step: Step, costs: Costs) -> MixPlanner:
    """The one of the last call, if that was for the same step and prices: smaller budgets help with larger ones."""
    if not _last or _last[0].step is not step or _last[0].costs is not costs:
        _last[:] = [MixPlanner(step, costs, lossless_codes(step, costs))]
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
