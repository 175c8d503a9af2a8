"""Small random steps with prices, and every plan there is for each: what a bound must never be above."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import nn

import memfit
from memfit.capture.rewrites import rewrite
from memfit.capture.rewrites.proof import AssumedProofs
from memfit.capture.step import Step
from memfit.codecs.registry import LOSSLESS_NAMES
from memfit.cost.costs import CodecRate, Costs, Link, OpCost, free_of_charge, priced_calls
from memfit.cost.signature import signature
from memfit.plan.decisions import Encode
from memfit.plan.encode import encode_step, why_not_encode
from memfit.plan.evaluate import Evaluator
from memfit.plan.problem import AWAY, DROP, KEEP, Problem

HOST = Link("host", "out", "back", 12e9, 11e9, 1e-6)
DISK = Link("disk", "disk", "disk", 2e9, 3e9, 1e-6)
DRAGS = {"send_drag": 0.4, "fetch_drag": 0.7}
LINKS = {
    "none": {},
    "host": {"host": HOST},
    "disk": {"disk": DISK},
    "disk, compute slows": {"disk": replace(DISK, **DRAGS)},
    "both, compute slows": {"disk": replace(DISK, **DRAGS), "host": replace(HOST, send_drag=0.1)},
    "one bus": {
        "disk": replace(DISK, send_channel="bus", fetch_channel="bus"),
        "host": replace(HOST, send_channel="bus", fetch_channel="bus"),
    },
}


# --- small steps -----------------------------------------------------------------------------------------------------


class Drawn(nn.Module):
    """Layers (name, a, b) one after the other; a and b count back among the tensors made so far."""

    def __init__(self, layers: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.layers = layers
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in layers)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [self.convs[0](x)]
        for index, (name, i, j) in enumerate(self.layers):
            a, b = made[-1 - i % len(made)], made[-1 - j % len(made)]
            match name:
                case "conv":
                    made.append(self.convs[index](a))
                case "norm relu_":
                    made.append(self.norms[index](a).relu_())
                case "relu pool":
                    made.append(nn.functional.max_pool2d(a.relu(), 3, 1, 1))
                case "dropout":
                    made.append(nn.functional.dropout(a, 0.3))
                case "softmax":
                    made.append(a.softmax(1) * b)
                case "add_":
                    made.append((a * 1.5).add_(b))
                case _:
                    made.append(a.tanh())
        return made[-1]


NAMES = ("conv", "norm relu_", "relu pool", "dropout", "softmax", "add_", "tanh")
LAYERS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=5)


def drawn_step(layers: list[tuple[str, int, int]]) -> Step:
    with torch.device("meta"):
        model, x = Drawn(layers), torch.empty(2, 4, 6, 6)
    return rewrite(memfit.capture(model, (x,), loss=torch.Tensor.sum, device="cpu"), proofs=AssumedProofs())


def drawn_costs(step: Step, links: dict[str, Link], rng: random.Random, *, with_ways: bool) -> Costs:
    """Some ops take no time, some need a workspace, and, with ways, some have a slower way without."""
    largest = max(step.storage_bytes)
    times_ps = (0, 10**5, 10**6, rng.randrange(10**7))
    prices, algorithms = {}, {}
    for op in priced_calls(step):
        key = signature(step, op)
        prices[key] = fast = OpCost(rng.choice(times_ps), rng.choice((0, 0, largest // 2)))
        if with_ways and fast.workspace_bytes:
            slow = OpCost(fast.time_ps + rng.randrange(10**6))
            algorithms[key] = {"fast": fast, "slow": slow}
    return replace(
        free_of_charge(step),
        by_signature=prices,
        links=links,
        algorithms=algorithms,
        default_codec=CodecRate(rng.choice([1e9, 1e12]), rng.choice([1e9, 1e12])),
    )


def drawn_codes(step: Step, rng: random.Random, most: int) -> dict[int, Encode]:
    legal = {s: [name for name in LOSSLESS_NAMES if not why_not_encode(step, s, name)] for s in step.storage}
    able = [s for s, names in legal.items() if names]
    return {s: Encode(rng.choice(legal[s])) for s in rng.sample(able, min(most, len(able)))}


# --- every plan there is ---------------------------------------------------------------------------------------------


def problems(step: Step, costs: Costs, codes: Mapping[int, Encode]) -> Iterator[Problem]:
    """The step with each choice of codes and of ways."""
    for size in range(len(codes) + 1):
        for chosen in itertools.combinations(sorted(codes), size):
            yield Problem.of(encode_step(step, {s: codes[s] for s in chosen}).step, costs)
    ways = costs.choices(step)
    free = sorted(ways)[:4]
    for slow in itertools.product(("fast", "slow"), repeat=len(free)):
        picked = dict.fromkeys(ways, "fast") | dict(zip(free, slow, strict=True))
        if "slow" in slow:
            yield Problem.of(step, costs.picking(picked))
    if ways:
        yield Problem.of(step, costs.picking(dict.fromkeys(ways, "slow")))


def all_states(problem: Problem, most: int) -> list[list[int]]:
    """Every state of as many storages as make no more states than that, the large ones first; defaults of others.

    Of what decisions can come to: what is encoded is neither sent nor kept besides, and of its codes only the first is
    sent, none made again.
    """
    step, reruns = problem.step, problem.reruns
    encoded: dict[int, list[int]] = {}
    for op in step.ops[: step.num_forward]:
        if op.target == "memfit.encode":
            source, code = (step.values[v].storage for v in (next(iter(op.reads())), op.made[0]))
            encoded.setdefault(source, []).append(code)
    codes = [code for found in encoded.values() for code in found]
    firsts = [found[0] for found in encoded.values()]
    options = {
        s: [KEEP]
        + [DROP] * (s in reruns.recomputable and s not in codes)
        + [AWAY + t for t in range(len(problem.tiers)) if not reruns.why_not_offload(s)]
        * (s not in codes or s in firsts)
        for s in reruns.owned
        if s not in encoded
    }
    chosen: list[int] = []
    count = 1
    for s in sorted(options, key=lambda s: (step.storage[s].first_backward is None, -step.storage_bytes[s])):
        if len(options[s]) > 1 and count * len(options[s]) <= most:
            chosen.append(s)
            count *= len(options[s])
    found = []
    for states in itertools.product(*(options[s] for s in chosen)):
        made = problem.default_states()
        for s, state in zip(chosen, states, strict=True):
            made[s] = state
        found.append(made)
    return found


@dataclass(frozen=True)
class EveryPlan:
    """All plans of a step, with all choices of codes and of ways; with `chance`, some by moves that are tried last.

    These are: made again more than once, and fetched out of turn.
    """

    plans: list[tuple[Evaluator, list[list[int]]]]

    @classmethod
    def of(
        cls,
        step: Step,
        costs: Costs,
        codes: Mapping[int, Encode],
        *,
        most: int = 250,
        chance: random.Random | None = None,
    ) -> EveryPlan:
        found = []
        for problem in problems(step, costs, codes):
            states = all_states(problem, most)
            if chance is not None:
                states += [strange(problem, one, chance) for one in chance.sample(states, min(len(states), 60))]
            found.append((Evaluator.of(problem), states))
        return cls(found)

    def peaks(self) -> list[int]:
        """What they need where nothing has to be waited for, the least first."""
        return sorted({evaluator.evaluate(s).peak_bytes for evaluator, states in self.plans for s in states})

    def fastest_ps(self, budget_bytes: int) -> int | None:
        """The step of the fastest that fits."""
        outcomes = (evaluator.evaluate(s, budget_bytes) for evaluator, states in self.plans for s in states)
        return min((o.step_ps for o in outcomes if o.peak_bytes <= budget_bytes), default=None)


def strange(problem: Problem, states: list[int], chance: random.Random) -> list[int]:
    """The same with some storages made again more than once, and some fetched out of turn."""
    found = list(states)
    for storage, state in enumerate(states):
        place = chance.randrange(problem.num_forward, problem.num_ops)
        if state >= AWAY and chance.random() < 0.6:
            found[storage] = problem.away_state(problem.tier_of(state), place)
        elif state == DROP and storage in problem.reruns.recomputable and chance.random() < 0.4:
            found[storage] = -place
    return found
