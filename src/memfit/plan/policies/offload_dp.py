"""offload-dp: which tensors to send away by a dynamic program over whole tensors (after Beaumont et al. 2020).

Beside all that offload-greedy chooses from there are, for each limit at which that still waits longer than the fluid
bound, the choice of plan/offloading/dp.py on the step's chain (neighbours in groups, at most 40), and choices that
differ from the best so far in one tensor, as long as that helps. The program is that of our notes, whether it is the
paper's recurrence we do not know; the exchanges are ours.

With a budget the fastest plan that fits is taken, of equally fast ones the smallest. Without one, the device's memory
is the budget.
"""

from __future__ import annotations

from memfit.capture.step import Step
from memfit.cost.costs import Costs
from memfit.plan.checkpointing.pool import Pool, remembered
from memfit.plan.policies.offload_greedy import chosen, greedy_plans
from memfit.plan.policies.policy import Decided, Policy


def decide(step: Step, costs: Costs, budget_bytes: int | None) -> Decided:
    """The fastest plan that fits; without a limit, the smallest that does not wait."""
    return chosen(_pool(step, costs), budget_bytes)


@remembered
def _pool(step: Step, costs: Costs) -> Pool:
    plans = greedy_plans(step, costs)
    plans.improve()
    return plans.pool()


OFFLOAD_DP = Policy(
    "offload-dp",
    "send tensors away as a dynamic program chooses them (after Beaumont et al. 2020)",
    decide,
    asks_costs=True,
    fills_device=True,
)
