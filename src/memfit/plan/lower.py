"""Turn a Step into a Program: where each storage is freed and each gradient handed over."""

from __future__ import annotations

from memfit.capture.step import Origin, Step
from memfit.plan.program import Boundary, Free, Give, Instruction, Program, Run


def lower_keep(step: Step) -> Program:
    """Run every op once, in order; free every storage right after its last use; hand gradients over when eager does."""
    last_touch: dict[int, int] = {}
    last_write: dict[int, int] = {}
    for index, op in enumerate(step.ops):
        for value in (*op.reads(), *op.made):
            last_touch[step.values[value].storage] = index
        last_write.update(dict.fromkeys(op.writes, index))
    tangents = {step.values[s.value].storage for s in step.sources if s.origin is Origin.TANGENT}
    gives: dict[int, list[int]] = {}
    given: dict[int, int] = {}
    earliest = step.num_forward
    last_part = {gradient.of: index for index, gradient in enumerate(step.gradients)}
    for index, gradient in enumerate(step.gradients):
        # Not before it is whole (its storage may be written through a view), and in eager's order: a later gradient
        # never overtakes an earlier one. The last part completes the gradient, and a hook may then write to the
        # parameter: nothing may read it afterwards.
        earliest = max(earliest, step.maker_of.get(gradient.value, -1) + 1)
        earliest = max(earliest, last_write.get(step.values[gradient.value].storage, -1) + 1)
        if last_part[gradient.of] == index:
            earliest = max(earliest, last_touch.get(step.values[gradient.of].storage, -1) + 1)
        if index == len(step.gradients) - 1:
            earliest = len(step.ops)  # what is left is there for its effects, and runs before backward is over
        gives.setdefault(earliest, []).append(index)
        given[step.values[gradient.value].storage] = earliest

    # The caller owns what it gave and what it is given. Tangents are ours once autograd has handed them over, and a
    # later part of a gradient is gone once it has been added to the first.
    sources = {step.values[s.value].storage for s in step.sources}
    stays = {step.values[v].storage for v in step.outputs} | {step.values[g.value].storage for g in step.first_parts}
    stays |= sources - tangents
    frees: dict[int, list[int]] = {}
    frees_after_give: dict[int, list[int]] = {}
    for storage, index in last_touch.items():
        if storage in stays:
            continue
        if given.get(storage, -1) > index:
            frees_after_give.setdefault(given[storage], []).append(storage)
        else:
            frees.setdefault(index, []).append(storage)

    instructions: list[Instruction] = []
    for index in range(len(step.ops) + 1):
        if index == step.num_forward:
            instructions.append(Boundary())
        instructions += [Give(gradient) for gradient in gives.get(index, ())]
        instructions += [Free(storage) for storage in sorted(frees_after_give.get(index, ()))]
        if index < len(step.ops):
            instructions.append(Run(index))
            instructions += [Free(storage) for storage in sorted(frees.get(index, ()))]
    return Program(step, tuple(instructions))
