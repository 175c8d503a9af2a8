"""Non-zeros with a byte each for their column, in rows of 256 elements: Gist's narrow CSR, for comparison.

    [values: the capacity][where the values of each row end: uint32][the column of each value: uint8]

0.125 bits for each element, and a value and a byte for each that is not zero: smaller than `sparse` only where fewer
than one element in eight is.
"""

from __future__ import annotations

import torch

from memfit.codecs import kernels
from memfit.codecs.codec import Settings
from memfit.codecs.kernels import Kernel
from memfit.codecs.sparse import BLOCK, CompactedCodec, counts, whole


class Csr(CompactedCodec):
    """The `csr` codec, or `csr:CAPACITY`."""

    name = "csr"
    bits_to_a_value = 8
    bits_to_an_element = 0

    def pack(self, tensor: torch.Tensor, code: torch.Tensor, settings: Settings) -> bool:
        numbers = self.numbers(tensor, settings)
        return kernels.run(Kernel.CSR_ENCODE, tensor, code, count=tensor.numel(), numbers=numbers) == 0

    def decoding(self, like: torch.Tensor, settings: Settings) -> tuple[Kernel, tuple[int, ...]]:
        return Kernel.CSR_DECODE, self.numbers(like, settings)

    def pack_twin(self, tensor: torch.Tensor, code: torch.Tensor, settings: Settings) -> bool:
        item_bytes, room = self.numbers(tensor, settings)
        patterns = whole(tensor)
        places = (patterns != 0).nonzero().view(-1)
        if places.numel() > room:
            return False
        values = patterns[places].view(torch.uint8)
        code[: values.numel()] = values
        ends = counts(patterns).cumsum(0).to(torch.int32).view(torch.uint8)
        code[room * item_bytes : room * item_bytes + ends.numel()] = ends
        columns = room * item_bytes + ends.numel()
        code[columns : columns + places.numel()] = (places % BLOCK).to(torch.uint8)
        return True

    def unpack_twin(self, code: torch.Tensor, like: torch.Tensor, settings: Settings) -> None:
        item_bytes, room = self.numbers(like, settings)
        patterns, num_rows = whole(like), -(-like.numel() // BLOCK)
        ends = code[room * item_bytes : room * item_bytes + 4 * num_rows].clone().view(torch.int32)
        ends = ends.to(torch.int64) & 0xFFFFFFFF
        begins = torch.cat([ends.new_zeros(1), ends])[:-1]
        rows = torch.arange(num_rows, device=like.device).repeat_interleave(ends - begins)
        columns = code[room * item_bytes + 4 * num_rows :][: rows.numel()].to(torch.int64)
        patterns.zero_()
        patterns[rows * BLOCK + columns] = code[: rows.numel() * item_bytes].clone().view(patterns.dtype)
