"""Turn a Step into a Program: where each storage is freed and each gradient handed over."""

from __future__ import annotations

from memfit.capture.step import Origin, Step
from memfit.plan.program import Boundary, Free, Give, Instruction, Program, Run


def lower_keep(step: Step) -> Program:
    """Run every op once, in order; free every storage right after its last use; hand gradients over when eager does."""
    last_touch: dict[int, int] = {}
    for index, op in enumerate(step.ops):
        for value in (*op.reads(), *op.made):
            last_touch[step.values[value].storage] = index
    tangents = {step.values[s.value].storage for s in step.sources if s.origin is Origin.TANGENT}
    frees: dict[int, list[int]] = {}
    gradients = {step.values[g.value].storage for g in step.gradients}
    for storage, index in last_touch.items():
        # The caller owns what it gave and what it is given. Tangents are ours once autograd has handed them over.
        if storage not in step.kept or (storage in tangents and storage not in gradients):
            frees.setdefault(index, []).append(storage)

    gives: dict[int, list[int]] = {}
    earliest = step.num_forward
    for index, gradient in enumerate(step.gradients):
        # Not before its maker has run, and in eager's order: a later gradient never overtakes an earlier one.
        maker = step.maker_of.get(gradient.value, -1)
        earliest = max(earliest, step.num_forward + gradient.after, maker + 1)
        gives.setdefault(earliest, []).append(index)

    instructions: list[Instruction] = []
    for index in range(len(step.ops) + 1):
        if index == step.num_forward:
            instructions.append(Boundary())
        instructions += [Give(gradient) for gradient in gives.get(index, ())]
        if index < len(step.ops):
            instructions.append(Run(index))
            instructions += [Free(storage) for storage in sorted(frees.get(index, ()))]
    return Program(step, tuple(instructions))
