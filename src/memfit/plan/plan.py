"""A Plan: the decisions, the Program that carries them out, and what they belong to. It has a JSON form."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from memfit.capture.step import Step
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
        step: the step that was planned for. The program's own differs from it where storages are encoded.
        decisions: by storage of that step.
        policy: who decided.
        device: the device whose costs the program was laid out for.
        budget_bytes: the budget it was made for, all included; None if there was none.
        peak_bytes: the simulated peak, workspaces included.
    """

    step: Step
    decisions: Decisions
    program: Program
    policy: str
    device: str
    budget_bytes: int | None
    peak_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-able data, tied to its step, torch and device."""
        return {
            "format": _FORMAT,
            "step": self.step.digest,
            "torch": torch.__version__,
            "device": self.device,
            "network": self.step.name,
            "policy": self.policy,
            "budget_bytes": self.budget_bytes,
            "peak_bytes": self.peak_bytes,
            "decisions": {str(s): to_text(d) for s, d in sorted(self.decisions.items())},
            "instructions": instructions_to_lists(self.program.instructions),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str, step: Step, *, device: str, allow_lossy: bool = False) -> Plan:
        """The plan that to_json wrote, if it belongs to this step, this torch and this device.

        One that changes gradients comes back only to those who allow it.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise WrongPlan(f"not a plan: {error}") from error
        return cls.from_dict(data, step, device=device, allow_lossy=allow_lossy)

    @classmethod
    def from_dict(cls, data: Any, step: Step, *, device: str, allow_lossy: bool = False) -> Plan:
        """The plan that to_dict wrote, checked: it belongs here, and its program is legal."""
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise WrongPlan(f"not a plan of format {_FORMAT}. Plans are what Plan.to_json() writes")
        for key, ours in (("step", step.digest), ("torch", torch.__version__), ("device", device)):
            if data.get(key) != ours:
                raise WrongPlan(
                    f"this plan is for {key} {data.get(key)!r} (network '{data.get('network', '')}'), and here {key} "
                    f"is {ours!r}. Plan again: a plan holds for one model, its shapes and rewrites, torch and device"
                )
        try:
            decisions = {int(s): from_text(text) for s, text in data["decisions"].items()}
            instructions = instructions_from_lists(data["instructions"])
            policy, budget, peak = str(data["policy"]), data["budget_bytes"], int(data["peak_bytes"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise WrongPlan(f"the plan for step {step.digest} is damaged: {error}") from error
        if not allow_lossy:
            refuse_lossy(step, decisions, who="the plan")
        program = Program(encode_step(step, decisions).step, instructions)
        check(program)
        return cls(step, decisions, program, policy, device, budget, peak)
