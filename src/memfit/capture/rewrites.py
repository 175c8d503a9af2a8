"""Exact rewrites of a Step that cost nothing."""

from __future__ import annotations

from memfit.capture.step import Step

NAMES: tuple[str, ...] = ()


def rewrite(step: Step, *, without: frozenset[str] = frozenset()) -> Step:
    """The step with every rewrite applied that is not in `without`."""
    return step
