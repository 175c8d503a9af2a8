"""torch's own kernels and those that stand in for them, given the same: which there are, calls of both, comparisons."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from memfit import stand_ins
from memfit.capture.rewrites.proof import same_bits
from memfit.native import library
from memfit.torch_internals import resolve

HAS_COMPILER = library._find_compiler(os.environ.get("CC")) is not None
# Not whether there are kernels: if they do not compile, tests must fail.
needs_kernels = pytest.mark.skipif(not HAS_COMPILER, reason="there is no C compiler")

BATCH_NORM = "aten.native_batch_norm.default"
NORM_GRADIENTS = "aten.native_batch_norm_backward.default"
ADDITION = "aten.add_.Tensor"
BERNOULLI = "aten.bernoulli_.float"
MAX_POOL = "aten.max_pool2d_with_indices.default"
AVERAGES, AVERAGES_GRADIENT = "aten.avg_pool2d.default", "aten.avg_pool2d_backward.default"
CONVOLUTION, GRADIENTS = "aten.convolution.default", "aten.convolution_backward.default"

NAN, INF = float("nan"), float("inf")


def both(target: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """What torch's own makes of the arguments, and what its stand-in does; each has its own copies."""

    def copied(arg: Any) -> Any:
        return arg.clone() if isinstance(arg, torch.Tensor) else arg

    results = []
    for name in (target, stand_ins.STAND_INS[target]):
        given = [copied(arg) for arg in args]
        made = resolve(name)(*given, **kwargs)
        # What was written to counts as made.
        results.append([*(made if isinstance(made, (tuple, list)) else [made]), *given])
    return tuple(results)  # type: ignore[return-value]


def assert_same(target: str, *args: Any, **kwargs: Any) -> None:
    plain, made = both(target, *args, **kwargs)
    for one, other in zip(plain, made, strict=True):
        assert not isinstance(one, torch.Tensor) or same_bits(one, other), (one, other)


@contextmanager
def forbidden() -> Iterator[None]:
    """No kernel in C runs."""
    os.environ["MEMFIT_NATIVE"] = "0"
    try:
        yield
    finally:
        del os.environ["MEMFIT_NATIVE"]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
