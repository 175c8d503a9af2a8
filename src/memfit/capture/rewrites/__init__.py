"""Exact rewrites of a Step that cost nothing, in the order they are applied.

Each takes a Step and gives a Step. Those that put another kernel call in an op's place are self-tested per op signature
on this machine (see proof.py) and leave the plain op where the bits differ. Each can be left out by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from memfit.capture.rewrites.batch_norm import rebuild_batch_norms
from memfit.capture.rewrites.convolution import split_convolutions
from memfit.capture.rewrites.draft import Draft
from memfit.capture.rewrites.inplace import reuse_operands, softmax_in_place
from memfit.capture.rewrites.pool import swap_relu_and_pool
from memfit.capture.rewrites.proof import PROOFS, Proofs
from memfit.capture.rewrites.shapes import drop_statistics, ghost_shapes, strip_detach
from memfit.capture.rewrites.stand_ins import let_kernels_stand_in
from memfit.capture.step import Step
from memfit.collector import collector_paused
from memfit.errors import BadOption

_REWRITES: dict[str, Callable[[Step, Proofs], Step]] = {
    "detach": strip_detach,
    "running-stats": drop_statistics,
    "pool-swap": swap_relu_and_pool,
    "conv-split": split_convolutions,
    "shape-only": ghost_shapes,
    "log-softmax": softmax_in_place,
    "reinplace": reuse_operands,
    "batch-norm": rebuild_batch_norms,
    "stand-ins": let_kernels_stand_in,
}
NAMES = tuple(_REWRITES)


def check_names(without: frozenset[str]) -> None:
    """Raise if one of these is not the name of a rewrite."""
    unknown = sorted(without - set(NAMES))
    if unknown:
        raise BadOption(f"without={unknown}: no such rewrite. Rewrites: {', '.join(NAMES)}")


@collector_paused()
def rewrite(step: Step, *, without: frozenset[str] = frozenset(), proofs: Proofs = PROOFS) -> Step:
    """The step with every rewrite applied that is not in `without`."""
    check_names(without)
    applied = []
    step = Draft(step).close()  # capture also sees autograd add up parts of gradients, which it does again by itself
    for name, apply in _REWRITES.items():
        if name not in without:
            step = apply(step, proofs)
            applied.append(name)
    return replace(step, rewrites=tuple(applied))
