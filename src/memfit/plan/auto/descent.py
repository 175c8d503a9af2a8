"""Local search: change what one storage or a few neighbours become, as long as that helps."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable

from memfit.plan.auto.board import Board
from memfit.plan.auto.sites import WaySite
from memfit.plan.evaluate import Rank

_MAX_ROUNDS = 30
_REFRESH = 16


def descend(board: Board, score: Rank, chance: random.Random, *, among: Iterable[int] | None = None) -> Rank:
    """Try every other move of every site in random order, take what is better, until nothing is or it is late."""
    indices = list(range(len(board.sites))) if among is None else list(among)
    unchanged = 0
    chance.shuffle(indices)
    for _ in range(_MAX_ROUNDS):
        for index in indices:
            if unchanged >= len(indices) or board.allowance.is_late():
                return score
            unchanged += 1
            held = board.moves[index]
            for number in range(len(board.sites[index].moves)):
                if number == held:
                    continue
                board.put(index, number)
                better = board.improves(score)
                if better is not None:
                    score, held, unchanged = better, number, 0
            board.put(index, held)
    return score


def iterate(
    board: Board, score: Rank, chance: random.Random, *, is_enough: Callable[[Rank], bool], num_rounds: int
) -> Rank:
    """Disturb a window, descend in it, keep what is not worse; many times.

    Sites stand in the order they are made, so that a window is a few neighbouring layers.
    """
    count = len(board.sites)
    ways = [index for index, site in enumerate(board.sites) if isinstance(site, WaySite)]
    for _ in range(num_rounds):
        if is_enough(score) or not count:
            break
        before = list(board.moves)
        centre, width = chance.randrange(count), chance.randint(2, 8)
        window = range(max(0, centre - width), min(count, centre + width + 1))
        for index in chance.sample(window, min(len(window), chance.randint(1, 3))):
            board.put(index, chance.randrange(len(board.sites[index].moves)))
        wide = range(max(0, centre - 2 * width), min(count, centre + 2 * width + 1))
        others = [*chance.sample(range(count), min(count, 8)), *ways]
        found = descend(board, board.score(), chance, among=dict.fromkeys((*wide, *others)))
        if found <= score:
            score = found
        else:
            board.put_all(before)
    return score


def relieve(board: Board, score: Rank) -> Rank:
    """From too many bytes down: the move that takes most bytes off for the time it adds, again and again.

    What a move is worth changes as others are made, but seldom by much. So stale figures stand in a heap, and only the
    one on top is asked again; all of them every few moves. When it is late, what it has come to will have to do.
    """
    worth: list[tuple[float, int, int]] = []
    accepted = 0
    while score[0] > 0 and not board.allowance.is_late():
        if accepted % _REFRESH == 0:
            worth = _all_worths(board, score)
            heapq.heapify(worth)
        if not worth:
            break
        _, index, number = heapq.heappop(worth)
        fresh = _worth(board, score, index, number)
        if fresh is None:
            continue
        value, found = fresh
        if worth and value > worth[0][0]:
            heapq.heappush(worth, (value, index, number))
            continue
        board.put(index, number)
        score = found
        accepted += 1
    return score


def _all_worths(board: Board, score: Rank) -> list[tuple[float, int, int]]:
    found = []
    for index, site in enumerate(board.sites):
        if board.allowance.is_late():
            break
        for number in range(len(site.moves)):
            fresh = _worth(board, score, index, number)
            if fresh is not None:
                found.append((fresh[0], index, number))
    return found


def _worth(board: Board, score: Rank, index: int, number: int) -> tuple[float, Rank] | None:
    """Minus the bytes taken off for each picosecond, so that less is better; None if it takes nothing off."""
    held = board.moves[index]
    if held == number:
        return None
    board.put(index, number)
    found = board.score()
    board.put(index, held)
    gained = score[0] - found[0]
    if gained <= 0:
        return None
    return -gained / max(found[1] - score[1], 1), found
