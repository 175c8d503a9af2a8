"""The geometry of a max pooling, from the op that reads its indices: plain numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BACKWARD = re.compile(r"aten\.(adaptive_)?max_pool([23])d(_with_indices)?_backward\.(default|grad_input)")


@dataclass(frozen=True)
class Pool:
    """How windows lie on the input. Those of an adaptive pooling share the input out, so they have no stride.

    Attributes:
        input_size: height and width, or depth, height and width.
        kernel: the size of a window, one number for each of these; of the largest one if adaptive.
        stride, padding, dilation: likewise; empty if adaptive.
    """

    input_size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()

    @classmethod
    def adaptive(cls, input_size: tuple[int, ...], output_size: tuple[int, ...]) -> Pool:
        """The pooling of an input to a given size."""
        kernel = []
        for size, out in zip(input_size, output_size, strict=True):
            kernel.append(max((-(-(o + 1) * size // out) - o * size // out for o in range(out)), default=1))
        return cls(input_size, tuple(kernel))

    def numbers(self) -> tuple[int, ...]:
        """All of it in a row, the number of dimensions first."""
        return (len(self.input_size), *self.input_size, *self.kernel, *self.stride, *self.padding, *self.dilation)

    @classmethod
    def of_numbers(cls, numbers: tuple[float, ...]) -> Pool:
        """What `numbers` wrote."""
        num_dims = int(numbers[0])
        parts = [tuple(int(n) for n in numbers[i : i + num_dims]) for i in range(1, len(numbers), num_dims)]
        return cls(*parts)

    def starts(self, output_size: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Along each dimension where its windows begin, which may be in the padding."""
        if self.stride:
            geometry = zip(output_size, self.stride, self.padding, strict=True)
            return tuple(tuple(o * step - pad for o in range(out)) for out, step, pad in geometry)
        sizes = zip(self.input_size, output_size, strict=True)
        return tuple(tuple(o * size // out for o in range(out)) for size, out in sizes)


def pool_of(target: str, arguments: Mapping[str, Any]) -> Pool | None:
    """The pooling whose indices a max-pool backward reads; None for other ops."""
    matched = _BACKWARD.fullmatch(target)
    shape = getattr(arguments.get("self"), "shape", None)
    if matched is None or shape is None:
        return None
    num_dims = int(matched[2])
    input_size = tuple(int(size) for size in shape[-num_dims:])
    if matched[1]:
        made = getattr(arguments.get("grad_output"), "shape", None)
        return None if made is None else Pool.adaptive(input_size, tuple(int(size) for size in made[-num_dims:]))

    def each(name: str) -> tuple[int, ...]:
        given = tuple(arguments[name])
        return given * num_dims if len(given) == 1 else given

    kernel = each("kernel_size")
    return Pool(input_size, kernel, each("stride") or kernel, each("padding"), each("dilation"))
