"""offload-dp: which tensors to send away by a dynamic program over whole tensors (after Beaumont et al. 2020).

Beside all that offload-greedy chooses from there are, for each limit at which that still waits longer than the fluid
bound, the choice of plan/offloading/dp.py on the step's chain (neighbours in groups, at most 40), and choices that
differ from the best so far in one tensor, as long as that helps. The program is that of our notes, whether it is the
paper's recurrence we do not know; the exchanges are ours.

With a budget the fastest plan that fits is taken. Without one, the smallest plan that never makes compute wait.
"""

from __future__ import annotations

from memfit.capture.step import Step
from memfit.cost.costs import Costs
from memfit.plan.checkpointing.pool import Pool, remembered
from memfit.plan.decisions import Decisions
from memfit.plan.offloading.step_pool import without_waiting
from memfit.plan.policies.offload_greedy import greedy_plans
from memfit.plan.policies.policy import Policy


def decide(step: Step, costs: Costs, budget_bytes: int | None) -> Decisions:
    """The fastest plan that fits; without a budget, the smallest that does not wait."""
    pool = _pool(step, costs)
    return (without_waiting(pool) if budget_bytes is None else pool.best(budget_bytes)).decisions


@remembered
def _pool(step: Step, costs: Costs) -> Pool:
    plans = greedy_plans(step, costs)
    plans.improve()
    return plans.pool()


OFFLOAD_DP = Policy(
    "offload-dp", "send tensors away as a dynamic program chooses them (after Beaumont et al. 2020)", decide, True
)
