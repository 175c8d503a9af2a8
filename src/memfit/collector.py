"""Python's collector of cycles, held off while much is made that lives on.

Every so many new objects it walks through all that are alive. Rewriting and planning a large step make hundreds of
thousands that stay and hardly a cycle: the walks took a quarter of the time to the first plan of densenet201.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collection of cycles in the block, or in the function it decorates; afterwards as it was before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
