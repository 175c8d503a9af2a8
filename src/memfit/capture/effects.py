"""Refuse what a model does outside its tensor ops while it is captured: replaying the step would not do it again."""

from __future__ import annotations

import contextlib
import logging
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
def effects_refused(recorder: Recorder) -> Iterator[None]:
    """Refuse seeding, draws from Python's or numpy's generator, hooks with effects, and looking at addresses."""
    with _calls_watched(recorder), _draws_refused(), _quiet_logs():
        yield


@contextlib.contextmanager
def _calls_watched(recorder: Recorder) -> Iterator[None]:
    """Stand in for the calls that matter, as long as they come from this thread."""
    thread = threading.get_ident()

    def in_this_thread(original: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return instead(*args, **kwargs) if threading.get_ident() == thread else original(*args, **kwargs)

        return call

    def seed(*args: Any, **kwargs: Any) -> Any:
        raise CaptureError(
            f"{recorder.where()} seeds the random generator; replaying the step would not. Seed outside the model"
        )

    def set_state(*args: Any, **kwargs: Any) -> Any:
        recorder.reseeded = True  # harmless unless something is drawn afterwards (torch.utils.checkpoint does this)

    def data_ptr(tensor: torch.Tensor) -> Any:
        raise CaptureError(
            f"{recorder.where()} asks for the address of a tensor (data_ptr); it would be frozen into the "
            "captured step. Do that outside the model"
        )

    register_hook = torch.Tensor.register_hook

    def watched_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Any:
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        where = recorder.where()
        if recorder.source_that_is(tensor) is not None:
            raise CaptureError(
                f"{where} registers a hook, {name}, on a parameter or input in the forward pass; it would be "
                "registered at capture only. Register it outside the model"
            )

        def pure(gradient: torch.Tensor) -> Any:
            result = hook(gradient)
            if result is None:
                raise CaptureError(
                    f"{where} registers a hook, {name}, that returns nothing: what it does elsewhere would happen at "
                    "capture only. Return the gradient's replacement, or hook the fitted model's outputs or parameters"
                )
            return result

        return register_hook(tensor, pure)

    with contextlib.ExitStack() as stack:
        for owner in (torch, torch.random):
            for name, instead in (("manual_seed", seed), ("seed", seed), ("set_rng_state", set_state)):
                stack.enter_context(mock.patch.object(owner, name, in_this_thread(getattr(owner, name), instead)))
        for name, method in (("register_hook", watched_hook), ("data_ptr", data_ptr)):
            original = getattr(torch.Tensor, name)
            stack.enter_context(mock.patch.object(torch.Tensor, name, in_this_thread(original, method)))
        yield


@contextlib.contextmanager
def _quiet_logs() -> Iterator[None]:
    """Keep torch from logging that a fake kernel failed: the error itself tells the user."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


@contextlib.contextmanager
def _draws_refused() -> Iterator[None]:
    """Raise if this thread drew from the global generator of Python or numpy."""
    # Our own threads only move bytes.
    others = [t for t in threading.enumerate() if t is not threading.current_thread() and not _is_ours(t)]
    watch = _draws_by_calls if others else _draws_by_state
    drawn: list[str] = []
    with watch(drawn):
        yield
    if drawn:
        raise CaptureError(
            f"the forward pass draws from {drawn[0]}; the draw would be frozen into the captured step. "
            "Draw with torch (torch.rand) and use the result in tensor ops, or draw outside the model and pass it in"
        )


def _is_ours(thread: threading.Thread) -> bool:
    return thread.name.startswith("memfit-")


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
    """With several threads the states move by themselves, so look at this thread's calls instead (slower).

    numpy's draws are Cython's and no profiler sees them. If its state has moved, it may have been another thread, but a
    draw that is frozen without a word is worse than a refusal too many.
    """
    python, numpys = random._inst, numpy.random.get_state()

    def saw(frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and getattr(function, "__self__", None) is python:
            drawn.append("Python's `random`")

    before = sys.getprofile()
    sys.setprofile(saw)
    try:
        yield
    finally:
        sys.setprofile(before)
        if any(not numpy.array_equal(a, b) for a, b in zip(numpy.random.get_state(), numpys, strict=True)):
            drawn.append("numpy's generator (or another thread does, meanwhile)")
