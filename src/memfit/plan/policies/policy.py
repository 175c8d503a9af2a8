"""What a policy is: a name, and a function from a step, its costs and a budget to decisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memfit.capture.step import Step
from memfit.cost.costs import Costs
from memfit.plan.decisions import Decisions


@dataclass(frozen=True)
class Decided:
    """Decisions of a policy that also chooses how ops are computed, or knows how good they are.

    Attributes:
        costs: the prices by its choice of algorithms; all else of them is as it was given.
        note: which way it took, for people.
        step: the step with further rewrites that the decisions are for; None: the one that was given.
        room_bytes: the limit for which the program is to be laid out; None: the budget itself.
        bound_ps: no plan of the policy's options takes less; None if it does not know.
        certificate: why nothing fits the budget, if that is proven.
    """

    decisions: Decisions
    costs: Costs
    note: str = ""
    step: Step | None = None
    room_bytes: int | None = None
    bound_ps: int | None = None
    certificate: str = ""


Decide = Callable[[Step, Costs, int | None], Decisions | Decided]


@dataclass(frozen=True)
class Policy:
    """One way to decide.

    Attributes:
        decide: (step, costs, budget in bytes or None) -> decisions. None for an account that no program can follow.
        summary: one line for people.
        asks_costs: its decisions depend on seconds and workspaces, so that they must be measured before it is run.
        is_lossy: it may choose lossy codecs, with which gradients are not eager's; of others such choices are refused.
        asks_densities: its decisions depend on how many zeros tensors have, which is then looked up in the data.
        with_format: the same policy with another format for what it stores; None if it has no such choice.
        asks_ways: it picks among ways to compute an op, and may need forms of the step that hold less
            (capture/rewrites/tight.py); these are then priced too.
        fills_device: without a budget it plans for all of the device's memory; others have a rule of their own.
    """

    name: str
    summary: str
    decide: Decide | None
    asks_costs: bool = False
    fills_device: bool = False
    is_lossy: bool = False
    asks_densities: bool = False
    asks_ways: bool = False
    with_format: Callable[[str], Policy] | None = None
