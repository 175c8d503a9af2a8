"""The encodings of Gist's paper by its own rules (Jain et al., ISCA 2018), on the step as eager runs it: an account.

    a ReLU's result that only max-pools take       a bit for each element (Binarize)
    the winners of a max-pool                      4 bits for each element of its result, 8 for windows of more than 16
    a ReLU's result, or a max-pool's of one, that  narrow CSR: rows of 256, a value and a byte for each non-zero
      a convolution or a product takes             (SSDC), where that is smaller than the dense map
    every other map, the images, CSR's values      in the format, if one is given (DPR)

Pairs of layers are matched as they stand: a ReLU before a concatenation or an average pool is none of the above.
Backward reads masks and winners as they are; all else is decoded to float32 right before its first use there. In-place
ReLU, the paper's first step, is in the zoo's networks already.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from memfit.capture.needs import Need
from memfit.capture.step import Origin, Step
from memfit.plan.footprint import Buffer, Role
from memfit.plan.program import Program, Run
from memfit.report.backward_needs import BackwardNeeds

_ROW = 256
_MAX_POOL = "aten.max_pool2d_with_indices.default"
_RELUS = frozenset({"aten.relu.default", "aten.relu_.default"})
_TAKES_SPARSE = frozenset({"aten.convolution.default", "aten.addmm.default", "aten.mm.default", "aten.linear.default"})

FORMAT_BYTES: dict[str, Callable[[int], int]] = {
    "fp16": lambda count: 2 * count,
    "fp10": lambda count: 4 * -(-count // 3),
    "fp8": lambda count: count,
}
"""What so many numbers take in each of the paper's formats: three of 10 bits share a word of 32."""


class Form(enum.Enum):
    """How a stashed map is stored."""

    MASK = "mask"
    WINNERS = "winners"
    CSR = "csr"
    REDUCED = "reduced"
    DENSE = "dense"


_READ_AS_CODE = frozenset({Form.MASK, Form.WINNERS})


@dataclass(frozen=True)
class Stash:
    """A map between its last forward and its first backward use."""

    storage: int
    form: Form
    bytes: int


def published_stashes(
    step: Step, saved: Sequence[int], *, format_: str | None, relu_sparsity: float, pooled_sparsity: float
) -> dict[int, Stash]:
    """For each storage that backward reads, maps and images, how the paper would stash it; no format is lossless."""
    rules = _Rules(step, BackwardNeeds(step), format_, relu_sparsity, pooled_sparsity)
    return {storage: rules.stash(storage) for storage in saved}


@dataclass(frozen=True)
class _Rules:
    step: Step
    needs: BackwardNeeds
    format_: str | None
    relu_sparsity: float
    pooled_sparsity: float

    def stash(self, storage: int) -> Stash:
        step = self.step
        dense = Stash(storage, Form.DENSE, step.storage_bytes[storage])
        if any(step.values[s.value].storage == storage and s.origin is Origin.INPUT for s in step.sources):
            return self._reduced(storage) or dense
        if storage in step.kept:
            return dense  # it is handed to the caller as it is
        needs, count = self.needs.of(storage), self._count(storage)
        if needs == {Need.WINDOW}:
            return Stash(storage, Form.WINNERS, -(-count * (4 if self.needs.num_slots(storage) <= 16 else 8) // 8))
        takers = self._takers(storage)
        if self._is_relu(storage) and needs <= {Need.SIGN, Need.SHAPE} and takers == {_MAX_POOL}:
            return Stash(storage, Form.MASK, -(-count // 8))
        smaller = self._reduced(storage) or dense
        sparsity = self._sparsity(storage)
        if sparsity is not None and takers & _TAKES_SPARSE and self._is_float32(storage):
            packed = self._csr_bytes(count, sparsity)
            if packed < smaller.bytes:
                return Stash(storage, Form.CSR, packed)
        return smaller

    def _reduced(self, storage: int) -> Stash | None:
        """The map in the format; None if there is none, or the map is no float32."""
        if self.format_ is None or not self._is_float32(storage):
            return None
        return Stash(storage, Form.REDUCED, FORMAT_BYTES[self.format_](self._count(storage)))

    def _is_float32(self, storage: int) -> bool:
        step = self.step
        return all(step.values[value].dtype is torch.float32 for value in step.storage[storage].values)

    def _count(self, storage: int) -> int:
        """How many elements it has."""
        step = self.step
        return step.storage_bytes[storage] // step.values[step.storage[storage].values[0]].dtype.itemsize

    def _csr_bytes(self, count: int, sparsity: float) -> int:
        non_zeros = count - int(sparsity * count)
        value_bytes = 4 * non_zeros if self.format_ is None else FORMAT_BYTES[self.format_](non_zeros)
        return value_bytes + non_zeros + 4 * -(-count // _ROW)

    def _sparsity(self, storage: int) -> float | None:
        """The share of zeros that is assumed of a map; None if it is not known to have any."""
        if self._is_relu(storage):
            return self.relu_sparsity
        maker = self.step.storage[storage].maker
        if maker is None or self.step.ops[maker].target != _MAX_POOL:
            return None
        pooled = self.step.values[next(self.step.ops[maker].reads())].storage
        return self.pooled_sparsity if self._is_relu(pooled) else None

    def _is_relu(self, storage: int) -> bool:
        """True if a ReLU wrote the storage last in the forward half."""
        known = self.step.storage[storage]
        writers = [op for op in (known.maker, *known.writers) if op is not None and op < self.step.num_forward]
        return bool(writers) and self.step.ops[max(writers)].target in _RELUS

    def _takers(self, storage: int) -> set[str]:
        """The forward ops that read the storage, but for its writers and for views of it."""
        step = self.step
        readers = {index for value in step.storage[storage].values for index in step.readers.get(value, ())}
        return {
            step.ops[index].target
            for index in readers
            if index < step.num_forward and all(step.values[v].storage != storage for v in step.ops[index].made)
        }


def published_buffers(program: Program, buffers: Sequence[Buffer], stashes: dict[int, Stash]) -> list[Buffer]:
    """The buffers of a program that keeps everything, were these maps stashed: float32, code, float32 again.

    Instructions are counted twice, so that there is room for an encode after each and for a decode before each.
    """
    step = program.step
    run_at = {instruction.op: at for at, instruction in enumerate(program.instructions) if isinstance(instruction, Run)}
    found: list[Buffer] = []
    for buffer in buffers:
        stash, known = stashes.get(buffer.storage), step.storage[buffer.storage]
        if stash is None or stash.form is Form.DENSE:
            found.append(Buffer(buffer.bytes, 2 * buffer.first, 2 * buffer.last, buffer.role, buffer.storage))
            continue
        assert known.last_forward is not None and known.first_backward is not None
        encode, decode = 2 * run_at[known.last_forward] + 1, 2 * run_at[known.first_backward] - 1
        found.append(Buffer(buffer.bytes, 2 * buffer.first, encode, buffer.role, buffer.storage))
        if stash.form in _READ_AS_CODE:
            found.append(Buffer(stash.bytes, encode, 2 * buffer.last, Role.CODE, buffer.storage))
        else:
            found.append(Buffer(stash.bytes, encode, decode, Role.CODE, buffer.storage))
            found.append(Buffer(buffer.bytes, decode, 2 * buffer.last, Role.DECODED, buffer.storage))
    return found
