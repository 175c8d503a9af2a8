"""Non-zeros packed with a bitmap, their values rounded: what Gist does to the values of its sparse form.

    [codes of the values: the capacity][where those of each block of 256 begin, in bytes: uint32][bitmap]

1 + 0.125 bits for each element, and for each that is not zero what the dense codec takes. The bitmap and the offsets
are exact. The codes of a block are what the dense codec makes of a tensor of its values alone, so that blocks do not
depend on one another:

- `fp16`, `bf16`: 16 bits for a value.
- `fp10`: three values to a word, and a block begins with a word of its own. Its w words are one run: word j holds its
  values j, j + w and j + 2 w. The capacity has room for up to two empty thirds in each block.
- `fp8`: a step of 32 bits in front of each block that has values, then a byte for a value.

Zero is +0.0 alone, as in `sparse`. What is not finite fares as in the dense codec.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from memfit.capture.step import Value
from memfit.codecs import bits, kernels
from memfit.codecs.bf16 import Bf16
from memfit.codecs.blocks import BLOCK, num_blocks
from memfit.codecs.codec import Reading, Settings
from memfit.codecs.fp8 import Fp8
from memfit.codecs.fp10 import FORMAT, Fp10
from memfit.codecs.fp16 import Fp16
from memfit.codecs.kernels import Kernel
from memfit.codecs.lossy import LossyCodec
from memfit.codecs.small_float import shrink, widen
from memfit.codecs.sparse import checked_capacity, counts, num_asked, whole


class SparseFloat(LossyCodec):
    """What the four share: the capacity, as a fraction of the elements, and the way from blocks to the code.

    Attributes:
        dense: the codec of the values.
        format_number: the same for the kernels, as in native/codecs/sparse_float_body.h.
    """

    encode_kernel = Kernel.SPARSE_FLOAT_ENCODE
    decode_kernel = Kernel.SPARSE_FLOAT_DECODE
    dense: LossyCodec
    format_number: int

    def __init__(self, capacity: float = 1.0) -> None:
        self.capacity = checked_capacity(self.name, capacity)

    def why_not(self, value: Value, readings: Sequence[Reading]) -> str:
        if self.capacity_bytes(value.num_elements, self.settings(readings)) >= 1 << 32:
            return "its values would have more bytes than offsets of 32 bits reach"
        return super().why_not(value, readings)

    def settings(self, readings: Sequence[Reading]) -> Settings:
        """1 if backward compares with zero, else 0; then the capacity."""
        return (*super().settings(readings), self.capacity)

    @abstractmethod
    def most_bytes(self, num_values: int, blocks: int) -> int:
        """What so many values take at most, however they are spread over so many blocks."""

    @abstractmethod
    def block_bytes(self, num_values: torch.Tensor) -> torch.Tensor:
        """What each block takes, by the number of its values."""

    @abstractmethod
    def pack_rows(self, rows: torch.Tensor, num_values: torch.Tensor, keeps_gate: float) -> torch.Tensor | None:
        """The bytes of each block, as rows of which the first `block_bytes` count; None if a value has no code.

        The values of a block are at the beginning of its row, zeros behind them.
        """

    @abstractmethod
    def unpack_rows(self, packed: torch.Tensor, num_values: torch.Tensor) -> torch.Tensor:
        """The values of each block again, at the beginning of its row."""

    def capacity_bytes(self, count: int, settings: Settings) -> int:
        """The room for the codes of the values."""
        return self.most_bytes(num_asked(settings[1] if settings else 1.0, count), num_blocks(count))

    def packed_bytes(self, count: int, item_bytes: int, settings: Settings) -> int:
        return self.capacity_bytes(count, settings) + 4 * num_blocks(count) + -(-count // 8)

    def numbers(self, count: int, settings: Settings) -> tuple[int, int, int]:
        """As the kernels take them."""
        return int(settings[0]), self.capacity_bytes(count, settings), self.format_number

    def pack(self, tensor: torch.Tensor, code: torch.Tensor, settings: Settings) -> bool:
        count = tensor.numel()
        numbers = self.numbers(count, settings)
        return kernels.run(Kernel.SPARSE_FLOAT_ENCODE, tensor, code, count=count, numbers=numbers) == 0

    def decoding(self, like: torch.Tensor, settings: Settings) -> tuple[Kernel, tuple[int, ...]]:
        return Kernel.SPARSE_FLOAT_DECODE, self.numbers(like.numel(), settings)

    def pack_twin(self, tensor: torch.Tensor, code: torch.Tensor, settings: Settings) -> bool:
        values, offsets, bitmap = self._parts(code, tensor.numel(), settings)
        begin = 0
        for start in range(0, tensor.numel(), bits.CHUNK):
            patterns = whole(tensor)[start : start + bits.CHUNK]
            num_values = counts(patterns)
            rows = patterns.new_zeros(num_values.numel(), BLOCK)
            rows[_first(num_values, BLOCK)] = patterns[patterns != 0]
            packed = self.pack_rows(rows.view(torch.float32), num_values, settings[0])
            if packed is None:
                return False
            sizes = self.block_bytes(num_values)
            said = packed[_first(sizes, packed.shape[1])]
            if begin + said.numel() > values.numel():
                return False
            values[begin : begin + said.numel()] = said
            begins = (begin + sizes.cumsum(0) - sizes).to(torch.int32).view(torch.uint8)
            offsets[start // BLOCK * 4 :][: begins.numel()] = begins
            mapped = bits.pack(patterns != 0, 1)
            bitmap[start // 8 :][: mapped.numel()] = mapped
            begin += said.numel()
        return True

    def unpack_twin(self, code: torch.Tensor, like: torch.Tensor, settings: Settings) -> None:
        values, _, bitmap = self._parts(code, like.numel(), settings)
        begin = 0
        for start in range(0, like.numel(), bits.CHUNK):
            patterns = whole(like)[start : start + bits.CHUNK]
            is_there = bits.unpack(bitmap[start // 8 : (start + bits.CHUNK) // 8], 1, patterns.numel()).bool()
            num_values = counts(is_there)
            sizes = self.block_bytes(num_values)
            packed = values.new_zeros(sizes.numel(), self.most_bytes(BLOCK, 1))
            said = _first(sizes, packed.shape[1])
            total = int(sizes.sum())
            packed[said] = values[begin : begin + total]
            rows = self.unpack_rows(packed, num_values).view(torch.int32)
            patterns.zero_()
            patterns[is_there] = rows[_first(num_values, BLOCK)]
            begin += total

    def _parts(self, code: torch.Tensor, count: int, settings: Settings) -> tuple[torch.Tensor, ...]:
        """The codes of the values, the offsets, the bitmap."""
        behind = self.capacity_bytes(count, settings)
        return code[:behind], code[behind : behind + 4 * num_blocks(count)], code[behind + 4 * num_blocks(count) :]


class _SparseHalves(SparseFloat):
    """Values of two bytes, each for itself."""

    def most_bytes(self, num_values: int, blocks: int) -> int:
        return 2 * num_values

    def block_bytes(self, num_values: torch.Tensor) -> torch.Tensor:
        return 2 * num_values

    def pack_rows(self, rows: torch.Tensor, num_values: torch.Tensor, keeps_gate: float) -> torch.Tensor | None:
        packed = torch.empty(2 * rows.numel(), dtype=torch.uint8, device=rows.device)
        self.dense.pack_twin(rows, packed, (keeps_gate,))
        return packed.view(-1, 2 * BLOCK)

    def unpack_rows(self, packed: torch.Tensor, num_values: torch.Tensor) -> torch.Tensor:
        rows = torch.empty(packed.shape[0], BLOCK, device=packed.device)
        self.dense.unpack_twin(packed.view(-1), rows, ())
        return rows


class SparseFp16(_SparseHalves):
    """The `sparse-fp16` codec, or `sparse-fp16:CAPACITY`."""

    name = "sparse-fp16"
    dense = Fp16()
    format_number = 0


class SparseBf16(_SparseHalves):
    """The `sparse-bf16` codec, or `sparse-bf16:CAPACITY`."""

    name = "sparse-bf16"
    dense = Bf16()
    format_number = 1


class SparseFp10(SparseFloat):
    """The `sparse-fp10` codec, or `sparse-fp10:CAPACITY`."""

    name = "sparse-fp10"
    dense = Fp10()
    format_number = 2

    def most_bytes(self, num_values: int, blocks: int) -> int:
        return 4 * ((num_values + 2 * min(num_values, blocks)) // 3)

    def block_bytes(self, num_values: torch.Tensor) -> torch.Tensor:
        return 4 * _words(num_values)

    def pack_rows(self, rows: torch.Tensor, num_values: torch.Tensor, keeps_gate: float) -> torch.Tensor | None:
        codes = torch.nn.functional.pad(shrink(rows, FORMAT, keeps_gate=bool(keeps_gate)), (0, 2))
        first = torch.arange(self.most_bytes(BLOCK, 1) // 4, device=rows.device)
        apart = _words(num_values).unsqueeze(1)
        thirds = [codes.gather(1, first + k * apart) << 10 * k for k in range(3)]
        return (thirds[0] | thirds[1] | thirds[2]).view(torch.uint8)

    def unpack_rows(self, packed: torch.Tensor, num_values: torch.Tensor) -> torch.Tensor:
        place = torch.arange(BLOCK, device=packed.device)
        apart = _words(num_values).clamp(min=1).unsqueeze(1)
        words = packed.view(torch.int32).gather(1, place % apart)
        return widen(words >> 10 * (place // apart).clamp(max=2).to(torch.int32) & 0x3FF, FORMAT)


class SparseFp8(SparseFloat):
    """The `sparse-fp8` codec, or `sparse-fp8:CAPACITY`."""

    name = "sparse-fp8"
    dense = Fp8()
    format_number = 3

    def most_bytes(self, num_values: int, blocks: int) -> int:
        return num_values + 4 * min(num_values, blocks)

    def block_bytes(self, num_values: torch.Tensor) -> torch.Tensor:
        return num_values + 4 * (num_values > 0)

    def pack_rows(self, rows: torch.Tensor, num_values: torch.Tensor, keeps_gate: float) -> torch.Tensor | None:
        blocks = rows.shape[0]
        packed = torch.empty(blocks * (4 + BLOCK), dtype=torch.uint8, device=rows.device)
        if not self.dense.pack_twin(rows, packed, (keeps_gate,)):
            return None
        return torch.cat([packed[: 4 * blocks].view(-1, 4), packed[4 * blocks :].view(-1, BLOCK)], dim=1)

    def unpack_rows(self, packed: torch.Tensor, num_values: torch.Tensor) -> torch.Tensor:
        rows = torch.empty(packed.shape[0], BLOCK, device=packed.device)
        steps_first = torch.cat([packed[:, :4].reshape(-1), packed[:, 4:].reshape(-1)])
        self.dense.unpack_twin(steps_first, rows, ())
        return rows


def _words(num_values: torch.Tensor) -> torch.Tensor:
    """How many words of three hold so many."""
    return (num_values + 2) // 3


def _first(lengths: torch.Tensor, width: int) -> torch.Tensor:
    """True for the first so many of each row."""
    return torch.arange(width, device=lengths.device) < lengths.unsqueeze(1)
