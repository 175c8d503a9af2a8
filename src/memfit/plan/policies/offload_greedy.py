"""offload-greedy: send away what comes first, as much as it takes (Beaumont et al. 2020).

If bytes could leave one by one, it would be best to send the first ones of the network, a prefix: they are ready first
and needed last. Beaumont et al.'s greedy, as our notes have it, sends the shortest prefix of whole tensors that has as
many bytes. It is adapted from chains to any Step by the order of execution (plan/offloading/step_chain.py). Ours is the
rest: longer prefixes and those of the convolutions' inputs are tried too, each gets its own timetable for 32 limits,
and all are judged by the simulator's own rules. vDNN's two plans stand beside them, so it is never slower than those.

With a budget the fastest plan that fits is taken. Without one, the smallest plan that never makes compute wait.
"""

from __future__ import annotations

from memfit.capture.step import Step
from memfit.cost.costs import PS_PER_S, Costs
from memfit.plan.checkpointing.pool import Pool, remembered
from memfit.plan.offloading.layers import Layers
from memfit.plan.offloading.step_bound import offload_bound_ps
from memfit.plan.offloading.step_chain import Luggage
from memfit.plan.offloading.step_pool import StepPool, without_waiting
from memfit.plan.offloading.way_out import tier_of
from memfit.plan.policies.policy import Decided, Policy
from memfit.plan.policies.vdnn import offloads


def decide(step: Step, costs: Costs, budget_bytes: int | None) -> Decided:
    """The fastest plan that fits; without a limit, the smallest that does not wait."""
    return chosen(_pool(step, costs), budget_bytes)


def chosen(pool: Pool, budget_bytes: int | None) -> Decided:
    """The plan that a pool has for a budget, and how much less any other could wait."""
    entry = without_waiting(pool) if budget_bytes is None else pool.best(budget_bytes)
    problem = pool.problem
    luggage = Luggage.of(problem, tier_of(problem.costs))
    waits_s = (entry.step_ps - luggage.work_ps) / PS_PER_S
    bound_ps = offload_bound_ps(luggage, entry.peak_bytes if budget_bytes is None else budget_bytes)
    bound = "" if bound_ps is None else f"; no plan that only offloads waits less than {bound_ps / PS_PER_S:.4f} s"
    return Decided(entry.decisions, problem.costs, f"waits {waits_s:.4f} s{bound}")


def greedy_plans(step: Step, costs: Costs) -> StepPool:
    """All that this policy chooses from."""
    tier, layers = tier_of(costs), Layers.of(step)
    plans = StepPool.of(step, costs, tier)
    for convolutions_only in (False, True):
        plans.add_plan(offloads(layers, tier, convolutions_only=convolutions_only))
    plans.fill_greedily()
    return plans


@remembered
def _pool(step: Step, costs: Costs) -> Pool:
    return greedy_plans(step, costs).pool()


OFFLOAD_GREEDY = Policy(
    "offload-greedy",
    "send the first tensors away, as many as the budget asks for (Beaumont et al. 2020)",
    decide,
    asks_costs=True,
    fills_device=True,
)
