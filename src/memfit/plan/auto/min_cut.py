"""Starts by prices: what to store if a byte stored costs so much, for a range of prices; each is one minimum cut.

Storing a tensor costs its bytes at that price, or those of its code and the time for that; not storing it costs to run
its makers again, and to have what these read. Which set costs least is a closure problem, solved exactly in
milliseconds. What it leaves out, that tensors made again take room too and that bytes matter only at the peak, is for
the evaluator to judge. What is stored is then sent away, oldest first, by and by.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from memfit.plan.auto.coded import CodedStep
from memfit.plan.auto.sites import Site
from memfit.plan.decisions import Decision, Encode, EncodeThenOffload, Keep, Offload, Recompute
from memfit.plan.problem import Problem

_NUM_PRICES = 24
_NUM_SHARES = 12
# Capacities are 32 bits: all finite ones together stay below what counts as infinite.
_TOTAL, _INFINITE = 3e8, 1 << 30


def priced_starts(plain: Problem, coded: CodedStep, sites: tuple[Site, ...]) -> Iterator[list[int]]:
    """Moves for every site: for each price, with none and then more and more of what is stored sent away.

    `plain` is the problem of the step without codes.
    """
    graph = _Graph(plain, coded, sites)
    seen: set[tuple[int, ...]] = set()
    for price in graph.prices():
        stored = graph.stored_at(price)
        for moves in _sent_away(sites, stored, plain.tiers):
            key = tuple(moves)
            if key not in seen:
                seen.add(key)
                yield moves


def _sent_away(sites: tuple[Site, ...], stored: list[int], tiers: tuple[str, ...]) -> Iterator[list[int]]:
    """The same with the oldest of what is stored sent away, a growing share of its bytes."""
    yield list(stored)
    for tier in tiers:
        away: list[tuple[int, int, int]] = []
        for index, (site, number) in enumerate(zip(sites, stored, strict=True)):
            decision = site.moves[number].decision
            goes: Decision | None = Offload(tier) if isinstance(decision, Keep) else None
            if isinstance(decision, Encode):
                goes = EncodeThenOffload(decision.codec, tier)
            there = None if goes is None else site.number(goes)
            if there is not None:
                away.append((index, there, site.num_bytes))
        total = sum(size for *_, size in away)
        for k in range(1, _NUM_SHARES + 1):
            moves, left = list(stored), total * k / _NUM_SHARES
            for index, there, size in away:
                if left <= 0:
                    break
                moves[index] = there
                left -= size
            yield moves


class _Graph:
    """Nodes: source, sink, and for each storage `needed` and `made again`, for each op `run again`."""

    def __init__(self, problem: Problem, coded: CodedStep, sites: tuple[Site, ...]) -> None:
        self._sites = sites
        self._problem = problem
        reruns, step = problem.reruns, problem.step
        site_of = {site.storage: index for index, site in enumerate(sites)}
        self._needed = {s: 2 + index for index, s in enumerate(reruns.owned)}
        base = 2 + len(self._needed)
        self._again = {s: base + index for index, s in enumerate(reruns.owned)}
        self._run = base + len(self._again)
        self._num_nodes = self._run + problem.num_forward
        fixed: list[tuple[int, int]] = []  # infinite
        self._priced: list[tuple[int, int, int, int, int]] = []  # from, to, bytes, bytes of the code, time of the code
        read = {s for op in range(problem.num_forward, problem.num_ops) for s in reruns.touches[op]}
        for storage, node in self._needed.items():
            if storage in read:
                fixed.append((0, node))
            size = step.storage_bytes[storage] if storage in site_of else 0
            code_bytes, code_ps = size, 0
            if storage in coded.codes:
                code_bytes = sum(coded.problem.step.storage_bytes[c] for c in coded.codes_of[storage])
                code_ps = max(coded.code_ps(storage), 0)
            if storage not in reruns.recomputable:
                self._priced.append((node, 1, size, code_bytes, code_ps))
                continue
            self._priced.append((node, self._again[storage], size, code_bytes, code_ps))
            fixed += [(self._again[storage], self._run + writer) for writer in reruns.writers[storage]]
        for op in range(problem.num_forward):
            fixed += [(self._run + op, self._needed[s]) for s in reruns.rerun_touches[op] if s in self._needed]
        self._fixed = np.array(fixed, dtype=np.int64).reshape(-1, 2)
        self._run_ps = np.array(problem.rerun_ps[: problem.num_forward], dtype=np.float64)

    def prices(self) -> Iterator[float]:
        """Picoseconds for a byte, from below what the cheapest op is worth to above the dearest."""
        problem = self._problem
        worth = [
            problem.rerun_ps[op] / size
            for op in range(problem.num_forward)
            if (size := sum(problem.step.storage_bytes[s] for s in problem.reruns.rerun_makes[op])) > 0
            and problem.rerun_ps[op] > 0
        ]
        if not worth:
            return
        yield from np.geomspace(min(worth) / 3, 30 * max(worth), _NUM_PRICES)

    def stored_at(self, price: float) -> list[int]:
        """The moves that are best if bytes cost that much."""
        by_code = {}
        capacities = []
        for start, _, size, code_bytes, code_ps in self._priced:
            plain, code = price * size, price * code_bytes + code_ps
            by_code[start] = code < plain
            capacities.append(min(plain, code))
        scale = _TOTAL / max(sum(capacities) + float(self._run_ps.sum()), 1.0)
        heads = np.array([(start, end) for start, end, *_ in self._priced], dtype=np.int64).reshape(-1, 2)
        ops = np.arange(len(self._run_ps)) + self._run
        starts = np.concatenate([self._fixed[:, 0], heads[:, 0], ops])
        ends = np.concatenate([self._fixed[:, 1], heads[:, 1], np.ones_like(ops)])
        scaled = np.ceil(np.concatenate([capacities, self._run_ps]) * scale)
        amounts = np.concatenate([np.full(len(self._fixed), _INFINITE, dtype=np.int64), scaled.astype(np.int64)])
        graph = csr_array((amounts.astype(np.int32), (starts, ends)), shape=(self._num_nodes, self._num_nodes))
        left = (graph - maximum_flow(graph, 0, 1).flow).tocsr()
        left.data[left.data < 0] = 0
        left.eliminate_zeros()
        reached = np.zeros(self._num_nodes, dtype=np.bool_)
        reached[breadth_first_order(left, 0, return_predecessors=False)] = True
        return [self._move(site, reached, by_code) for site in self._sites]

    def _move(self, site: Site, reached: npt.NDArray[np.bool_], by_code: dict[int, bool]) -> int:
        needed = self._needed[site.storage]
        is_stored = reached[needed] and not reached[self._again[site.storage]]
        wanted = Recompute() if not is_stored else Keep()
        if is_stored and by_code[needed]:
            coded = next((n for n, move in enumerate(site.moves) if isinstance(move.decision, Encode)), None)
            if coded is not None:
                return coded
        return site.number(wanted) or 0
