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
from memfit.cost.costs import Costs
from memfit.plan.checkpointing.pool import Pool, remembered
from memfit.plan.decisions import Decisions
from memfit.plan.offloading.layers import Layers
from memfit.plan.offloading.step_pool import StepPool, without_waiting
from memfit.plan.offloading.way_out import tier_of
from memfit.plan.policies.policy import Policy
from memfit.plan.policies.vdnn import offloads


def decide(step: Step, costs: Costs, budget_bytes: int | None) -> Decisions:
    """The fastest plan that fits; without a budget, the smallest that does not wait."""
    pool = _pool(step, costs)
    return (without_waiting(pool) if budget_bytes is None else pool.best(budget_bytes)).decisions


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
    "offload-greedy", "send the first tensors away, as many as the budget asks for (Beaumont et al. 2020)", decide, True
)
