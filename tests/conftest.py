"""What all tests share: a garbage collector that does not walk over torch again and again."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def leave_out_what_is_old() -> None:
    """Captures collect garbage, and so do many tests. What was there before a module's tests is hardly ever any.

    A full collection takes 0.2 s and more with torch and all that earlier tests have cached, next to nothing without.
    """
    gc.collect()
    gc.freeze()
