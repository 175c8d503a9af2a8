"""A Step taken apart for editing, and closed again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from memfit.capture.step import Half, Op, Ref, Step, Value, map_refs
from memfit.torch_internals import has_effect


class Draft:
    """Mutable ops and values of a step; `close` drops what nobody needs any more."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.ops: list[Op | None] = list(step.ops)
        self.values: list[Value] = list(step.values)
        self.storage_bytes: list[int] = list(step.storage_bytes)
        self.outputs = list(step.outputs)
        self.gradients = list(step.gradients)
        self._names = {value.name for value in step.values}
        self._before: dict[int, list[Op]] = defaultdict(list)

    def insert_before(self, index: int, op: Op) -> None:
        """Put an op in front of the one of that index."""
        self._before[index].append(op)

    def new_value(self, like: Value, name: str) -> Value:
        """A value with the layout of another, in a storage of its own."""
        self.storage_bytes.append(like.bytes)
        return self._add(replace(like, storage=len(self.storage_bytes) - 1, offset=0), name)

    def new_view(self, of: Value, like: Value, name: str) -> Value:
        """A value with the layout of one, offset included, in the storage of another."""
        return self._add(replace(like, storage=of.storage), name)

    def _add(self, value: Value, name: str) -> Value:
        fresh, number = name, 1
        while fresh in self._names:
            number += 1
            fresh = f"{name}_{number}"
        self._names.add(fresh)
        self.values.append(replace(value, id=len(self.values), name=fresh))
        return self.values[-1]

    def merge_storages(self, into: dict[int, int]) -> None:
        """Everything that looked at one storage looks at another."""
        self.values = [replace(v, storage=into[v.storage]) if v.storage in into else v for v in self.values]
        self.ops = [
            replace(op, writes=tuple(into.get(s, s) for s in op.writes)) if op is not None and op.writes else op
            for op in self.ops
        ]

    def close(self, *, substitute: dict[int, int] | None = None) -> Step:
        """The edited step: values replaced as told, dead ops gone, ops in order."""
        table = substitute or {}

        def final(value: int) -> int:
            while value in table:
                value = table[value]
            return value

        ops = [op for _, op in self._in_order()]
        if table:
            ops = [
                replace(
                    op,
                    args=map_refs(op.args, lambda ref: Ref(final(ref.value))),
                    kwargs=tuple((k, map_refs(v, lambda ref: Ref(final(ref.value)))) for k, v in op.kwargs),
                )
                for op in ops
            ]
        outputs = tuple(final(value) for value in self.outputs)
        gradients = tuple(replace(g, value=final(g.value)) for g in self.gradients)
        wanted = {*outputs, *(gradient.value for gradient in gradients)}
        return replace(
            self.step,
            ops=tuple(_alive(ops, wanted)),
            values=tuple(self.values),
            outputs=outputs,
            gradients=gradients,
            storage_bytes=tuple(self.storage_bytes),
        )

    def renumbered(self, closed: Step) -> list[int]:
        """For each op of the step taken apart its number in the one it was closed to, or that of the next op left.

        For drafts closed without substitutes, which leave ops as they are.
        """
        number = {id(op): index for index, op in enumerate(closed.ops)}
        found = [len(closed.ops)] * len(self.ops)
        following = len(closed.ops)
        for index, op in reversed(list(self._in_order())):
            following = number.get(id(op), following)
            if index is not None:
                found[index] = following
        return found

    def _in_order(self) -> Iterator[tuple[int | None, Op]]:
        """The ops that are left, each with its number in the step taken apart; None for those put in."""
        for index, op in enumerate(self.ops):
            # Between the halves, what is put into the forward one comes first.
            put_in = sorted(self._before.get(index, ()), key=lambda new: new.half is Half.BACKWARD)
            yield from ((None, new) for new in put_in)
            if op is not None:
                yield index, op


def touched_bytes(step: Step, op: Op) -> int:
    """Bytes of all storages that the op reads and makes."""
    return sum(step.storage_bytes[s] for s in {step.values[value].storage for value in (*op.reads(), *op.made)})


def with_operand(op: Op, name: str, operand: Any) -> Op:
    """The op with one argument, named as in the schema, replaced."""
    from memfit.torch_internals import argument_names

    position = argument_names(op.target).index(name)
    if position < len(op.args):
        return replace(op, args=(*op.args[:position], operand, *op.args[position + 1 :]))
    return replace(op, kwargs=tuple((k, operand if k == name else v) for k, v in op.kwargs))


def _alive(ops: list[Op], wanted: set[int]) -> list[Op]:
    """The ops whose results somebody reads, or that do more than make a result."""
    needed = set(wanted)
    kept: list[Op] = []
    for op in reversed(ops):
        effect = bool(op.writes) or (not op.target.startswith("memfit.") and has_effect(op.target))
        if effect or needed & set(op.made):
            kept.append(op)
            needed.update(op.reads())
    kept.reverse()
    return kept
