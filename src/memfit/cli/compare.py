"""`memfit compare NET`: every policy side by side, for every budget asked for."""

from __future__ import annotations

import argparse
from typing import Any

from memfit.cli.options import add_network, add_planning, num_threads
from memfit.cli.screen import Screen, mebibytes, seconds
from memfit.cli.target import Pricing, Target, costs_facts, costs_summary
from memfit.cost.costs import PS_PER_S, Costs
from memfit.errors import BadOption, MemfitError
from memfit.plan.budget import Budget
from memfit.plan.planner import Planned, plan_step
from memfit.plan.policies.policy import Policy
from memfit.plan.policies.registry import POLICIES, policy_named, require_permission
from memfit.resident import peak_bytes

_OK, _DOES_NOT_FIT = 0, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_network(parser)
    parser.add_argument(
        "--budget", metavar="A,B,C", help="budgets such as 8GiB,60%% (default: all of the device's memory)"
    )
    add_planning(parser)
    parser.add_argument(
        "--policy",
        metavar="P,Q",
        help=f"only these of {', '.join(POLICIES)} (default: all; lossy ones with --allow-lossy)",
    )
    parser.add_argument(
        "--allow-lossy", action="store_true", help="also policies with which gradients differ from eager's"
    )


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Exit code 0 if at least one plan fits, 2 if none does."""
    allow_lossy = arguments.allow_lossy
    chosen = [policy for policy in POLICIES.values() if allow_lossy or not policy.is_lossy]
    if arguments.policy is not None:
        chosen = [policy_named(name.strip()) for name in arguments.policy.split(",")]
        for policy in chosen:
            require_permission(policy, allow_lossy=allow_lossy)
        if allow_lossy and not any(policy.is_lossy for policy in chosen):
            raise BadOption(f"--allow-lossy: none of '{arguments.policy}' loses anything. Leave it out")
    budgets: list[Budget | None] = [None]
    if arguments.budget is not None:
        budgets = [Budget.parse(text) for text in arguments.budget.split(",")]
    pricing = Pricing.of(arguments, screen)
    with num_threads(arguments.threads):
        screen.progress(f"capturing {arguments.network}")
        target = Target.capture(arguments.network, batch=arguments.batch, image=arguments.image)
        screen.progress("pricing")
        costs = pricing.costs(target.rewritten, ways=any(policy.asks_ways for policy in chosen))
        keep = plan_step(target.rewritten, costs, optimizer=arguments.optimizer)
        plain = pricing.costs(target.step) if any(policy.decide is None for policy in chosen) else costs
        rows = []
        for budget in budgets:
            for policy in chosen:
                screen.progress(f"planning by {policy.name}")
                price = plain if policy.decide is None else costs
                rows.append(_row(policy, target, price, budget, keep, arguments.optimizer))
    screen.done()

    found = _common(target, pricing, keep, arguments.optimizer) | {"rows": rows, "rss_bytes": peak_bytes()}
    any_fits = any(row["fits"] for row in rows)
    if screen.json:
        screen.object(found if any_fits else found | {"error": _no_fit(rows), "kind": "DoesNotFit"})
    else:
        _print(found, target, costs, screen)
    if not any_fits:
        screen.error(_no_fit(rows))
        return _DOES_NOT_FIT
    return _OK


def _common(target: Target, pricing: Pricing, keep: Planned, optimizer: str) -> dict[str, Any]:
    """What all rows share; keep's figures are those of the step with its rewrites."""
    return {
        "network": target.network,
        "batch": target.batch,
        "image": target.image,
        "device": pricing.name,
        "optimizer": optimizer,
        "workspace": pricing.workspace,
        "memory_bytes": keep.costs.memory_bytes,
        "fixed_bytes": keep.fixed_bytes,
        "keep_peak_bytes": keep.keep_peak_bytes,
        "keep_activation_bytes": keep.keep_activation_bytes,
        "keep_step_s": keep.keep.step_s,
        "capture_s": target.capture_s,
        "costs": costs_summary(keep.costs),
        "digest": keep.step.digest,
    }


def _row(
    policy: Policy, target: Target, costs: Costs, budget: Budget | None, keep: Planned, optimizer: str
) -> dict[str, Any]:
    """One policy within one budget."""
    asked = None if budget is None else budget.text
    if budget is not None:
        # In bytes, so that all rows of one budget are within the same: steps without rewrites have another keep plan.
        resolved = budget.resolve(fixed_bytes=keep.fixed_bytes, activation_bytes=keep.keep_activation_bytes)
        budget = Budget(num_bytes=resolved)
    row: dict[str, Any] = {"policy": policy.name, "budget": asked, "fits": False, "error": None}
    try:
        planned = plan_step(
            target.step_for(policy),
            costs,
            policy=policy.name,
            budget=budget,
            optimizer=optimizer,
            allow_lossy=policy.is_lossy,
        )
    except MemfitError as error:
        # A policy may want what this device does not have. That is no reason to hide the others.
        limit = keep.costs.memory_bytes if budget is None else budget.num_bytes
        return row | {"budget_bytes": limit, "error": str(error)}
    return row | {
        "budget_bytes": planned.budget_bytes,
        "fits": planned.fits,
        "peak_bytes": planned.peak_bytes,
        "average_bytes": planned.average_bytes,
        "step_s": planned.step_s,
        "overhead": planned.overhead,
        "stall_s": 0.0 if planned.timeline is None else planned.timeline.stall_ps / PS_PER_S,
        "plan_s": planned.plan_s,
    }


def _no_fit(rows: list[dict[str, Any]]) -> str:
    needs = [(row["peak_bytes"], row["policy"]) for row in rows if "peak_bytes" in row]
    if not needs:
        return f"no policy makes a plan here. {rows[0]['policy']}: {rows[0]['error']}"
    least_bytes, policy = min(needs)
    largest = max((row["budget_bytes"] for row in rows), default=0)
    return (
        f"no policy fits. The least that one needs is {least_bytes:,} bytes ('{policy}'), the largest budget is "
        f"{largest:,}. Give a budget of at least {least_bytes:,} bytes, or a smaller batch"
    )


def _print(found: dict[str, Any], target: Target, costs: Costs, screen: Screen) -> None:
    memory = "not known" if found["memory_bytes"] is None else mebibytes(found["memory_bytes"])
    screen.facts(
        [
            ("network", target.title),
            ("device", f"{found['device']}, memory {memory}"),
            ("optimizer", found["optimizer"]),
            ("no plan can change", f"{mebibytes(found['fixed_bytes'])} (parameters, inputs, gradients, optimizer)"),
            ("activations of keep", mebibytes(found["keep_activation_bytes"])),
            ("workspaces", found["workspace"]),
            *costs_facts(costs),
            ("captured in", seconds(found["capture_s"])),
            ("RAM of memfit", mebibytes(found["rss_bytes"])),
        ]
    )
    screen.line()
    header = ("budget", "", "policy", "fits", "peak", "average", "step", "overhead", "planned in")
    right = ("budget", "peak", "average", "step", "overhead", "planned in")
    screen.table(header, [_cells(row) for row in found["rows"]], right=right)
    for row in found["rows"]:
        if row["error"] is not None:
            screen.line(f"{row['policy']}: {row['error']}")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    budget = "none" if row["budget_bytes"] is None else mebibytes(row["budget_bytes"])
    share = row["budget"] if isinstance(row["budget"], str) else ""
    if row["error"] is not None:
        return (budget, share, row["policy"], "no plan", "", "", "", "", "")
    return (
        budget,
        share,
        row["policy"],
        "yes" if row["fits"] else "NO",
        mebibytes(row["peak_bytes"]),
        mebibytes(row["average_bytes"]),
        seconds(row["step_s"]),
        f"{row['overhead']:+.1%}",
        seconds(row["plan_s"]),
    )
