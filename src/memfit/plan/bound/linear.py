"""Linear programs in a box: rows collected entry by entry, solved by HiGHS, bounded without trusting it.

[Note: proof]
A solver's optimum is as good as its tolerances. So the bound is computed from the solver's multipliers alone: for any
multipliers that are not positive, the minimum of the Lagrangian over the box of the variables is a lower bound on the
optimum, however good or bad they are. What is left is the rounding of one sum.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog
from scipy.sparse import csr_matrix, hstack, vstack

Floats = npt.NDArray[np.float64]

_INFEASIBLE = 2
_ROUNDING = 1e-11
"""Of the largest terms of the sum, far more than adding some thousands of them can lose."""


@dataclass
class Rows:
    """Rows of `factors * variables <= limit`, collected entry by entry."""

    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    num_rows: int = 0

    def add(self, *terms: tuple[int, float]) -> int:
        """Put in one row; its number."""
        for column, factor in terms:
            self.rows.append(self.num_rows)
            self.columns.append(column)
            self.factors.append(factor)
        self.num_rows += 1
        return self.num_rows - 1

    def matrix(self, width: int) -> csr_matrix:
        return csr_matrix((self.factors, (self.rows, self.columns)), shape=(self.num_rows, width))


@dataclass(frozen=True)
class Solved:
    """A program's optimum.

    Attributes:
        proven: no point of the box that obeys the rows has less.
        point: where the solver found it; None if it found nothing.
        multipliers: of the rows, by which it is proven; not above zero.
        is_infeasible: the solver says that no point obeys the rows.
    """

    proven: float
    point: Floats | None = None
    multipliers: Floats | None = None
    is_infeasible: bool = False


@dataclass
class LinearProgram:
    """Minimise `objective * x` with `matrix * x <= limits` and `lower <= x <= upper`."""

    objective: Floats
    matrix: csr_matrix
    limits: Floats
    lower: Floats
    upper: Floats

    def with_rows(self, rows: Floats, limits: Floats) -> LinearProgram:
        """The same with more rows, given as a dense block."""
        matrix = vstack([self.matrix, csr_matrix(rows)], format="csr")
        return LinearProgram(self.objective, matrix, np.append(self.limits, limits), self.lower, self.upper)

    def within(self, lower: Floats, upper: Floats) -> LinearProgram:
        """The same in another box."""
        return LinearProgram(self.objective, self.matrix, self.limits, lower, upper)

    def is_proven_infeasible(self) -> bool:
        """Whether multipliers prove that no point of the box obeys the rows: each must be let go of by more than none.

        One more variable says by how much; what is proven of its least is proven like any other bound.
        """
        num_rows, width = self.matrix.shape
        slack = csr_matrix(-np.ones((num_rows, 1)))
        most = abs(self.matrix) @ np.maximum(np.abs(self.lower), np.abs(self.upper)) + np.abs(self.limits)
        loosened = LinearProgram(
            np.append(np.zeros(width), 1.0),
            hstack([self.matrix, slack], format="csr"),
            self.limits,
            np.append(self.lower, 0.0),
            np.append(self.upper, float(most.max(initial=0)) + 1.0),
        )
        solved = loosened.solve()
        return not solved.is_infeasible and solved.proven > 0

    def solve(self) -> Solved:
        """The optimum, and the proof of it."""
        found = linprog(
            self.objective,
            A_ub=self.matrix,
            b_ub=self.limits,
            bounds=np.column_stack([self.lower, self.upper]),
            method="highs",
        )
        if found.status == _INFEASIBLE:
            return Solved(float("inf"), is_infeasible=True)
        if found.x is None or found.ineqlin is None or found.ineqlin.marginals is None:
            return Solved(self.proven(np.zeros(len(self.limits))))
        multipliers = np.minimum(np.nan_to_num(found.ineqlin.marginals), 0.0)
        return Solved(self.proven(multipliers), found.x, multipliers)

    def proven(self, multipliers: Floats) -> float:
        """The lower bound that these multipliers prove."""
        reduced = self.objective - self.matrix.T @ multipliers
        least = np.where(reduced > 0, reduced * self.lower, reduced * self.upper)
        terms = multipliers * self.limits
        rounding = _ROUNDING * (float(np.abs(terms).sum()) + float(np.abs(least).sum()) + 1)
        return float(terms.sum()) + float(least.sum()) - rounding
