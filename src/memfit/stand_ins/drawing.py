"""`bernoulli_`: the same numbers as torch draws, and its generator left where torch would leave it."""

from __future__ import annotations

import math
import threading

import torch

from memfit.stand_ins import compiled
from memfit.stand_ins.compiled import LEAST_ELEMENTS, is_plain

_STATE_BYTES = 5056  # of torch's generator for CPUs, as get_state() gives it
# Between taking a generator's state and putting it back nobody else of us may draw. A draw of torch's own in another
# thread meanwhile is lost; but then which of the two is first is up to chance in eager too.
_DRAWING = threading.Lock()


def bernoulli_(self: torch.Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """Ones with that probability, else zeros; the generator is left where torch's own would leave it."""
    library = compiled.kernels()
    source = torch.default_generator if generator is None else generator
    is_served = source.device.type == "cpu" and is_plain(self) and 0 <= p <= 1 and self.numel() >= LEAST_ELEMENTS
    with _DRAWING:
        state = source.get_state() if is_served else None
        if library is None or state is None or state.numel() != _STATE_BYTES:
            torch.ops.aten.bernoulli_.float(self, p, generator=generator)
        else:
            library.memfit_bernoulli(state.data_ptr(), self.data_ptr(), self.numel(), math.ceil(p * 2.0**53))
            source.set_state(state)
            torch.autograd.graph.increment_version(self)
    return self
