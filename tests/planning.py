"""Steps and prices for tests of planning: small chains whose seconds and bytes can be counted by hand."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import nn

import memfit
from memfit import zoo
from memfit.capture.rewrites import rewrite
from memfit.capture.rewrites.proof import AssumedProofs
from memfit.capture.step import Step
from memfit.capture.trace import capture
from memfit.cost.costs import Costs, Link, OpCost
from memfit.cost.signature import signature
from memfit.report.step_module import loss_of

SIDE = 256
TENSOR = SIDE * SIDE * 4  # bytes of every tensor of a chain
SECOND = 10**12


class Chain(nn.Module):
    """x * w, then `length` times tanh, then a sum: backward reads the result of every tanh."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(SIDE, SIDE))
        self.length = length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.w
        for _ in range(self.length):
            y = y.tanh()
        return y.sum()


def chain(length: int) -> Step:
    """The step of a Chain as eager runs it: nothing in place."""
    return memfit.capture(Chain(length), (torch.zeros(SIDE, SIDE),))


def tanh_storages(step: Step) -> list[int]:
    """The storages of the tanhs of a chain, first to last."""
    return [step.values[op.made[0]].storage for op in step.ops if op.target == "aten.tanh.default"]


def priced(
    step: Step,
    seconds: Mapping[str, float],
    *,
    links: tuple[Link, ...] = (),
    workspace_bytes: Mapping[str, int] | None = None,
    memory_bytes: int | None = None,
) -> Costs:
    """Costs by the name of the op (`tanh`); what is not named takes no time."""
    by_signature = {}
    for op in step.ops:
        name = op.target.split(".")[1]
        cost = OpCost(round(seconds.get(name, 0) * SECOND), (workspace_bytes or {}).get(name, 0))
        by_signature[signature(step, op)] = cost
    return Costs("test", by_signature, {link.tier: link for link in links}, memory_bytes=memory_bytes)


@functools.lru_cache(maxsize=8)
def planned_network(name: str, *, batch: int, image: int | None = None, rewritten: bool = True) -> Step:
    """A network of the zoo with its loss, captured without making any tensor of its size; the same one every time."""
    example = zoo.load(name, batch=batch, image=image, device="meta")
    step = capture(
        example.model.train(),
        example.args,
        example.kwargs,
        loss=lambda output, *targets: loss_of(output, example.loss, targets),
        targets=example.targets,
        device="cpu",
        name=name,
    )
    return rewrite(step, proofs=AssumedProofs()) if rewritten else step
