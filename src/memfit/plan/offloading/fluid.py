"""The least idle time if bytes could be sent one by one: a bound on every schedule, and where the greedy starts.

The relaxation: any fraction of what a stage saved may be sent, and each byte is released when it has left. Sending
bytes of an earlier stage instead of a later one then helps in forward, where they are ready sooner, and in backward,
where they are needed later. So some best solution sends the first bytes of the chain, a prefix, and no more than the
stage with the largest excess demands. What is left is a walk along each half.

Every real schedule is one of the relaxation, so its idle time is at least this. The walk of one half is that of our
notes on the paper. Ours is that both halves move the same bytes and that all have left by the boundary, which raises
the bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from memfit.plan.offloading.chain import PS_PER_S, Chain, Half


@dataclass(frozen=True, slots=True)
class Fluid:
    """The optimum of the relaxation.

    Attributes:
        sent_bytes: the first bytes that stages save, so many of them, are sent.
        forward_idle_ps, backward_idle_ps: how long compute waits; exact.
    """

    sent_bytes: int
    forward_idle_ps: Fraction
    backward_idle_ps: Fraction

    @property
    def idle_ps(self) -> Fraction:
        return self.forward_idle_ps + self.backward_idle_ps

    @property
    def bound_ps(self) -> int:
        """No schedule of whole picoseconds waits for less."""
        return math.ceil(self.idle_ps)


def fluid(chain: Chain) -> Fluid | None:
    """The relaxation's optimum, in one walk along each half; None below `chain.floor_bytes`."""
    return fluid_halves(*chain.halves)


def fluid_halves(forward: Half, backward: Half) -> Fluid | None:
    """The same for halves whose stages may be in different orders: still a bound, if no longer one that is reached.

    In a step that is no chain, what is read last in forward is not always read first in backward.
    """
    for half in (forward, backward):
        needs = (saved + transient for saved, transient in zip(half.saved_bytes, half.transient_bytes, strict=True))
        if max(needs) > half.limit_bytes:
            return None
    sent_bytes = max(0, *forward.excess_bytes, *backward.excess_bytes)
    return Fluid(sent_bytes, _idle_ps(forward, sent_bytes), _idle_ps(backward, sent_bytes))


def _idle_ps(half: Half, sent_bytes: int) -> Fraction:
    """How long a half waits if the first so many bytes leave, each as soon as the link is free."""
    waited = 0  # for so many bytes, counted like `left` in parts of a byte that move in a picosecond
    left = ready = 0
    for duration_ps, size, excess in zip(half.durations_ps, half.saved_bytes, half.excess_bytes, strict=True):
        wanted = excess * PS_PER_S
        if left < wanted:
            waited += wanted - left
            left = wanted
        left = min(ready, left + duration_ps * half.bytes_per_s)
        ready = min(ready + size * PS_PER_S, sent_bytes * PS_PER_S)
    return Fraction(waited + sent_bytes * PS_PER_S - left, half.bytes_per_s)
