"""Fake tensors that outlive their capture: somebody outside the model holds them, and would take them for real."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memfit.errors import CaptureError


@dataclass(frozen=True)
class Made:
    """A tensor that the forward pass made, held weakly, and the module and line that made it."""

    reference: weakref.ref[torch.Tensor]
    path: str
    source: str


def refuse_escaped(made: Sequence[Made]) -> None:
    """Raise if one of these is still alive though the capture that made it is over."""
    if not any(m.reference() is not None for m in made):
        return
    gc.collect()  # modules and graphs are cycles
    for m in made:
        if m.reference() is not None:
            raise CaptureError(
                f"module '{m.path or '(root)'}' at {m.source} makes a tensor that is kept outside the model: in a "
                "cache (functools.lru_cache), a global or a list. What was kept now is a stand-in without data: clear "
                "it. Make it a buffer (register_buffer), or keep it outside forward"
            )
