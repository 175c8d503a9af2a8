"""Word of how planning goes, for whoever waits for it: a planner tells, a command or a log listens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

Listener = Callable[[str], None]

FIRST_PLAN = "first plan"
"""How the line begins that says: now there is a plan within the budget."""

_listener: ContextVar[Listener | None] = ContextVar("memfit_progress", default=None)


def tell(text: str) -> None:
    """Say one line to whoever listens, if anybody does."""
    listener = _listener.get()
    if listener is not None:
        listener(text)


@contextlib.contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    """Let the listener hear what planners tell meanwhile; None leaves things as they are."""
    if listener is None:
        yield
        return
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
