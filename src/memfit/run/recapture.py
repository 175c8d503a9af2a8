"""Another backward half of a captured call: what it is captured from, and what it takes over from the first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from memfit.capture.rewrites.chunks import is_in_chunks, way_of
from memfit.capture.step import Step
from memfit.capture.structure import put_together, take_apart
from memfit.capture.trace import Layout
from memfit.cost.costs import Costs
from memfit.plan.decisions import Decision, Encode, EncodeThenOffload, Offload
from memfit.plan.encode import encode_step
from memfit.run.compiled import Compiled
from memfit.torch_internals import fake_mode


def decisions_as_in(like: Compiled, step: Step) -> dict[int, Decision]:
    """The same decisions for a step whose forward half is the same: storages are known by their first value's name."""
    assert like.planned is not None and like.planned.plan is not None
    plan = like.planned.plan
    codes = encode_step(plan.step, plan.decisions).codes
    made: dict[int, Decision] = {}
    for s, d in plan.decisions.items():
        d = replace(d, as_in=codes[s]) if isinstance(d, Encode | EncodeThenOffload) else d
        # Ops of the backward half that it was to be back by have other numbers there, or are not there at all.
        made[s] = replace(d, back_by=0) if isinstance(d, Offload | EncodeThenOffload) else d
    by_name = {plan.step.values[plan.step.storage[s].values[0]].name: d for s, d in made.items()}
    names = {storage.id: step.values[storage.values[0]].name for storage in step.storages}
    return {storage: by_name[name] for storage, name in names.items() if name in by_name}


def ways_as_in(like: Compiled, step: Step, costs: Costs) -> dict[int, str]:
    """The ops in chunks of a step whose forward half is the same: known by the name of what they make.

    In another backward half that may be another op: only ways that it has count.
    """
    known = like.program.step
    by_name = {known.values[op.made[0]].name: way_of(op) for op in known.ops if is_in_chunks(op)}
    choices = costs.choices(step) if by_name else {}
    names = {index: step.values[step.ops[index].made[0]].name for index in choices}
    return {index: by_name[name] for index, name in names.items() if by_name.get(name, "") in choices[index]}


def stand_ins(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The call's arguments with floating-point tensors replaced by fakes, so that keeping them keeps no bytes.

    Small integer tensors are copied: the model may branch on their values.
    """
    tensors, skeleton = take_apart((args, kwargs))
    kept: list[torch.Tensor] = []
    for tensor in tensors:
        with torch.no_grad():
            if tensor.is_floating_point() or tensor.is_complex() or tensor.numel() > 1 << 20:
                with fake_mode():
                    fresh = Layout.of(tensor).fake().detach()
            else:
                fresh = tensor.detach().clone()
        kept.append(fresh.requires_grad_(tensor.requires_grad))
    return put_together(skeleton, kept)
