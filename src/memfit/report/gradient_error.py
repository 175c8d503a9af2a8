"""How far the gradients of a lossy plan are from eager's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

GRADIENTS = ("gradient", "input gradient")


@dataclass(frozen=True)
class GradientError:
    """Two sets of gradients, each taken as one long vector.

    Attributes:
        cosine: of the angle between them: 1 is the same direction.
        relative_norm: the length of their difference, as a share of eager's length.
        worst: the tensor whose own relative norm is the largest, by name, with that norm and its cosine.
    """

    cosine: float
    relative_norm: float
    worst: str
    worst_relative_norm: float
    worst_cosine: float

    def __str__(self) -> str:
        return (
            f"cosine {self.cosine:.6f}, relative norm {self.relative_norm:.2e}; worst '{self.worst}': "
            f"cosine {self.worst_cosine:.6f}, relative norm {self.worst_relative_norm:.2e}"
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able data: JSON knows no NaN and no infinity, so these become strings."""
        found = asdict(self)
        return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in found.items()}

    @classmethod
    def of(cls, eager: Iterable[tuple[str, str, Any]], fitted: Iterable[tuple[str, str, Any]]) -> GradientError | None:
        """From what both arms made, as Arm.made gives it; None if there is no gradient among it."""
        parts = [
            (name, _Sums.of(ours, theirs))
            for (kind, name, ours), (_, _, theirs) in zip(eager, fitted, strict=True)
            if kind in GRADIENTS and isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)
        ]
        if not parts:
            return None
        total = _Sums(*(sum(column) for column in zip(*(s.row for _, s in parts), strict=True)))
        name, worst = max(parts, key=lambda part: _rank(part[1].relative_norm))
        return cls(total.cosine, total.relative_norm, name, worst.relative_norm, worst.cosine)


def is_broken(eager: Any, fitted: Any) -> bool:
    """True if the fitted gradient is missing, is one that eager has not, or is not finite where eager's is."""
    if not isinstance(eager, torch.Tensor) or not isinstance(fitted, torch.Tensor):
        return type(eager) is not type(fitted)
    return eager.shape != fitted.shape or (bool(eager.isfinite().all()) and not bool(fitted.isfinite().all()))


@dataclass(frozen=True)
class _Sums:
    """Sums of squares and of products over two tensors, in float64."""

    eager: float
    fitted: float
    product: float
    difference: float

    @classmethod
    def of(cls, eager: torch.Tensor, fitted: torch.Tensor) -> _Sums:
        ours, theirs = (_flat(tensor) for tensor in (eager, fitted))
        apart = ours - theirs
        return cls(
            *(float(torch.dot(a, b)) for a, b in ((ours, ours), (theirs, theirs), (ours, theirs), (apart, apart)))
        )

    @property
    def row(self) -> tuple[float, float, float, float]:
        return (self.eager, self.fitted, self.product, self.difference)

    @property
    def cosine(self) -> float:
        if self.difference == 0:
            return 1.0  # also of two that are zero
        length = math.sqrt(self.eager) * math.sqrt(self.fitted)
        if not math.isfinite(length):
            return math.nan
        return min(max(self.product / length, -1.0), 1.0) if length else 0.0

    @property
    def relative_norm(self) -> float:
        if self.difference == 0:
            return 0.0
        if math.isnan(self.difference) or math.isnan(self.eager):
            return math.nan
        return math.sqrt(self.difference / self.eager) if self.eager else math.inf


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All numbers of a tensor in float64; those of a complex one are two each."""
    tensor = tensor.detach()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1).to(torch.float64)


def _rank(norm: float) -> float:
    """NaN is the worst of all."""
    return math.inf if math.isnan(norm) else norm


def worse(one: GradientError | None, other: GradientError | None) -> GradientError | None:
    """The one that is farther from eager."""
    found = [error for error in (one, other) if error is not None]
    return max(found, key=lambda error: _rank(error.relative_norm), default=None)
