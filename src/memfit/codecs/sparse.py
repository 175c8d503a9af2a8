"""Non-zeros packed one after the other, with a bitmap: for what ReLU and dropout leave.

    [values: the capacity][where the values of each block of 256 begin: uint32][bitmap: a bit for each element]

1 + 0.125 bits for each element and a whole value for each that is not zero. Zero is +0.0 alone, bit for bit: -0.0, NaN
and subnormals are values. Behind the last value the capacity's room is not written to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from memfit.capture.step import Value
from memfit.codecs import bits, kernels
from memfit.codecs.codec import PackedCodec, Reading, Settings, described, flat
from memfit.codecs.kernels import Kernel
from memfit.errors import BadOption

BLOCK = 256
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class CompactedCodec(PackedCodec):
    """What `sparse` and `csr` share: the capacity, and which tensors they take.

    The capacity is a fraction of the elements; of more non-zeros than that a dense copy is made. By default it is as
    large as keeps the code smaller than the tensor: safe, but it saves next to nothing by plan.
    """

    bits_to_a_value: int
    bits_to_an_element: int

    def __init__(self, capacity: float = 1.0) -> None:
        self.capacity = checked_capacity(self.name, capacity)

    def why_not(self, value: Value, readings: Sequence[Reading]) -> str:
        if not value.is_dense:
            return "its elements do not fill a gapless range"
        if value.dtype not in _FLOATS:
            return f"it is {described(value.dtype)}, not a float"
        if value.num_elements >= 1 << 32:
            return "it has more elements than offsets of 32 bits reach"
        return self.no_gain(value, readings)

    def settings(self, readings: Sequence[Reading]) -> Settings:
        """The capacity."""
        return (self.capacity,)

    def room(self, count: int, item_bytes: int, settings: Settings) -> int:
        """For how many values there is room: what was asked for, or what keeps the code smaller than the tensor."""
        asked = num_asked(settings[0] if settings else 1.0, count)
        fixed = 4 * -(-count // BLOCK) + -(-count * self.bits_to_an_element // 8)
        each = item_bytes + self.bits_to_a_value // 8
        return max(min(asked, (count * item_bytes - 1 - fixed) // each), 0)

    def packed_bytes(self, count: int, item_bytes: int, settings: Settings) -> int:
        fixed = 4 * -(-count // BLOCK) + -(-count * self.bits_to_an_element // 8)
        return fixed + self.room(count, item_bytes, settings) * (item_bytes + self.bits_to_a_value // 8)

    def numbers(self, tensor: torch.Tensor, settings: Settings) -> tuple[int, int]:
        """As the kernels take them."""
        return tensor.element_size(), self.room(tensor.numel(), tensor.element_size(), settings)


class Sparse(CompactedCodec):
    """The `sparse` codec, or `sparse:CAPACITY`."""

    name = "sparse"
    encode_kernel = Kernel.SPARSE_ENCODE
    decode_kernel = Kernel.SPARSE_DECODE
    bits_to_a_value = 0
    bits_to_an_element = 1

    def pack(self, tensor: torch.Tensor, code: torch.Tensor, settings: Settings) -> bool:
        numbers = self.numbers(tensor, settings)
        return kernels.run(Kernel.SPARSE_ENCODE, tensor, code, count=tensor.numel(), numbers=numbers) == 0

    def decoding(self, like: torch.Tensor, settings: Settings) -> tuple[Kernel, tuple[int, ...]]:
        return Kernel.SPARSE_DECODE, self.numbers(like, settings)

    def pack_twin(self, tensor: torch.Tensor, code: torch.Tensor, settings: Settings) -> bool:
        item_bytes, room = self.numbers(tensor, settings)
        patterns = whole(tensor)
        values = patterns[patterns != 0]
        if values.numel() > room:
            return False
        code[: values.nbytes] = values.view(torch.uint8)
        behind = room * item_bytes
        begins = counts(patterns).cumsum(0) - counts(patterns)
        offsets = begins.to(torch.int32).view(torch.uint8)
        code[behind : behind + offsets.numel()] = offsets
        code[behind + offsets.numel() :] = bits.pack(patterns != 0, 1)
        return True

    def unpack_twin(self, code: torch.Tensor, like: torch.Tensor, settings: Settings) -> None:
        item_bytes, room = self.numbers(like, settings)
        patterns = whole(like)
        is_there = bits.unpack(code[room * item_bytes + 4 * -(-like.numel() // BLOCK) :], 1, like.numel()).bool()
        values = code[: int(is_there.sum()) * item_bytes].clone().view(patterns.dtype)
        patterns.zero_()
        patterns[is_there] = values


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in the order of memory as integers: their bits, of which zero has none."""
    return flat(tensor).view(_WHOLE[tensor.element_size()])


def counts(patterns: torch.Tensor) -> torch.Tensor:
    """The number of non-zeros in each block."""
    padded = torch.zeros(-(-patterns.numel() // BLOCK) * BLOCK, dtype=torch.int64, device=patterns.device)
    padded[: patterns.numel()] = patterns != 0
    return padded.view(-1, BLOCK).sum(1)


def checked_capacity(name: str, capacity: float) -> float:
    """The capacity that a codec's option asks for."""
    if not 0 < capacity <= 1:
        raise BadOption(f"codec '{name}:{capacity}': the capacity is a fraction of the elements, in (0, 1]")
    return capacity


def num_asked(capacity: float, count: int) -> int:
    """For how many values of so many elements that capacity asks for room."""
    return min(count, math.ceil(capacity * count))
