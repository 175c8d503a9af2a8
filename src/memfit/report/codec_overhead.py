"""What codes cost here: the same step through one policy after the other, in turn, on one model.

All arms share the model's tensors, so that a large network needs no copy for each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from memfit import zoo
from memfit.api import fit, unfit
from memfit.plan.encode import encode_step
from memfit.plan.planner import Planned
from memfit.plan.policies.gist import FORMATS
from memfit.plan.policies.registry import policy_named
from memfit.report.step_module import TrainingStep
from memfit.run.fitted import Fitted

POLICIES = (
    "keep",
    *(f"gist-lossless:{code}" for code in ("mask", "window", "sparse", "csr")),
    "gist-lossless",
    *(f"gist-lossy:{format_}" for format_ in FORMATS),
)
_NUM_WARM_UP = 1


@dataclass(frozen=True)
class CodecOverhead:
    """One policy's steps beside those of the first one.

    Attributes:
        step_s: the median.
        time_ratio: the median of the ratios of steps that were taken one after the other.
        encoded_bytes, code_bytes: of the tensors that are encoded, and of what is stored instead.
    """

    policy: str
    step_s: float
    time_ratio: float
    encoded_bytes: int
    code_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_codecs(
    network: str,
    *,
    batch: int,
    image: int | None = None,
    steps: int = 5,
    policies: Sequence[str] = POLICIES,
    progress: Callable[[str], None] = lambda text: None,
) -> list[CodecOverhead]:
    """Time training steps of the network by each policy, all in turn, `steps` times; ratios are to the first one."""
    model, call = TrainingStep.of(zoo.load(network, batch=batch, image=image, seed=0))
    arms: list[Fitted] = []
    for policy in policies:
        progress(f"fitting {network} by {policy}")
        unfit(model)
        fit(model, policy=policy, allow_lossy=policy_named(policy).is_lossy)
        arms.append(model.__dict__["memfit"])
    seconds: list[list[float]] = [[] for _ in arms]
    try:
        for round_ in range(_NUM_WARM_UP + steps):
            progress(f"{network}: round {round_ + 1} of {_NUM_WARM_UP + steps}")
            for times, arm in zip(seconds, arms, strict=True):
                model.__dict__["memfit"] = model.__dict__["forward"] = arm
                times.append(_step_s(model, call))
    finally:
        unfit(model)
    return [
        _overhead(policy, arm, times[_NUM_WARM_UP:], seconds[0][_NUM_WARM_UP:])
        for policy, arm, times in zip(policies, arms, seconds, strict=True)
    ]


def _step_s(model: torch.nn.Module, call: Any) -> float:
    model.zero_grad(set_to_none=True)
    start_s = time.perf_counter()
    model(*call).backward()
    return time.perf_counter() - start_s


def _overhead(policy: str, arm: Fitted, times: list[float], beside: list[float]) -> CodecOverhead:
    encoded_bytes, code_bytes = _bytes(arm.planned)
    return CodecOverhead(
        policy,
        step_s=statistics.median(times),
        time_ratio=statistics.median(ours / theirs for ours, theirs in zip(times, beside, strict=True)),
        encoded_bytes=encoded_bytes,
        code_bytes=code_bytes,
    )


def _bytes(planned: Planned) -> tuple[int, int]:
    """Of what is encoded: before and after."""
    assert planned.plan is not None
    encoded = encode_step(planned.step, planned.plan.decisions)
    sizes = encoded.step.storage_bytes
    return sum(sizes[s] for s in encoded.code_of), sum(sizes[code] for code in encoded.code_of.values())
