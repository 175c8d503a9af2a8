"""Annealing: a walk that takes worse plans too, less and less often, and may be above the budget on its way.

A descent ends where no single move helps. But what helps is mostly an exchange: a tensor that was dear to make again is
kept, and others are dropped for it. Such a way leads over plans that are slower, or that do not fit. So bytes above the
budget have a price here, which rises while the walk is above it and falls while it is not.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from memfit.plan.auto.board import Board
from memfit.plan.evaluate import Rank

_FIRST_HEAT, _LAST_HEAT = 2e-3, 2e-6
"""Of the step's time: how much slower a plan may be to be taken one time out of e."""
_ENOUGH_EACH = 800
"""With so many evaluations for each site the walk may begin that hot; with fewer it would not cool down in time."""
_PRICE_STEP, _PRICE_RANGE = 1.02, 1e4
_ASK_EVERY = 256
_NEAR = 12


def anneal(
    board: Board,
    score: Rank,
    chance: random.Random,
    *,
    num_evaluations: int,
    is_enough: Callable[[Rank], bool],
) -> Rank:
    """Walk from what is on the board; leaves the best plan met there, and returns its score."""
    movable = [index for index, site in enumerate(board.sites) if len(site.moves) > 1]
    if not movable:
        return score
    best, best_moves = score, list(board.moves)
    here = score
    price = _first_price(board, score)
    lowest, highest = price / _PRICE_RANGE, price * _PRICE_RANGE
    heat = min(1.0, (num_evaluations / (_ENOUGH_EACH * len(movable))) ** 1.5)
    for turn in range(num_evaluations):
        if board.allowance.is_late() or (turn % _ASK_EVERY == 0 and is_enough(best)):
            break
        share = turn / num_evaluations
        warmth = heat * max(score[1], 1) * _FIRST_HEAT * (_LAST_HEAT / _FIRST_HEAT) ** share
        changed = _proposal(board, movable, chance)
        held = [(index, board.moves[index]) for index, _ in changed]
        for index, number in changed:
            board.put(index, number)
        found = board.score()
        added = found[1] - here[1] + price * (found[0] - here[0])
        if added <= 0 or chance.random() < math.exp(-added / warmth):
            here = found
            if found < best:
                best, best_moves = found, list(board.moves)
        else:
            for index, number in held:
                board.put(index, number)
        price = min(max(price * (_PRICE_STEP if here[0] else 1 / _PRICE_STEP), lowest), highest)
    board.put_all(best_moves)
    return best


def _first_price(board: Board, score: Rank) -> float:
    """About what a byte costs: the time of the step over all bytes that can be decided about."""
    return max(score[1], 1) / max(sum(site.num_bytes for site in board.sites), 1)


def _proposal(board: Board, movable: list[int], chance: random.Random) -> list[tuple[int, int]]:
    """Another move for one site, or for two of which one is given back what was taken from it."""
    centre = chance.randrange(len(movable))
    first = movable[centre]
    changes = [(first, _other(board, first, chance))]
    if chance.random() < 0.5:
        near = movable[max(0, centre - _NEAR) : centre + _NEAR + 1]
        second = chance.choice(near if chance.random() < 0.5 else movable)
        if second != first:
            back = 0 if board.moves[second] else _other(board, second, chance)
            changes.append((second, back))
    return changes


def _other(board: Board, index: int, chance: random.Random) -> int:
    number = chance.randrange(len(board.sites[index].moves) - 1)
    return number + (number >= board.moves[index])
