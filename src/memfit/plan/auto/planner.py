"""The best mix for a budget: searched for, held against single policies and the bound, remembered for other budgets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from memfit.capture.step import Step
from memfit.cost.costs import Costs
from memfit.plan.auto.board import leave_out_ways
from memfit.plan.auto.coded import CodedStep
from memfit.plan.auto.judged import Judged, Judgements, judge
from memfit.plan.auto.rounding import rounded_starts
from memfit.plan.auto.search import Effort, Search
from memfit.plan.auto.singles import Singles
from memfit.plan.auto.sites import (
    Site,
    decisions_of,
    first_ways_of,
    sites_made_often,
    sites_of,
    sites_out_of_turn,
)
from memfit.plan.bound.bound import Bound, Bounds
from memfit.plan.decisions import Decisions, Encode
from memfit.plan.encode import encode_step
from memfit.plan.evaluate import Evaluator
from memfit.plan.keep_timeline import keep_timeline
from memfit.plan.problem import Problem
from memfit.plan.progress import tell

NEAR_ENOUGH = 0.0002
"""Within that share of the step of what is proven best, the search ends."""
_WORTH_REFINING = 0.001
"""Of the step: if what is proven best is further away than that from the plan, more is done to prove it."""
_NUM_SOLVES = 100
_WORTH_ENUMERATING = 0.005
"""The same for going through what may become of the largest storages, which takes longer."""
_NUM_SETS = 4_000
_MOST_COLUMNS = 400
"""In larger programs each tensor matters less, and solving takes longer."""
_WORTH_REORDERING, _FEW_OPS = 0.005, 400
"""From a plan of few ops that is further from the bound than that share of the step, fetches out of turn are tried."""
_NUM_OFFERED = 8
"""So many of the newest best are judged, if the newest is not what the search took it for."""


@dataclass(frozen=True)
class Mix:
    """What the planner found for one budget.

    Attributes:
        plan: the best plan; where none fits, the smallest.
        bound: what is proven about all plans.
        num_evaluations: how many plans were tried.
        is_cut_short: the clock ended the search, so that another run may end elsewhere.
    """

    plan: Judged
    bound: Bound
    num_evaluations: int = 0
    is_cut_short: bool = False


@dataclass(eq=False)
class MixPlanner:
    """Plans one step at one list of prices, for one budget after another: each profits from those before.

    Attributes:
        codes: the storages that may be encoded, and how.
        asks_offloading: whether policies that offload are asked. No plan may be slower than theirs of the step as it
            is; of its other form they would only be places to start from, and they take the longest.
    """

    step: Step
    costs: Costs
    codes: Mapping[int, Encode]
    asks_offloading: bool = True
    judged: Judgements = field(default_factory=Judgements)

    @cached_property
    def plain(self) -> Problem:
        return Problem.of(self.step, self.costs)

    @cached_property
    def coded(self) -> CodedStep:
        return CodedStep.of(self.step, self.costs, self.codes)

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        return sites_of(self.coded)

    @cached_property
    def keep(self) -> Judged:
        timeline = keep_timeline(self.step, self.costs)
        return Judged("keep", {}, {}, None, timeline.peak_bytes, timeline.step_ps)

    @cached_property
    def bounds(self) -> Bounds:
        return Bounds(self.step, self.costs, self.codes)

    @cached_property
    def _singles(self) -> Singles:
        return Singles(self.step, self.costs, offloading=self.asks_offloading)

    def kept(self, budget_bytes: int, bound: Bound | None = None) -> Mix | None:
        """Nothing to do, if everything fits; `bound` is that of this step at this budget, if it is known."""
        if self.keep.peak_bytes > budget_bytes:
            return None
        tell("everything fits: nothing to do")
        self.judged.add(self.keep)
        return Mix(self.keep, self.bounds.at(budget_bytes) if bound is None else bound)

    def begin(self, budget_bytes: int, effort: Effort, *, seeds: Iterable[Judged] = ()) -> Search:
        """A search that has its first plans, if there are any."""
        search = self._search(self.sites, budget_bytes, effort)
        for known in self.judged.plans:
            name = f"the plan of a budget of {known.room_bytes} bytes"
            search.offer_decisions(known.decisions, name)
            search.offer_decisions(known.decisions, name, picked=known.picked)
        for seed in seeds:
            search.offer_decisions(seed.decisions, "the plan of the step's other form")
        search.begin()
        search.descend()
        return search

    def finish(self, search: Search, bound: Bound | None = None) -> Mix:
        """What the search comes to with all its evaluations."""
        budget_bytes = search.board.budget_bytes
        if bound is None:
            tell("how good a plan can be")
            bound = self.bounds.at(budget_bytes, target_ps=self._enough_ps(search.best[1]) if search.fits else None)
        if bound.over_ps is not None:
            search.target_ps = bound.keep_ps + bound.over_ps + int(NEAR_ENOUGH * bound.keep_ps)
            for moves in rounded_starts(self.sites, bound.shares, self.plain.tiers):
                search.offer(moves, "rounding")
            search.descend()
            search.relieve()
        search.anneal()
        if bound.over_ps is not None:
            # The better the best, the fewer policies are left that are not proven to be slower.
            for single in self._singles.plans(budget_bytes, lambda: search.best[1] if search.fits else None):
                self.judged.add(single)
                search.offer_decisions(single.decisions, single.found_by)
            search.descend()
        search.search_windows()
        self._take(search, budget_bytes)
        best = self.judged.best(budget_bytes) or self.judged.smallest()
        assert best is not None
        return Mix(best, bound, search.num_evaluations, search.is_cut_short)

    def insist(self, mix: Mix, effort: Effort) -> Mix:
        """Where nothing fits: go on from the smallest, with storages that may be made again more than once."""
        budget_bytes = mix.bound.budget_bytes
        if mix.bound.over_ps is None or mix.plan.peak_bytes <= budget_bytes:
            return mix
        tell("with storages made again more than once")
        search = self._search(sites_made_often(self.coded, self.sites), budget_bytes, effort)
        for known in self.judged.plans:
            search.offer_decisions(known.decisions, known.found_by)
        search.descend()
        search.relieve()
        return self._gone_on(mix, search)

    def reordered(self, mix: Mix, effort: Effort) -> Mix:
        """Where a plan is far from what is proven: go on from it, with storages that may be fetched out of turn."""
        plan, bound = mix.plan, mix.bound
        if bound.over_ps is None or plan.peak_bytes > bound.budget_bytes or not self.plain.tiers:
            return mix
        if plan.step_ps - bound.keep_ps - bound.over_ps <= _WORTH_REORDERING * bound.keep_ps:
            return mix
        if self.plain.num_ops > _FEW_OPS:
            return mix
        tell("with storages fetched out of turn")
        search = self._search(sites_out_of_turn(self.coded, self.sites), bound.budget_bytes, effort)
        search.offer_decisions(plan.decisions, plan.found_by, picked=plan.picked)
        search.descend()
        return self._gone_on(mix, search)

    def refined(self, bound: Bound, step_ps: int) -> Bound:
        """The bound with whole tensors, where a plan of that time is far from it and tensors are few."""
        if bound.over_ps is None or self.bounds.columns.width > _MOST_COLUMNS:
            return bound
        if step_ps - bound.keep_ps - bound.over_ps <= _WORTH_REFINING * bound.keep_ps:
            return bound
        tell("how good a plan of whole tensors can be")
        target_ps = self._enough_ps(step_ps)
        bound = self.bounds.refined(bound, target_ps=target_ps, num_solves=_NUM_SOLVES)
        assert bound.over_ps is not None
        if step_ps - bound.keep_ps - bound.over_ps <= _WORTH_ENUMERATING * bound.keep_ps:
            return bound
        return self.bounds.enumerated(bound, target_ps=target_ps, num_sets=_NUM_SETS)

    def _enough_ps(self, step_ps: int) -> int:
        """Once a bound is that high, a plan of that time is near enough to it."""
        keep_ps = self.keep.step_ps
        return step_ps - keep_ps - int(NEAR_ENOUGH * keep_ps)

    def _search(self, sites: tuple[Site, ...], budget_bytes: int, effort: Effort) -> Search:
        return Search(self.plain, self.coded, sites, budget_bytes, effort=effort.on(self.plain.num_ops))

    def _gone_on(self, mix: Mix, search: Search) -> Mix:
        """What a further search comes to, and all before it."""
        search.anneal()
        search.search_windows()
        self._take(search, mix.bound.budget_bytes)
        best = self.judged.best(mix.bound.budget_bytes) or self.judged.smallest()
        assert best is not None
        cut_short = mix.is_cut_short or search.is_cut_short
        return Mix(best, mix.bound, mix.num_evaluations + search.num_evaluations, cut_short)

    def _take(self, search: Search, budget_bytes: int) -> None:
        """Judge what the search found; should that not fit after all, what it had found before."""
        for moves in reversed(search.history[-_NUM_OFFERED:]):
            first_ways = first_ways_of(search.sites, moves)
            found = self._judged(decisions_of(search.sites, moves), first_ways, budget_bytes)
            self.judged.add(found)
            if found.peak_bytes <= budget_bytes:
                return

    def _judged(self, decisions: Decisions, first_ways: Mapping[int, int], budget_bytes: int) -> Judged:
        """The plan in the ways that are fastest with it, of those that may be taken."""
        encoded = encode_step(self.step, decisions)
        problem = Problem.of(encoded.step, self.costs)
        evaluator = Evaluator.of(problem)
        leave_out_ways(evaluator, self.coded, first_ways)
        ways = evaluator.ways(problem.states(encoded.decisions), budget_bytes)
        number = {op.outputs: index for index, op in enumerate(self.step.ops)}
        picked = {number[encoded.step.ops[op].outputs]: way for op, way in ways.items()}
        return judge(self.step, self.costs, decisions, found_by="auto", room_bytes=budget_bytes, picked=picked)
