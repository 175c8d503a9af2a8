"""`memfit bench auto`: auto beside every other exact policy and the bound, over networks, devices and budgets."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from types import MappingProxyType

from memfit import zoo
from memfit.cli.benchmarks.networks import networks_asked_for
from memfit.cli.options import duration
from memfit.cli.screen import Screen, seconds
from memfit.cli.target import Pricing, Target
from memfit.cost.costs import HERE, Costs
from memfit.errors import BadOption
from memfit.plan.budget import Budget
from memfit.plan.planner import plan_step
from memfit.report.auto_grid import (
    AIMS,
    GAP_FROM_SHARE,
    MEDIAN_GAP,
    WORST_GAP,
    Aim,
    Case,
    Cell,
    Gaps,
    Reached,
    cells_of,
    rises,
)
from memfit.report.frontier import AUTO, budgets_asked_for, exact_policies, frontier

SUMMARY = "auto beside every exact policy and the proven bound, over the zoo, devices and budgets"

_DEVICES = f"titan-x,v100-16gb,rtx-4090,{HERE}"
_BUDGETS = "25%,40%,60%,80%"
_AIMS_DEVICE = "titan-x"
_CAP_S = 20.0
# On this machine every op is run: at these (batch, image) that is feasible. None is the published image.
_HERE_SIZES = MappingProxyType({"gpt2": (1, 256), "unet": (1, 256), "darts": (16, None)})
_HERE_SIZE = (2, None)
_HEADER = ("device", "batch", "budget", "auto", "bound", "gap", "best other", "", "planned in", "holds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which part of the grid."""
    parser.add_argument("--networks", metavar="A,B,C", help="networks of the zoo (default: all)")
    parser.add_argument(
        "--devices",
        default=_DEVICES,
        metavar="D,E",
        help=f"of `memfit devices`, or {HERE}: this machine, at small batches (default: %(default)s)",
    )
    parser.add_argument("--budgets", default=_BUDGETS, metavar="A,B", help="such as 40%%,8GiB (default: %(default)s)")
    parser.add_argument(
        "--cap",
        type=duration,
        metavar="SECONDS",
        help=f"how long to measure each network on {HERE}; what is left is estimated (default: {_CAP_S:g})",
    )


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Exit code 0 if all that must hold does, 1 if not; how long planning took is shown, and is no verdict."""
    networks = networks_asked_for(arguments.networks) or list(zoo.names())
    budgets = budgets_asked_for(arguments.budgets)
    devices = [name.strip() for name in arguments.devices.split(",") if name.strip()]
    if not devices:
        raise BadOption(f"--devices {arguments.devices!r} names no device. Separate names by commas")
    if arguments.cap is not None and HERE not in devices:
        raise BadOption(f"--cap {arguments.cap:g}: nothing is measured but on '{HERE}', which is not among --devices")
    cap_s = _CAP_S if arguments.cap is None else arguments.cap
    pricings = {name: Pricing(name, workspace=None, cap_s=None, screen=screen) for name in devices}
    cells: list[Cell] = []
    reached: list[Reached] = []
    for number, network in enumerate(networks):
        progress = f"{network} ({number + 1} of {len(networks)})"
        of_network = list(_cells(network, pricings, budgets, cap_s, progress, screen, reached))
        cells += of_network
        screen.done()
        _print_cells(network, of_network, screen)
    if _AIMS_DEVICE in pricings:
        done = {result.aim for result in reached}
        for aim in AIMS:
            if aim.network in networks and aim not in done:
                target = Target.capture(aim.network, batch=aim.batch, image=None)
                costs = pricings[_AIMS_DEVICE].costs(target.rewritten, ways=True)
                reached.append(_reach(aim, target, costs, screen))
    screen.done()

    gaps, rising = Gaps.of(cells), rises(cells)
    faults = [fault for cell in cells for fault in cell.faults]
    holds = not faults and not rising and gaps.holds and all(r.is_met or r.is_impossible for r in reached)
    if screen.json:
        screen.object(
            {
                "benchmark": "auto",
                "policies": list(exact_policies()),
                "here_sizes": {name: list(_size_here(name)) for name in networks} if HERE in pricings else {},
                "rows": [cell.to_dict() for cell in cells],
                "faults": faults,
                "rises": rising,
                "gaps": gaps.to_dict(),
                "aims": [result.to_dict() for result in reached],
                "plan_s": _planning(cells),
                "num_unproven": len(_unproven(cells)),
                "holds": holds,
            }
        )
    else:
        _print_verdicts(cells, gaps, rising, faults, reached, screen)
    return 0 if holds else 1


def _cells(
    network: str,
    pricings: dict[str, Pricing],
    budgets: tuple[Budget, ...],
    cap_s: float,
    title: str,
    screen: Screen,
    reached: list[Reached],
) -> Iterator[Cell]:
    """All cells of one network; it is captured once for each size, and priced once for each device."""
    targets: dict[tuple[int | None, int | None], Target] = {}
    for name, pricing in pricings.items():
        size = _size_here(network) if name == HERE else (None, None)
        if size not in targets:
            screen.progress(f"{title}: capturing")
            targets[size] = Target.capture(network, batch=size[0], image=size[1])
        target = targets[size]
        screen.progress(f"{title}: pricing on {name}")
        if name == HERE:  # each network has as long as the others
            pricing = Pricing(name, workspace=None, cap_s=cap_s, screen=screen)
        costs = pricing.costs(target.rewritten, ways=True)
        found = frontier(
            target.rewritten,
            costs,
            budgets=budgets,
            policies=exact_policies(),
            progress=lambda text: screen.progress(f"{title} on {name}: {text}"),
        )
        yield from cells_of(Case(network, target.batch, target.image, pricing.name), found)
        if name == _AIMS_DEVICE:
            # Here, where the step and its prices are at hand, and auto knows plans for other budgets.
            aims = [aim for aim in AIMS if (aim.network, aim.batch) == (network, target.batch)]
            reached += [_reach(aim, target, costs, screen) for aim in aims]


def _size_here(network: str) -> tuple[int | None, int | None]:
    return _HERE_SIZES.get(network, _HERE_SIZE)


def _reach(aim: Aim, target: Target, costs: Costs, screen: Screen) -> Reached:
    if aim.activation_bytes is None:
        assert aim.budget is not None
        budget = Budget.parse(aim.budget)
    else:
        budget = Budget(num_bytes=plan_step(target.rewritten, costs).fixed_bytes + aim.activation_bytes)
    found = frontier(
        target.rewritten,
        costs,
        budgets=[budget],
        policies=[AUTO],
        progress=lambda text: screen.progress(f"{aim.title}: {text}"),
    )
    return Reached(aim, found.points[0], found.limits[0])


def _planning(cells: list[Cell]) -> dict[str, float]:
    """The longest that auto planned, by network."""
    found: dict[str, float] = {}
    for cell in cells:
        found[cell.case.network] = max(found.get(cell.case.network, 0.0), cell.auto.plan_s or 0.0)
    return found


def _unproven(cells: list[Cell]) -> list[Cell]:
    """Where nothing fits, and nothing proves that nothing can."""
    return [c for c in cells if not c.auto.fits and c.best_other is None and not c.limit.certificate]


def _print_cells(network: str, cells: list[Cell], screen: Screen) -> None:
    screen.line(network)
    rows = []
    for cell in cells:
        best, bound = cell.best_other, cell.limit.lower_bound_overhead
        misfit = "impossible" if cell.limit.certificate else "does not fit"
        rows.append(
            (
                cell.case.device,
                str(cell.case.batch or ""),
                str(cell.limit.budget),
                _percent(cell.auto.overhead) if cell.auto.fits else misfit,
                "" if bound is None else _percent(bound),
                "" if cell.gap is None else f"{100 * cell.gap:.2f}",
                "" if best is None else _percent(best.overhead),
                "" if best is None else best.policy,
                "" if cell.auto.plan_s is None else seconds(cell.auto.plan_s),
                "NO" if cell.faults else "yes",
            )
        )
    screen.table(_HEADER, rows, right=(*_HEADER[1:7], "planned in"))
    screen.line()


def _print_verdicts(
    cells: list[Cell], gaps: Gaps, rising: list[str], faults: list[str], reached: list[Reached], screen: Screen
) -> None:
    screen.line(f"never worse than a single technique: {_verdict(faults)} (of {len(cells):,})")
    screen.line(f"overhead never rises with the budget: {_verdict(rising)}")
    for fault in (*faults, *rising):
        screen.line(f"  {fault}")
    if gaps.median is not None and gaps.worst is not None and gaps.worst_cell is not None:
        where = f"{gaps.worst_cell.case} within {gaps.worst_cell.limit.budget}"
        screen.line(
            f"near the bound, from {GAP_FROM_SHARE:.0%} up: {'yes' if gaps.holds else 'NO'}: median "
            f"{100 * gaps.median:.2f} points (at most {100 * MEDIAN_GAP:g}), worst {100 * gaps.worst:.2f} "
            f"(at most {100 * WORST_GAP:g}; {where})"
        )
    unproven = _unproven(cells)
    if unproven:
        screen.line(f"nothing fits, and it is not proven that nothing can: {len(unproven):,} cells")
    longest = sorted(_planning(cells).items(), key=lambda item: -item[1])[:3]
    screen.line(f"longest planning: {', '.join(f'{name} {seconds(plan_s)}' for name, plan_s in longest)}")
    if reached:
        screen.line()
        screen.table(
            (f"on {_AIMS_DEVICE}", "at most", "auto", "bound", "verdict", "held against"),
            [
                (
                    result.aim.title,
                    _percent(result.aim.at_most),
                    _percent(result.auto.overhead) if result.auto.fits else "does not fit",
                    _percent(result.limit.lower_bound_overhead),
                    result.verdict,
                    result.aim.source,
                )
                for result in reached
            ],
            right=("at most", "auto", "bound"),
        )


def _verdict(faults: list[str]) -> str:
    return f"NO, {len(faults):,} times" if faults else "yes"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:+.2%}"
