"""vdnn-dyn: as little offloading and as fast algorithms as fit (Rhu et al. 2016), found by trying in a fixed order.

(p) is the fastest algorithm of every convolution, (m) the one with the smallest workspace. The order is the published
one; the first trial that fits is taken:

1.  all(m): if that does not fit, the network cannot be trained;
2.  none(p), conv(p), all(p), where none sends nothing;
3.  conv and then all, each convolution with the fastest algorithm that fits where it runs, forward and backward each
    by itself and without looking back;
4.  all(m), known to fit.

A trial is an account of one step. Which algorithms there are is asked of the costs; where there is only one, as on this
machine, (p) and (m) are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from memfit.capture.step import Step
from memfit.cost.costs import Costs, OpCost
from memfit.plan.decisions import Decisions
from memfit.plan.ledger import Ledger
from memfit.plan.lower import lower
from memfit.plan.offloading.layers import Layers
from memfit.plan.offloading.way_out import tier_of
from memfit.plan.policies.policy import Decided, Policy
from memfit.plan.policies.vdnn import offloads
from memfit.plan.program import Run

Picked = Mapping[int, str]


@dataclass(frozen=True)
class Trial:
    """One set of feature maps to send, and what is live beside any workspace when each op runs."""

    name: str
    step: Step
    costs: Costs
    decisions: Decisions

    @cached_property
    def _ledger(self) -> Ledger:
        return Ledger.of(lower(self.step, self.decisions, self.costs))

    @cached_property
    def live_bytes(self) -> list[int]:
        """By op; workspaces are not in it, so that algorithms can be chosen on top."""
        found = [0] * len(self.step.ops)
        for entry in self._ledger.entries:
            if isinstance(entry.instruction, Run):
                found[entry.instruction.op] = entry.total_bytes
        return found

    def peak_bytes(self, picked: Picked) -> int:
        """The most bytes with these algorithms."""
        prices = self.costs.picking(picked).of(self.step)
        peak = max((live + p.workspace_bytes for live, p in zip(self.live_bytes, prices, strict=True)), default=0)
        return max(peak, self._ledger.peak_bytes)  # which may be where gradients are added up


def fastest(choices: Mapping[int, Mapping[str, OpCost]]) -> Picked:
    """(p): for every op that has a choice the algorithm that takes least time."""
    return {op: min(ways, key=lambda way: ways[way].time_ps) for op, ways in choices.items()}


def smallest(choices: Mapping[int, Mapping[str, OpCost]]) -> Picked:
    """(m): for every op that has a choice the algorithm with the smallest workspace."""
    return {op: min(ways, key=lambda w: (ways[w].workspace_bytes, ways[w].time_ps)) for op, ways in choices.items()}


def greedy(trial: Trial, choices: Mapping[int, Mapping[str, OpCost]], limit_bytes: int) -> Picked:
    """For every op the fastest algorithm that fits where it runs, or the smallest if none does."""
    picked = dict(smallest(choices))
    for op, ways in choices.items():
        room = limit_bytes - trial.live_bytes[op]
        fitting = [way for way in ways if ways[way].workspace_bytes <= room]
        if fitting:
            picked[op] = min(fitting, key=lambda way: ways[way].time_ps)
    return picked


def decide(step: Step, costs: Costs, budget_bytes: int | None) -> Decided:
    """The first trial of the sequence that fits; if none does, all(m), which then does not fit."""
    layers, tier, choices = Layers.of(step), tier_of(costs), costs.choices(step)
    none = Trial("none", step, costs, {})
    conv = Trial("conv", step, costs, offloads(layers, tier, convolutions_only=True))
    all_ = Trial("all", step, costs, offloads(layers, tier, convolutions_only=False))
    limit = 1 << 62 if budget_bytes is None else budget_bytes

    def decided(trial: Trial, picked: Picked, number: str, algorithms: str) -> Decided:
        how = f"vdnn-dyn: step {number}, {trial.name}{algorithms}"
        return Decided(trial.decisions, costs.picking(picked), how)

    least = smallest(choices)
    if all_.peak_bytes(least) > limit:
        return decided(all_, least, "1", "(m): does not fit, so nothing does")
    sequence: list[tuple[str, Trial, str, Callable[[Trial], Picked]]] = [
        ("2a", none, "(p)", lambda _: fastest(choices)),
        ("2b", conv, "(p)", lambda _: fastest(choices)),
        ("2c", all_, "(p)", lambda _: fastest(choices)),
        ("3a", conv, "+greedy", lambda trial: greedy(trial, choices, limit)),
        ("3b", all_, "+greedy", lambda trial: greedy(trial, choices, limit)),
    ]
    for number, trial, algorithms, pick in sequence:
        picked = pick(trial)
        if trial.peak_bytes(picked) <= limit:
            return decided(trial, picked, number, algorithms)
    return decided(all_, least, "4", "(m)")


VDNN_DYN = Policy(
    "vdnn-dyn",
    "send as little and compute as fast as fits, found by trying in order (vDNN, Rhu et al. 2016)",
    decide,
    asks_costs=True,
    fills_device=True,
)
