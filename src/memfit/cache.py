"""Where memfit keeps what it measured, proved and compiled."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$MEMFIT_CACHE, else the user's cache folder."""
    chosen = os.environ.get("MEMFIT_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memfit"
