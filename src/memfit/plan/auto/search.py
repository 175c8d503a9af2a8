"""The search for the best mix: cheap starts, descent from each, then windows disturbed and mended until it will do."""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from memfit.plan.auto.annealing import anneal
from memfit.plan.auto.board import Allowance, Board, OutOfEvaluations
from memfit.plan.auto.coded import CodedStep
from memfit.plan.auto.descent import descend, iterate, relieve
from memfit.plan.auto.min_cut import priced_starts
from memfit.plan.auto.sites import Site, WaySite, moves_of, way_sites_of
from memfit.plan.decisions import Decisions
from memfit.plan.evaluate import Rank
from memfit.plan.problem import Problem
from memfit.plan.progress import FIRST_PLAN, tell

_NUM_DESCENTS = 3
"""How many of the starts by price are descended from; greedy's, and those of other policies, come on top."""
_SHORT_STEP = 1_500
"""Ops of a step that is planned with all evaluations: those of resnet152, not those of gpt2."""
_PATIENCE = 4
"""A plan that comes late is better than none. Without a compiler one evaluation takes up to a quarter of a second."""
_ROUNDS = 4
"""Of windows, between which the best is kept: what is found after that is lost if evaluations run out."""
_ANNEALED = 0.75
"""How much of what is left after all descents goes into annealing; the rest mends windows."""


@dataclass(frozen=True)
class Effort:
    """How long to search. The number of evaluations decides; the clock only cuts what would take far too long.

    Attributes:
        num_evaluations: over all starts and rounds.
        cap_s: seconds after which a search ends, as soon as anything fits; at the latest after _PATIENCE times as many.
        seed: of the random order in which things are tried.
    """

    num_evaluations: int = 60_000
    cap_s: float = 20.0
    seed: int = 0

    def on(self, num_ops: int) -> Effort:
        """The same for a step of that many ops: evaluations of a long one take longer, and it gets fewer."""
        if num_ops <= _SHORT_STEP:
            return self
        return replace(self, num_evaluations=self.num_evaluations // 2)


class Search:
    """One search within one budget. `best` is there as soon as anything fits."""

    def __init__(
        self,
        plain: Problem,
        coded: CodedStep,
        sites: tuple[Site, ...],
        budget_bytes: int,
        *,
        effort: Effort,
    ) -> None:
        self.plain = plain
        self.coded = coded
        self.storage_sites = sites
        # Without transfers there is nothing for which a slower way would leave room.
        ways = way_sites_of(coded, budget_bytes) if plain.tiers else ()
        self.sites: tuple[Site | WaySite, ...] = (*sites, *ways)
        self.effort = effort
        self.target_ps = 0
        """No plan is faster than that, as far as is known: what is that fast ends the search."""
        self._chance = random.Random(effort.seed)
        self._begun_s = time.perf_counter()
        self.best: Rank = (sys.maxsize, 0)
        self.best_moves: list[int] = [0] * len(self.sites)
        self.board = Board(coded, self.sites, budget_bytes, Allowance(effort.num_evaluations, self._is_late))
        self.history: list[list[int]] = []
        """All that was the best at its time, the newest last."""
        self._starts: list[tuple[Rank, list[int], str]] = []

    @property
    def fits(self) -> bool:
        return self.best[0] == 0

    @property
    def num_evaluations(self) -> int:
        return self.effort.num_evaluations - self.board.allowance.left

    @property
    def is_cut_short(self) -> bool:
        """True if evaluations are left that the clock did not allow."""
        is_good = self.fits and self.best[1] <= self.target_ps
        return not is_good and self.board.allowance.left > 0 and self._took_s > self.effort.cap_s

    def is_enough(self, score: Rank | None = None) -> bool:
        """True if nothing better is worth looking for, or there is no time."""
        found = self.best if score is None else score
        return (found[0] == 0 and found[1] <= self.target_ps) or self._is_late()

    @property
    def _took_s(self) -> float:
        return time.perf_counter() - self._begun_s

    def _is_late(self) -> bool:
        """True once the clock ends the search; of what it has nothing to show for yet, only much later."""
        if not self.history:
            return False
        return self._took_s > self.effort.cap_s * (1 if self.fits else _PATIENCE)

    def offer(self, moves: Sequence[int], found_by: str) -> None:
        """Evaluate one start, which may leave open in which ways ops are computed."""
        moves = [*moves, *[0] * (len(self.sites) - len(moves))]
        with contextlib.suppress(OutOfEvaluations):
            self.board.put_all(moves)
            score = self.board.score()
            self._starts.append((score, moves, found_by))
            self._keep(score, found_by)

    def offer_decisions(
        self, decisions: Decisions, found_by: str, *, picked: Mapping[int, str] = MappingProxyType({})
    ) -> None:
        """The same for decisions, as far as the search can express them, with ops computed in the ways `picked`."""
        ways = {self.coded.number_of[op]: way for op, way in picked.items() if op in self.coded.number_of}
        self.offer(moves_of(self.sites, decisions, ways), found_by)

    def begin(self) -> None:
        """Everything kept, and the starts by price: a first plan in a fraction of a second."""
        self.offer([0] * len(self.sites), "keep")
        for moves in priced_starts(self.plain, self.coded, self.storage_sites):
            if self._is_late():
                break
            self.offer(moves, "prices")

    def descend(self) -> None:
        """Descend from the best of the starts so far, each once."""
        chosen = sorted(self._starts, key=lambda start: start[0])[:_NUM_DESCENTS]
        self._starts.clear()
        with contextlib.suppress(OutOfEvaluations):
            for _, moves, name in chosen:
                if self.is_enough():
                    return
                self.board.put_all(moves)
                self._keep(descend(self.board, self.board.score(), self._chance), f"{name}, descended")

    def relieve(self) -> None:
        """From everything kept: take bytes off where that costs least, and descend from there."""
        if self.is_enough():
            return
        with contextlib.suppress(OutOfEvaluations):
            self.board.put_all([0] * len(self.sites))
            score = relieve(self.board, self.board.score())
            self._keep(score, "greedy")
            self._keep(descend(self.board, score, self._chance), "greedy, descended")

    def anneal(self) -> None:
        """Walk from the best, over plans that are worse, with most of the evaluations that are left."""
        if self.is_enough() or not self.sites:
            return
        self.board.put_all(self.best_moves)
        num_evaluations = int(_ANNEALED * self.board.allowance.left)
        with contextlib.suppress(OutOfEvaluations):
            score = anneal(
                self.board, self.best, self._chance, num_evaluations=num_evaluations, is_enough=self.is_enough
            )
            self._keep(score, "annealing")

    def search_windows(self) -> None:
        """Disturb and mend the best, as long as there are evaluations, unless it is enough before."""
        self.board.put_all(self.best_moves)
        score = self.best
        with contextlib.suppress(OutOfEvaluations):
            while not self.is_enough() and self.sites:
                score = iterate(self.board, score, self._chance, is_enough=self.is_enough, num_rounds=_ROUNDS)
                self._keep(score, "windows")

    def _keep(self, score: Rank, found_by: str) -> None:
        """Remember what is on the board if it is the best so far."""
        if score < self.best:
            was_fitting = self.fits
            self.best, self.best_moves = score, list(self.board.moves)
            self.history.append(self.best_moves)
            if self.fits:
                word = "better plan" if was_fitting else FIRST_PLAN
                tell(f"{word} by {found_by}, {self.num_evaluations:,} evaluations")
