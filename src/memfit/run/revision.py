"""A call that needed more than its budget, planned again: with what was learnt, or else in less room."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from memfit.cost.costs import Costs
from memfit.errors import BudgetExceeded, MemfitError
from memfit.plan.planner import Planned
from memfit.run.feedback import Correction, Excess

log = logging.getLogger("memfit")

MAX_REVISIONS = 3
"""How often a call is planned again. The first plan to come knows the ops to blame, those after it have less room."""

_MOST_NAMED = 3

PlanWithin = Callable[[Costs, int], tuple[Planned, Costs]]
"""Plans the call by these costs within that many bytes, and says by which costs after all: ops that hold less may have
been priced for it. Raises an error of ours if that cannot be."""


@dataclass(frozen=True)
class Revision:
    """A plan to go on with.

    Attributes:
        costs: the prices it was made by, corrected.
        cut_bytes: how much less than the budget it was given.
        num_before: how many plans the call had before it.
    """

    planned: Planned
    costs: Costs
    cut_bytes: int = 0
    num_before: int = 0


def corrected(costs: Costs, corrections: tuple[Correction, ...]) -> Costs:
    """The costs with larger workspaces for these ops; the same object if no price of theirs is in the list.

    Ops that are in no list, such as codecs, hold what they hold whatever is written about them.
    """
    prices, algorithms = dict(costs.by_signature), dict(costs.algorithms)
    changed = False
    for found in corrections:
        price = prices.get(found.signature)
        if price is not None and price.workspace_bytes < found.workspace_bytes:
            prices[found.signature] = replace(price, workspace_bytes=found.workspace_bytes)
            changed = True
            if found.signature in algorithms:  # where the price list has one of several ways
                ways = algorithms[found.signature]
                algorithms[found.signature] = {n: prices[found.signature] if w == price else w for n, w in ways.items()}
    return replace(costs, by_signature=prices, algorithms=algorithms) if changed else costs


def revise(revision: Revision, excess: Excess, path: str, *, plan_within: PlanWithin) -> Revision | None:
    """Another plan for the call, with a warning that says why and what it is; None if there is none.

    Where workspaces explain the excess, the new plan has them corrected and all of the budget. Where they do not, or
    where nothing fits then, what was not foreseen is taken off the room that the plan is given: the next plan will be
    wrong by as much, and end within the budget.
    """
    if revision.num_before >= MAX_REVISIONS:
        log.warning("%s: %s. It was planned %d times, and is left at that. %s", path, excess, 1 + MAX_REVISIONS, ADVICE)
        return None
    better = corrected(revision.costs, excess.corrections)
    narrow = max(excess.unforeseen_bytes, revision.cut_bytes)
    attempts: list[tuple[Costs, int]] = [(better, narrow)]
    if better is not revision.costs:
        attempts = [(better, revision.cut_bytes), (better, narrow), (revision.costs, narrow)]
    # If so little room is not enough for any plan, a step towards it is better than none.
    attempts.append((revision.costs, max(excess.measured_bytes - excess.budget_bytes, revision.cut_bytes)))
    why = ""
    in_vain: list[tuple[Costs, int]] = []
    for costs, cut_bytes in attempts:
        if any(costs is tried and cut_bytes >= least for tried, least in in_vain):
            continue  # in less room it fits even less
        try:
            planned, used = plan_within(costs, max(excess.budget_bytes - cut_bytes, 1))
        except MemfitError as error:  # nothing fits, or a tier has no room
            why = str(error)
            in_vain.append((costs, cut_bytes))
            continue
        if planned.program.instructions == revision.planned.program.instructions:
            why = why or "the plan would be the same again"
            continue
        found = Revision(planned, used, cut_bytes, revision.num_before + 1)
        log.warning("%s: %s. %s", path, excess, _what_was_done(revision, found, excess.corrections))
        return found
    log.warning("%s: %s. No other plan was found: %s. The step goes on as it is. %s", path, excess, why, ADVICE)
    return None


ADVICE = (
    "Give a larger budget or a smaller batch; strict=True makes this an error. If other threads or other models grow "
    "meanwhile, what they take counts here too"
)


def raise_excess(excess: Excess, path: str) -> None:
    """Raise what strict=True asks for."""
    raise BudgetExceeded(
        f"{path}: {excess}{_blamed(excess.corrections)}. Give a budget of at least {excess.measured_bytes:,} bytes or "
        "a smaller batch, or leave out strict=True: then the step is planned again with what was found"
    )


def _blamed(corrections: tuple[Correction, ...]) -> str:
    """The ops that held more than their prices say, those that held most first."""
    if not corrections:
        return ". No op held more than was foreseen"
    largest = sorted(corrections, key=lambda each: -each.workspace_bytes)
    held = (f"{c.target} in '{c.path or '(root)'}' {c.workspace_bytes:,} bytes" for c in largest[:_MOST_NAMED])
    more = f" and {len(largest) - _MOST_NAMED} more" if len(largest) > _MOST_NAMED else ""
    return f". Besides operands and results, more than foreseen was held by {', '.join(held)}{more}"


def _what_was_done(before: Revision, after: Revision, corrections: tuple[Correction, ...]) -> str:
    parts = []
    shown = [str(c) for c in corrections if _has_changed(before.costs.by_signature, after.costs.by_signature, c)]
    if shown:
        more = f" and {len(shown) - _MOST_NAMED} more" if len(shown) > _MOST_NAMED else ""
        parts.append(f"Workspaces were corrected: {', '.join(shown[:_MOST_NAMED])}{more}")
    if after.cut_bytes > before.cut_bytes:
        cause = "This was not enough" if parts else "No op's workspace explains it"
        parts.append(f"{cause}, so the plan is given {after.cut_bytes:,} bytes less than the budget")
    new, old = after.planned, before.planned
    parts.append(
        f"Planned again: peak {new.peak_bytes:,} bytes (was {old.peak_bytes:,}), predicted step {new.step_s:.3f} s "
        f"(was {old.step_s:.3f})"
    )
    return ". ".join(parts)


def _has_changed(before: Mapping[str, object], after: Mapping[str, object], correction: Correction) -> bool:
    return before.get(correction.signature) != after.get(correction.signature)
