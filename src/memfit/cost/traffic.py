"""The bytes one op moves through a device's memory: what it truly reads, and what it writes."""

from __future__ import annotations

from memfit.capture.needs import Need
from memfit.capture.schemas import named_operands, operand_needs
from memfit.capture.step import Op, Step, refs_in
from memfit.torch_internals import written_arguments

# Only a header changes: no kernel runs although the schema says that `self` is written.
_HEADERS = "as_strided_ detach_ squeeze_ swapaxes_ swapdims_ t_ transpose_ unsqueeze_"
# Memory is set aside and nobody fills it.
_EMPTY = "empty empty_like empty_permuted empty_strided new_empty new_empty_strided"
_NO_KERNEL = frozenset(f"aten.{name}" for name in (*_HEADERS.split(), *_EMPTY.split()))

# `self` is written without being read.
_DRAWS = "bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_"
_OVERWRITES = frozenset(f"aten.{name}" for name in ("copy_", "fill_", "zero_", *_DRAWS.split()))

# Of this operand only the elements are read that another one points at.
_PICKED = {
    "aten.embedding": "weight",
    "aten.gather": "self",
    "aten.index": "self",
    "aten.index_select": "self",
    "aten.nll_loss_forward": "self",
    "aten.nll_loss2d_forward": "self",
}


def runs_no_kernel(step: Step, op: Op) -> bool:
    """True if the op moves nothing: it makes views of storages it was given, or memory that is not filled."""
    if _packet(op) in _NO_KERNEL:
        return True
    given = {step.values[value].storage for value in op.reads()}
    return bool(op.made) and not op.writes and all(step.values[value].storage in given for value in op.made)


def traffic_bytes(step: Step, op: Op) -> int:
    """Bytes read plus bytes written, each distinct tensor once."""
    return 0 if runs_no_kernel(step, op) else _read_bytes(step, op) + _written_bytes(step, op)


def _read_bytes(step: Step, op: Op) -> int:
    unread = written_arguments(op.target) & {name for name, _ in op.kwargs}  # out=
    if _packet(op) in _OVERWRITES:
        unread |= {"self"}
    picked_from = _PICKED.get(_packet(op))
    whole: set[int] = set()
    picked: set[int] = set()
    for name, value, need in operand_needs(op, step.values):
        if need is not Need.SHAPE and name not in unread:
            (picked if name == picked_from else whole).add(value)
    whole_bytes = _distinct_bytes(step, whole)
    if not picked:
        return whole_bytes
    # As many as come out, or, where they are summed up at once, as there are indices.
    return whole_bytes + min(
        _distinct_bytes(step, picked), max(sum(step.values[v].bytes for v in op.made), whole_bytes)
    )


def _written_bytes(step: Step, op: Op) -> int:
    given = {step.values[value].storage for value in op.reads()}
    results = {v for v in op.made if step.values[v].storage not in given or step.values[v].storage in op.writes}
    # Running statistics are written but not returned.
    returned = {step.values[value].storage for value in results}
    silent = set(op.writes) - returned
    if silent:
        named = named_operands(op)
        targets = [value for name in written_arguments(op.target) for value in refs_in(named.get(name))]
        results |= {value for value in targets if step.values[value].storage in silent}
    return _distinct_bytes(step, results)


def _distinct_bytes(step: Step, values: set[int]) -> int:
    """Bytes behind the values: equal views count once, and so do the copies that an expanded one seems to hold."""
    found: dict[tuple[object, ...], int] = {}
    for id_ in values:
        value = step.values[id_]
        num_bytes = value.dtype.itemsize
        for size, stride in zip(value.shape, value.stride, strict=True):
            num_bytes *= size if stride or not size else 1
        # Windows that overlap (unfold) hold no more than their storage.
        found[value.storage, value.offset, value.shape, value.stride] = min(
            num_bytes, step.storage_bytes[value.storage]
        )
    return sum(found.values())


def _packet(op: Op) -> str:
    return op.target.rpartition(".")[0]
