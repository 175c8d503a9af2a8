"""`memfit bench planning`: how long auto plans and what memory it takes, over the size of the graph."""

from __future__ import annotations

import argparse
import os

from memfit.cli.screen import Screen, mebibytes, seconds
from memfit.cost.costs import HERE
from memfit.cost.devices import device
from memfit.errors import BadOption
from memfit.plan.budget import Budget
from memfit.report.deep_network import DeepNetwork
from memfit.report.planning_cost import (
    AT_MOST_S,
    FIRST_PLAN_AT_MOST_S,
    RESIDENT_AT_MOST_BYTES,
    Growth,
    PlanningCost,
    growths,
    planning_cost,
)
from memfit.resident import require_linux

SUMMARY = "how long auto plans and what memory it takes, over the size of the graph"

NETWORKS = "resnet50,resnet101,resnet152,densenet121,densenet201,gpt2:12,gpt2:24,gpt2:48"
_DEVICE, _BUDGET = "v100-16gb", "40%"
_BUSY_SHARE = 0.25
_HEADER = (
    *("network", "ops", "storages", "captured in", "prepared in", "first plan", "planned in", "of CPU", "tried"),
    *("overhead", "bound", "grew by", "in all", "holds"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which networks at which depth, on which device, within which budget."""
    parser.add_argument(
        "--networks",
        default=NETWORKS,
        metavar="A,B:N",
        help="networks of the zoo, at their published sizes; gpt2:24 is one of 24 layers (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        default=_DEVICE,
        metavar="NAME",
        help="whose costs to plan with: a name of `memfit devices`, a TOML file, or fields (default: %(default)s)",
    )
    parser.add_argument(
        "--budget", default=_BUDGET, metavar="SIZE", help="such as 40%% or 6GiB, for each (default: 40%%)"
    )


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Exit code 0, or 1 if a limit on seconds or bytes was not kept; on a busy machine that says little."""
    require_linux()  # memory is read as Linux tells it
    networks = _networks(arguments.networks)
    budget = Budget.parse(arguments.budget)
    if arguments.device == HERE:
        raise BadOption(
            f"--device {HERE}: ops would have to be run to be priced, which is no planning. Name a device of the "
            "catalogue (`memfit devices`)"
        )
    chosen = device(arguments.device)  # before the first is captured
    busy_share = os.getloadavg()[0] / (os.cpu_count() or 1)
    costs = []
    for number, network in enumerate(networks):
        screen.progress(f"planning {network} ({number + 1} of {len(networks)})")
        costs.append(planning_cost(network, device=arguments.device, budget=budget.text))
    screen.done()
    found, broken = growths(costs), [sentence for cost in costs for sentence in cost.broken]
    if screen.json:
        screen.object(
            {
                "benchmark": "planning",
                "device": chosen.name,
                "budget": budget.text,
                "num_cores": os.cpu_count(),
                "busy_share": busy_share,
                "rows": [cost.to_dict() for cost in costs],
                "growths": [growth.to_dict() for growth in found],
                "limits": {
                    "after_capture_s": dict(AT_MOST_S),
                    "first_plan_after_capture_s": FIRST_PLAN_AT_MOST_S,
                    "peak_resident_bytes": RESIDENT_AT_MOST_BYTES,
                },
                "broken": broken,
                "holds": not broken,
            }
        )
    else:
        screen.table(_HEADER, [_cells(cost) for cost in costs], right=_HEADER[1:-1])
        screen.line()
        for growth in found:
            screen.line(_growth_text(growth))
        if busy_share > _BUSY_SHARE:
            screen.line(f"the machine was busy before this began ({busy_share:.0%} of its cores): seconds are too many")
        screen.line(f"within all limits: {f'NO, {len(broken):,} broken' if broken else 'yes'}")
        for sentence in broken:
            screen.line(f"  {sentence}")
    return 1 if broken else 0


def _networks(text: str) -> list[DeepNetwork]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise BadOption(f"--networks {text!r} names no network. Separate names by commas")
    return [DeepNetwork.parse(name) for name in names]


def _cells(cost: PlanningCost) -> tuple[str, ...]:
    bound = cost.lower_bound_overhead
    return (
        cost.network,
        f"{cost.num_ops:,}",
        f"{cost.num_storages:,}",
        seconds(cost.capture_s),
        seconds(cost.prepare_s),
        "none" if cost.first_plan_s is None else seconds(cost.first_plan_s),
        seconds(cost.plan_s),
        seconds(cost.plan_cpu_s),
        "" if cost.num_evaluations is None else f"{cost.num_evaluations:,}",
        f"{cost.overhead:+.2%}" if cost.fits else "does not fit",
        "" if bound is None else f"{bound:+.2%}",
        mebibytes(cost.growth_bytes),
        mebibytes(cost.peak_resident_bytes),
        "NO" if cost.broken else "yes",
    )


def _growth_text(growth: Growth) -> str:
    memory = "not at all" if growth.exponent_bytes is None else f"like ops ** {growth.exponent_bytes:.2f}"
    return (
        f"{growth.network} at {growth.num_rows} depths: seconds of planning grow like ops ** {growth.exponent_s:.2f} "
        f"(of CPU: {growth.exponent_cpu_s:.2f}), memory {memory}"
    )
