"""offload-greedy on a chain: send a prefix, as the fluid relaxation does, in whole stages.

The paper's, as our notes have it: the shortest prefix of stages with the bytes that the relaxation sends. In whole
stages, released when their transfers end, it always fits, but it may wait longer than vDNN does: one large stage at
its end is enough.
Ours: every longer prefix is evaluated exactly too, and so are the prefixes of the convolutions alone. vDNN's two
choices are among them, sent in the same order but never held up, so that this is never slower than vDNN. The best is
taken, of equals the one that sends least.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from memfit.plan.offloading.chain import Chain, Schedule, evaluate
from memfit.plan.offloading.fluid import fluid


def shortest_prefix(chain: Chain) -> range | None:
    """The paper's choice: the fewest first stages that save what the relaxation sends; None below the floor."""
    relaxed = fluid(chain)
    return None if relaxed is None else range(len(_enough(chain, range(len(chain.stages)), relaxed.sent_bytes)[0]))


def solve_greedy(chain: Chain) -> Schedule | None:
    """The best prefix, of all stages or of the convolutions; None below `chain.floor_bytes`, never otherwise."""
    relaxed = fluid(chain)
    if relaxed is None:
        return None
    # The last stage's backward comes at once: sending what it saved frees nothing that anything needs.
    stages = range(len(chain.stages) - 1)
    convolutions = [stage for stage in stages if chain.stages[stage].is_convolution]
    best: Schedule | None = None
    best_bytes = 0
    for away in [prefix for of in (stages, convolutions) for prefix in _enough(chain, of, relaxed.sent_bytes)]:
        sent_bytes = sum(chain.stages[stage].saved_bytes for stage in away)
        if best is not None and best.idle_ps == relaxed.bound_ps and sent_bytes >= best_bytes:
            continue
        schedule = evaluate(chain, frozenset(away))
        if schedule is None:  # a prefix of convolutions may keep too much before its first
            continue
        if best is None or (schedule.idle_ps, sent_bytes) < (best.idle_ps, best_bytes):
            best, best_bytes = schedule, sent_bytes
    return best


def _enough(chain: Chain, stages: Sequence[int], sent_bytes: int) -> list[Sequence[int]]:
    """The prefixes of these stages that save so many bytes, shortest first."""
    sums = accumulate((chain.stages[stage].saved_bytes for stage in stages), initial=0)
    return [stages[:length] for length, total in enumerate(sums) if total >= sent_bytes]
