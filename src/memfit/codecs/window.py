"""Max-pool indices as slots of their windows: 2, 4 or 8 bits for the 64 of an index.

An index is where its window begins plus how far its slot lies from there, both counted in elements of the input; that
distance depends on the slot alone. So two small tables do it: the distance of each slot, and the slot of each distance.
Slots are counted in the order of the input inside the window. Where two slots have one distance (a window wider than
the input) the first stands for both: it gives the same index.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memfit.capture.needs import Need
from memfit.capture.step import Value
from memfit.codecs import bits, kernels
from memfit.codecs.codec import PackedCodec, Reading, Settings, described, flat
from memfit.codecs.kernels import Kernel
from memfit.codecs.pool import Pool

_NO_SLOT = 0xFFFF
_MAX_SLOTS = 256
_MAX_DISTANCES = 1 << 22
_CPU = torch.device("cpu")


class Window(PackedCodec):
    """The `window` codec: 16 times smaller for windows of up to 16 slots, 32 times for up to 4.

    An index outside its window, which no known kernel gives, makes it a dense copy.
    """

    name = "window"
    encode_kernel = Kernel.WINDOW_PACK
    decode_kernel = Kernel.WINDOW_UNPACK

    def why_not(self, value: Value, readings: Sequence[Reading]) -> str:
        pools = {reading.pool for reading in readings}
        pool = next(iter(pools), None)
        if any(reading.need is not Need.WINDOW for reading in readings) or pool is None:
            return "backward needs more of it than which slot of its window an index points to"
        if len(pools) != 1:
            return "its uses are of different poolings"
        if value.dtype is not torch.int64:
            return f"it is {described(value.dtype)}, and indices are int64"
        if _inner(value.shape, value.stride, len(pool.input_size)) is None:
            return "it is neither contiguous nor channels_last"
        if math.prod(pool.kernel) > _MAX_SLOTS:
            return f"its windows have {math.prod(pool.kernel)} slots, and a byte tells {_MAX_SLOTS} apart"
        if max(_distances(pool)) >= _MAX_DISTANCES:
            return "its windows reach too far over the input"
        return self.no_gain(value, readings)

    def settings(self, readings: Sequence[Reading]) -> Settings:
        """The numbers of the pooling."""
        pool = next((reading.pool for reading in readings if reading.pool is not None), None)
        return () if pool is None else pool.numbers()

    def packed_bytes(self, count: int, item_bytes: int, settings: Settings) -> int:
        return -(-count * _bits(settings) // 8)

    def pack(self, tensor: torch.Tensor, code: torch.Tensor, settings: Settings) -> bool:
        windows = Windows.of(settings, _output_size(tensor, settings), tensor.device)
        numbers = windows.numbers(_layout(tensor, settings))
        strange = kernels.run(
            Kernel.WINDOW_PACK, tensor, code, count=tensor.numel(), numbers=numbers, table=windows.slot_of
        )
        return strange == 0

    def decoding(self, like: torch.Tensor, settings: Settings) -> tuple[Kernel, tuple[int, ...]]:
        windows = Windows.of(settings, _output_size(like, settings), like.device)
        return Kernel.WINDOW_UNPACK, windows.numbers(_layout(like, settings))

    def unpack(self, code: torch.Tensor, like: torch.Tensor, settings: Settings) -> None:
        kernel, numbers = self.decoding(like, settings)
        table = Windows.of(settings, _output_size(like, settings), like.device).distance_of
        kernels.run(kernel, code, like, count=like.numel(), numbers=numbers, table=table)

    def pack_twin(self, tensor: torch.Tensor, code: torch.Tensor, settings: Settings) -> bool:
        windows = Windows.of(settings, _output_size(tensor, settings), tensor.device)
        distances = (windows.spread(tensor, settings) - windows.begins(tensor.device)).reshape(-1)
        slot_of = windows.slot_of.to(torch.int64) & _NO_SLOT
        is_near = (distances >= 0) & (distances < slot_of.numel())
        slots = slot_of[distances.where(is_near, 0)].where(is_near, _NO_SLOT)
        code.copy_(bits.pack(slots.to(torch.uint8), windows.bits))
        return not bool((slots == _NO_SLOT).any())

    def unpack_twin(self, code: torch.Tensor, like: torch.Tensor, settings: Settings) -> None:
        windows = Windows.of(settings, _output_size(like, settings), like.device)
        slots = bits.unpack(code, windows.bits, like.numel()).to(torch.int64)
        placed = windows.spread(like, settings)
        distances = windows.distance_of[slots].view(placed.shape)
        placed.copy_(distances + windows.begins(like.device))


@dataclass(frozen=True, eq=False)
class Windows:
    """What packing and unpacking the indices of one pooling look up; the tables are where the indices are."""

    bits: int
    starts: tuple[tuple[int, ...], ...]  # along each dimension, in elements of the input
    slot_of: torch.Tensor
    distance_of: torch.Tensor

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def of(settings: Settings, output_size: tuple[int, ...], device: torch.device = _CPU) -> Windows:
        pool = Pool.of_numbers(settings)
        distances = _distances(pool)
        slot_of = torch.full((max(distances) + 1,), _NO_SLOT, dtype=torch.int32)
        for slot in reversed(range(len(distances))):
            slot_of[distances[slot]] = slot
        bits_each = _bits_for(len(distances))
        distance_of = torch.zeros(1 << bits_each, dtype=torch.int64)
        distance_of[: len(distances)] = torch.tensor(distances)
        along = zip(pool.starts(output_size), _steps(pool.input_size), strict=True)
        scaled = tuple(tuple(start * step for start in row) for row, step in along)
        return Windows(bits_each, scaled, slot_of.to(torch.int16).to(device), distance_of.to(device))

    def numbers(self, inner: int) -> tuple[int, ...]:
        """As the kernels take them."""
        deep = ((0,), *self.starts)[-3:]
        return (self.bits, *map(len, deep), inner, self.slot_of.numel(), *itertools.chain(*deep))

    def begins(self, device: torch.device) -> torch.Tensor:
        """Where each window begins, to be set against `spread`."""
        total = torch.zeros((), dtype=torch.int64, device=device)
        for row in self.starts:
            total = total.unsqueeze(-1) + torch.tensor(row, dtype=torch.int64, device=device)
        return total.reshape(1, -1, 1)

    def spread(self, tensor: torch.Tensor, settings: Settings) -> torch.Tensor:
        """The indices in the order of memory, as (outer, window, inner)."""
        num_windows = math.prod(map(len, self.starts))
        inner = _layout(tensor, settings)
        return flat(tensor).view(tensor.numel() // max(num_windows * inner, 1), num_windows, inner)


def _bits_for(num_slots: int) -> int:
    return 2 if num_slots <= 4 else 4 if num_slots <= 16 else 8


@functools.lru_cache(maxsize=256)
def _bits(settings: Settings) -> int:
    """How many bits a slot takes."""
    return _bits_for(math.prod(Pool.of_numbers(settings).kernel))


def _steps(input_size: tuple[int, ...]) -> tuple[int, ...]:
    """How far apart in the input two neighbours along each dimension are."""
    return tuple(math.prod(input_size[dim + 1 :]) for dim in range(len(input_size)))


def _distances(pool: Pool) -> list[int]:
    """How far each slot lies from the beginning of its window."""
    dilation = pool.dilation or (1,) * len(pool.kernel)
    apart = [d * step for d, step in zip(dilation, _steps(pool.input_size), strict=True)]
    return [sum(map(int.__mul__, at, apart)) for at in itertools.product(*map(range, pool.kernel))]


def _output_size(tensor: torch.Tensor, settings: Settings) -> tuple[int, ...]:
    return tuple(tensor.shape[-int(settings[0]) :])


def _layout(tensor: torch.Tensor, settings: Settings) -> int:
    inner = _inner(tuple(tensor.shape), tuple(tensor.stride()), int(settings[0]))
    assert inner is not None, "why_not refuses other layouts"
    return inner


def _inner(shape: tuple[int, ...], stride: tuple[int, ...], num_dims: int) -> int | None:
    """How many elements of one window are neighbours: 1 if contiguous, the channels if channels_last, else None."""
    order = list(range(len(shape)))
    if is_in_order(shape, stride, order):
        return 1
    channel = len(shape) - num_dims - 1
    order = [*order[:channel], *order[channel + 1 :], channel]
    return shape[channel] if channel >= 0 and is_in_order(shape, stride, order) else None


def is_in_order(shape: tuple[int, ...], stride: tuple[int, ...], order: list[int]) -> bool:
    """True if memory goes through the dimensions in that order, the last one fastest, without gaps."""
    expected = 1
    for dim in reversed(order):
        if shape[dim] == 0:
            return True
        if shape[dim] > 1 and stride[dim] != expected:
            return False
        expected *= shape[dim]
    return True
