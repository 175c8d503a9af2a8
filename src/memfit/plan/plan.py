"""A Plan: the decisions, the Program that carries them out, and what they belong to. It has a JSON form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.capture.rewrites.chunks import WHOLE, num_chunks_of, proven_counts, why_not_in_chunks
from memfit.capture.rewrites.proof import PROOFS, AssumedProofs, Proofs
from memfit.capture.rewrites.tight import tight_above_bytes, tighten
from memfit.capture.step import Step
from memfit.cost.costs import HERE
from memfit.cost.roofline import WORKSPACES
from memfit.errors import MemfitError
from memfit.plan.check import check
from memfit.plan.decisions import Decisions, from_text, to_text
from memfit.plan.encode import encode_step, refuse_lossy
from memfit.plan.program import Program, instructions_from_lists, instructions_to_lists

_FORMAT = 1


class WrongPlan(MemfitError):
    """A plan that does not belong to the step it is to be used for, or that is no plan."""


@dataclass(frozen=True)
class Plan:
    """What was decided for one step on one device, and the Program that does it.

    Attributes:
        step: the step that was planned for. The program's own differs from it where storages are encoded, and where
            ops are computed in chunks.
        decisions: by storage of that step.
        policy: who decided.
        device: the device whose costs the program was laid out for.
        budget_bytes: the budget it was made for, all included; None if there was none.
        peak_bytes: the simulated peak, workspaces included.
        picked: for ops of that step, by number, the ways in which they are computed. Those in chunks are calls of their
            own in the program's step; the others are a device's own business.
    """

    step: Step
    decisions: Decisions
    program: Program
    policy: str
    device: str
    budget_bytes: int | None
    peak_bytes: int
    picked: Mapping[int, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-able data, tied to its step, torch and device."""
        return {
            "format": _FORMAT,
            "step": self.step.digest,
            "tight_above_bytes": tight_above_bytes(self.step),
            "torch": torch.__version__,
            "device": self.device,
            "network": self.step.name,
            "policy": self.policy,
            "budget_bytes": self.budget_bytes,
            "peak_bytes": self.peak_bytes,
            "decisions": {str(s): to_text(d) for s, d in sorted(self.decisions.items())},
            "picked": {str(op): way for op, way in sorted(self.picked.items())},
            "instructions": instructions_to_lists(self.program.instructions),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(
        cls, text: str, step: Step, *, device: str, allow_lossy: bool = False, proofs: Proofs = PROOFS
    ) -> Plan:
        """The plan that to_json wrote, if it belongs to this step, this torch and this device.

        One that changes gradients comes back only to those who allow it, and one with ops in chunks only where these
        give the same bits, by `proofs`.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise WrongPlan(f"not a plan: {error}") from error
        return cls.from_dict(data, step, device=device, allow_lossy=allow_lossy, proofs=proofs)

    @classmethod
    def from_dict(
        cls, data: Any, step: Step, *, device: str, allow_lossy: bool = False, proofs: Proofs = PROOFS
    ) -> Plan:
        """The plan that to_dict wrote, checked: it belongs here, and its program is legal.

        One that was made for a tighter form of the step (capture/rewrites/tight.py) comes back with that form.
        """
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise WrongPlan(f"not a plan of format {_FORMAT}. Plans are what Plan.to_json() writes")
        above = data.get("tight_above_bytes")
        if isinstance(above, int):
            # Of a device that is not here nobody can ask whether the bits are the same.
            step = tighten(step, above_bytes=above, proofs=proofs if device == HERE else AssumedProofs())
        for key, ours in (("step", step.digest), ("torch", torch.__version__), ("device", device)):
            if data.get(key) != ours:
                raise WrongPlan(
                    f"this plan is for {key} {data.get(key)!r} (network '{data.get('network', '')}'), and here {key} "
                    f"is {ours!r}. Plan again: a plan holds for one model, its shapes and rewrites, torch and device"
                )
        try:
            decisions = {int(s): from_text(text) for s, text in data["decisions"].items()}
            picked = {int(op): str(way) for op, way in data.get("picked", {}).items()}
            instructions = instructions_from_lists(data["instructions"])
            policy, budget, peak = str(data["policy"]), data["budget_bytes"], int(data["peak_bytes"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise WrongPlan(f"the plan for step {step.digest} is damaged: {error}") from error
        if not allow_lossy:
            refuse_lossy(step, decisions, who="the plan")
        for op, way in picked.items():
            why = _why_not_by(step, op, way, proofs)
            if why:
                raise WrongPlan(f"the plan for step {step.digest} computes op {op} by '{way}': {why}. Plan again")
        program = Program(encode_step(step, decisions, picked).step, instructions)
        check(program)
        return cls(step, decisions, program, policy, device, budget, peak, picked)


def _why_not_by(step: Step, index: int, way: str, proofs: Proofs) -> str:
    """What is wrong with computing the op that way, or nothing."""
    if not 0 <= index < len(step.ops):
        return f"the step has ops 0 to {len(step.ops) - 1}"
    count = num_chunks_of(way)
    if count is None:
        known = (WHOLE, *WORKSPACES)
        return "" if way in known else f"no such way. Known: {', '.join(known)}, and chunks:2 and so on"
    op = step.ops[index]
    why = why_not_in_chunks(step, op, count)
    if not why and not proven_counts(step, op, [count], proofs):
        why = "it does not give the same bits here"
    return f"{op.target} in module '{op.path or '(root)'}': {why}" if why else ""
