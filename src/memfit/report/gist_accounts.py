"""What is saved for backward and what the maps take at most, by several ways to count: eager's is what all are beside.

    eager      what autograd saves: every operand of its formulas, 64-bit winners of max-pools among them
    inductor   the same storages in what torch.compile gives them: a byte for a comparison, a winner or a bool, nothing
               where only a shape is read. What its partitioner would recompute is not taken off
    keep       memfit's rewrites, nothing encoded
    paper      Gist's own encodings by its rules on eager's step (gist_published.py)
    memfit     the codes of a plan, and what it leaves as it is

Images are the caller's. memfit leaves them as they are; the paper owns them, and reduces them in its lossy modes. So
every account names them apart, and `reduced_image_bytes` is what they would take in a format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memfit.capture.needs import Need
from memfit.capture.rerun_form import rerun_form
from memfit.capture.step import Step, Value
from memfit.codecs.registry import codec
from memfit.plan.footprint import Footprint, buffers_of, image_storages
from memfit.plan.lower import lower_keep
from memfit.plan.policies.vdnn_published import as_published
from memfit.plan.program import Free, Program, Run, SendWait
from memfit.report.backward_needs import BackwardNeeds
from memfit.report.gist_published import published_buffers, published_stashes

_A_BYTE_EACH = frozenset({Need.SIGN, Need.WINDOW, Need.MASK})


@dataclass(frozen=True)
class Saved:
    """Bytes that lie between the two halves: made by the forward half, and read by the backward half."""

    map_bytes: int
    image_bytes: int

    @property
    def bytes(self) -> int:
        return self.map_bytes + self.image_bytes


@dataclass(frozen=True)
class Account:
    """One way to count.

    Attributes:
        maps: what the maps take at most.
        maps_and_images: the same with the images, from the beginning to backward's last use of them.
    """

    saved: Saved
    maps: Footprint
    maps_and_images: Footprint

    @classmethod
    def of(cls, program: Program) -> Account:
        """The account of a program as it is."""
        buffers = buffers_of(program), buffers_of(program, with_images=True)
        return cls(saved(program), *map(Footprint.of, buffers))


def saved_storages(program: Program) -> tuple[int, ...]:
    """The storages that a program's backward half finds here when it begins, and reads; not those it was given."""
    step, boundary = program.step, program.boundary
    here: set[int] = set()
    for instruction in program.instructions[:boundary]:
        match instruction:
            case Run(index):
                here |= {step.values[v].storage for v in step.ops[index].made}
            case Free(storage) | SendWait(storage):
                here.discard(storage)
            case _:
                pass
    here -= {step.values[source.value].storage for source in step.sources}
    read: set[int] = set()
    for instruction in program.instructions[boundary:]:
        match instruction:
            case Run(index, again):
                op = rerun_form(step.ops[index]) if again else step.ops[index]
                read |= {step.values[v].storage for v in op.reads()} & here
            case Free(storage) | SendWait(storage):
                here.discard(storage)
            case _:
                pass
    return tuple(sorted(read))


def saved(program: Program) -> Saved:
    """What a program saves: maps, and codes of maps."""
    size = program.step.storage_bytes
    return Saved(
        sum(size[storage] for storage in saved_storages(program)),
        sum(size[storage] for storage in image_storages(program.step)),
    )


def inductor_saved(program: Program) -> Saved:
    """What torch.compile would save of the storages that this program, eager's, saves."""
    needs = BackwardNeeds(program.step)
    maps = sum(_inductor_bytes(needs, storage) for storage in saved_storages(program))
    return Saved(maps, saved(program).image_bytes)


def _inductor_bytes(needs: BackwardNeeds, storage: int) -> int:
    step, needed = needs.step, needs.of(storage) - {Need.SHAPE}
    size = step.storage_bytes[storage]
    if storage in step.kept or not needed <= _A_BYTE_EACH:
        return size
    return size // step.values[step.storage[storage].values[0]].dtype.itemsize if needed else 0


def reduced_image_bytes(step: Step, format_: str | None) -> int:
    """What the images would take in a format of ours; labels and the like stay as they are."""
    total = 0
    for storage in image_storages(step):
        value = _whole(step, storage)
        if format_ is None or value is None or value.dtype is not torch.float32:
            total += step.storage_bytes[storage]
        else:
            total += codec(format_).code_bytes(value)
    return total


def _whole(step: Step, storage: int) -> Value | None:
    values = (step.values[v] for v in step.storage[storage].values)
    return next((value for value in values if value.bytes == step.storage_bytes[storage]), None)


def published(eager: Program, *, format_: str | None, relu_sparsity: float, pooled_sparsity: float) -> Account:
    """The account of the paper's encodings on eager's program."""
    step, images = eager.step, image_storages(eager.step)
    stashes = published_stashes(
        step,
        (*saved_storages(eager), *images),
        format_=format_,
        relu_sparsity=relu_sparsity,
        pooled_sparsity=pooled_sparsity,
    )
    total = sum(stash.bytes for stash in stashes.values())
    image_bytes = sum(stashes[storage].bytes for storage in images)
    footprints = [
        Footprint.of(published_buffers(eager, buffers_of(eager, with_images=with_images), stashes))
        for with_images in (False, True)
    ]
    return Account(Saved(total - image_bytes, image_bytes), *footprints)


def published_baseline(eager: Step) -> Account:
    """The account of the framework of the paper: its pools keep their input and their result, and no winners."""
    return Account.of(lower_keep(as_published(eager)))
