"""What a codec is: a smaller form of a tensor from which everything its backward uses need can be had again.

[Note: a code has one size]
A plan reserves a number of bytes for every code, so a code has a size that follows from the layout and the settings
alone. Some tensors do not fit into theirs: more non-zeros than there is room for, an index out of its range, infinity
in a format that has none. Such a tensor is stored as a dense copy instead, which is exact and is never larger than the
tensor, but is larger than planned: the ledger is short by the difference while it lives. `dense.py` counts these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from memfit.capture.needs import Gate, Need
from memfit.capture.step import Value
from memfit.codecs import dense, kernels
from memfit.codecs.kernels import Kernel
from memfit.codecs.pool import Pool

Settings = tuple[float, ...]


@dataclass(frozen=True)
class Reading:
    """One backward use of a tensor: what it needs of it, and what else the op says about it.

    Attributes:
        gate: for SIGN the classes it tells apart.
        pool: for WINDOW the geometry of the pooling.
        bounds: for indices the least and the largest that the op accepts.
        compares: it needs values, but also compares them with a number other than zero.
    """

    need: Need
    gate: Gate | None = None
    pool: Pool | None = None
    bounds: tuple[int, int] | None = None
    compares: bool = False


class Codec(Protocol):
    """One encoding, for dense tensors."""

    name: str
    is_lossy: bool

    def why_not(self, value: Value, readings: Sequence[Reading]) -> str:
        """What stands in the way of encoding a value with these uses, or nothing."""

    def settings(self, readings: Sequence[Reading]) -> Settings:
        """What encoding and decoding must know besides the layout, as plain numbers."""

    def code_bytes(self, value: Value, settings: Settings = ()) -> int:
        """The exact size of the code: a flat tensor of that many bytes."""

    def encode(self, tensor: torch.Tensor, settings: Settings) -> torch.Tensor:
        """The code of a tensor; larger than planned if it had to be a dense copy."""

    def decode(self, code: torch.Tensor, like: torch.Tensor, settings: Settings) -> torch.Tensor:
        """Fill `like`, which has the layout of what was encoded, and return it."""


class PackedCodec(ABC):
    """A codec that falls back to a dense copy: each has a kernel in C, and a twin in torch that is its reference.

    One that says which kernels it uses runs in Triton on a GPU, where Triton has them; another's twin serves there.
    """

    name: str
    is_lossy: bool = False
    encode_kernel: Kernel | None = None
    decode_kernel: Kernel | None = None

    @abstractmethod
    def packed_bytes(self, count: int, item_bytes: int, settings: Settings) -> int:
        """The size of the code of that many elements, were it always smaller than they are."""

    @abstractmethod
    def pack(self, tensor: torch.Tensor, code: torch.Tensor, settings: Settings) -> bool:
        """Fill the code by the kernel; False if the tensor has none."""

    @abstractmethod
    def pack_twin(self, tensor: torch.Tensor, code: torch.Tensor, settings: Settings) -> bool:
        """The same in torch."""

    @abstractmethod
    def decoding(self, like: torch.Tensor, settings: Settings) -> tuple[Kernel, tuple[int, ...]]:
        """The kernel that decodes, and the numbers it takes."""

    def unpack(self, code: torch.Tensor, like: torch.Tensor, settings: Settings) -> None:
        """Fill `like` from the code by the kernel."""
        kernel, numbers = self.decoding(like, settings)
        kernels.run(kernel, code, like, count=like.numel(), numbers=numbers)

    @abstractmethod
    def unpack_twin(self, code: torch.Tensor, like: torch.Tensor, settings: Settings) -> None:
        """The same in torch."""

    def code_bytes(self, value: Value, settings: Settings = ()) -> int:
        return min(self.packed_bytes(value.num_elements, value.dtype.itemsize, settings), value.bytes)

    def encode(self, tensor: torch.Tensor, settings: Settings) -> torch.Tensor:
        planned_bytes = self.packed_bytes(tensor.numel(), tensor.element_size(), settings)
        if planned_bytes >= tensor.nbytes:
            return dense.copy_of(tensor)
        code = torch.empty(planned_bytes, dtype=torch.uint8, device=tensor.device)
        pack = self.pack if kernels.can_run(tensor, self.encode_kernel) else self.pack_twin
        return code if pack(tensor, code, settings) else dense.fall_back(self.name, tensor, planned_bytes)

    def decode(self, code: torch.Tensor, like: torch.Tensor, settings: Settings) -> torch.Tensor:
        if dense.is_dense(code, like):
            return dense.restore(code, like)
        unpack = self.unpack if kernels.can_run(like, self.decode_kernel) else self.unpack_twin
        unpack(code, like, settings)
        return like

    def no_gain(self, value: Value, readings: Sequence[Reading]) -> str:
        """That the code would be no smaller, or nothing."""
        size = self.packed_bytes(value.num_elements, value.dtype.itemsize, self.settings(readings))
        return f"its code of {size:,} bytes would be no smaller" if size >= value.bytes > 0 else ""

    @abstractmethod
    def settings(self, readings: Sequence[Reading]) -> Settings:
        """What encoding and decoding must know besides the layout, as plain numbers."""


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def described(dtype: torch.dtype) -> str:
    """`float32`, as messages say it."""
    return str(dtype).removeprefix("torch.")
