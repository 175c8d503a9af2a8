"""Every error memfit raises on purpose, and how to tell one that it does not."""

from __future__ import annotations


class MemfitError(Exception):
    """Something memfit cannot do; the text says what, why, and what to do instead."""


class CaptureError(MemfitError, RuntimeError):
    """A model whose training step cannot be captured; names the module path and the source line."""


class UnsupportedUse(MemfitError, RuntimeError):
    """A fitted model was used in a way whose result would not equal eager's, so it was refused."""


class BadOption(MemfitError, ValueError):
    """An option or argument whose value memfit cannot honour."""


class DoesNotFit(MemfitError):
    """The plan needs more bytes than the budget; says where, and the smallest budget known to be enough."""


class BudgetExceeded(MemfitError):
    """A step that was measured to need more than the budget, of a model fitted with strict=True."""


def is_out_of_memory(error: BaseException) -> bool:
    """True if memory ran out: Python's, that of torch's allocator for CPUs, or an accelerator's."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )
