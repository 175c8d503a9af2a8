"""Several cuts of a step as one linear program, tied together by the time that has passed.

A single cut counts waiting before its instant as if the backward half could go on without any, and the other way round.
Cut at several instants at once, the overhead that has passed by each of them grows from one to the next: what is
waited for at an early instant is not there to hide transfers behind at a late one.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_matrix, hstack, vstack

from memfit.plan.bound.cut import Cuts
from memfit.plan.bound.linear import LinearProgram


def coupled_ps(cuts: Cuts, ops: list[int]) -> int:
    """A lower bound on what any plan within the budget takes beyond the time of its ops; each op by itself has room.

    Columns: for each instant those of a single cut; then whether each storage is encoded, what has passed at the
    boundary, what has passed by each instant, and what the whole step takes longer.
    """
    columns = cuts.columns
    ops = sorted(ops)
    num_coded, width = len(columns.coded), columns.width
    shared_at = width * len(ops)
    boundary_at = shared_at + num_coded
    passed_at = boundary_at + 1
    total_at = passed_at + len(ops)
    objective, lower, upper = np.zeros(total_at + 1), np.zeros(total_at + 1), np.zeros(total_at + 1)
    coded = list(columns.column_of_coded.values())
    objective[shared_at:boundary_at] = cuts.prices[coded]
    objective[total_at] = 1
    upper[shared_at:boundary_at] = 1
    upper[boundary_at:] = cuts.most_waiting
    blocks, limits = [], []
    ties: list[dict[int, float]] = []
    for number, op in enumerate(ops):
        program, by_way = cuts.program(op)
        at = slice(number * width, (number + 1) * width)
        lower[at], upper[at] = program.lower, program.upper
        blocks.append(program.matrix)
        limits.append(program.limits)
        passed, is_forward = passed_at + number, op < cuts.account.num_forward
        base = number * width
        before = boundary_at if not is_forward else passed
        since = boundary_at if is_forward else passed
        # Waiting and what sends cost before is what has passed; waiting, re-runs and fetches after are still to come.
        sends, fetches = (
            {base + columns.num_items + int(c): float(drag[c]) for c in np.flatnonzero(drag)}
            for drag in (columns.send_drag, columns.fetch_drag)
        )
        ties.append({base + columns.before_at: 1.0, **sends, before: -1.0})
        again = {base + int(c): float(cuts.again[c]) for c in np.flatnonzero(cuts.again)}
        ways = {base + columns.ways_at + i: float(extra) for i, extra in enumerate(by_way) if extra}
        # So is what a slower way takes, as soon as the op has begun; in the forward half that is before the boundary.
        slower = {} if is_forward else ways
        ties.append({base + columns.after_at: 1.0, **again, **fetches, **slower, total_at: -1.0, since: 1.0})
        following = passed_at + number + 1  # the next instant, or the end
        ties.append({passed: 1.0, following: -1.0, **ways})
        for sign in (1.0, -1.0):  # what is encoded at one instant is at all
            ties += [{base + column: sign, shared_at + i: -sign} for i, column in enumerate(coded)]
    num_before = sum(op < cuts.account.num_forward for op in ops)
    if num_before:
        ties.append({passed_at + num_before - 1: 1.0, boundary_at: -1.0})
    ties.append({boundary_at: 1.0, passed_at + num_before: -1.0})
    matrix = _diagonal(blocks, columns.width, total_at + 1)
    tied = csr_matrix(
        (
            [factor for tie in ties for factor in tie.values()],
            ([row for row, tie in enumerate(ties) for _ in tie], [column for tie in ties for column in tie]),
        ),
        shape=(len(ties), total_at + 1),
    )
    whole = LinearProgram(
        objective, vstack([matrix, tied], format="csr"), np.concatenate([*limits, np.zeros(len(ties))]), lower, upper
    )
    solved = whole.solve()
    return cuts.over_ps(float("-inf") if solved.is_infeasible else solved.proven)


def _diagonal(blocks: list[csr_matrix], block_width: int, width: int) -> csr_matrix:
    """The blocks side by side and below each other, and room for the columns that they share."""
    rows = []
    for number, block in enumerate(blocks):
        left = csr_matrix((block.shape[0], number * block_width))
        right = csr_matrix((block.shape[0], width - (number + 1) * block_width))
        rows.append(hstack([left, block, right], format="csr"))
    return vstack(rows, format="csr")
