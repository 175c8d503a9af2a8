"""Random decisions for any step, as a policy of its own: what every plan must get right, whoever made it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator

from memfit.capture.step import Step
from memfit.codecs.registry import LOSSLESS_NAMES as CODECS
from memfit.cost.costs import Costs
from memfit.plan.decisions import Decision, Decisions, Encode, EncodeThenOffload, Keep, Moments, Offload, Recompute
from memfit.plan.encode import why_not_encode
from memfit.plan.policies.policy import Policy
from memfit.plan.policies.registry import POLICIES
from memfit.plan.rerun import Reruns
from memfit.tiers.null import NullTier
from memfit.tiers.registry import TIERS


def random_moments(step: Step, storage: int, reruns: Reruns, rng: random.Random) -> Moments:
    """Some moments at which the storage may travel."""
    life, num_forward = step.storage[storage], step.num_forward
    assert life.last_forward is not None
    last_write = reruns.writers[storage][-1]
    first_backward = len(step.ops) - 1 if life.first_backward is None else life.first_backward
    fetched = rng.randint(num_forward, first_backward)
    return Moments(
        send=rng.randint(last_write + 1, life.last_forward + 1),
        sent=rng.choice([None, rng.randint(life.last_forward + 1, num_forward)]),
        fetch=rng.randint(num_forward, fetched),
        fetched=fetched,
    )


def random_place(step: Step, rng: random.Random) -> int:
    """By which op something is to be back: mostly for its first use, else by any of the backward half."""
    return rng.choice([0, 0, rng.randrange(step.num_forward, len(step.ops))])


def choices(step: Step, storage: int, reruns: Reruns, tiers: list[str], rng: random.Random) -> list[Decision]:
    """Everything that may be decided about a storage."""
    found: list[Decision] = [Keep()]
    if storage in reruns.recomputable:
        # Held at once, never, or from some backward op on.
        found += [Recompute(), Recompute(len(step.ops)), Recompute((step.num_forward + len(step.ops)) // 2)]
    if not reruns.why_not_offload(storage):
        found += [Offload(tier, back_by=random_place(step, rng)) for tier in tiers]
        found += [Offload(tier, random_moments(step, storage, reruns, rng)) for tier in tiers]
    for name in CODECS:
        if not why_not_encode(step, storage, name):
            found += [Encode(name)]
            found += [EncodeThenOffload(name, tier, back_by=random_place(step, rng)) for tier in tiers]
    return found


def random_decisions(step: Step, costs: Costs, seed: int) -> Decisions:
    """One of those for every storage; which ones, and how mixed, depends on the seed."""
    rng = random.Random(seed)
    reruns, tiers = Reruns(step), sorted(costs.links)
    favourite = rng.choice([Keep, Recompute, Offload, Encode, None])
    made: dict[int, Decision] = {}
    for storage in reruns.owned:
        possible = choices(step, storage, reruns, tiers, rng)
        favoured = [d for d in possible if favourite is not None and isinstance(d, favourite)]
        made[storage] = rng.choice(favoured if favoured and rng.random() < 0.7 else possible)
    return made


@contextlib.contextmanager
def policy_of(name: str, decide: Callable[[Step, Costs, int | None], Decisions]) -> Iterator[str]:
    """A policy, and two tiers to put bytes in, for the time being."""
    POLICIES[name] = Policy(name, "of a test", decide)
    TIERS.update({"first": NullTier(), "second": NullTier()})
    try:
        yield name
    finally:
        del POLICIES[name], TIERS["first"], TIERS["second"]


def random_policy(seed: int) -> contextlib.AbstractContextManager[str]:
    """One that decides at random."""
    return policy_of(f"random-{seed}", lambda step, costs, budget: random_decisions(step, costs, seed))
