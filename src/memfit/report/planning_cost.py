"""What planning a step takes: seconds and bytes over the size of the graph, and the limits they are held against.

Each network is planned in a process of its own (memfit.report.planning_worker), so that nothing is cached and the
memory is that of one plan. Plans are of `auto`, for a device of the catalogue, without the cache of plans.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from memfit.errors import MemfitError
from memfit.report.deep_network import DeepNetwork

AT_MOST_S = MappingProxyType({"resnet50": 5.0, "gpt2": 5.0, "densenet201": 30.0, "gpt2:48": 30.0})
"""Seconds after capture until the plan is there."""
FIRST_PLAN_AT_MOST_S = 2.0
"""Seconds after capture until the search has a plan within the budget, of any network."""
RESIDENT_AT_MOST_BYTES = 1 << 30
"""All that the process has resident while it plans, torch and the captured step included."""


@dataclass(frozen=True)
class PlanningCost:
    """What it took to plan one network.

    Attributes:
        num_ops, num_storages: of the step that was planned, after the free rewrites.
        prepare_s: from the capture to the start of planning: rewriting the step, pricing its ops.
        first_plan_s: from the start of planning to the first plan within the budget; None if there never was one.
        plan_s: from the start of planning to its end, as `memfit plan` says it.
        plan_cpu_s: of processors, in the same time; far less than plan_s if others kept the machine busy.
        num_evaluations: plans that were tried; None if the policy does not say.
        note: which way the policy took.
        growth_bytes: how far the resident set rose after the capture.
        peak_resident_bytes: the most it was while planning, in all.
    """

    network: str
    num_ops: int
    num_storages: int
    capture_s: float
    prepare_s: float
    first_plan_s: float | None
    plan_s: float
    plan_cpu_s: float
    num_evaluations: int | None
    note: str
    fits: bool
    overhead: float
    lower_bound_overhead: float | None
    growth_bytes: int
    peak_resident_bytes: int

    @property
    def after_capture_s(self) -> float:
        """From the capture to the plan."""
        return self.prepare_s + self.plan_s

    @property
    def broken(self) -> tuple[str, ...]:
        """Which limits were not kept, each in a sentence."""
        found = []
        at_most_s = AT_MOST_S.get(self.network, math.inf)
        if self.after_capture_s > at_most_s:
            found.append(f"{self.network}: planned {self.after_capture_s:.2f} s after capture, at most {at_most_s:g} s")
        first_s = self.prepare_s + (self.first_plan_s or 0.0)
        if first_s > FIRST_PLAN_AT_MOST_S:
            found.append(
                f"{self.network}: a first plan {first_s:.2f} s after capture, at most {FIRST_PLAN_AT_MOST_S:g} s"
            )
        if self.peak_resident_bytes > RESIDENT_AT_MOST_BYTES:
            found.append(
                f"{self.network}: {self.peak_resident_bytes / 2**20:,.0f} MiB resident while planning, at most "
                f"{RESIDENT_AT_MOST_BYTES / 2**20:,.0f} MiB"
            )
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"after_capture_s": self.after_capture_s, "broken": list(self.broken)}


@dataclass(frozen=True)
class Growth:
    """How seconds and bytes grow with the ops of one network as it gets more layers: like ops to that power.

    Attributes:
        exponent_s, exponent_cpu_s: of the seconds of planning, by the clock and of processors. The clock's says little
            if others kept the machine busier in one row than in the next.
        exponent_bytes: None if the process did not grow in some row: then there is no power to speak of.
    """

    network: str
    num_rows: int
    exponent_s: float
    exponent_cpu_s: float
    exponent_bytes: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def growths(costs: Iterable[PlanningCost]) -> tuple[Growth, ...]:
    """Of each network that was planned at two depths or more."""
    families: dict[str, list[PlanningCost]] = {}
    for cost in costs:
        families.setdefault(DeepNetwork.parse(cost.network).name, []).append(cost)
    found = []
    for name, family in families.items():
        sizes = [cost.num_ops for cost in family]
        if len(set(sizes)) < 2:
            continue
        by_s = exponent(sizes, [cost.plan_s for cost in family])
        by_cpu_s = exponent(sizes, [cost.plan_cpu_s for cost in family])
        assert by_s is not None and by_cpu_s is not None  # or a clock stood still
        by_bytes = exponent(sizes, [cost.growth_bytes for cost in family])
        found.append(Growth(name, len(family), by_s, by_cpu_s, by_bytes))
    return tuple(found)


def exponent(sizes: Sequence[float], amounts: Sequence[float]) -> float | None:
    """The power of size that fits amounts best: least squares of their logarithms; None if an amount has none."""
    if min(amounts) <= 0:
        return None
    return statistics.linear_regression([math.log(s) for s in sizes], [math.log(a) for a in amounts]).slope


def planning_cost(network: DeepNetwork, *, device: str, budget: int | str) -> PlanningCost:
    """Plan the network by `auto` in a fresh process; raises what planning it raised."""
    request = {"network": str(network), "device": device, "budget": budget}
    source = "from memfit.report.planning_worker import main; main()"
    # -P: see memfit.report.measure.
    command = [sys.executable, "-P", "-c", source, json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not done.stdout:
        lines = done.stderr.strip().splitlines()
        said = lines[-1] if lines else "it said nothing"
        raise MemfitError(f"the process that plans {network} ended with code {done.returncode}: {said}")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise MemfitError(f"planning {network} fails: {answer['kind']}: {answer['error']}")
    return PlanningCost(**answer)
