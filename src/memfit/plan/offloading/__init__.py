"""Which stages of a chain to send away so that compute waits least (Beaumont et al. 2020), and vDNN's rules beside it.

from memfit.plan.offloading import Chain, Stage, solve_dp

chain = Chain((Stage(1, 3, 3), Stage(1, 2, 1), Stage(1, 2, 1)), limit_bytes=4, send_bytes_per_s=10**12)
solution = solve_dp(chain)
solution.schedule.away, solution.schedule.idle_ps     # (1,), 2
solution.bound_ps                                     # 2: no schedule waits less
"""

from memfit.plan.offloading.chain import Chain, Half, Schedule, Stage, Transfer, evaluate
from memfit.plan.offloading.dp import Choice, Solution, solve_dp, solve_relaxed, solve_whole
from memfit.plan.offloading.fluid import Fluid, fluid, fluid_halves
from memfit.plan.offloading.greedy import shortest_prefix, solve_greedy
from memfit.plan.offloading.vdnn_chain import VdnnChoice, solve_vdnn

__all__ = [
    "Chain",
    "Choice",
    "Fluid",
    "Half",
    "Schedule",
    "Solution",
    "Stage",
    "Transfer",
    "VdnnChoice",
    "evaluate",
    "fluid",
    "fluid_halves",
    "shortest_prefix",
    "solve_dp",
    "solve_greedy",
    "solve_relaxed",
    "solve_vdnn",
    "solve_whole",
]
