"""What the backward half needs of each storage that the forward half made: the union of all its uses.

For accounts of other systems, which decide by needs alone. What memfit may encode, plan/readings.py says.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from memfit.capture.needs import Need
from memfit.capture.schemas import visible_arguments
from memfit.capture.step import Step
from memfit.codecs.pool import pool_of


@dataclass(frozen=True)
class BackwardNeeds:
    """The needs of one step's backward half, by storage."""

    step: Step

    def of(self, storage: int) -> frozenset[Need]:
        """What is needed of it; only its shape if backward does not read it. Two-valued noise of dropout is a MASK."""
        needs = self._by_storage.get(storage, frozenset({Need.SHAPE}))
        return frozenset({Need.MASK}) if Need.VALUE in needs and self._is_noise(storage) else needs

    def num_slots(self, storage: int) -> int:
        """For winners of max-pools, how many elements the largest of their windows has."""
        step = self.step
        readers = {index for value in step.storage[storage].values for index in step.readers.get(value, ())}
        found = (pool_of(step.ops[i].target, visible_arguments(step.ops[i], step.values)) for i in readers)
        return max((math.prod(pool.kernel) for pool in found if pool is not None), default=1)

    @cached_property
    def _by_storage(self) -> dict[int, frozenset[Need]]:
        step = self.step
        found: dict[int, set[Need]] = defaultdict(set)
        for use in step.uses:
            storage = step.values[use.value].storage
            if use.op >= step.num_forward and not self._is_view(use.op, storage):
                found[storage].add(use.need)
        return {storage: frozenset(needs) for storage, needs in found.items()}

    def _is_view(self, index: int, storage: int) -> bool:
        """True if the op only looks at the storage in another layout: whoever reads the view is counted."""
        op = self.step.ops[index]
        return bool(op.made) and not op.writes and all(self.step.values[v].storage == storage for v in op.made)

    def _is_noise(self, storage: int) -> bool:
        """True for what dropout on CPU multiplies by: zeros, and one other number."""
        targets = [self.step.ops[writer].target for writer in self.step.storage[storage].writers]
        return targets[-2:] == ["aten.bernoulli_.float", "aten.div_.Scalar"]
