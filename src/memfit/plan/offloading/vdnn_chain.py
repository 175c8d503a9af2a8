"""vDNN's rules on a chain (Rhu et al. 2016): one transfer per stage, and both streams meet at the stage's end.

Forward: what a stage saved is sent while the next stage runs, which is not over before the send is. (vDNN sends the
input of a layer while that layer reads it. Our model, like `plan/lower.py`, sends after the last read: one stage on.)
Backward: each stage fetches at most one other beside itself, and is not over before that has come. It is the nearest
that is still away, if it lies in the window: down to the next convolution below, that one included. A chain never comes
to vDNN's fetch on demand: what is still away is fetched beside the stage right above it at the latest.

The choice does not depend on the limit: the schedule fits it or does not. The last stage is never sent.
"""

from __future__ import annotations

import enum
from collections.abc import Collection

from memfit.plan.offloading.chain import Chain, Schedule, Transfer


class VdnnChoice(enum.Enum):
    """Which stages are sent."""

    ALL = "vdnn-all"
    CONVOLUTIONS = "vdnn-conv"


def solve_vdnn(chain: Chain, choice: VdnnChoice) -> Schedule | None:
    """The schedule of vDNN's rules, or None if it needs more than the limit."""
    away = frozenset(
        index for index, stage in enumerate(chain.stages[:-1]) if choice is VdnnChoice.ALL or stage.is_convolution
    )
    forward_starts_ps, sends, end_ps, forward_peak_bytes = _forward(chain, away)
    backward_starts_ps, fetches, end_ps, backward_peak_bytes = _backward(chain, away, end_ps)
    peak_bytes = max(forward_peak_bytes, backward_peak_bytes)
    if peak_bytes > chain.limit_bytes:
        return None
    return Schedule(
        tuple(sorted(away)),
        forward_starts_ps,
        backward_starts_ps,
        sends,
        fetches,
        peak_bytes,
        end_ps - chain.work_ps,
    )


_Walk = tuple[tuple[int, ...], tuple[Transfer, ...], int, int]
"""Starts by stage, transfers, the end, the most bytes at once."""


def _forward(chain: Chain, away: Collection[int]) -> _Walk:
    transfer_ps = chain.halves[0].transfer_ps
    starts_ps: list[int] = []
    sends: list[Transfer] = []
    now_ps = held_bytes = peak_bytes = 0
    for index, stage in enumerate(chain.stages):
        held_bytes += stage.saved_bytes
        peak_bytes = max(peak_bytes, held_bytes + stage.forward_transient_bytes)
        starts_ps.append(now_ps)
        end_ps = now_ps + stage.forward_ps
        if index - 1 in away:
            sends.append(Transfer(index - 1, now_ps, now_ps + transfer_ps[index - 1]))
            end_ps = max(end_ps, sends[-1].end_ps)
            held_bytes -= chain.stages[index - 1].saved_bytes
        now_ps = end_ps
    return tuple(starts_ps), tuple(sends), now_ps, peak_bytes


def _backward(chain: Chain, away: Collection[int], now_ps: int) -> _Walk:
    transfer_ps = chain.halves[1].transfer_ps
    pending = set(away)
    starts_ps = [0] * len(chain.stages)
    fetches: list[Transfer] = []
    held_bytes = sum(stage.saved_bytes for index, stage in enumerate(chain.stages) if index not in away)
    peak_bytes = held_bytes
    for index in reversed(range(len(chain.stages))):
        stage = chain.stages[index]
        starts_ps[index] = now_ps
        end_ps = now_ps + stage.backward_ps
        ahead = prefetched_beside(chain, index, pending)
        if ahead is not None:
            pending.remove(ahead)
            fetches.append(Transfer(ahead, now_ps, now_ps + transfer_ps[ahead]))
            end_ps = max(end_ps, fetches[-1].end_ps)
            held_bytes += chain.stages[ahead].saved_bytes
        peak_bytes = max(peak_bytes, held_bytes + stage.backward_transient_bytes)
        held_bytes -= stage.saved_bytes
        now_ps = end_ps
    return tuple(starts_ps), tuple(fetches), now_ps, peak_bytes


def prefetched_beside(chain: Chain, current: int, pending: Collection[int]) -> int | None:
    """What the backward of a stage fetches beside itself: vDNN's findPrefetchLayer, with its bounded window."""
    for index in reversed(range(current)):
        if index in pending:
            return index
        if chain.stages[index].is_convolution:
            return None
    return None
