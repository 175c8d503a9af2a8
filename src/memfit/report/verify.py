"""Run training steps both ways from the same state and compare every bit."""

from __future__ import annotations


class Verdict: ...


def verify() -> Verdict:
    return Verdict()
