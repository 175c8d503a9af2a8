"""At which ops to cut a step: where a bound is likely to be high."""

from __future__ import annotations

import numpy as np

from memfit.plan.bound.account import Account

_MOST_INSTANTS = 200
_EARLY_PART = 25


def crowded_instants(account: Account, budget_bytes: int) -> list[int]:
    """Ops at which the keep plan is above the budget: the fullest, those with the least room, and some of the rest."""
    allowed = np.zeros(account.num_ops, dtype=bool)
    allowed[list(account.instants())] = True
    crowded = np.flatnonzero(allowed & (account.keep_bytes > budget_bytes))
    if crowded.size <= _MOST_INSTANTS:
        return [int(op) for op in crowded]
    third = _MOST_INSTANTS // 3
    fullest = crowded[np.argsort(-account.keep_bytes[crowded], kind="stable")[:third]]
    tightest = crowded[np.argsort(-account.needed_bytes[crowded], kind="stable")[:third]]
    spread = crowded[np.linspace(0, crowded.size - 1, third).astype(int)]
    return sorted({int(op) for op in (*fullest, *tightest, *spread)})


def first_instants(account: Account, crowded: list[int]) -> list[int]:
    """Where to begin: where the most is to go, where the least room is, and around the boundary.

    Early in the backward half all is still to be used; the op there that leaves the least room is often the best.
    """
    late = account.num_forward + max(account.num_ops // _EARLY_PART, 3)
    early = [op for op in crowded if account.num_forward <= op < late]
    first = [max(early, key=lambda op: int(account.needed_bytes[op]))] if early else []
    boundary = min(crowded, key=lambda op: (op < account.num_forward, abs(op - account.num_forward)))
    tightest = max(crowded, key=lambda op: int(account.needed_bytes[op]))
    fullest = max(crowded, key=lambda op: int(account.keep_bytes[op]))
    return list(dict.fromkeys([*first, fullest, tightest, boundary]))
