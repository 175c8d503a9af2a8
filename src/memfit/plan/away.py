"""What a Program has in the tiers."""

from __future__ import annotations

from collections import defaultdict

from memfit.plan.program import FetchWait, Program, SendStart


def most_bytes_away(program: Program) -> dict[str, int]:
    """For each tier the most bytes that have room there at once: from the start of a send to the end of its fetch.

    A code that its tensor does not fit into is a copy of it, so that a code has room for that.
    """
    step = program.step
    size = list(step.storage_bytes)
    for op in step.ops:
        if op.target == "memfit.encode":
            size[step.values[op.made[0]].storage] = step.values[next(iter(op.reads()))].bytes
    tier_of: dict[int, str] = {}
    away: dict[str, int] = defaultdict(int)
    most: dict[str, int] = defaultdict(int)
    for instruction in program.instructions:
        match instruction:
            case SendStart(storage, tier):
                tier_of[storage] = tier
                away[tier] += size[storage]
                most[tier] = max(most[tier], away[tier])
            case FetchWait(storage):
                away[tier_of.pop(storage)] -= size[storage]
            case _:
                pass
    return dict(most)
