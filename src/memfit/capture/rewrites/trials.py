"""What trials of stand-ins work on, and which of two calls takes less time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from memfit.capture.step import Value

_NUM_TIMED, _FASTER = 6, 0.97
_SWEEP_BYTES = 32 << 20


class Numbers:
    """Normal random numbers, drawn once for all trials of a step: to draw them takes longer than most trials."""

    def __init__(self) -> None:
        self._drawn = torch.empty(0, dtype=torch.float32)

    def like(self, value: Value, number: int, seed: int) -> torch.Tensor:
        """A tensor of that layout: other numbers for each operand, and elsewhere in memory with each seed.

        With the first all begin where lines of the cache do, as tensors in a step do.
        """
        begin = 1024 * number + 7 * seed
        count = begin + 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride, strict=True))
        if self._drawn.numel() < count:
            self._drawn = torch.randn(count, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
        return self._drawn[begin:count].as_strided(value.shape, value.stride)

    def forget(self) -> None:
        """Hold none, until some are asked for again."""
        self._drawn = self._drawn.new_empty(0)


def is_faster(plain: Callable[[], Any], made: Callable[[], Any]) -> bool:
    """True if the second call takes clearly less time than the first; in turn, as a machine may be slow for a while.

    What they work on is out of the cache, as it is in a step.
    """
    times_s: tuple[list[float], list[float]] = ([], [])
    sweep = torch.zeros(_SWEEP_BYTES, dtype=torch.uint8)
    for _ in range(_NUM_TIMED):
        for call, taken_s in zip((plain, made), times_s, strict=True):
            sweep.add_(1)
            start_s = time.perf_counter()
            call()
            taken_s.append(time.perf_counter() - start_s)
    return min(times_s[1]) <= _FASTER * min(times_s[0])
