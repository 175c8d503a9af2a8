"""Convolutions: how much arithmetic one does, and how much workspace its fastest algorithm asks for."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from memfit.capture.schemas import named_operands
from memfit.capture.step import Ghost, Op, Ref, Step, Value

_FORWARD = frozenset({"aten.convolution", "aten._convolution", "aten.convolution_overrideable"})
_BACKWARD = frozenset({"aten.convolution_backward", "aten.convolution_backward_overrideable"})

# A tile of 32 x 32 numbers; its transform is 32 x 17 complex numbers, by the symmetry of real input.
_TILE = 32
_TILE_FLOATS = _TILE * (_TILE // 2 + 1) * 2


@dataclass(frozen=True, slots=True)
class Convolution:
    """One call: forward, or as many of the two gradients as it is asked for.

    Attributes:
        flops: of all its passes. Each gradient costs as much as the forward.
        num_passes: 1 for forward; for backward 0 (the bias's gradient alone), 1 or 2.
        num_elements: of the larger of input and output.
    """

    flops: int
    num_passes: int
    num_elements: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    dtype: torch.dtype

    @property
    def is_tileable(self) -> bool:
        """True if tiled FFT can compute it: 2-D, dense, kernels of 3 to 32 a side."""
        return (
            self.num_passes > 0
            and len(self.kernel) == 2
            and all(3 <= side <= _TILE for side in self.kernel)
            and set(self.stride) == {1}
            and set(self.dilation) == {1}
            and self.groups == 1
        )

    @property
    def tile_bytes(self) -> int:
        """The workspace of tiled FFT: the larger of input and output, transformed tile by tile.

        Tiles overlap by the kernel less one, so each yields (32 - k + 1)**2 numbers of the map and takes 32 * 17 * 2.
        Half-precision maps are transformed in float32.
        """
        if not self.is_tileable:
            return 0
        itemsize = max(self.dtype.itemsize, torch.float32.itemsize)
        useful = (_TILE - max(self.kernel) + 1) ** 2
        return self.num_elements * itemsize * _TILE_FLOATS // useful


def convolution_of(step: Step, op: Op) -> Convolution | None:
    """What the op convolves; None if it is no convolution."""
    packet = op.target.rpartition(".")[0]
    if packet not in _FORWARD and packet not in _BACKWARD:
        return None
    named = named_operands(op)
    source, weight = _layout(step, named["input"]), _layout(step, named["weight"])
    if packet in _FORWARD:
        result: Value | Ghost = step.values[op.made[0]]
        num_passes = 1
    else:
        result = _layout(step, named["grad_output"])
        num_passes = sum(map(bool, named["output_mask"][:2]))
    # A transposed convolution scatters each input element; a plain one gathers for each output element.
    positions = source if named["transposed"] else result
    num_spatial = len(weight.shape) - 2
    flops = 2 * source.shape[0] * prod(positions.shape[2:]) * prod(weight.shape)
    return Convolution(
        flops=num_passes * flops,
        num_passes=num_passes,
        num_elements=max(prod(source.shape), prod(result.shape)),
        kernel=weight.shape[2:],
        stride=_per_side(named["stride"], num_spatial),
        dilation=_per_side(named["dilation"], num_spatial),
        groups=named["groups"],
        dtype=source.dtype,
    )


def _layout(step: Step, operand: Ref | Ghost) -> Value | Ghost:
    return step.values[operand.value] if isinstance(operand, Ref) else operand


def _per_side(given: tuple[int, ...], num_sides: int) -> tuple[int, ...]:
    """One number stands for all sides."""
    return tuple(given) * num_sides if len(given) == 1 else tuple(given)
