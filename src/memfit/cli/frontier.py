"""`memfit frontier NET`: overhead over budget for every exact policy, and the proven bound; as a table and a plot."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from memfit.cli.options import add_network, add_planning, num_threads
from memfit.cli.screen import Screen, mebibytes, seconds
from memfit.cli.target import Pricing, Target, costs_facts, costs_summary
from memfit.cost.costs import Costs
from memfit.report.frontier import AUTO, Frontier, Point, budgets_asked_for, frontier, policies_asked_for
from memfit.report.frontier_plot import SUFFIXES, check_plot_file, plot
from memfit.resident import peak_bytes

_BUDGETS = "15%,20%,25%,30%,40%,50%,60%,70%,80%,90%"
_OK, _DOES_NOT_FIT = 0, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_network(parser)
    parser.add_argument(
        "--budgets",
        default=_BUDGETS,
        metavar="A,B,C",
        help="such as 25%%,40%%,6GiB; a percentage is of the keep plan's activations (default: %(default)s)",
    )
    add_planning(parser)
    parser.add_argument("--policies", metavar="P,Q", help="only these (default: auto and every other exact one)")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help=f"draw it there as well, into a file ending in {' or '.join(SUFFIXES)}",
    )


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Exit code 0 if anything fits, 2 if nothing does within any of the budgets."""
    budgets = budgets_asked_for(arguments.budgets)
    policies = policies_asked_for(arguments.policies)
    if arguments.plot is not None:
        check_plot_file(arguments.plot)
    pricing = Pricing.of(arguments, screen)
    with num_threads(arguments.threads):
        screen.progress(f"capturing {arguments.network}")
        target = Target.capture(arguments.network, batch=arguments.batch, image=arguments.image)
        screen.progress("pricing")
        costs = pricing.costs(target.rewritten, ways=True)
        found = frontier(
            target.rewritten,
            costs,
            budgets=budgets,
            policies=policies,
            optimizer=arguments.optimizer,
            progress=screen.progress,
        )
    if arguments.plot is not None:
        screen.progress(f"drawing {arguments.plot}")
        how = "simulated" if pricing.device is not None else "simulated with measured times"
        title = f"{target.title}, on {pricing.name}: what a budget costs"
        plot(found, arguments.plot, title=title, subtitle=f"{how}; {rates(costs, pricing)}")
    screen.done()

    facts = {
        "network": target.network,
        "batch": target.batch,
        "image": target.image,
        "device": pricing.name,
        "rates": rates(costs, pricing),
        "optimizer": arguments.optimizer,
        "workspace": pricing.workspace,
        "memory_bytes": costs.memory_bytes,
        "capture_s": target.capture_s,
        "costs": costs_summary(costs),
        "digest": target.rewritten.digest,
        "policies": list(policies),
        "plot": None if arguments.plot is None else str(arguments.plot),
        "rss_bytes": peak_bytes(),
    }
    fits = any(point.fits for point in found.points)
    if screen.json:
        screen.object(facts | found.to_dict() | ({} if fits else {"error": _misfit(found), "kind": "DoesNotFit"}))
    else:
        _print(facts, found, target, costs, screen)
    if not fits:
        screen.error(_misfit(found))
        return _DOES_NOT_FIT
    return _OK


def rates(costs: Costs, pricing: Pricing) -> str:
    """What the device was taken to be, in a line: without it, an overhead says nothing."""
    found = []
    if pricing.device is not None:
        device = pricing.device
        found.append(f"{device.flops_per_s / 1e12:.3g} TFLOPS in float32")
        found.append(f"memory at {device.bandwidth_bytes_per_s / 1e9:.4g} GB/s")
    else:
        found.append("each kind of op measured here")
    for tier, link in costs.links.items():
        out, back = link.send_bytes_per_s / 1e9, link.fetch_bytes_per_s / 1e9
        found.append(f"{tier} link {out:.3g} GB/s out, {back:.3g} back")
        if link.has_drag:
            found[-1] += f" ({link.send_drag:.0%} and {link.fetch_drag:.0%} of that time lost to compute)"
    return ", ".join(found)


def _misfit(found: Frontier) -> str:
    """Why nothing fits, and what would."""
    needs = [(point.peak_bytes, point.policy) for point in found.points if point.peak_bytes is not None]
    if not needs:
        first = found.points[0]
        return f"no policy makes a plan here. {first.policy}: {first.error}"
    largest = found.limits[-1]
    least_bytes, policy = min(needs)
    proof = f"No plan does: {largest.certificate}. " if largest.certificate else ""
    return (
        f"nothing fits {largest.budget_bytes:,} bytes, the largest of these budgets. {proof}The least that a policy "
        f"needs is {least_bytes:,} bytes ('{policy}'). Give a budget of at least that, or a smaller batch"
    )


def _print(facts: dict[str, Any], found: Frontier, target: Target, costs: Costs, screen: Screen) -> None:
    screen.facts(
        [
            ("network", target.title),
            ("device", f"{facts['device']}: {facts['rates']}"),
            ("optimizer", facts["optimizer"]),
            ("keep", f"{mebibytes(found.keep_peak_bytes)} at its peak, {seconds(found.keep_step_s)}"),
            ("no plan can change", f"{mebibytes(found.fixed_bytes)} (parameters, inputs, gradients, optimizer)"),
            ("activations of keep", mebibytes(found.keep_activation_bytes)),
            *costs_facts(costs),
            ("captured in", seconds(facts["capture_s"])),
            ("RAM of memfit", mebibytes(facts["rss_bytes"])),
        ]
    )
    screen.line()
    screen.line("step time over keep's, by budget; '-' does not fit, '!' makes no plan here")
    budgets = [_label(limit.budget) for limit in found.limits]
    header = ("policy", *budgets, "planned in")
    rows = [("budget in all", *(mebibytes(limit.budget_bytes) for limit in found.limits), "")]
    rows.append(("bound", *("none fits" if x is None else f"{x:+.2%}" for x in _bounds(found)), ""))
    rows += [_cells(policy, found) for policy in found.policies]
    screen.table(header, rows, right=header[1:])
    if AUTO in found.policies:
        gaps = [
            f"{_label(point.budget)} {100 * (point.overhead - bound):.2f}"
            for point, bound in zip(found.of(AUTO), _bounds(found), strict=True)
            if point.fits and point.overhead is not None and bound is not None
        ]
        screen.line()
        screen.line(f"auto less the bound, in points: {', '.join(gaps) or 'fits nowhere'}")
    for limit in found.limits:
        if limit.certificate:
            screen.line(f"{_label(limit.budget)}: no plan fits: {limit.certificate}")
    errors = {point.policy: point.error for point in found.points if point.error is not None}
    for policy, error in errors.items():
        screen.line(f"{policy}: {error}")
    if facts["plot"] is not None:
        screen.line(f"drawn in {facts['plot']}")


def _bounds(found: Frontier) -> list[float | None]:
    return [limit.lower_bound_overhead for limit in found.limits]


def _cells(policy: str, found: Frontier) -> tuple[str, ...]:
    points = found.of(policy)
    planned_s = sum(point.plan_s or 0.0 for point in points)
    return (policy, *(_cell(point) for point in points), seconds(planned_s))


def _cell(point: Point) -> str:
    if point.error is not None or point.overhead is None:
        return "!"
    return f"{point.overhead:+.2%}" if point.fits else "-"


def _label(budget: int | str) -> str:
    return budget if isinstance(budget, str) else mebibytes(budget)
