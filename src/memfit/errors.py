"""Every error memfit raises on purpose."""

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
