"""How much memory the maps of a step take, by two allocators: one that shares blocks for good, one that frees.

Maps are what the layers make and what comes back to them: feature maps, their codes and decoded copies, gradient maps.
Parameters, gradients that are handed over and workspaces are not among them: published ratios leave them out.

`static_bytes` is CNTK's allocator as Gist's paper uses it: the largest buffer first, each into the first group with
none of whose members it is alive at the same time; a group takes as much as its largest member. `dynamic_bytes` is what
an allocator needs that gives every buffer its bytes at its first use and takes them back after its last, without gaps.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memfit.capture.rerun_form import rerun_form
from memfit.capture.step import Kind, Origin, Step
from memfit.plan.program import FetchStart, Free, Program, Run, SendWait


class Role(enum.Enum):
    """What a buffer holds."""

    IMAGE = "image"  # what the caller passed in
    FEATURE = "feature map"
    CODE = "code"
    DECODED = "decoded"
    GRADIENT = "gradient map"


@dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes that are there from one instruction to another, both included."""

    bytes: int
    first: int
    last: int
    role: Role
    storage: int

    def overlaps(self, other: Buffer) -> bool:
        """True if there is an instruction at which both are alive."""
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Footprint:
    """What buffers take.

    Attributes:
        direct_bytes: dynamic without decoded copies: were backward's kernels to read codes as they are.
    """

    static_bytes: int
    dynamic_bytes: int
    direct_bytes: int

    @classmethod
    def of(cls, buffers: Sequence[Buffer]) -> Footprint:
        read_as_codes = [buffer for buffer in buffers if buffer.role is not Role.DECODED]
        return cls(static_bytes(buffers), dynamic_bytes(buffers), dynamic_bytes(read_as_codes))


def static_bytes(buffers: Iterable[Buffer]) -> int:
    """The sum of the groups that CNTK's allocator makes of the buffers."""
    total_bytes = 0
    groups: list[int] = []  # of each the instructions at which a member is alive, as bits of one number
    for buffer in sorted(buffers, key=lambda b: (-b.bytes, b.first, b.last)):
        if buffer.bytes == 0:
            break
        alive = ((1 << (buffer.last - buffer.first + 1)) - 1) << buffer.first
        for number, taken in enumerate(groups):
            if not taken & alive:
                groups[number] = taken | alive
                break
        else:
            groups.append(alive)
            total_bytes += buffer.bytes  # the first member is the largest
    return total_bytes


def dynamic_bytes(buffers: Iterable[Buffer]) -> int:
    """The most bytes that are alive at once."""
    change: dict[int, int] = defaultdict(int)
    for buffer in buffers:
        change[buffer.first] += buffer.bytes
        change[buffer.last + 1] -= buffer.bytes
    most = alive = 0
    for instruction in sorted(change):
        alive += change[instruction]
        most = max(most, alive)
    return most


def buffers_of(program: Program, *, with_images: bool = False) -> list[Buffer]:
    """The maps of a program, one for each life of a storage.

    With images, those that backward reads are there until its last use of them, as in frameworks that own them.
    """
    step = program.step
    roles = _roles(step)
    began: dict[int, int] = {}
    found: list[Buffer] = []
    for at, instruction in enumerate(program.instructions):
        match instruction:
            case Run(index, again):
                op = rerun_form(step.ops[index]) if again else step.ops[index]
                for storage in dict.fromkeys(step.values[value].storage for value in op.made):
                    if storage not in roles:
                        continue
                    if storage not in began:
                        began[storage] = at
                    elif again and step.storage[storage].maker == index:
                        # Made once more while it is here: the copy goes with the call.
                        found.append(_buffer(step, storage, at, at, roles))
            case FetchStart(storage) if storage in roles and storage not in began:
                began[storage] = at
            case Free(storage) | SendWait(storage) if storage in began:
                found.append(_buffer(step, storage, began.pop(storage), at - 1, roles))
            case _:
                pass
    end = len(program.instructions) - 1
    found += [_buffer(step, storage, first, end, roles) for storage, first in began.items()]
    return found + (_images(program) if with_images else [])


def _buffer(step: Step, storage: int, first: int, last: int, roles: dict[int, Role]) -> Buffer:
    return Buffer(step.storage_bytes[storage], first, last, roles[storage], storage)


def _roles(step: Step) -> dict[int, Role]:
    """The storages that hold maps."""
    handed_over = {step.values[gradient.value].storage for gradient in step.gradients}
    roles: dict[int, Role] = {}
    for storage in step.storages:
        if storage.maker is None or storage.id in handed_over or storage.kind in (Kind.PARAMETER, Kind.GRADIENT):
            continue
        match step.ops[storage.maker].target:
            case "memfit.encode":
                roles[storage.id] = Role.CODE
            case "memfit.decode":
                roles[storage.id] = Role.DECODED
            case _:
                roles[storage.id] = Role.FEATURE if storage.maker < step.num_forward else Role.GRADIENT
    return roles


def _images(program: Program) -> list[Buffer]:
    step = program.step
    run_at = {instruction.op: at for at, instruction in enumerate(program.instructions) if isinstance(instruction, Run)}
    found = []
    for storage in image_storages(step):
        last = step.storage[storage].last_backward
        assert last is not None
        found.append(Buffer(step.storage_bytes[storage], 0, run_at[last], Role.IMAGE, storage))
    return found


def image_storages(step: Step) -> tuple[int, ...]:
    """The storages that the caller passed in and that backward reads: images, and the labels of a loss."""
    given = {step.values[s.value].storage for s in step.sources if s.origin is Origin.INPUT}
    return tuple(storage for storage in sorted(given) if step.storage[storage].first_backward is not None)
