"""How backward reads a storage that forward made: what of it, through which layouts, by which ops.

The union of all these readings decides which codecs are legal for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from memfit.capture.needs import Gate, Need, gate_of
from memfit.capture.schemas import operand_needs, visible_arguments
from memfit.capture.step import Step, Value
from memfit.codecs.bounds import bounds_of
from memfit.codecs.codec import Reading
from memfit.codecs.pool import pool_of

_COMPARING = tuple(
    f"aten.{name}"
    for name in (
        *("threshold_backward.", "hardtanh_backward.", "hardshrink_backward.", "softshrink_backward."),
        *("eq.", "ne.", "lt.", "le.", "gt.", "ge."),
    )
)
"""Ops that compare with a tensor, or with a number; where it is a plain one they need SIGN only."""

Use = tuple[int, tuple[Reading, ...]]


@dataclass(frozen=True)
class Candidate:
    """A storage that could be encoded.

    Attributes:
        value: a forward value that covers all of the storage: what is encoded, and what decoding gives back.
        uses: the backward ops that read it, in order, each with what it asks of it: a reading for each operand that it
            is and whose bytes matter. Ops that only make a view of it are not among them.
        views: the values that these read with another layout than `value`, to be made from what decoding gives back.
    """

    value: Value
    uses: tuple[Use, ...]
    views: tuple[int, ...] = ()

    @property
    def readings(self) -> tuple[Reading, ...]:
        """What all uses together ask of it."""
        return tuple(reading for _, readings in self.uses for reading in readings)

    def readings_of(self, *, only: tuple[int, ...] | None = None, without: tuple[int, ...] = ()) -> tuple[Reading, ...]:
        """What some of the uses ask of it, by their ops."""
        chosen = [rs for index, rs in self.uses if (only is None or index in only) and index not in without]
        return tuple(reading for readings in chosen for reading in readings)

    @property
    def gated(self) -> tuple[int, ...]:
        """The ops that ask only for one and the same gate, beside others that ask for more; else none."""
        gates = {index: {repr(reading.gate) for reading in readings} for index, readings in self.uses if readings}
        asks_more = [index for index, readings in self.uses if any(r.need is not Need.SIGN for r in readings)]
        gated = [index for index in gates if index not in asks_more]
        is_one = len({gate for index in gated for gate in gates[index]}) == 1
        return tuple(gated) if asks_more and is_one else ()


def candidate_of(step: Step, storage: int, value: str | None = None) -> Candidate | str:
    """What there is to encode, or the reason that there is nothing; `value` names what was encoded already."""
    known = step.storage.get(storage)
    if known is None or known.maker is None or known.maker >= step.num_forward or storage in step.kept:
        return "it is not made by the forward half, or it is handed to the caller"
    if known.first_backward is None:
        return "backward does not read it"
    if any(writer >= step.num_forward for writer in known.writers):
        return "backward writes to it"
    uses = [
        (index, value)
        for value in known.values
        for index in step.readers.get(value, ())
        if index >= step.num_forward and not _is_view(step, index, storage)
    ]
    if not uses:
        return "backward does not read it"
    read = sorted({value for _, value in uses})
    whole = next((v for v in map(step.values.__getitem__, known.values) if v.name == value), None)
    whole = _whole(step, storage, read) if whole is None else whole
    if whole is None:
        return "no single tensor covers all of it"
    views = tuple(v for v in read if layout(step.values[v]) != layout(whole))
    if any(step.values[v].dtype is not whole.dtype for v in views):
        return "backward reads its bytes as another dtype"
    by_op: dict[int, list[Reading]] = {index: [] for index, _ in sorted(uses)}
    for index, seen in sorted(uses):
        by_op[index] += _readings(step, index, seen, views)
    if not any(by_op.values()):
        return "backward reads nothing of it but its shape"
    noise = _dropout_noise(step, storage)
    if noise is not None:
        by_op = {index: [Reading(Need.SIGN, noise)] * len(readings) for index, readings in by_op.items()}
    return Candidate(whole, tuple((index, tuple(readings)) for index, readings in by_op.items()), views)


def _is_view(step: Step, index: int, storage: int) -> bool:
    """True if the op does nothing but look at the storage in another layout."""
    op = step.ops[index]
    return bool(op.made) and not op.writes and all(step.values[v].storage == storage for v in op.made)


def layout(value: Value) -> tuple[object, ...]:
    """What two values of one storage must share to be the same tensor."""
    return (value.shape, value.stride, value.offset, value.dtype, value.device)


def _whole(step: Step, storage: int, read: list[int]) -> Value | None:
    """The newest forward value over all of the storage, if possible with a layout in which backward reads it."""
    known = step.storage[storage]
    assert known.last_forward is not None
    whole = [
        step.values[v]
        for v in known.values
        if step.maker_of.get(v, step.num_forward) <= known.last_forward
        and step.values[v].offset == 0
        and step.values[v].bytes == known.bytes
        and step.values[v].is_dense
    ]
    as_read = {layout(step.values[v]) for v in read}
    return next((v for v in reversed(whole) if layout(v) in as_read), whole[-1] if whole else None)


def _readings(step: Step, index: int, value: int, views: tuple[int, ...]) -> Iterator[Reading]:
    """How one op uses one value: a reading for each operand that it is and whose bytes matter."""
    op = step.ops[index]
    for operand, read, need in operand_needs(op, step.values):
        if read == value and need is not Need.SHAPE:  # any bytes will do for that one
            arguments = visible_arguments(op, step.values)
            if step.values[value].dtype is torch.bool:
                need = Need.MASK  # its two values are all there is, whatever it is compared with
            if need is Need.WINDOW and value in views:
                need = Need.VALUE  # slots are counted in the layout that the pool has written
            yield Reading(
                need,
                gate_of(op.target, operand, arguments) if need is Need.SIGN else None,
                pool_of(op.target, arguments) if need is Need.WINDOW else None,
                bounds_of(op.target, operand, arguments),
                compares=need is Need.VALUE and op.target.startswith(_COMPARING),
            )


def _dropout_noise(step: Step, storage: int) -> Gate | None:
    """The two numbers that dropout's noise on CPU consists of, as a gate: whoever reads it, these are all there is."""
    known = step.storage[storage]
    writers = [step.ops[w] for w in known.writers]
    targets = [op.target for op in writers]
    if targets[-2:] != ["aten.bernoulli_.float", "aten.div_.Scalar"] or len(writers[-1].args) != 2:
        return None
    value, divisor = step.values[writers[-1].made[0]], writers[-1].args[1]
    is_whole = all(step.values[op.made[0]].bytes == known.bytes for op in writers[-2:])
    if not is_whole or not isinstance(divisor, (int, float)) or not divisor > 0:
        return None
    scale = float(torch.ones((), dtype=value.dtype).div_(divisor))
    return Gate(((0.0, 0.0, 0.0),), otherwise=scale) if math.isfinite(scale) else None
