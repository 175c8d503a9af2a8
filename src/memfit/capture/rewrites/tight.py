"""Rewrites that lower the floor of a step: they make ops hold less, and some of them slower.

The others are free, so they are always on. These are for budgets that nothing else fits: a planner asks for them, for
the ops that are too large, and prices the step that comes of it. Each op is self-tested like theirs.

    tight = tighten(step, above_bytes=room)           where the bits are the same on this machine
    costs = measure(step, ways=True, also=[tight])    or roofline(step, device, also=[tight]): prices for both
    Decided(decisions, costs, step=tight)             decisions about storages of the step keep their meaning
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from memfit.capture.rewrites.batch_norm_in_place import batch_norm_backward_in_place
from memfit.capture.rewrites.loss_in_place import loss_backward_in_place
from memfit.capture.rewrites.proof import PROOFS, Proofs
from memfit.capture.step import Step
from memfit.collector import collector_paused

_TIGHT: dict[str, Callable[[Step, Proofs, int], Step]] = {
    "loss-in-place": loss_backward_in_place,
    "batch-norm-in-place": batch_norm_backward_in_place,
}
TIGHT_NAMES = tuple(_TIGHT)


@collector_paused()
def tighten(step: Step, *, above_bytes: int = 0, proofs: Proofs = PROOFS) -> Step:
    """The step with less held at its largest ops; the very same step where there is nothing to gain.

    Only ops that touch more than `above_bytes` are rewritten. The forward half, its storages and their numbers stay
    what they are, so decisions about them keep their meaning.
    """
    applied = []
    for name, apply in _TIGHT.items():
        changed = apply(step, proofs, above_bytes)
        if [op.target for op in changed.ops] != [op.target for op in step.ops]:
            step = changed
            applied.append(f"{name}>{above_bytes}")
    return replace(step, rewrites=(*step.rewrites, *applied)) if applied else step


def tight_above_bytes(step: Step) -> int | None:
    """Above which size the ops of the step were tightened; None if they were not."""
    for entry in step.rewrites:
        name, _, size = entry.partition(">")
        if name in _TIGHT:
            return int(size)
    return None
