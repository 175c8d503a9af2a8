"""What may be run again in the backward half, and in which form.

[Note: versions]
A step keeps eager's in-place writes, so one storage holds several versions over time. An op may be run again only if
what it reads is then what it read the first time: every storage it reads was read at its last version, in both halves,
or is the very storage that the re-run is rebuilding. That is a property of the op alone, whatever else is decided.
A storage can be recomputed if all its forward writers can be run again: they are re-run in order.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from memfit.capture.rerun_form import rerun_form
from memfit.capture.step import Op, Origin, Step, refs_in

# Their kernels add in an order that depends on timing, on some device or other.
_NOT_DETERMINISTIC = (
    "aten.index_add",
    "aten.index_put",
    "aten.scatter_add",
    "aten.scatter_reduce",
    "aten.put_",
    "aten.histc",
    "aten.bincount",
    "aten._embedding_bag",
    "aten._ctc_loss",
    "aten._cudnn_ctc_loss",
    "aten.kthvalue",
    "aten.cumsum",
    "aten.segment_reduce",
)


@dataclass(frozen=True)
class Reruns:
    """For one step: which ops may run again, which storages may be recomputed, offloaded or encoded, and why not."""

    step: Step

    @cached_property
    def sources(self) -> frozenset[int]:
        return frozenset(self.step.values[source.value].storage for source in self.step.sources)

    @cached_property
    def owned(self) -> tuple[int, ...]:
        """Storages the step makes in its forward half and hands to nobody: those that can be decided about."""
        outside = self.step.kept
        return tuple(
            s.id
            for s in self.step.storages
            if s.maker is not None and s.maker < self.step.num_forward and s.id not in outside
        )

    @cached_property
    def writers(self) -> dict[int, tuple[int, ...]]:
        """For each owned storage the forward ops that make and write it, in order."""
        found: dict[int, list[int]] = {s: [] for s in self.owned}
        for index, op in enumerate(self.step.ops[: self.step.num_forward]):
            for storage in sorted({*op.writes, *self.makes[index]}):
                if storage in found:
                    found[storage].append(index)
        return {storage: tuple(ops) for storage, ops in found.items()}

    @cached_property
    def makes(self) -> tuple[tuple[int, ...], ...]:
        """For each op the storages that are new with it, ascending."""
        made: dict[int, set[int]] = defaultdict(set)
        for storage in self.step.storages:
            if storage.maker is not None:
                made[storage.maker].add(storage.id)
        return tuple(tuple(sorted(made[index])) for index in range(len(self.step.ops)))

    @cached_property
    def touches(self) -> tuple[tuple[int, ...], ...]:
        """For each op the storages it reads, writes or makes, ascending."""
        values = self.step.values
        return tuple(tuple(sorted({values[v].storage for v in (*op.reads(), *op.made)})) for op in self.step.ops)

    @cached_property
    def rerun_touches(self) -> tuple[tuple[int, ...], ...]:
        """The same for each forward op in the form it is re-run in, without the storages it then makes."""
        values = self.step.values
        found = []
        for index, op in enumerate(self.step.ops[: self.step.num_forward]):
            form = rerun_form(op)
            written = {values[v].storage for v in form.made} - set(self.makes[index])
            found.append(tuple(sorted({values[v].storage for v in form.reads()} | written)))
        return tuple(found)

    @cached_property
    def rerun_makes(self) -> tuple[tuple[int, ...], ...]:
        """For each forward op the storages that are new when it is run again, ascending."""
        values = self.step.values
        found = []
        for index, op in enumerate(self.step.ops[: self.step.num_forward]):
            made = {values[v].storage for v in rerun_form(op).made}
            found.append(tuple(storage for storage in self.makes[index] if storage in made))
        return tuple(found)

    @cached_property
    def _last_write(self) -> dict[int, int]:
        return {storage: index for index, op in enumerate(self.step.ops) for storage in op.writes}

    @cached_property
    def obstacles(self) -> tuple[str, ...]:
        """For each forward op why it cannot be run again, or nothing."""
        return tuple(self._obstacle(index) for index in range(self.step.num_forward))

    def _obstacle(self, index: int) -> str:
        op = self.step.ops[index]
        if op.random:
            return f"{op.target} draws random numbers"
        if op.target.startswith(_NOT_DETERMINISTIC):
            return f"{op.target} is not deterministic on every device"
        form = rerun_form(op)
        written = set(form.writes)
        if written & self.sources:
            return f"{op.target} writes a buffer, a parameter or an input"
        if len(written) > 1 or (written and self.makes[index]):
            return f"{op.target} writes in place and makes something else besides"
        for storage in self.rerun_touches[index]:
            if storage not in written and self._last_write.get(storage, -1) > index:
                return f"{op.target} reads something that is overwritten later"
        return ""

    @cached_property
    def recomputable(self) -> frozenset[int]:
        """The owned storages that can be made again."""
        return frozenset(s for s in self.owned if not self.why_not_recompute(s))

    def why_not_recompute(self, storage: int) -> str:
        """What stands in the way of recomputing it, or nothing."""
        if storage not in self.writers:
            return "it is not made by the forward half, or it is handed to the caller"
        if any(self.step.values[v].dtype.is_complex for v in self.step.storage[storage].values):
            return "it is complex: lazily conjugated views cannot be rebuilt from bytes"
        if any(storage in self.makes[w] and storage not in self.rerun_makes[w] for w in self.writers[storage]):
            return "its maker is re-run from it"
        return next((self.obstacles[w] for w in self.writers[storage] if self.obstacles[w]), "")

    def why_not_offload(self, storage: int) -> str:
        """What stands in the way of sending it away, or nothing."""
        known = self.step.storage.get(storage)
        if known is None or known.id not in self.writers:
            return "it is not made by the forward half, or it is handed to the caller"
        if any(self.step.values[v].dtype.is_complex for v in known.values):
            return "it is complex: lazily conjugated views cannot be rebuilt from bytes"
        return "it has no bytes" if known.bytes == 0 else ""


def tangent_storages(step: Step) -> frozenset[int]:
    """The storages that arrive with the boundary."""
    return frozenset(step.values[s.value].storage for s in step.sources if s.origin is Origin.TANGENT)


def reads_of(op: Op) -> tuple[int, ...]:
    """The values an op reads, each once, in the order of its arguments."""
    return tuple(dict.fromkeys(v for _, arg in op.operands() for v in refs_in(arg)))
