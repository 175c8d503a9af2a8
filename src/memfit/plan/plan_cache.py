"""Plans on disk: what was decided once for a step, its costs and a budget is not searched for again.

[Note: why a plan from disk is safe]
A file gives nothing but decisions and a list of instructions. They are proven again as if a stranger had sent them:
that they belong to this step, that the program is legal, that its peak by today's prices is the peak that was promised
and is within the budget. What fails is planned anew, and its file written over.

[Note: densities]
How many zeros a tensor has is looked up in the data, and differs from run to run. So it is not in the key. A plan from
disk is taken if the tensors are about as dense as when it was made, and if each code that has room for a share of
non-zeros still has room to spare: one that is too small would become a dense copy, beyond the ledger.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping
from typing import Any

import torch

from memfit.cache import cache_folder
from memfit.capture.rewrites.proof import PROOFS, Proofs
from memfit.capture.step import Step
from memfit.codecs.registry import codec
from memfit.cost.costs import Costs
from memfit.errors import MemfitError
from memfit.json_folder import JsonFolder, digest, sources_digest
from memfit.plan.budget import Budget
from memfit.plan.check import check
from memfit.plan.decisions import Encode, EncodeThenOffload
from memfit.plan.ledger import Ledger
from memfit.plan.plan import Plan
from memfit.plan.planner import Planned, plan_step
from memfit.plan.progress import Listener
from memfit.plan.simulate import simulate

log = logging.getLogger("memfit")

MAX_FILES, MAX_BYTES = 256, 64 << 20
_LEAST_PLAN_S = 0.25
_SOURCES = ("capture", "codecs", "cost", "plan", "native", "operators.py", "torch_internals.py")
# What decides a plan only through what is in the key already, or not at all.
_NOT_IN_THE_KEY = frozenset({"densities", "source", "notes"})
# How far densities may have moved, on average over all bytes; and what a code must still have room for.
_MOVED = 0.02
_SPARE_SHARE, _SPARE = 1.05, 0.005
# What is worked out again, from the plan and the costs. All other fields of Planned are figures, and are kept.
_WORKED_OUT = frozenset(
    {
        *("step", "costs", "keep", "plan", "timeline", "plan_s"),
        *("budget", "budget_bytes", "optimizer_bytes", "peak_bytes", "average_bytes", "step_s", "parts"),
    }
)


class Stale(MemfitError):
    """A plan on disk that does not hold here and now; the text says why. It never leaves this file."""


def plan_folder() -> JsonFolder:
    """Where plans are kept: at most MAX_FILES, and MAX_BYTES in all."""
    return JsonFolder(cache_folder() / "plans", max_files=MAX_FILES, max_bytes=MAX_BYTES)


def cached_plan(
    step: Step,
    costs: Costs,
    *,
    policy: str,
    budget: Budget | None,
    optimizer: str = "none",
    allow_lossy: bool = False,
    headroom: bool = True,
    folder: JsonFolder | None = None,
    least_plan_s: float = _LEAST_PLAN_S,
    proofs: Proofs = PROOFS,
    progress: Listener | None = None,
) -> Planned:
    """The plan of that policy, from disk if it is there and holds, else made now and kept. It may not fit the budget.

    Args:
        step, costs, policy, budget, optimizer, allow_lossy, headroom: as plan_step takes them.
        folder: where plans are kept; None: in memfit's cache folder.
        least_plan_s: plans that took less time than that are not worth a file.
        proofs: which ops give the same bits in chunks.
        progress: told how planning goes, where it takes long.
    """
    folder = folder or plan_folder()
    key = plan_key(
        step, costs, policy=policy, budget=budget, optimizer=optimizer, allow_lossy=allow_lossy, headroom=headroom
    )
    content = folder.read(key)
    if content is not None:
        start_s = time.perf_counter()
        try:
            found = _read(content, step, costs, policy, budget, optimizer, allow_lossy=allow_lossy, proofs=proofs)
            took_s = time.perf_counter() - start_s
            log.info("the plan of '%s' for %s is from disk, proven in %.2f s", policy, step.name or "a step", took_s)
            return dataclasses.replace(found, plan_s=took_s)
        except (MemfitError, KeyError, TypeError, ValueError, AttributeError, IndexError, AssertionError) as error:
            folder.discard(key, f"{type(error).__name__}: {error}")
    planned = plan_step(
        step,
        costs,
        policy=policy,
        budget=budget,
        optimizer=optimizer,
        headroom=headroom,
        allow_lossy=allow_lossy,
        progress=progress,
    )
    if planned.plan is not None and planned.fits and planned.plan_s >= least_plan_s:
        figures = _figures(planned)
        if figures is not None:
            folder.write(key, _written(planned, costs, figures))
    return planned


def plan_key(
    step: Step,
    costs: Costs,
    *,
    policy: str,
    budget: Budget | None,
    optimizer: str,
    allow_lossy: bool,
    headroom: bool,
) -> dict[str, Any]:
    """All that decides a plan, but for densities."""
    return {
        "step": step.digest,
        "costs": digest(_prices(costs)),
        "device": costs.device,
        "policy": policy,  # with its format
        "budget": None if budget is None else budget.text,
        "optimizer": optimizer,
        "allow_lossy": allow_lossy,
        "headroom": headroom,
        "torch": torch.__version__,
        "memfit": sources_digest(*_SOURCES),
    }


def _prices(costs: Costs) -> Any:
    fields = (f.name for f in dataclasses.fields(costs) if f.name not in _NOT_IN_THE_KEY)
    return [[name, _plain(getattr(costs, name))] for name in fields]


def _plain(thing: Any) -> Any:
    """Prices as JSON-able data that does not depend on the order they were written down in."""
    if dataclasses.is_dataclass(thing):
        return [_plain(getattr(thing, f.name)) for f in dataclasses.fields(thing)]
    if isinstance(thing, Mapping):
        return sorted(([str(name), _plain(value)] for name, value in thing.items()), key=lambda pair: pair[0])
    if isinstance(thing, (set, frozenset)):
        return sorted(thing)
    return [_plain(item) for item in thing] if isinstance(thing, (tuple, list)) else thing


def _figures(planned: Planned) -> dict[str, Any] | None:
    """What the planner says besides the plan, as plain numbers and texts; None if some of it is neither."""
    found = {f.name: getattr(planned, f.name) for f in dataclasses.fields(planned) if f.name not in _WORKED_OUT}
    odd = [name for name, value in found.items() if not (value is None or isinstance(value, (bool, int, float, str)))]
    if odd:
        log.debug("the plan of '%s' is not kept: %s has no plain form", planned.policy, ", ".join(odd))
        return None
    return found


def _written(planned: Planned, costs: Costs, figures: dict[str, Any]) -> dict[str, Any]:
    assert planned.plan is not None
    return {
        "plan": planned.plan.to_dict(),
        "figures": figures,
        "densities": {str(storage): round(share, 4) for storage, share in sorted(costs.densities.items())},
    }


def _read(
    content: Any,
    step: Step,
    costs: Costs,
    policy: str,
    budget: Budget | None,
    optimizer: str,
    *,
    allow_lossy: bool,
    proofs: Proofs,
) -> Planned:
    """The plan in a file, proven; raises if it is damaged or does not hold."""
    plan = Plan.from_dict(content["plan"], step, device=costs.device, allow_lossy=allow_lossy, proofs=proofs)
    if plan.policy != policy:
        raise Stale(f"it is of policy '{plan.policy}'")
    _require_room(plan, costs, {int(storage): float(share) for storage, share in content["densities"].items()})
    # The plan of `keep` for the same budget has all that does not depend on the policy.
    kept = plan_step(step, costs, policy="keep", budget=budget, optimizer=optimizer)
    following = costs.picking(plan.picked).following(plan.step, plan.program.step)
    timeline = simulate(plan.program, following)
    if timeline.peak_bytes != plan.peak_bytes:
        raise Stale(f"its peak is {timeline.peak_bytes:,} bytes, and was {plan.peak_bytes:,}")
    workspaces = [cost.workspace_bytes for cost in following.of(plan.program.step)]
    check(plan.program, workspace_bytes=workspaces, peak_bytes=timeline.peak_bytes)
    peak = timeline.ledger.peak
    parts = {kind.value: size for kind, size in zip(Ledger.kinds, peak.bytes, strict=True)}
    parts |= {"workspace": peak.workspace_bytes, "optimizer": kept.optimizer_bytes}
    figures = dict(content["figures"])
    if figures.keys() != {f.name for f in dataclasses.fields(Planned)} - _WORKED_OUT:
        raise Stale("its figures are of another version")
    found = dataclasses.replace(
        kept,
        step=plan.step,
        costs=following,
        peak_bytes=timeline.peak_bytes + kept.optimizer_bytes,
        average_bytes=timeline.average_bytes + kept.optimizer_bytes,
        step_s=timeline.step_s,
        parts=parts,
        plan=dataclasses.replace(plan, budget_bytes=kept.budget_bytes),
        timeline=timeline,
        **figures,
    )
    if not found.fits:
        raise Stale(f"it needs {found.peak_bytes:,} bytes, the budget is {found.budget_bytes:,}")
    return found


def _require_room(plan: Plan, costs: Costs, before: Mapping[int, float]) -> None:
    """Raise Stale if tensors are no longer as dense as they were, or if one would not fit into its code."""
    step, now = plan.step, costs.densities
    known = {s for s in (*now, *before) if s in step.storage}
    total = sum(step.storage_bytes[s] for s in known)
    moved = sum(abs(now.get(s, 1.0) - before.get(s, 1.0)) * step.storage_bytes[s] for s in known)
    if moved > _MOVED * total:
        raise Stale(f"densities have moved by {moved / total:.3f} on average")
    for storage, decision in plan.decisions.items():
        if not isinstance(decision, Encode | EncodeThenOffload):
            continue
        capacity = getattr(codec(decision.codec), "capacity", None)
        if capacity is not None and capacity < _SPARE_SHARE * now.get(storage, 1.0) + _SPARE:
            share = now.get(storage, 1.0)
            raise Stale(f"storage {storage} has {share:.3f} of non-zeros now, its code '{decision.codec}' is too small")
