"""Plan a step by the policy asked for: decide, lower, simulate, check, and hold the result against the budget."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from memfit.capture.step import Step
from memfit.collector import collector_paused
from memfit.cost.costs import PS_PER_S, Costs
from memfit.errors import DoesNotFit
from memfit.plan.budget import Budget, headroom_bytes, optimizer_bytes, with_headroom
from memfit.plan.check import check
from memfit.plan.decisions import Decision, Decisions, Offload
from memfit.plan.encode import refuse_lossy
from memfit.plan.keep_timeline import keep_timeline
from memfit.plan.ledger import Ledger
from memfit.plan.lower import lower
from memfit.plan.plan import Plan
from memfit.plan.policies.network_wide import NetworkWide
from memfit.plan.policies.policy import Decided
from memfit.plan.policies.registry import policy_named, require_permission
from memfit.plan.program import Program
from memfit.plan.progress import Listener, listening
from memfit.plan.simulate import Timeline, simulate


@dataclass(frozen=True)
class Planned:
    """A plan with what it costs, beside the keep plan of the same step.

    Attributes:
        plan, timeline: None for an account that no program can follow (network-wide).
        costs: the prices of the plan: those that were given, by the algorithms that the policy chose.
        note: which way the policy took, if it says so.
        bound_s: no plan of the policy's choices takes less; None if it does not know.
        certificate: why no plan fits the budget, where the policy proved that: what every plan has, and what there is
            beside any plan.
        budget_bytes: all that may be on the device at once; None if nobody set a limit.
        optimizer_bytes: state of the optimizer, on the device throughout.
        peak_bytes, average_bytes: all included; the average is over time.
        parts: what the peak is made of, in bytes by name.
        plan_s: how long planning took.
        has_headroom: the policy was to leave a little of the budget, for what a process holds besides tensors.
    """

    policy: str
    step: Step
    costs: Costs
    keep: Timeline
    budget: Budget | None
    budget_bytes: int | None
    optimizer_bytes: int
    peak_bytes: int
    average_bytes: int
    step_s: float
    parts: Mapping[str, int]
    plan_s: float
    plan: Plan | None = None
    timeline: Timeline | None = None
    note: str = ""
    bound_s: float | None = None
    certificate: str = ""
    has_headroom: bool = False

    @property
    def program(self) -> Program:
        """The program of a plan that has one."""
        assert self.plan is not None, f"'{self.policy}' has no program"
        return self.plan.program

    @property
    def simulated(self) -> Timeline:
        """The timeline of a plan that has one."""
        assert self.timeline is not None, f"'{self.policy}' has no timeline"
        return self.timeline

    @property
    def fits(self) -> bool:
        return self.budget_bytes is None or self.peak_bytes <= self.budget_bytes

    @property
    def overhead(self) -> float:
        """How much longer than the keep plan the step takes: 0.1 is ten per cent."""
        return self.step_s / self.keep.step_s - 1 if self.keep.step_ps else 0.0

    @property
    def lower_bound_overhead(self) -> float | None:
        """No plan within the budget has a smaller overhead, at these costs and choices; None if that is not known."""
        if self.bound_s is None:
            return None
        return self.bound_s / self.keep.step_s - 1 if self.keep.step_ps else 0.0

    @property
    def keep_peak_bytes(self) -> int:
        return self.keep.peak_bytes + self.optimizer_bytes

    @property
    def fixed_bytes(self) -> int:
        """What no plan can change: parameters, buffers, inputs, gradients and the optimizer's state."""
        return self.keep.ledger.fixed_bytes + self.optimizer_bytes

    @property
    def keep_activation_bytes(self) -> int:
        """What the keep plan needs besides: the share of a budget in per cent is a share of this."""
        return self.keep.ledger.activation_bytes

    @cached_property
    def obstacle(self) -> str:
        """What stands at the peak, in words."""
        if self.timeline is not None:
            state = f", and {self.optimizer_bytes / 2**20:.1f} MiB of the optimizer" if self.optimizer_bytes else ""
            return self.timeline.ledger.describe_peak() + state
        return ", ".join(f"{name} {size / 2**20:,.1f}" for name, size in self.parts.items()) + " MiB"

    def require_fit(self) -> None:
        """Raise DoesNotFit if the peak is above the budget."""
        if not self.fits:
            raise DoesNotFit(self.misfit)

    @property
    def misfit(self) -> str:
        """Why it does not fit, and what would."""
        assert self.budget_bytes is not None
        share = "" if self.budget is None or self.budget.share is None else f" ({self.budget.share:.0%})"
        proof = f"No plan fits: {self.certificate}. " if self.certificate else ""
        return (
            f"policy '{self.policy}' needs {self.peak_bytes:,} bytes, the budget is {self.budget_bytes:,}{share}. "
            f"{proof}The peak is {self.obstacle}. "
            f"Give a budget of at least {self.smallest_budget_bytes:,} bytes{self._share_needed}, or a smaller batch"
        )

    @property
    def smallest_budget_bytes(self) -> int:
        """What this plan needs, and what would be set aside of so much room."""
        if not self.has_headroom:
            return self.peak_bytes
        return with_headroom(self.peak_bytes - self.optimizer_bytes) + self.optimizer_bytes

    @property
    def _share_needed(self) -> str:
        if self.keep_activation_bytes <= 0:
            return ""
        # Rounded up: given as it stands here, it must do.
        share = max(self.smallest_budget_bytes - self.fixed_bytes, 0) / self.keep_activation_bytes
        return f" ({math.ceil(1000 * share) / 10}%)"


def whole_certificate(certificate: str, *, state_bytes: int, headroom_bytes: int = 0) -> str:
    """The certificate of a step, with what else there must be room for in the budget; empty if there is none."""
    others = [f"{state_bytes:,} bytes of the optimizer's state"] if state_bytes else []
    if headroom_bytes:
        others.append(f"{headroom_bytes:,} bytes set aside for what a process holds besides tensors")
    return f"{certificate}, beside {' and '.join(others)}" if certificate and others else certificate


@collector_paused()
def plan_step(
    step: Step,
    costs: Costs,
    *,
    policy: str = "keep",
    budget: Budget | None = None,
    optimizer: str = "none",
    decisions: Decisions | None = None,
    headroom: bool = False,
    allow_lossy: bool = False,
    progress: Listener | None = None,
) -> Planned:
    """The plan of that policy for the step at these costs, whether it fits the budget or not.

    Without a budget, the device's own memory is the limit. Decisions that were taken already are not taken again. With
    `headroom` the policy aims a little lower than the budget, for what a process holds besides tensors. Policies that
    change gradients are refused unless `allow_lossy` is said.
    """
    start_s = time.perf_counter()
    chosen = policy_named(policy)
    require_permission(chosen, allow_lossy=allow_lossy)
    state_bytes = optimizer_bytes(step, optimizer)
    keep = keep_timeline(step, costs)
    budget_bytes = costs.memory_bytes
    if budget is not None:
        budget_bytes = budget.resolve(
            fixed_bytes=keep.ledger.fixed_bytes + state_bytes, activation_bytes=keep.ledger.activation_bytes
        )
    if chosen.decide is None:
        account = NetworkWide.of(step, costs)
        parts = {
            "parameters": account.parameter_bytes,
            "gradients": account.gradient_bytes,
            "inputs": account.input_bytes,
            "feature maps": account.map_bytes,
            "gradient buffers": account.gradient_buffer_bytes,
            "workspace": account.workspace_bytes,
            "optimizer": state_bytes,
        }
        total = account.total_bytes + state_bytes
        took_s = time.perf_counter() - start_s
        return Planned(
            policy, step, costs, keep, budget, budget_bytes, state_bytes, total, total, keep.step_s, parts, took_s
        )
    # Programs know nothing of the optimizer's state: it is there, whatever they do.
    room = None if budget_bytes is None else max(budget_bytes - state_bytes, 0)
    set_aside_bytes = 0
    if headroom and room is not None:
        set_aside_bytes = headroom_bytes(room)
        room -= set_aside_bytes
    note, certificate, bound_ps = "", "", None
    if decisions is not None:
        decisions = _for_this_step(step, decisions)
    else:
        with listening(progress):
            decided = chosen.decide(step, costs, room if budget is not None or chosen.fills_device else None)
        if not isinstance(decided, Decided):
            decided = Decided(decided, costs)
        decisions, costs, note = decided.decisions, decided.costs, decided.note
        bound_ps = decided.bound_ps
        certificate = whole_certificate(decided.certificate, state_bytes=state_bytes, headroom_bytes=set_aside_bytes)
        if decided.step is not None:
            step = decided.step
        if decided.room_bytes is not None:
            room = decided.room_bytes
    if not chosen.is_lossy:
        refuse_lossy(step, decisions, who=f"policy '{policy}'")
    picked = costs.picked
    timeline = keep
    if decisions or picked or step is not keep.program.step:
        program = lower(step, decisions, costs, budget_bytes=room)
        costs = costs.following(step, program.step)
        timeline = simulate(program, costs)
    program = timeline.program
    check(program, workspace_bytes=[c.workspace_bytes for c in costs.of(program.step)], peak_bytes=timeline.peak_bytes)
    peak = timeline.ledger.peak
    parts = {kind.value: size for kind, size in zip(Ledger.kinds, peak.bytes, strict=True)}
    parts |= {"workspace": peak.workspace_bytes, "optimizer": state_bytes}
    return Planned(
        policy=policy,
        step=step,
        costs=costs,
        keep=keep,
        budget=budget,
        budget_bytes=budget_bytes,
        optimizer_bytes=state_bytes,
        peak_bytes=timeline.peak_bytes + state_bytes,
        average_bytes=timeline.average_bytes + state_bytes,
        step_s=timeline.step_s,
        parts=parts,
        plan_s=time.perf_counter() - start_s,
        plan=Plan(step, decisions, program, policy, costs.device, budget_bytes, timeline.peak_bytes, picked),
        timeline=timeline,
        note=note,
        bound_s=None if bound_ps is None else bound_ps / PS_PER_S,
        certificate=certificate,
        has_headroom=headroom,
    )


def runnable_plan(
    step: Step,
    costs: Costs,
    *,
    policy: str,
    budget: Budget | None,
    decisions: Decisions | None = None,
    allow_lossy: bool = False,
    progress: Listener | None = None,
) -> Planned:
    """The same for a plan that is to be run here: raises DoesNotFit if it is larger than the budget."""
    planned = plan_step(
        step,
        costs,
        policy=policy,
        budget=budget,
        decisions=decisions,
        headroom=True,
        allow_lossy=allow_lossy,
        progress=progress,
    )
    if budget is not None:
        planned.require_fit()
    return planned


def _for_this_step(step: Step, decisions: Decisions) -> Decisions:
    """Decisions of a step with the same forward half: in another backward half, fetches end by its own first uses."""
    found: dict[int, Decision] = {}
    for storage, decision in decisions.items():
        if isinstance(decision, Offload) and decision.when is not None and storage in step.storage:
            first_use = step.storage[storage].first_backward
            latest = len(step.ops) - 1 if first_use is None else first_use
            fetched = min(decision.when.fetched, latest)
            when = replace(decision.when, fetch=min(decision.when.fetch, fetched), fetched=fetched)
            decision = replace(decision, when=when)
        found[storage] = decision
    return found
