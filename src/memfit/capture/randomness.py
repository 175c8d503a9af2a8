"""Watch the random generators while a model is captured: what it draws in Python would be frozen into the step."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy
import torch

from memfit.capture.recorder import Recorder
from memfit.errors import CaptureError


@contextlib.contextmanager
def generators_watched(recorder: Recorder) -> Iterator[None]:
    """Refuse a model that seeds torch's generator or draws from Python's or numpy's; put those back where they were."""
    with _seeding_refused(recorder), _draws_refused():
        yield


@contextlib.contextmanager
def _seeding_refused(recorder: Recorder) -> Iterator[None]:
    """Let this thread neither seed nor set torch's generator."""
    thread = threading.get_ident()

    def refused(original: Callable[..., Any]) -> Callable[..., Any]:
        def seed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return original(*args, **kwargs)
            raise CaptureError(
                f"{recorder.where()} seeds the random generator ({original.__name__}); replaying the step would not. "
                "Seed outside the model"
            )

        return seed

    def noted(original: Callable[..., Any]) -> Callable[..., Any]:
        def set_state(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return original(*args, **kwargs)
            recorder.reseeded = True  # harmless unless something is drawn afterwards (torch.utils.checkpoint does this)
            return None

        return set_state

    with contextlib.ExitStack() as stack:
        for owner in (torch, torch.random):
            for name in ("manual_seed", "seed"):
                stack.enter_context(mock.patch.object(owner, name, refused(getattr(owner, name))))
            stack.enter_context(mock.patch.object(owner, "set_rng_state", noted(owner.set_rng_state)))
        yield


@contextlib.contextmanager
def _draws_refused() -> Iterator[None]:
    """Raise if this thread drew from the global generator of Python or numpy."""
    watch = _draws_by_calls if threading.active_count() > 1 else _draws_by_state
    drawn: list[str] = []
    with watch(drawn):
        yield
    if drawn:
        raise CaptureError(
            f"the forward pass draws from {drawn[0]}; the draw would be frozen into the captured step. "
            "Draw with torch (torch.rand) and use the result in tensor ops, or draw outside the model and pass it in"
        )


@contextlib.contextmanager
def _draws_by_state(drawn: list[str]) -> Iterator[None]:
    """With one thread, whoever moved a generator was the model."""
    python, legacy = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        if random.getstate() != python:
            drawn.append("Python's `random`")
            random.setstate(python)
        if any(not numpy.array_equal(a, b) for a, b in zip(numpy.random.get_state(), legacy, strict=True)):
            drawn.append("numpy's generator")
            numpy.random.set_state(legacy)


@contextlib.contextmanager
def _draws_by_calls(drawn: list[str]) -> Iterator[None]:
    """With several threads the states move by themselves, so look at this thread's calls instead (slower)."""
    python, legacy = random._inst, numpy.random.mtrand._rand

    def saw(frame: Any, event: str, function: Any) -> None:
        if event == "c_call":
            owner = getattr(function, "__self__", None)
            if owner is python:
                drawn.append("Python's `random`")
            elif owner is legacy:
                drawn.append("numpy's generator")

    before = sys.getprofile()
    sys.setprofile(saw)
    try:
        yield
    finally:
        sys.setprofile(before)
