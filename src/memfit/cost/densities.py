"""What share of a tensor's elements is not zero, where nobody has looked: assumed, by the ops that made it.

ReLU leaves zeros, max-pooling keeps the larger of them, dropout adds more. How many depends on weights and data; a
model that is fitted is looked at instead (run/densities.py).
"""

from __future__ import annotations

from memfit.capture.step import Op, Ref, Step

RELU = 0.4
"""After ReLU: Gist and others report 40 to 70 % of zeros; the notes of its figures assume 60 %."""
POOLED = 0.6
"""After max-pooling of that."""

_RELUS = ("aten.relu.default", "aten.relu_.default")
_POOLS = ("aten.max_pool2d_with_indices.default", "aten.max_pool2d.default")
_PRODUCTS = ("aten.mul.Tensor", "aten.mul_.Tensor")


def assumed_densities(step: Step, *, relu: float = RELU, pooled: float = POOLED) -> dict[int, float]:
    """The share of non-zeros by storage, for those of the forward half that are known to have zeros."""
    found: dict[int, float] = {}
    noises = _kept_by_dropout(step)
    for op in step.ops[: step.num_forward]:
        if not op.made:
            continue
        made = step.values[op.made[0]].storage
        read = [step.values[v].storage for v in op.reads()]
        if op.target in _RELUS:
            found[made] = pooled if _is_pooled(step, op) else relu
        elif op.target in _POOLS and read[0] in found:
            found[made] = pooled
        elif op.target in _PRODUCTS and len(read) == 2 and read[1] in noises:
            found[made] = found.get(read[0], 1.0) * noises[read[1]]
        elif op.target == "aten.cat.default":
            sizes = [step.values[v].num_elements for v in op.reads()]
            count = sum(found.get(s, 1.0) * size for s, size in zip(read, sizes, strict=True))
            if any(s in found for s in read) and any(sizes):
                found[made] = count / sum(sizes)
        elif made not in read or op.writes:
            found.pop(made, None)  # a view changes nothing; anything else may fill the zeros in
    return found


def _is_pooled(step: Step, op: Op) -> bool:
    """True if a ReLU's operand comes from max-pooling: where the two are swapped."""
    operand = next(op.reads())
    maker = step.storage[step.values[operand].storage].maker
    return maker is not None and step.ops[maker].target in _POOLS


def _kept_by_dropout(step: Step) -> dict[int, float]:
    """The storages of dropout's noise, each with the chance that an element is not zero."""
    found = {}
    for op in step.ops[: step.num_forward]:
        if op.target == "aten.bernoulli_.float" and isinstance(op.args[0], Ref):
            chance = op.args[1] if len(op.args) > 1 else 0.5
            found[step.values[op.made[0]].storage] = float(chance)
    return found
