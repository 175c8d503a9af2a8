"""The captured training step as plain data: ops in order, the values they make, the storages behind them."""

from __future__ import annotations

import enum
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from memfit.capture.needs import Need


class Half(enum.Enum):
    """Which half of the step an op belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Kind(enum.Enum):
    """What a storage is, for the ledger: who owns its bytes and when they can go.

    PARAMETER: parameters, buffers and constants, there before the step and after it.
    INPUT: what the caller passed in, and the tangents that start the backward half.
    GRADIENT: a gradient that is handed over; it outlives the step.
    SAVED: made in the forward half and read in the backward half, or returned to the caller.
    TRANSIENT: made and dropped inside one half.
    """

    PARAMETER = "parameter"
    INPUT = "input"
    GRADIENT = "gradient"
    SAVED = "saved"
    TRANSIENT = "transient"


class Origin(enum.Enum):
    """Where a value that no op made comes from."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    ATTRIBUTE = "attribute"
    CONSTANT = "constant"
    INPUT = "input"
    TANGENT = "tangent"


@dataclass(frozen=True, slots=True)
class Ref:
    """An operand: the value of that id."""

    value: int


@dataclass(frozen=True, slots=True)
class Ghost:
    """An operand of which only the shape is read: a tensor with sizes and strides but no bytes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str


@dataclass(frozen=True, slots=True)
class Opaque:
    """An operand that is no tensor and no literal (a torch.Generator): held by reference, by index."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor at one moment: a name, a layout, and the storage it looks at."""

    id: int
    name: str
    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: str

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    @property
    def is_dense(self) -> bool:
        """True if the elements fill a gapless range, each once (any order of dimensions)."""
        expected = 1
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size == 1:
                continue
            if size == 0:
                return True
            if stride != expected:
                return False
            expected *= size
        return True

    def describe(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{kind}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Op:
    """One ATen call: what it reads, what it makes, and which line of the model asked for it."""

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[int | None, ...]
    returns_many: bool
    half: Half
    path: str
    source: str
    writes: tuple[int, ...] = ()
    random: bool = False
    again: str = ""  # another op to make its result again with, see rerun_form.py
    stand_in: str = ""  # an op of ours that does the same in less time, see rewrites/stand_ins.py
    # Asked for a hundred times in a plan, and args may be nested.
    _reads: tuple[int, ...] | None = field(default=None, init=False, repr=False, compare=False)

    def operands(self) -> Iterator[tuple[str, Any]]:
        """Arguments with a label each: the position, or the keyword."""
        for index, arg in enumerate(self.args):
            yield str(index), arg
        yield from self.kwargs

    def reads(self) -> Iterator[int]:
        """Ids of the values this op takes, with repeats, in the order of its arguments."""
        if self._reads is None:
            object.__setattr__(self, "_reads", tuple(value for _, arg in self.operands() for value in refs_in(arg)))
        return iter(self._reads or ())

    @property
    def made(self) -> tuple[int, ...]:
        return tuple(out for out in self.outputs if out is not None)

    @property
    def called(self) -> str:
        """The operator that is called where the op runs."""
        return self.stand_in or self.target


@dataclass(frozen=True, slots=True)
class Source:
    """A value that the step is given: a parameter, a buffer, an input, a constant, a tangent."""

    value: int
    origin: Origin
    name: str
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient to hand over: of which source, and which value, listed in the order autograd gets them.

    A source that is used several times is listed several times: autograd adds the parts itself, in eager's order, with
    whatever parts come from outside the step.
    """

    of: int
    value: int


@dataclass(frozen=True, slots=True)
class Storage:
    """A block of bytes, the values that look at it, and when they are used."""

    id: int
    bytes: int
    device: str
    kind: Kind
    values: tuple[int, ...]
    maker: int | None
    writers: tuple[int, ...]
    last_forward: int | None
    first_backward: int | None
    last_backward: int | None


@dataclass(frozen=True, slots=True)
class Use:
    """One reading of a value: by which op, through which operand, and what it truly needs."""

    op: int
    operand: str
    value: int
    need: Need


def refs_in(arg: Any) -> Iterator[int]:
    """Ids of the values inside one argument, however nested."""
    if isinstance(arg, Ref):
        yield arg.value
    elif isinstance(arg, (tuple, list)):
        for item in arg:
            yield from refs_in(item)


def map_refs(arg: Any, change: Any) -> Any:
    """The same argument with `change` applied to each Ref in it."""
    if isinstance(arg, Ref):
        return change(arg)
    if isinstance(arg, (tuple, list)):
        return type(arg)(map_refs(item, change) for item in arg)
    return arg


@dataclass(frozen=True)
class Step:
    """One training step: forward ops, then backward ops, over values and storages."""

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    sources: tuple[Source, ...]
    outputs: tuple[int, ...]
    tangents: tuple[int | None, ...]
    gradients: tuple[Gradient, ...]
    storage_bytes: tuple[int, ...]
    name: str = ""
    rewrites: tuple[str, ...] = field(default=())

    @cached_property
    def num_forward(self) -> int:
        """How many of the ops are the forward half; they come first."""
        return sum(op.half is Half.FORWARD for op in self.ops)

    @cached_property
    def source_of(self) -> dict[int, Source]:
        return {source.value: source for source in self.sources}

    @cached_property
    def readers(self) -> dict[int, tuple[int, ...]]:
        """For each value the ops that read it, in order."""
        found: dict[int, list[int]] = defaultdict(list)
        for index, op in enumerate(self.ops):
            for value in dict.fromkeys(op.reads()):
                found[value].append(index)
        return {value: tuple(ops) for value, ops in found.items()}

    @cached_property
    def maker_of(self) -> dict[int, int]:
        """For each value that an op makes, that op."""
        return {value: index for index, op in enumerate(self.ops) for value in op.made}

    @cached_property
    def uses(self) -> tuple[Use, ...]:
        """Every reading of every value with what it truly needs of it."""
        from memfit.capture.schemas import operand_needs

        return tuple(
            Use(index, operand, value, need)
            for index, op in enumerate(self.ops)
            for operand, value, need in operand_needs(op, self.values)
        )

    @cached_property
    def storages(self) -> tuple[Storage, ...]:
        """The storages that anything in the step looks at, with their life."""
        return tuple(_storages(self))

    @cached_property
    def storage(self) -> dict[int, Storage]:
        return {storage.id: storage for storage in self.storages}

    @cached_property
    def kept(self) -> frozenset[int]:
        """Ids of the storages whose bytes the step does not own: given to it, or handed out by it."""
        owned_outside = {self.values[source.value].storage for source in self.sources}
        handed_out = {self.values[value].storage for value in self.outputs}
        handed_out |= {self.values[gradient.value].storage for gradient in self.gradients}
        return frozenset(owned_outside | handed_out)

    @cached_property
    def first_parts(self) -> tuple[Gradient, ...]:
        """For each source the gradient that comes first: autograd keeps it and adds later parts to it."""
        seen: set[int] = set()
        return tuple(g for g in self.gradients if not (g.of in seen or seen.add(g.of)))  # type: ignore[func-returns-value]

    @cached_property
    def addition_bytes(self) -> tuple[int, ...]:
        """For each gradient what autograd allocates to take it in: a later part is added to the first in a new one."""
        firsts = {id(gradient) for gradient in self.first_parts}
        return tuple(0 if id(g) in firsts else self.values[g.value].bytes for g in self.gradients)

    @property
    def saved_bytes(self) -> int:
        """Bytes made in the forward half that live on to the backward half."""
        return sum(s.bytes for s in self.storages if s.kind is Kind.SAVED and s.first_backward is not None)

    @property
    def parameter_bytes(self) -> int:
        return sum(s.bytes for s in self.storages if s.kind is Kind.PARAMETER)

    @property
    def gradient_bytes(self) -> int:
        return sum(s.bytes for s in self.storages if s.kind is Kind.GRADIENT)

    @cached_property
    def digest(self) -> str:
        """A hash of everything that decides what the step computes: ops, operands, layouts; not its name."""
        content = {key: part for key, part in self.to_dict().items() if key != "name"}
        text = json.dumps(content, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """The step as JSON-able data."""
        return {
            "name": self.name,
            "rewrites": list(self.rewrites),
            "values": [
                [v.name, v.storage, list(v.shape), list(v.stride), v.offset, str(v.dtype), v.device]
                for v in self.values
            ],
            "ops": [
                [
                    op.target,
                    [_plain(a) for a in op.args],
                    {k: _plain(v) for k, v in op.kwargs},
                    list(op.outputs),
                    op.half.value,
                    op.path,
                    list(op.writes),
                    op.again,
                ]
                for op in self.ops
            ],
            "sources": [[s.value, s.origin.value, s.name, s.requires_grad] for s in self.sources],
            "outputs": list(self.outputs),
            "tangents": list(self.tangents),
            "gradients": [[g.of, g.value] for g in self.gradients],
            "storage_bytes": list(self.storage_bytes),
        }

    def __repr__(self) -> str:
        return (
            f"Step({self.name or 'model'}: {self.num_forward} forward + {len(self.ops) - self.num_forward} backward "
            f"ops, {len(self.storages)} storages, {self.saved_bytes / 2**20:.1f} MiB saved)"
        )

    def __str__(self) -> str:
        return self.table()

    def table(self, *, max_rows: int | None = None) -> str:
        """A readable table: one row per op with what it makes, its bytes, its module path and source line."""
        from memfit.capture.table import step_table

        return step_table(self, max_rows=max_rows)


def _plain(arg: Any) -> Any:
    if isinstance(arg, Ref):
        return {"value": arg.value}
    if isinstance(arg, Ghost):
        return {"ghost": [list(arg.shape), list(arg.stride), str(arg.dtype), arg.device]}
    if isinstance(arg, (tuple, list)):
        return [_plain(item) for item in arg]
    if arg is None or isinstance(arg, (bool, int, float, str)):
        return arg
    return str(arg)


def _storages(step: Step) -> Iterator[Storage]:
    """Derive each storage's kind and life from the ops that touch its values."""
    values: dict[int, list[int]] = defaultdict(list)
    touches: dict[int, list[int]] = defaultdict(list)
    writers: dict[int, list[int]] = defaultdict(list)
    makers: dict[int, int] = {}
    for source in step.sources:
        values[step.values[source.value].storage].append(source.value)
    for index, op in enumerate(step.ops):
        for value in op.made:
            storage = step.values[value].storage
            if not values[storage]:
                makers[storage] = index
            values[storage].append(value)
        for value in (*op.reads(), *op.made):
            touches[step.values[value].storage].append(index)
        for storage in op.writes:
            writers[storage].append(index)

    given = {step.values[s.value].storage: s.origin for s in step.sources}
    gradients = {step.values[g.value].storage for g in step.first_parts}
    outputs = {step.values[value].storage for value in step.outputs}
    for storage, members in sorted(values.items()):
        forward = [i for i in touches[storage] if i < step.num_forward]
        backward = [i for i in touches[storage] if i >= step.num_forward]
        origin = given.get(storage)
        if origin in (Origin.INPUT, Origin.TANGENT):
            kind = Kind.INPUT
        elif origin is not None:
            kind = Kind.PARAMETER
        elif storage in gradients:
            kind = Kind.GRADIENT
        elif storage in outputs or (forward and backward):
            kind = Kind.SAVED
        else:
            kind = Kind.TRANSIENT
        yield Storage(
            id=storage,
            bytes=step.storage_bytes[storage],
            device=step.values[members[0]].device,
            kind=kind,
            values=tuple(dict.fromkeys(members)),
            maker=makers.get(storage),
            writers=tuple(writers[storage]),
            last_forward=max(forward, default=None),
            first_backward=min(backward, default=None),
            last_backward=max(backward, default=None),
        )
