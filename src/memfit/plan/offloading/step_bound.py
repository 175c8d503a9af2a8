"""The least time that compute waits in any plan of a Step that offloads within a budget and recomputes nothing.

The fluid relaxation of fluid.py, op by op instead of stage by stage, with everything that could help a schedule:
bytes leave one by one and without latency; they may leave once they are written for the last time, read or not; and
each half sends in its own best order, those that are ready first. What it keeps is that the bytes above the budget
must be gone when an op begins, that a link is only so fast, and that both halves move the same bytes between them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from memfit.plan.offloading.chain import Half
from memfit.plan.offloading.fluid import fluid_halves
from memfit.plan.offloading.step_chain import Luggage


def offload_bound_ps(luggage: Luggage, budget_bytes: int) -> int | None:
    """No offloading plan with a peak within the budget waits less; None if there is none at all.

    It holds for the prices that the luggage was made with, and for plans that send to its tier.
    """
    problem, link = luggage.problem, luggage.link
    written: dict[int, int] = {}
    used: dict[int, int] = {}
    for item in luggage.items:
        written[item.written] = written.get(item.written, 0) + item.num_bytes
        used[item.first_backward] = used.get(item.first_backward, 0) + item.num_bytes
    forward = _half(luggage, range(problem.num_forward), written, budget_bytes, link.send_bytes_per_s)
    reversed_ops = range(problem.num_ops - 1, problem.num_forward - 1, -1)
    backward = _half(luggage, reversed_ops, used, budget_bytes, link.fetch_bytes_per_s)
    found = fluid_halves(forward, backward)
    # Transfers take whole picoseconds, to the nearest: each half may be shorter by half of one for every item.
    return None if found is None else max(0, found.bound_ps - len(luggage.items))


def _half(luggage: Luggage, ops: range, ready: Mapping[int, int], budget_bytes: int, bytes_per_s: float) -> Half:
    """One half, a stage for each op: what it saves is what may travel once it is over."""
    transients = []
    total = 0
    for op in ops:
        total += ready.get(op, 0)
        transients.append(luggage.keep_bytes[op] - total)
    return Half(
        durations_ps=tuple(luggage.problem.op_ps[op] for op in ops),
        transient_bytes=tuple(transients),
        saved_bytes=tuple(ready.get(op, 0) for op in ops),
        limit_bytes=budget_bytes,
        bytes_per_s=math.ceil(bytes_per_s),
        latency_ps=0,
    )
