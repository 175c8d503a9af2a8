"""vDNN's ten configurations on the Titan X of its paper: network-wide memory, and every policy beside the oracle.

The oracle has unlimited memory, the fastest algorithms, and sends nothing. Every policy is planned twice: for the step
as memfit runs it, and for the same step as the paper counts it (plan/policies/vdnn_published.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from memfit.capture.rewrites import rewrite
from memfit.capture.rewrites.proof import AssumedProofs
from memfit.capture.step import Step
from memfit.cli.benchmarks.networks import add_arguments, networks_asked_for
from memfit.cli.benchmarks.vdnn_figures import CONFIGURATIONS, SUMMARY_FIGURES, Configuration
from memfit.cli.screen import Screen, mebibytes
from memfit.cli.target import Target
from memfit.cost.costs import Costs
from memfit.cost.devices import device
from memfit.cost.roofline import FASTEST, NONE, roofline
from memfit.plan.away import most_bytes_away
from memfit.plan.budget import Budget
from memfit.plan.offloading.layers import Layers
from memfit.plan.planner import Planned, plan_step
from memfit.plan.policies.registry import POLICIES
from memfit.plan.policies.vdnn_published import as_published
from memfit.plan.policies.vdnn_usage import Averages, all_bytes, averages, managed_bytes

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "feature maps sent to the host, vDNN, Rhu et al., MICRO 2016"

_DEVICE = "titan-x"
# As the paper names them: (p) at the fastest algorithms, (m) without workspace.
_POLICIES = {
    "none(p)": ("keep", FASTEST),
    "conv(m)": ("vdnn-conv", NONE),
    "conv(p)": ("vdnn-conv", FASTEST),
    "all(m)": ("vdnn-all", NONE),
    "all(p)": ("vdnn-all", FASTEST),
    "dyn": ("vdnn-dyn", FASTEST),
}
_MANAGED_PARTS = ("feature maps", "gradient buffers", "workspace")
_HEADER = (
    *("network", "batch", "network-wide", "fits", "all(m) peak", "as published", "all(m) cut", "published cut"),
    *("dyn", "dyn peak", "dyn host", "dyn throughput", "published"),
)


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Plan every configuration that was asked for, and put the published figures beside."""
    configurations = _configurations(networks_asked_for(arguments.networks), arguments.batch)
    rows = []
    for configuration in configurations:
        screen.progress(f"planning {configuration.network} at {configuration.batch}")
        rows.append(_row(configuration))
    screen.done()
    found: dict[str, Any] = {"benchmark": "vdnn", "device": _DEVICE, "memory_bytes": device(_DEVICE).memory_bytes}
    found["rows"] = rows
    # Statements on all ten are held against all ten only.
    complete = tuple(configurations) == CONFIGURATIONS
    found["figures"] = [figure.beside(found) for figure in SUMMARY_FIGURES] if complete else []
    found["differences"] = _differences(found)
    if screen.json:
        screen.object(found)
    else:
        _print(found, screen)
    return 0


def _configurations(networks: list[str], batch: int | None) -> list[Configuration]:
    """The published ones of these networks; a network or batch that was not published stands for itself."""
    found: list[Configuration] = []
    for name in networks or list(dict.fromkeys(c.network for c in CONFIGURATIONS)):
        published = [c for c in CONFIGURATIONS if c.network == name and batch in (None, c.batch)]
        found += published or [Configuration(name, batch or 0)]
    return found


def _row(configuration: Configuration) -> dict[str, Any]:
    target = Target.capture(configuration.network, batch=configuration.batch or None, image=None)
    plain = target.step_for(POLICIES["network-wide"])
    baseline = plan_step(plain, roofline(plain, device(_DEVICE)), policy="network-wide")
    managed = sum(baseline.parts[part] for part in _MANAGED_PARTS)
    published = as_published(rewrite(target.step, without=frozenset({"pool-swap"}), proofs=AssumedProofs()))
    row: dict[str, Any] = {
        "network": target.network,
        "batch": target.batch,
        "image": target.image,
        "capture_s": target.capture_s,
        "network_wide": {
            "bytes": baseline.peak_bytes,
            "managed_bytes": managed,
            "fits": baseline.fits,
            "parts": dict(baseline.parts),
        },
        "policies": _policies(target.rewritten, configuration.budget),
        "published_account": _policies(published, configuration.budget),
    }
    row["average_cut"] = _cuts(row["policies"]["all(m)"], baseline.peak_bytes, managed)
    row["average_cut_as_published"] = _cuts(row["published_account"]["all(m)"], baseline.peak_bytes, managed)
    row["figures"] = [figure.beside(row) for figure in configuration.figures]
    row["differences"] = _differences(row)
    return row


def _policies(step: Step, budget: str | None) -> dict[str, dict[str, Any]]:
    """Every policy for the step, by the paper's name."""
    layers = Layers.of(step)
    prices = {workspace: roofline(step, device(_DEVICE), workspace=workspace) for workspace in (FASTEST, NONE)}
    found = {name: _plan(step, prices[algorithms], policy, None) for name, (policy, algorithms) in _POLICIES.items()}
    if budget is not None:
        found[f"dyn in {budget}"] = _plan(step, prices[FASTEST], "vdnn-dyn", Budget.parse(budget))
    oracle_s = found["none(p)"].step_s
    return {name: _figures(planned, layers, oracle_s) for name, planned in found.items()}


def _plan(step: Step, costs: Costs, policy: str, budget: Budget | None) -> Planned:
    return plan_step(step, costs, policy=policy, budget=budget)


def _figures(planned: Planned, layers: Layers, oracle_s: float) -> dict[str, Any]:
    host_bytes = sum(most_bytes_away(planned.program).values())
    return {
        "fits": planned.fits,
        "max_bytes": planned.peak_bytes,
        "average": _means(averages(planned.simulated, layers, all_bytes)),
        "average_managed": _means(averages(planned.simulated, layers, managed_bytes)),
        "host_bytes": host_bytes,
        "host_share": host_bytes / (host_bytes + planned.peak_bytes),
        "step_s": planned.step_s,
        "throughput": oracle_s / planned.step_s,
        "peak_at": planned.obstacle,
        "choice": planned.note or None,
    }


def _means(found: Averages) -> dict[str, int]:
    return {"time": found.time_bytes, "layer": found.layer_bytes, "kernel": found.kernel_bytes}


def _cuts(figures: Mapping[str, Any], baseline_bytes: int, managed_bytes: int) -> dict[str, dict[str, float]]:
    """By how much the averages are below the network-wide account, which is the same all the time."""
    return {
        "all": {over: 1 - size / baseline_bytes for over, size in figures["average"].items()},
        "managed": {over: 1 - size / managed_bytes for over, size in figures["average_managed"].items()},
    }


def _differences(found: Mapping[str, Any]) -> list[str]:
    return [figure["difference"] for figure in found["figures"] if figure["difference"] is not None]


def _print(found: Mapping[str, Any], screen: Screen) -> None:
    screen.table(_HEADER, [_cells(row) for row in found["rows"]], right=_HEADER[1:8] + _HEADER[9:])
    screen.line()
    screen.line(f"On {found['device']}, {mebibytes(found['memory_bytes'])}. Peaks of all(m): of the step as it is run")
    screen.line("here, and with the operands that the paper's pools read. Cuts: average over kernels of managed bytes")
    screen.line(
        "(feature maps, their gradients, workspaces); --json has the other averages. Throughput: the oracle is 1."
    )
    for row in found["rows"]:
        for difference in row["differences"]:
            screen.line(f"{row['network']} at {row['batch']}: {difference}")
    for difference in found["differences"]:
        screen.line(difference)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    policies, published = row["policies"], {figure["figure"]: figure["published"] for figure in row["figures"]}
    dyn = policies["dyn"]
    cut, throughput = published.get("average usage cut"), published.get("throughput of dyn, of the oracle's")
    return (
        row["network"],
        str(row["batch"]),
        mebibytes(row["network_wide"]["bytes"]),
        "yes" if row["network_wide"]["fits"] else "no",
        mebibytes(policies["all(m)"]["max_bytes"]),
        mebibytes(row["published_account"]["all(m)"]["max_bytes"]),
        f"{row['average_cut']['managed']['kernel']:.1%}",
        "" if cut is None else f"{cut:.0%}",
        (dyn["choice"] or "").rpartition(", ")[2],
        mebibytes(dyn["max_bytes"]),
        mebibytes(dyn["host_bytes"]),
        f"{dyn['throughput']:.3f}",
        "" if throughput is None else f"{throughput:.2f}",
    )
