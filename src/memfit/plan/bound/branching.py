"""A cut with whole tensors: its program split where the optimum holds half of one, until nothing is left to split.

[Note: whole tensors]
A plan has each storage wholly here or not, wholly away or not, encodes it or not, and runs an op again or not. The
program of cut.py knows only shares, and where tensors are few and huge it keeps the half of one that has room. So a
share that is neither nothing nor all is set to nothing in one program and to all in another: every plan is in one of
them. What no plan is better than is the least that is proven of any program that was not split further.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from memfit.plan.bound.cut import Cut, Cuts
from memfit.plan.bound.linear import Floats

_WHOLE = 1e-6
"""A share this near to nothing or to all is so: which one to split is only a guess about where it pays."""
_SOLVES_OF_SPLIT = 4  # at most: two programs, and for each that it has no solution
_SOLVES_IN_TURN = 16
_WORTH_A_TURN = 1.0
"""Of the program's units, a hundredth of a point: an instant that gained less in its turn lets others pass."""


@dataclass(frozen=True, order=True)
class _Leaf:
    """A program that was not split: what is proven of all plans in it.

    Attributes:
        number: in the order in which they were made, the earlier first where the same is proven.
        point: the optimum; None where the solver found none: such a leaf is not split, and what is proven stands.
    """

    proven: float
    number: int
    lower: Floats = field(compare=False, repr=False)
    upper: Floats = field(compare=False, repr=False)
    point: Floats | None = field(default=None, compare=False, repr=False)


class Branching:
    """The cut at one instant, split step by step where the least is proven."""

    def __init__(self, cuts: Cuts, op: int) -> None:
        self.cuts, self.op = cuts, op
        self.num_solves = 0
        self._program = cuts.program(op)[0]
        self._bytes = _bytes_of_columns(cuts, op)
        self._leaves: list[_Leaf] = []
        self._num_leaves = 0
        self._add(float("-inf"), self._program.lower, self._program.upper)

    @property
    def proven(self) -> float:
        """No plan adds less, in the units of the program; infinite where no plan is in any leaf."""
        return self._leaves[0].proven if self._leaves else float("inf")

    @property
    def over_ps(self) -> int:
        """What any plan takes beyond the time of its ops."""
        return self.cuts.over_ps(self.proven)

    @property
    def cut(self) -> Cut:
        """The same as a cut, with the optimum of the leaf that it hangs on."""
        return Cut(self.op, self.over_ps, point=self._leaves[0].point if self._leaves else None)

    @property
    def is_done(self) -> bool:
        """Whether splitting on cannot prove more: the optimum has nothing but whole tensors, or is not known."""
        return not self._leaves or self._column_to_split(self._leaves[0]) is None

    def run(self, *, num_solves: int, target_ps: int) -> None:
        """Split until that much is proven, or that many more programs were solved, or nothing is left to split."""
        most = self.num_solves + num_solves
        while self._leaves and self.over_ps < target_ps and self.num_solves + _SOLVES_OF_SPLIT <= most:
            column = self._column_to_split(self._leaves[0])
            if column is None:
                return
            leaf = heapq.heappop(self._leaves)
            for share in (0.0, 1.0):
                lower, upper = leaf.lower.copy(), leaf.upper.copy()
                lower[column] = upper[column] = share
                self._add(leaf.proven, lower, upper)

    def _add(self, known: float, lower: Floats, upper: Floats) -> None:
        """Solve a program of which so much is known already; one that is proven to have no plan is left out."""
        program = self._program.within(lower, upper)
        solved = program.solve()
        self.num_solves += 1
        if solved.is_infeasible:
            self.num_solves += 1
            if program.is_proven_infeasible():
                return
        # Of what the solver only says to have no solution, nothing more is known than before.
        proven = known if solved.is_infeasible else max(known, solved.proven)
        heapq.heappush(self._leaves, _Leaf(proven, self._num_leaves, lower, upper, solved.point))
        self._num_leaves += 1

    def _column_to_split(self, leaf: _Leaf) -> int | None:
        """Where the most bytes are neither one nor the other; None if all is whole."""
        if leaf.point is None:
            return None
        from_whole = np.minimum(leaf.point, 1 - leaf.point)
        columns = self.cuts.columns
        from_whole[[columns.before_at, columns.after_at]] = 0  # time comes in any amount
        from_whole[leaf.lower == leaf.upper] = 0
        if from_whole.max(initial=0) <= _WHOLE:
            return None
        return int(np.argmax(np.where(from_whole > _WHOLE, from_whole * self._bytes, -1.0)))


def most_proven(cuts: Cuts, ops: list[int], *, target_ps: int, num_solves: int) -> Branching | None:
    """The instant among these at which the most is proven by solving at most so many programs.

    Turn by turn the one that is ahead is split on; those whose turns were in vain wait for the others.
    """
    begun: list[Branching] = []
    in_vain: dict[int, int] = dict.fromkeys(ops, 0)
    num_solved = 0
    for op in ops:
        if num_solved + 2 > num_solves:
            break
        begun.append(Branching(cuts, op))
        num_solved += begun[-1].num_solves
    best = max(begun, key=lambda each: each.proven, default=None)
    while begun and best is not None and best.over_ps < target_ps and num_solved + _SOLVES_OF_SPLIT <= num_solves:
        ahead = max(begun, key=lambda each: (-in_vain[each.op], each.proven))
        proven_before, solved_before = ahead.proven, ahead.num_solves
        ahead.run(num_solves=min(num_solves - num_solved, _SOLVES_IN_TURN), target_ps=target_ps)
        num_solved += ahead.num_solves - solved_before
        if ahead.proven > best.proven:
            best = ahead
        in_vain[ahead.op] += ahead.proven - proven_before < _WORTH_A_TURN
        if ahead.is_done:
            begun.remove(ahead)
    return best


def _bytes_of_columns(cuts: Cuts, op: int) -> Floats:
    """How many bytes each variable decides about; one more, so that none is worth nothing."""
    account, columns = cuts.account, cuts.columns
    found = np.zeros(columns.width)
    found[: columns.again_at] = np.tile(columns.size, 1 + len(columns.tiers))
    for storage in columns.storages:
        for writer in account.reruns.writers[storage] if storage in account.reruns.recomputable else ():
            found[columns.column_of_op[writer]] += float(account.size[storage])
    for storage, column in columns.column_of_coded.items():
        found[column] = float(account.size[storage])
    for number, way in enumerate(account.ways_within(op, cuts.budget_bytes)):
        found[columns.ways_at + number] = way.workspace_bytes
    return found + 1
