"""The state of a search: one move for each site, laid out so that the evaluator reads it where it lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from memfit.plan.auto.coded import CodedStep, Switchboard
from memfit.plan.auto.sites import Site, WaySite, decisions_of, first_ways_of
from memfit.plan.decisions import Decisions
from memfit.plan.encode import encode_step
from memfit.plan.evaluate import Evaluator, NativeEvaluator, Outcome, Rank
from memfit.plan.problem import KEEP, Problem


class OutOfEvaluations(Exception):
    """The search has used up what it was given."""


def _is_never_late() -> bool:
    return False


@dataclass
class Allowance:
    """How many evaluations are left. Counting them, not seconds, makes the same plan on every machine.

    Attributes:
        is_late: True once the clock ends the search all the same. Whoever goes through many moves asks.
    """

    left: int
    is_late: Callable[[], bool] = _is_never_late

    def take(self) -> None:
        if self.left <= 0:
            raise OutOfEvaluations
        self.left -= 1


class Board:
    """Moves of all sites, and what they come to within the budget."""

    def __init__(
        self, coded: CodedStep, sites: Sequence[Site | WaySite], budget_bytes: int, allowance: Allowance
    ) -> None:
        self.coded = coded
        self.sites = tuple(sites)
        self.budget_bytes = budget_bytes
        self.allowance = allowance
        self.moves = [0] * len(self.sites)
        self.evaluator = Evaluator.of(coded.problem)
        states = coded.problem.default_states()
        for storage in coded.codes:
            states[storage] = KEEP  # by default as if no code were on, whether or not anything is decided about it
        self._states = self.evaluator.array(states)
        self._is_on: set[int] = set()
        self._switchboard = (
            Switchboard(coded, self.evaluator) if coded.codes and isinstance(self.evaluator, NativeEvaluator) else None
        )
        for index in range(len(self.sites)):
            self.put(index, 0)

    def put(self, index: int, number: int) -> None:
        """Make a move for one site."""
        self.moves[index] = number
        site = self.sites[index]
        if isinstance(site, WaySite):
            self.evaluator.first_ways[site.choice] = number
            return
        move = site.moves[number]
        self._states[site.storage] = move.state
        if site.storage not in self.coded.codes:
            return
        self._states[self.coded.codes_of[site.storage][0]] = KEEP if move.code_state is None else move.code_state
        if (site.storage in self._is_on) != move.is_coded:
            self._is_on ^= {site.storage}
            if self._switchboard is not None:
                self._switchboard.switch(site.storage, on=move.is_coded)

    def put_all(self, moves: Sequence[int]) -> None:
        """Make a move for every site."""
        for index, (old, new) in enumerate(zip(self.moves, moves, strict=True)):
            if old != new:
                self.put(index, new)

    def outcome(self) -> Outcome:
        """What the moves come to."""
        self.allowance.take()
        if self._is_slow:
            return self._outcome_in_full()
        return self.evaluator.evaluate(self._states, self.budget_bytes, choose_ways=True)

    def score(self) -> Rank:
        return self.outcome().rank

    def improves(self, best: Rank) -> Rank | None:
        """The score of the moves if it is less than that, else None; which may be found out sooner."""
        if self._is_slow:
            score = self.score()
            return score if score < best else None
        self.allowance.take()
        found = self.evaluator.improves(self._states, self.budget_bytes, best, choose_ways=True)
        return None if found is None else found.rank

    @property
    def _is_slow(self) -> bool:
        """True if codes have to be written into the step for every evaluation."""
        return bool(self.coded.codes) and self._switchboard is None

    def _outcome_in_full(self) -> Outcome:
        """Without a compiler: by writing just these codes into the step."""
        encoded = encode_step(self.coded.step, self.decisions)
        problem = Problem.of(encoded.step, self.coded.costs)
        states = problem.states(encoded.decisions)
        evaluator = Evaluator.of(problem)
        leave_out_ways(evaluator, self.coded, first_ways_of(self.sites, self.moves))
        return evaluator.evaluate(states, self.budget_bytes, choose_ways=True)

    @property
    def decisions(self) -> Decisions:
        return decisions_of(self.sites, self.moves)


def leave_out_ways(evaluator: Evaluator, coded: CodedStep, first_ways: Mapping[int, int]) -> None:
    """Let ops of another step have the first ways of those with the same outputs in the step with all codes."""
    ops = coded.problem.step.ops
    first = {ops[op].outputs: number for op, number in first_ways.items()}
    for choice, (op, ways) in enumerate(evaluator.problem.ways.items()):
        wanted = first.get(evaluator.problem.step.ops[op].outputs, 0)
        evaluator.first_ways[choice] = min(wanted, len(ways) - 1)
