"""Compare tensors bit for bit, and say how far apart they are where they differ."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

_INTEGER_OF_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """Where two runs of the same steps part: in which tensor, in how many of its elements, and by how much.

    `step` counts from 1. `kind` is output, loss, gradient, input gradient, buffer, parameter or rng. `num_different`
    and `max_abs_difference` are None where the two cannot be compared element by element: `reason` says why.
    """

    step: int
    kind: str
    name: str
    reason: str
    num_different: int | None = None
    num_elements: int | None = None
    max_abs_difference: float | None = None

    def __str__(self) -> str:
        return f"step {self.step}, {self.kind} '{self.name}': {self.reason}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able data: JSON knows no NaN and no infinity, so these become strings."""
        found = asdict(self)
        if self.max_abs_difference is not None and not math.isfinite(self.max_abs_difference):
            found["max_abs_difference"] = str(self.max_abs_difference)
        return found


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """True if shape, dtype and every bit agree: NaN equals the same NaN, and -0.0 is not 0.0."""
    if left.shape != right.shape or left.dtype != right.dtype or left.device != right.device:
        return False
    return torch.equal(_bits(left), _bits(right))


def difference(step: int, kind: str, name: str, eager: Any, fitted: Any) -> Difference | None:
    """How `fitted` differs from `eager`, two tensors or None or plain values; None if it does not."""
    if not isinstance(eager, torch.Tensor) or not isinstance(fitted, torch.Tensor):
        if type(eager) is type(fitted) and (eager == fitted or repr(eager) == repr(fitted)):
            return None
        return Difference(step, kind, name, f"eager has {_shown(eager)}, fitted has {_shown(fitted)}")
    for what, ours, theirs in (
        ("shape", tuple(eager.shape), tuple(fitted.shape)),
        ("dtype", eager.dtype, fitted.dtype),
        ("device", eager.device, fitted.device),
    ):
        if ours != theirs:
            return Difference(step, kind, name, f"{what} {ours} in eager, {theirs} fitted")
    if same_bits(eager, fitted):
        return None
    apart = _bits(eager) != _bits(fitted)
    if eager.dtype.is_complex:
        apart = apart.any(dim=-1)
    num_different, num_elements = int(apart.sum()), apart.numel()
    wide = torch.complex128 if eager.dtype.is_complex else torch.float64
    # Only where bits differ: NaN minus the same NaN is no difference.
    gap = (_dense(eager)[apart].to(wide) - _dense(fitted)[apart].to(wide)).abs()
    # A NaN on one side only makes the gap NaN, and max() hands NaN on: a number would hide it.
    largest = float(gap.max())
    by = f"by at most {largest:.3g}" if largest != 0 else "in bits that do not change the value (the sign of a zero)"
    reason = f"{num_different:,} of {num_elements:,} elements differ, {by}"
    return Difference(step, kind, name, reason, num_different, num_elements, largest)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as integers, one per element (two for a complex one)."""
    plain = _dense(tensor).contiguous()
    if plain.dtype.is_complex:
        plain = torch.view_as_real(plain)
    return plain.view(_INTEGER_OF_BYTES[plain.dtype.itemsize])


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    return plain.resolve_conj().resolve_neg()


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "none" if value is None else repr(value)
