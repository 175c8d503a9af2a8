"""rotor: the optimal dynamic program for chains of unlike stages under a byte budget (Beaumont et al. 2019).

Stages lie between the boundaries of the graph. What is recomputed may be recomputed again: each time the schedule says
whether it stays. The program is solved for several budgets, and the simulator judges all of them.

Memory comes in slots, and what a stage holds is rounded up: with n stages a schedule may be taken to need up to n + 1
slots too many (Schedule.error_bytes), so at the worst a budget that much larger would have been needed.
"""

from __future__ import annotations

from memfit.capture.step import Step
from memfit.cost.costs import Costs
from memfit.plan.checkpointing.pool import Pool, remembered
from memfit.plan.checkpointing.rotor import floor_bytes, simulate, solve_each
from memfit.plan.checkpointing.rotor_chain import Kind, Operation
from memfit.plan.checkpointing.stages import Stages
from memfit.plan.checkpointing.storage_graph import StorageGraph
from memfit.plan.decisions import Decisions
from memfit.plan.policies.policy import Policy

NUM_SLOTS = 400
_MAX_STAGES = 100
_NUM_BUDGETS = 24


def decide(step: Step, costs: Costs, budget_bytes: int | None) -> Decisions:
    """The fastest schedule that fits; without a budget, the one that needs least."""
    return _pool(step, costs).best(budget_bytes).decisions


@remembered
def _pool(step: Step, costs: Costs) -> Pool:
    stages = Stages.of(StorageGraph.of(step), costs)
    chain = stages.chain
    count = len(chain.stages)
    everything = [Operation(Kind.FORWARD_ALL, i) for i in range(count)]
    everything += [Operation(Kind.BACKWARD, i) for i in reversed(range(count))]
    pool = Pool.of(step, costs)
    pool.add({})
    floor, most = floor_bytes(chain), simulate(chain, everything)[0]
    budgets = [floor + (most - floor) * k // _NUM_BUDGETS for k in range(_NUM_BUDGETS)]
    schedules = solve_each(chain, budgets, num_slots=NUM_SLOTS, max_stages=_MAX_STAGES)
    for operations in dict.fromkeys(schedule.operations for schedule in schedules if schedule is not None):
        pool.add(stages.decisions(operations))
    return pool


ROTOR = Policy(
    "rotor", "the optimal schedule of a chain in a budget, recomputing repeatedly (Beaumont et al. 2019)", decide, True
)
