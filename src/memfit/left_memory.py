"""Memory that a tensor leaves when it goes, for the next result of ours that has as many bytes.

malloc gives large blocks back to the kernel and gets fresh ones, whose pages are made when they are first touched: that
takes longer than what is written to them. A step whose next result is made where one was just freed holds no more by
that, and touches what is there. Generated code says which (run/heirs.py).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

_left = threading.local()


def taking(values: dict[str, Any], name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function; its first result is made in the memory of that value, if it has as many bytes.

    Nobody else may read the value any more. It is gone from here on, so that the memory goes at once where it is of no
    use.
    """
    _left.memory = values.pop(name).untyped_storage()
    try:
        return function(*args, **kwargs)
    finally:
        _left.memory = None


def let_go() -> None:
    """Give back what was left: the result is made by somebody who cannot be told where."""
    _left.memory = None


def new_empty(shape: Sequence[int], stride: Sequence[int] | None, like: torch.Tensor) -> torch.Tensor:
    """Room for a result of that dtype and device: what was left, if it has the size. Without strides, contiguous.

    The first that is asked for decides: what it has no use for goes.
    """
    memory, _left.memory = getattr(_left, "memory", None), None
    if memory is None or memory.nbytes() != math.prod(shape) * like.itemsize or memory.device != like.device:
        del memory
        return like.new_empty(shape) if stride is None else like.new_empty_strided(shape, stride)
    if stride is None:
        stride = torch.empty(shape, device="meta").stride()
    elif 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) != math.prod(shape):
        del memory  # the result has gaps, for which there is no room
        return like.new_empty_strided(shape, stride)
    return torch.empty(0, dtype=like.dtype, device=like.device).set_(memory, 0, tuple(shape), tuple(stride))
