"""The tensors behind a step's sources, found anew at every call: the model's own, and what the caller passes in."""

from __future__ import annotations

from typing import Any

import torch

from memfit.capture.step import Origin, Step, Value
from memfit.capture.trace import Capture


def find_sources(capture: Capture, step: Step, inputs: list[torch.Tensor]) -> list[Any] | None:
    """The tensors in the order of the step's sources, or None if the model's own no longer hang where they did."""
    state: list[torch.Tensor] = []
    for places in capture.slots:
        tensor = places[0].read()
        if tensor is None or any(place.read() is not tensor for place in places[1:]):
            return None
        if places[0].origin is Origin.ATTRIBUTE and not _fits(tensor, step.values[len(state)]):
            return None
        state.append(tensor)
    given = iter([*state, *inputs])
    found: list[Any] = []
    for source in step.sources:
        if source.origin is Origin.CONSTANT:
            found.append(capture.constants[source.value])
        else:
            found.append(None if source.origin is Origin.TANGENT else next(given))
    return found


def _fits(tensor: torch.Tensor, value: Value) -> bool:
    """True if the tensor has the layout that was captured; the signature does not cover plain attributes."""
    return (
        tuple(tensor.shape) == value.shape
        and tuple(tensor.stride()) == value.stride
        and tensor.dtype == value.dtype
        and tensor.grad_fn is None
    )
