"""`memfit plan NET`: what becomes of every saved tensor on a device within a budget, and what that costs."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from memfit.capture.step import Storage
from memfit.cli.capture import described, largest_first
from memfit.cli.options import add_budget, add_losses, add_network, add_planning, add_policy, num_threads, positive
from memfit.cli.screen import Screen, mebibytes, seconds
from memfit.cli.sketch import sketch
from memfit.cli.target import Pricing, Target, costs_facts, costs_summary
from memfit.cost.costs import PS_PER_S
from memfit.errors import BadOption
from memfit.plan.budget import Budget
from memfit.plan.decisions import Decision, Keep, Recompute, to_text, untimed
from memfit.plan.options import policy_or_default
from memfit.plan.planner import Planned, plan_step
from memfit.plan.policies.network_wide import layer_input_bytes
from memfit.plan.policies.registry import RUNNABLE, policy_named, require_permission, with_format
from memfit.resident import peak_bytes

_OK, _DOES_NOT_FIT = 0, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_network(parser)
    add_budget(parser)
    add_planning(parser)
    add_policy(parser)
    add_losses(parser)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the plan there, as JSON, if it fits")
    parser.add_argument(
        "--rows", type=positive, default=12, metavar="N", help="how many of the largest storages (default: %(default)s)"
    )


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Exit code 0 if the plan fits, 2 if not: its figures are shown all the same."""
    budget = Budget.of(arguments.budget)
    policy = policy_named(with_format(policy_or_default(arguments.policy, budget), arguments.format))
    require_permission(policy, allow_lossy=arguments.allow_lossy)
    if arguments.allow_lossy and not policy.is_lossy:
        raise BadOption(f"--allow-lossy: policy '{policy.name}' loses nothing. Leave it out")
    if arguments.save is not None and policy.decide is None:
        raise BadOption(
            f"--save: policy '{policy.name}' is an account to compare with; there is no plan to save. "
            f"Policies that make one: {', '.join(RUNNABLE)}"
        )
    pricing = Pricing.of(arguments, screen)
    with num_threads(arguments.threads), _saving(arguments.save) as save:
        screen.progress(f"capturing {arguments.network}")
        target = Target.capture(arguments.network, batch=arguments.batch, image=arguments.image)
        step = target.step_for(policy)
        costs = pricing.costs(step, ways=policy.asks_ways)
        screen.progress("planning")
        planned = plan_step(
            step,
            costs,
            policy=policy.name,
            budget=budget,
            optimizer=arguments.optimizer,
            allow_lossy=arguments.allow_lossy,
            progress=lambda text: screen.progress(f"planning: {text}"),
        )
        if arguments.save is not None and planned.plan is not None and planned.fits:
            save(planned.plan.to_json())
    screen.done()

    saved = str(arguments.save) if arguments.save is not None and planned.fits else None
    found = summary(planned, target, pricing, arguments.optimizer) | {"saved": saved, "rss_bytes": peak_bytes()}
    found["largest"] = _largest(planned, arguments.rows)
    if screen.json:
        screen.object(found)
    else:
        _print(found, planned, target, screen)
    if not planned.fits:
        screen.error(planned.misfit)
        return _DOES_NOT_FIT
    return _OK


def summary(planned: Planned, target: Target, pricing: Pricing, optimizer: str) -> dict[str, Any]:
    """The plan in numbers."""
    timeline = planned.timeline
    budget_bytes = planned.budget_bytes
    program_step = planned.step if timeline is None else timeline.program.step
    found = {
        "network": target.network,
        "batch": target.batch,
        "image": target.image,
        "device": planned.costs.device,
        "policy": planned.policy,
        "choice": planned.note or None,
        "optimizer": optimizer,
        "fits": planned.fits,
        "budget": None if planned.budget is None else planned.budget.text,
        "budget_bytes": budget_bytes,
        # Below zero if the budget does not even hold what no plan can change.
        "budget_fixed_bytes": planned.fixed_bytes,
        "budget_activation_bytes": None if budget_bytes is None else budget_bytes - planned.fixed_bytes,
        "peak_bytes": planned.peak_bytes,
        "average_bytes": planned.average_bytes,
        "keep_peak_bytes": planned.keep_peak_bytes,
        "keep_activation_bytes": planned.keep_activation_bytes,
        "fixed_bytes": planned.fixed_bytes,
        "optimizer_bytes": planned.optimizer_bytes,
        "step_s": planned.step_s,
        "keep_step_s": planned.keep.step_s,
        "overhead": planned.overhead,
        "lower_bound_overhead": planned.lower_bound_overhead,
        "stall_s": 0.0 if timeline is None else timeline.stall_ps / PS_PER_S,
        "drag_s": 0.0 if timeline is None else timeline.drag_ps / PS_PER_S,
        "plan_s": planned.plan_s,
        "capture_s": target.capture_s,
        "parts": dict(planned.parts),
        "peak_at": planned.obstacle,
        "workspace": pricing.workspace,
        "workspace_bytes": max((cost.workspace_bytes for cost in planned.costs.of(program_step)), default=0),
        "layer_input_bytes": layer_input_bytes(planned.step),
        "decisions": _decisions(planned),
        "costs": costs_summary(planned.costs),
        "digest": planned.step.digest,
    }
    if not planned.fits:
        found |= {
            "smallest_budget_bytes": planned.smallest_budget_bytes,
            "obstacle": planned.obstacle,
            "certificate": planned.certificate or None,
            "error": planned.misfit,
            "kind": "DoesNotFit",
        }
    return found


def _decided(planned: Planned) -> list[tuple[Storage, Decision]]:
    """The forward half's storages that backward reads, or holds to recompute from, each with its decision."""
    decisions = {} if planned.plan is None else planned.plan.decisions
    found = []
    for storage in planned.step.storages:
        if storage.maker is None or storage.maker >= planned.step.num_forward:
            continue
        decision = decisions.get(storage.id)
        held_for_reruns = decision is not None and not isinstance(decision, Recompute)
        if storage.first_backward is not None or held_for_reruns:
            found.append((storage, decision or Keep()))
    return found


def _decisions(planned: Planned) -> dict[str, dict[str, int]]:
    """How many storages each decision was taken for, and their bytes; the moments of transfers are not told apart."""
    found: dict[str, dict[str, int]] = {}
    for storage, decision in _decided(planned):
        row = found.setdefault(to_text(untimed(decision)), {"count": 0, "bytes": 0})
        row["count"] += 1
        row["bytes"] += storage.bytes
    return dict(sorted(found.items()))


def _largest(planned: Planned, num_rows: int) -> list[dict[str, Any]]:
    decided = {storage.id: (storage, decision) for storage, decision in _decided(planned)}
    largest = largest_first(storage for storage, _ in decided.values())[:num_rows]
    return [described(planned.step, storage) | {"decision": to_text(decided[storage.id][1])} for storage in largest]


@contextlib.contextmanager
def _saving(path: Path | None) -> Iterator[Callable[[str], None]]:
    """A function that writes the file whole or not at all; a place that cannot be written raises right away."""
    if path is None:
        yield lambda text: None
        return
    if path.exists() and not path.is_file():
        raise BadOption(f"--save {path}: is there, and is no file")
    final = path.resolve()
    draft = final.with_name(f".{final.name}.{os.getpid()}.part")
    try:
        draft.touch(exist_ok=False)
    except OSError as error:
        raise BadOption(f"--save {path}: cannot be written: {error.strerror}") from None

    def save(text: str) -> None:
        try:
            draft.write_text(text + "\n", encoding="utf-8")
            os.replace(draft, final)
        except OSError as error:
            raise BadOption(f"--save {path}: cannot be written: {error.strerror}") from error

    try:
        yield save
    finally:
        draft.unlink(missing_ok=True)


def _print(found: dict[str, Any], planned: Planned, target: Target, screen: Screen) -> None:
    screen.facts([*_facts(found, planned, target), *costs_facts(planned.costs), *_footer(found)])
    if found["largest"]:
        screen.line()
        screen.table(
            ("largest", "tensor", "made by", "module", "decision"),
            [
                (mebibytes(s["bytes"]), s["value"], s["op"], s["module"] or "(root)", s["decision"])
                for s in found["largest"]
            ],
            right=("largest",),
        )
    screen.line()
    if planned.timeline is None:
        screen.line(f"'{planned.policy}' is an account and no plan: all of it is there all the time")
        return
    for line in sketch(planned.timeline, budget_bytes=planned.budget_bytes, always_bytes=planned.optimizer_bytes):
        screen.line(line)


def _facts(found: dict[str, Any], planned: Planned, target: Target) -> Iterator[tuple[str, str]]:
    yield "network", target.title
    yield "device", found["device"]
    yield "policy", f"{found['policy']}: {policy_named(found['policy']).summary}"
    if found["choice"] is not None:
        yield "  choice", found["choice"]
    yield "optimizer", f"{found['optimizer']}, {mebibytes(found['optimizer_bytes'])} of state"
    yield "fits", "yes" if found["fits"] else "NO"
    yield from budget_facts(planned)
    state = f", {mebibytes(found['optimizer_bytes'])} of it the optimizer's" if found["optimizer_bytes"] else ""
    yield "peak", f"{mebibytes(found['peak_bytes'])}{state}; {mebibytes(found['average_bytes'])} on average"
    yield "  at" if planned.timeline is not None else "  made of", found["peak_at"]
    yield "peak of keep", mebibytes(found["keep_peak_bytes"])
    yield "step", _step_text(found)
    largest = f"at most {mebibytes(found['workspace_bytes'])}" if found["workspace_bytes"] else "no op has one"
    yield "workspaces", f"{found['workspace']}, {largest}"
    inputs = ", ".join(f"{name} {mebibytes(size)}" for name, size in found["layer_input_bytes"].items() if size)
    if inputs:
        yield "inputs of layers", inputs
    decisions = (f"{name} {row['count']:,} ({mebibytes(row['bytes'])})" for name, row in found["decisions"].items())
    yield "decisions", ", ".join(decisions) or "none: backward reads nothing of the forward half"


def budget_facts(planned: Planned) -> Iterator[tuple[str, str]]:
    """The budget and both its parts: what no plan can change, and what is left for activations."""
    fixed = f"{mebibytes(planned.fixed_bytes)} (parameters, inputs, gradients, optimizer)"
    if planned.budget_bytes is None:
        yield "budget", "none: the memory of this device is not known"
        yield "  no plan can change", fixed
        return
    asked = "all of the device's memory"
    if planned.budget is not None:
        share = planned.budget.share
        asked = "as asked for" if share is None else f"{share:.4g} of the activations of keep, and what is fixed"
    left_bytes = planned.budget_bytes - planned.fixed_bytes
    yield "budget", f"{mebibytes(planned.budget_bytes)} ({asked})"
    yield "  no plan can change", fixed
    left = f"{mebibytes(left_bytes)}" if left_bytes >= 0 else f"nothing: {mebibytes(-left_bytes)} too little"
    yield "  for activations", f"{left}; keep needs {mebibytes(planned.keep_activation_bytes)}"


def _step_text(found: dict[str, Any]) -> str:
    stalls = f", of which {seconds(found['stall_s'])} waiting" if found["stall_s"] else ""
    bound = found["lower_bound_overhead"]
    proven = "" if bound is None else f", and no plan has less than {bound:+.2%}"
    step = f"{seconds(found['step_s'])}{stalls}; keep {seconds(found['keep_step_s'])}"
    return f"{step}; overhead {found['overhead']:{'+.1%' if bound is None else '+.2%'}}{proven}"


def _footer(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "captured in", f"{seconds(found['capture_s'])}; planned in {seconds(found['plan_s'])}"
    yield "RAM of memfit", mebibytes(found["rss_bytes"])
    yield "digest", found["digest"]
    if found["saved"] is not None:
        yield "saved as", found["saved"]
