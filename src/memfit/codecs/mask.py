"""One or two bits per element: for bools, and where backward asks only into which class of a gate an element falls.

The bits are in the order of memory, the first element in the lowest bits of a byte. What a gate leaves over, NaN always
among it, is class 0; the other classes are numbered as they appear among the cells.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memfit.capture.needs import Need
from memfit.capture.step import Value
from memfit.codecs import bits, kernels
from memfit.codecs.codec import Reading, Settings, flat
from memfit.codecs.kernels import Kernel

_KINDS = {torch.float32: 0, torch.bfloat16: 1}  # what the kernel in C packs; it unpacks all
_TRITON_KINDS = {**_KINDS, torch.float16: 2, torch.float64: 3}
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NAN = float("nan")


class Mask:
    """The `mask` codec: 32 times smaller than float32 (16 times for three or four classes), 8 times than bool."""

    name = "mask"
    is_lossy = False

    def why_not(self, value: Value, readings: Sequence[Reading]) -> str:
        if not value.is_dense:
            return "its elements do not fill a gapless range"
        if value.dtype is torch.bool:
            return ""
        gates = [reading.gate for reading in readings]
        if any(reading.need is not Need.SIGN for reading in readings):
            return "backward needs more of it than on which side of a gate each element lies"
        if any(gate is None or repr(gate) != repr(gates[0]) for gate in gates):  # by repr because NaN != NaN
            return "its uses ask for different gates"
        assert gates[0] is not None
        return "" if len(gates[0].stand_ins) <= 4 else "its gate has more than four classes"

    def settings(self, readings: Sequence[Reading]) -> Settings:
        """The cells of the gate one after the other, then what stands for the rest; nothing for bools."""
        gate = readings[0].gate if readings else None
        if gate is None:
            return ()
        return (*(number for cell in gate.cells for number in cell), gate.otherwise)

    def code_bytes(self, value: Value, settings: Settings = ()) -> int:
        return -(-value.num_elements * _Classes.of(settings).bits // 8)

    def encode(self, tensor: torch.Tensor, settings: Settings) -> torch.Tensor:
        classes, count = _Classes.of(settings), tensor.numel()
        code = torch.empty(-(-count * classes.bits // 8), dtype=torch.uint8, device=tensor.device)
        kernel = Kernel.MASK_PACK if settings else Kernel.MASK_PACK_BOOL
        if not kernels.can_run(tensor, kernel) or (settings and tensor.dtype not in _kinds(tensor)):
            return encode_twin(tensor, code, settings)
        if not settings:
            kernels.run(Kernel.MASK_PACK_BOOL, tensor, code, count=count, numbers=())
        else:
            numbers = (classes.bits, _kinds(tensor)[tensor.dtype], len(classes.cells))
            reals = [number for cell in classes.cells for number in cell]
            kernels.run(Kernel.MASK_PACK, tensor, code, count=count, numbers=numbers, reals=reals)
        return code

    def decode(self, code: torch.Tensor, like: torch.Tensor, settings: Settings) -> torch.Tensor:
        if not kernels.can_run(like, Kernel.MASK_UNPACK):
            return decode_twin(code, like, settings)
        classes = _Classes.of(settings)
        numbers = (classes.bits, like.element_size(), *_patterns(classes, like.dtype))
        kernels.run(Kernel.MASK_UNPACK, code, like, count=like.numel(), numbers=numbers)
        return like


def encode_twin(tensor: torch.Tensor, code: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Fill the code in torch."""
    whole, classes = flat(tensor), _Classes.of(settings)
    per_byte = 8 // classes.bits
    for start in range(0, whole.numel(), bits.CHUNK):
        packed = bits.pack(_class_of(whole[start : start + bits.CHUNK], settings), classes.bits)
        code[start // per_byte : start // per_byte + packed.numel()] = packed
    return code


def decode_twin(code: torch.Tensor, like: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Fill the tensor in torch."""
    whole, classes = flat(like), _Classes.of(settings)
    per_byte = 8 // classes.bits
    for start in range(0, whole.numel(), bits.CHUNK):
        stretch = whole[start : start + bits.CHUNK]
        packed = code[start // per_byte : (start + bits.CHUNK) // per_byte]
        found = bits.unpack(packed, classes.bits, stretch.numel())
        stretch.fill_(classes.stand_ins[0])
        for number, stand_in in enumerate(classes.stand_ins[1:], start=1):
            stretch.masked_fill_(found == number, stand_in)
    return like


@dataclass(frozen=True)
class _Classes:
    """A gate with its classes numbered: the cells as (low, high, class), and the stand-in of each class."""

    cells: tuple[tuple[float, float, int], ...]
    stand_ins: tuple[float, ...]

    @property
    def bits(self) -> int:
        return 1 if len(self.stand_ins) <= 2 else 2

    @staticmethod
    def of(settings: Settings) -> _Classes:
        """Of a mask's settings; of none it is a bool's."""
        return _Classes._of(_with_one_nan(settings))

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def _of(settings: Settings) -> _Classes:
        if not settings:
            return _Classes((), (0, 1))
        stand_ins = {repr(settings[-1]): settings[-1]}  # by repr because NaN != NaN
        for stand_in in settings[2:-1:3]:
            stand_ins.setdefault(repr(stand_in), stand_in)
        number = {key: index for index, key in enumerate(stand_ins)}
        cells = zip(settings[0:-1:3], settings[1:-1:3], settings[2:-1:3], strict=True)
        return _Classes(tuple((low, high, number[repr(s)]) for low, high, s in cells), tuple(stand_ins.values()))


def _with_one_nan(settings: Settings) -> Settings:
    """The same settings for a cache: NaN equals only itself, and generated code makes another one at every call."""
    return tuple(_NAN if number != number else number for number in settings)


@functools.lru_cache(maxsize=1024)
def _patterns(classes: _Classes, dtype: torch.dtype) -> tuple[int, ...]:
    """The bits of each of four stand-ins in that dtype."""
    stand_ins = torch.zeros(4, dtype=dtype)
    for number, stand_in in enumerate(classes.stand_ins):
        stand_ins[number] = stand_in
    return tuple(stand_ins.view(_WHOLE[dtype.itemsize]).tolist())


def _kinds(tensor: torch.Tensor) -> dict[torch.dtype, int]:
    """What the kernel for this tensor's device packs, and the number it has for each."""
    return _TRITON_KINDS if kernels.is_for_triton(tensor) else _KINDS


def _class_of(elements: torch.Tensor, settings: Settings) -> torch.Tensor:
    """The class of each element."""
    if not settings:
        return elements
    found = torch.zeros(elements.shape, dtype=torch.uint8, device=elements.device)
    for low, high, number in reversed(_Classes.of(settings).cells):  # the first cell that fits wins, so is written last
        found.masked_fill_((elements >= low) & (elements <= high), number)
    return found
