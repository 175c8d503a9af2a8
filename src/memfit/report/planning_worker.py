"""The process that plans one network and watches itself: it is started fresh and prints one JSON object.

Started by memfit.report.planning_cost as `python -P -c "from memfit.report.planning_worker import main; main()"`,
without pinning malloc: that would slow planning down, and what malloc holds in reserve is memory that planning takes.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import time
from dataclasses import asdict

from memfit.capture.rewrites import rewrite
from memfit.capture.rewrites.proof import AssumedProofs
from memfit.capture.rewrites.tight import tighten
from memfit.cost.devices import device
from memfit.cost.roofline import roofline
from memfit.errors import MemfitError
from memfit.native.library import native_library
from memfit.plan.budget import Budget
from memfit.plan.planner import plan_step
from memfit.plan.progress import FIRST_PLAN
from memfit.report.deep_network import DeepNetwork
from memfit.report.planning_cost import PlanningCost
from memfit.resident import high_water_bytes, reset_high_water, resident_bytes, trim

_TRIED = re.compile(r"([0-9,]+) plans tried")  # in the note of auto


def main() -> None:
    """Answer the request in the last argument on stdout."""
    request = json.loads(sys.argv[-1])
    # What libraries print goes to stderr: stdout is for the answer.
    answer_to = os.dup(1)
    os.dup2(2, 1)
    try:
        cost = watch(DeepNetwork.parse(request["network"]), request["device"], Budget.parse(request["budget"]))
        answer = asdict(cost)
    except MemfitError as error:
        answer = {"error": str(error), "kind": type(error).__name__}
    with os.fdopen(answer_to, "w") as file:
        json.dump(answer, file)


def watch(network: DeepNetwork, device_name: str, budget: Budget) -> PlanningCost:
    """Capture the network, plan it by `auto`, and say what the planning took. Nothing is taken from disk."""
    native_library()  # compiled once per machine, which is no part of planning
    step, capture_s = network.captured()
    gc.collect()
    trim()
    reset_high_water()
    before_bytes = resident_bytes()

    captured_at_s = time.perf_counter()
    step = rewrite(step, proofs=AssumedProofs())
    costs = roofline(step, device(device_name), also=[tighten(step, proofs=AssumedProofs())])
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    first_s: list[float] = []

    def listen(text: str) -> None:
        if text.startswith(FIRST_PLAN):
            first_s.append(time.perf_counter() - start_s)

    planned = plan_step(step, costs, policy="auto", budget=budget, progress=listen)
    cpu_s, peak_bytes = time.process_time() - start_cpu_s, high_water_bytes()

    tried = _TRIED.search(planned.note)
    # Not heard of where everything fits as it is, or where only another policy has a plan that fits.
    first_plan_s = first_s[0] if first_s else planned.plan_s
    return PlanningCost(
        network=str(network),
        num_ops=len(step.ops),
        num_storages=len(step.storages),
        capture_s=capture_s,
        prepare_s=start_s - captured_at_s,
        first_plan_s=first_plan_s if planned.fits else None,
        plan_s=planned.plan_s,
        plan_cpu_s=cpu_s,
        num_evaluations=None if tried is None else int(tried[1].replace(",", "")),
        note=planned.note,
        fits=planned.fits,
        overhead=planned.overhead,
        lower_bound_overhead=planned.lower_bound_overhead,
        growth_bytes=peak_bytes - before_bytes,
        peak_resident_bytes=peak_bytes,
    )
