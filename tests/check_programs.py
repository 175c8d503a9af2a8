"""Small steps, and legal programs for them written by hand: what the tests of the checker break."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence import Apply, seeded
from torch import nn

import memfit
from memfit.capture.step import Half, Origin, Step
from memfit.plan.check import IllegalProgram, Rule, check
from memfit.plan.program import (
    Boundary,
    FetchStart,
    FetchWait,
    Free,
    Give,
    Instruction,
    Program,
    Run,
    SendStart,
    SendWait,
)

# --- steps -----------------------------------------------------------------------------------------------------------


def net(**options: Any) -> nn.Module:
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, **options), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(36, 2))


def tied(m: Any, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(F.linear(F.relu(F.linear(x, m.w)), m.w.t()), 0.5) + m.b


def chain(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * m.w
    return y.add_(1).sigmoid_() * m.v * m.v


def views_of_one_buffer() -> nn.Module:
    flat = torch.randn(12)
    return Apply(lambda m, x: (x * m.w).sin() * m.v, w=nn.Parameter(flat[:6]), v=nn.Parameter(flat[6:]))


IMAGE, ROWS = (2, 3, 8, 8), (3, 6)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "net": (net, IMAGE),
    "net in evaluation": (lambda: net().eval(), IMAGE),
    "net without statistics": (lambda: net(track_running_stats=False), IMAGE),
    "tied": (lambda: Apply(tied, w=(5, 6), b=(6,)), ROWS),
    "chain": (lambda: Apply(chain, w=(6,), v=(6,)), ROWS),
    "written input": (lambda: Apply(lambda m, x: x.mul_(2).sin() * m.w, w=(6,)), ROWS),
    "tangent as gradient": (lambda: Apply(lambda m, x: x * m.w + m.b, w=(6,), b=(3, 6)), ROWS),
    "one buffer": (views_of_one_buffer, ROWS),
    "layer norm": (lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU()), ROWS),
    "two outputs": (lambda: Apply(lambda m, x: ((x * m.w).exp(), (x * m.v)[0]), w=(6,), v=(6,)), ROWS),
}


@cache
def step_of(name: str) -> Step:
    build, shape = MODELS[name]
    return memfit.capture(seeded(build), (torch.randn(shape),), name=name)


def op_of(step: Step, name: str, half: Half = Half.FORWARD, nth: int = 0) -> int:
    return [i for i, op in enumerate(step.ops) if op.half is half and op.target.split(".")[1] == name][nth]


def made_by(step: Step, op: int, nth: int = 0) -> int:
    return step.values[step.ops[op].made[nth]].storage


def source_of(step: Step, name: str) -> int:
    (found,) = [step.values[source.value].storage for source in step.sources if source.name == name]
    return found


def saved(step: Step) -> list[int]:
    """Storages that are made in the forward half, read in the backward half and handed out to nobody."""
    return [
        s.id
        for s in step.storages
        if s.maker is not None and s.maker < step.num_forward and s.first_backward is not None and s.id not in step.kept
    ]


# --- legal programs, by hand -----------------------------------------------------------------------------------------


def keep(step: Step) -> Program:
    """Run every op in order, give each gradient and free each storage as soon as that is legal."""
    return Program(step, tuple(_keep(step)))


def _keep(step: Step) -> Iterator[Instruction]:
    touched: dict[int, int] = {}
    for index, op in enumerate(step.ops):
        touched |= dict.fromkeys((step.values[v].storage for v in (*op.reads(), *op.made)), index)
    owned = {step.values[s.value].storage for s in step.sources if s.origin is not Origin.TANGENT}
    owned |= {step.values[v].storage for v in (*step.outputs, *(g.value for g in step.first_parts))}
    parts = [step.values[g.value].storage for g in step.gradients]
    last = {gradient.of: index for index, gradient in enumerate(step.gradients)}
    num_given = 0
    freed = set(owned)

    def ready(gradient: int, now: int) -> bool:
        writers = [i for i, op in enumerate(step.ops) if parts[gradient] in op.writes]
        of = step.gradients[gradient].of
        is_last = last[of] == gradient
        is_read_later = is_last and touched.get(step.values[of].storage, -1) > now
        # A gradient that later ops read would be cloned by autograd; as here, it may be given all the same.
        made = [i for i, op in enumerate(step.ops) for v in op.made if v == step.gradients[gradient].value]
        return max((*writers, *made), default=-1) <= now and not is_read_later

    for now in range(len(step.ops)):
        if now == step.num_forward:
            yield Boundary()
        yield Run(now)
        if now < step.num_forward:
            pending = set(parts)
        else:
            while num_given < len(parts) and ready(num_given, now):
                yield Give(num_given)
                num_given += 1
            pending = set(parts[num_given:])
        for storage in sorted(s for s, end in touched.items() if end <= now and s not in freed | pending):
            freed.add(storage)
            yield Free(storage)


def insert(program: Program, at: int, *instructions: Instruction) -> Program:
    return Program(program.step, (*program.instructions[:at], *instructions, *program.instructions[at:]))


def without(program: Program, *dropped: Instruction) -> Program:
    assert all(program.instructions.count(instruction) == 1 for instruction in dropped)
    return Program(program.step, tuple(i for i in program.instructions if i not in dropped))


def before(program: Program, anchor: Instruction, *instructions: Instruction) -> Program:
    return insert(program, program.instructions.index(anchor), *instructions)


def after(program: Program, anchor: Instruction, *instructions: Instruction) -> Program:
    return insert(program, program.instructions.index(anchor) + 1, *instructions)


def swapped(program: Program, first: int, second: int) -> Program:
    listed = list(program.instructions)
    listed[first], listed[second] = listed[second], listed[first]
    return Program(program.step, tuple(listed))


def offload(program: Program, storage: int, tier: str = "ram") -> Program:
    """Send the storage after its last use in the forward half, fetch it before its first in the backward half."""
    life = program.step.storage[storage]
    program = after(program, Run(life.last_forward), SendStart(storage, tier))
    program = before(program, Boundary(), SendWait(storage))
    return before(program, Run(life.first_backward), FetchStart(storage, tier), FetchWait(storage))


def recompute(program: Program, storage: int, *ops: int) -> Program:
    """Free the storage after its last use in the forward half, run the ops again before its first in the backward."""
    life = program.step.storage[storage]
    program = after(program, Run(life.last_forward), Free(storage))
    return before(program, Run(life.first_backward), *(Run(op, again=True) for op in ops))


def net_offloaded() -> Program:
    return offload(keep(step_of("net")), made_by(step_of("net"), op_of(step_of("net"), "convolution")))


def net_recomputed(name: str = "net") -> Program:
    """Batch norm's output, overwritten by ReLU, is made again by both; its saved statistics are kept."""
    step = step_of(name)
    norm = op_of(step, "native_batch_norm")
    return recompute(keep(step), made_by(step, norm), norm, op_of(step, "relu_"))


def chain_recomputed() -> Program:
    step = step_of("chain")
    product = op_of(step, "mul")
    return recompute(keep(step), made_by(step, product), product, op_of(step, "add_"), op_of(step, "sigmoid_"))


LEGAL: dict[str, Callable[[], Program]] = {
    **{f"keep {name}": (lambda name=name: keep(step_of(name))) for name in MODELS},
    "net offloaded": net_offloaded,
    "net recomputed": net_recomputed,
    "net in evaluation recomputed": lambda: net_recomputed("net in evaluation"),
    "net without statistics recomputed": lambda: net_recomputed("net without statistics"),
    "chain recomputed": chain_recomputed,
}


def broken(program: Program, rule: Rule, text: str, **options: Any) -> IllegalProgram:
    """The error that the checker raises: of this rule, with this text."""
    with pytest.raises(IllegalProgram) as caught:
        check(program, **options)
    assert caught.value.rule is rule and text in str(caught.value), str(caught.value)
    return caught.value
