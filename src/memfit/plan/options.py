"""The options of fit(): budgets in bytes, policies by name, rewrites to leave out."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from memfit.capture.rewrites import check_names
from memfit.errors import BadOption

POLICIES = ("keep",)
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(budget: int | str | None) -> int | None:
    """Bytes from 6_000_000_000, "6GB" or "6GiB"; None stays None."""
    if budget is None:
        return None
    if isinstance(budget, bool) or not isinstance(budget, (int, str)):
        raise BadOption(f"budget={budget!r}: give bytes as an int, or a string such as '6GiB' or '800MB'")
    if isinstance(budget, int):
        size: float = budget
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", budget)
        if match is None or match[2].lower() not in _UNITS:
            raise BadOption(f"budget={budget!r}: not a size. Write bytes, or a number with KB, MB, GB, KiB, MiB or GiB")
        size = float(match[1]) * _UNITS[match[2].lower()]
    if size <= 0:
        raise BadOption(f"budget={budget!r}: must be more than zero bytes")
    return int(size)


@dataclass(frozen=True)
class Options:
    """How a model is fitted."""

    budget_bytes: int | None = None
    policy: str = "keep"
    without: frozenset[str] = field(default=frozenset())
    max_captures: int = 8

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise BadOption(f"policy={self.policy!r}: unknown. Known policies: {', '.join(POLICIES)}")
        check_names(self.without)
        if self.max_captures < 1:
            raise BadOption(f"max_captures={self.max_captures}: must be at least 1")
