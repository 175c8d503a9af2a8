"""The plans of single policies, which the best mix must not be worse than.

Running them all takes longer than the search. So each family of policies has a lower bound: where the search is already
as fast as any plan of the family can be, none of it is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from memfit.capture.step import Step
from memfit.cost.costs import Costs, OpCost
from memfit.errors import MemfitError
from memfit.plan.auto.judged import Judged, judge
from memfit.plan.bound.bound import Bounds
from memfit.plan.decisions import Offload
from memfit.plan.offloading.step_bound import offload_bound_ps
from memfit.plan.offloading.step_chain import Luggage
from memfit.plan.offloading.way_out import tier_of
from memfit.plan.policies.checkpoint_search import CHECKPOINT_SEARCH
from memfit.plan.policies.checkpoint_search_peak import CHECKPOINT_SEARCH_PEAK
from memfit.plan.policies.gist import GIST_LOSSLESS
from memfit.plan.policies.offload_dp import OFFLOAD_DP
from memfit.plan.policies.overlap import OVERLAP, OVERLAP_ON_DEMAND
from memfit.plan.policies.policy import Decided, Policy
from memfit.plan.policies.rotor import ROTOR
from memfit.plan.policies.sqrt import SQRT
from memfit.plan.policies.vdnn_dyn import VDNN_DYN
from memfit.plan.problem import Problem
from memfit.plan.progress import tell

RECOMPUTING = (SQRT, CHECKPOINT_SEARCH, CHECKPOINT_SEARCH_PEAK, ROTOR)
OFFLOADING = (VDNN_DYN, OFFLOAD_DP, OVERLAP, OVERLAP_ON_DEMAND)
"""offload-dp chooses from all that offload-greedy, vdnn-all and vdnn-conv do, so these need not be asked."""
ENCODING = (GIST_LOSSLESS,)


@dataclass(frozen=True)
class Family:
    """Policies of one technique.

    Attributes:
        least_ps: (budget) -> no plan of these takes less; None if none can fit.
    """

    policies: tuple[Policy, ...]
    least_ps: Callable[[int], int | None]


class Singles:
    """Single policies on one step at one list of prices."""

    def __init__(self, step: Step, costs: Costs, *, offloading: bool = True) -> None:
        self._step = step
        self._costs = costs
        cached = lru_cache(maxsize=4)
        self._families = [Family(ENCODING, lambda _: 0), Family(RECOMPUTING, cached(self._least_by_recomputing_ps))]
        if costs.links and offloading:
            self._families.append(Family(OFFLOADING, cached(self._least_by_offloading_ps)))

    def plans(self, budget_bytes: int, known_ps: Callable[[], int | None]) -> Iterator[Judged]:
        """The plans of all policies that may be faster than what is known by then, each judged."""
        for family in self._families:
            for policy in family.policies:
                known = known_ps()
                if known is not None:
                    least = family.least_ps(budget_bytes)
                    if least is None or known <= least:
                        break
                yield self._plan(policy, budget_bytes)

    def _plan(self, policy: Policy, budget_bytes: int) -> Judged:
        assert policy.decide is not None
        tell(f"asking {policy.name}")
        decided = policy.decide(self._step, self._costs, budget_bytes)
        if not isinstance(decided, Decided):
            decided = Decided(decided, self._costs)
        stays = self._costs.unforeseen
        decisions = {s: d for s, d in decided.decisions.items() if s not in stays or not isinstance(d, Offload)}
        return judge(
            self._step,
            self._costs,
            decisions,
            found_by=policy.name,
            room_bytes=budget_bytes,
            picked=decided.costs.picked,
        )

    def _least_by_recomputing_ps(self, budget_bytes: int) -> int | None:
        """No plan that only recomputes, in the ways of the price list, takes less."""
        found = self._recomputing.at(budget_bytes)
        return None if found.over_ps is None else found.keep_ps + found.over_ps

    @cached_property
    def _recomputing(self) -> Bounds:
        return Bounds(self._step, replace(self._costs, links={}, algorithms={}))

    def _least_by_offloading_ps(self, budget_bytes: int) -> int | None:
        """No plan that only offloads takes less, whatever ways it picks: each op as fast and as small as any of its."""
        prices = self._costs.by_signature
        offered = {key: [prices[key], *ways.values()] for key, ways in self._costs.algorithms.items() if key in prices}
        best = {
            key: OpCost(min(w.time_ps for w in ways), min(w.workspace_bytes for w in ways))
            for key, ways in offered.items()
        }
        costs = replace(self._costs, by_signature={**self._costs.by_signature, **best}, algorithms={})
        problem = Problem.of(self._step, costs)
        try:
            waits_ps = offload_bound_ps(Luggage.of(problem, tier_of(costs)), budget_bytes)
        except MemfitError:
            return 0
        return None if waits_ps is None else sum(problem.op_ps) + waits_ps
