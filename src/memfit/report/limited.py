"""Training in a process whose memory is limited: eager without the limit, eager within it, memfit within it.

[Note: the limit]
Linux limits what a process may have (RLIMIT_DATA): private memory that can be written, thread stacks and what malloc
holds included. It is set after everything is imported and one tiny step is done, to what is there by then and an
allowance. All that comes later is within it: the network, its data, capturing, planning, and training. Not measuring:
what ops cost is measured once on a machine, and a process of its own does that before, without a limit. A process that
has measured keeps memory that the limit counts although next to nothing of it is touched, and ran out of it. A part of
the allowance (`_MARGIN_BYTES`) is not given to fit() as its budget: that is for tensors and workspaces; Python's
objects, threads and malloc's holes are neither.

How large that part has to be is what `memfit demo --json` says of the time between two steps (`between_steps`). With
resnet50, batch 32, the process then has 361 MiB of such memory more than before the network was there, of which
weights, gradients and the batch are 201. Of the rest 55 are in use, 17 in eager: a captured step, prices and plans are
kept. 105 are merely set aside, 68 in eager, which counts all the same: stacks of threads, and what malloc's arenas for
them have given back but not unmapped. What a step takes beyond that is what its plan says: 454 MiB planned, and 58 more
than that at its peak.

glibc keeps freed blocks of up to 32 MiB, which the limit would count. So blocks of a MiB and more are given back at
once (mallopt), in all three processes alike. That costs both sides page faults; a ratio of times is one of equals.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memfit.errors import MemfitError
from memfit.resident import CannotMeasure, require_linux

_MARGIN_BYTES = 208 << 20
_GIVE_BACK_FROM_BYTES = 1 << 20
_BUSY_SHARE = 0.25
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_PIN = (
    f"import ctypes; _pin = ctypes.CDLL(None).mallopt; _pin({_M_MMAP_THRESHOLD}, {_GIVE_BACK_FROM_BYTES}); "
    f"_pin({_M_TRIM_THRESHOLD}, {_GIVE_BACK_FROM_BYTES})"
)


@dataclass(frozen=True)
class Trained:
    """How one process fared.

    Attributes:
        baseline_bytes: what it had before the network was there; the limit is that and the allowance.
        peak_bytes: how far its resident set rose above that in a step that was done.
        losses: of each step that was done, as hexadecimal floats.
        weights: a hash of all weights and buffers in the end; None if it did not get there.
        step_s: of each step that was done. Fitted, the first has capturing, measuring and planning in it.
        error: what ended it early; is_out_of_memory says that memory was refused.
        between_steps: after the last step that was done, how far it was above what it had before the network was there:
            in memory that the limit counts, in its resident set; and what of that are weights, gradients and the batch.
        plan: fitted, what was decided and what that was predicted to cost.
    """

    baseline_bytes: int
    peak_bytes: int
    losses: tuple[str, ...]
    step_s: tuple[float, ...]
    error: str | None = None
    is_out_of_memory: bool = False
    weights: str | None = None
    between_steps: Mapping[str, int] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)

    @property
    def typical_step_s(self) -> float | None:
        """The median without the first two steps: one sets things up, and one may be observed op by op."""
        return statistics.median(self.step_s[2:]) if len(self.step_s) > 2 else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "baseline_bytes": self.baseline_bytes,
            "peak_bytes": self.peak_bytes,
            "losses": [float.fromhex(loss) for loss in self.losses],
            "losses_hex": list(self.losses),
            "weights_sha256": self.weights,
            "step_s": list(self.step_s),
            "between_steps": dict(self.between_steps),
            "error": self.error,
            "is_out_of_memory": self.is_out_of_memory,
        }


@dataclass(frozen=True)
class LimitedTraining:
    """The three processes side by side.

    Attributes:
        allowance_bytes: what the limited two were allowed beyond their baseline.
        budget_bytes: what fit() was given of it.
        busy_share: how busy the machine was before (its load over its CPUs). The three run one after the other, so on a
            machine that does other things as well the ratio of their times says little.
    """

    network: str
    batch: int | None
    image: int | None
    steps: int
    allowance_bytes: int
    budget_bytes: int
    eager: Trained
    eager_limited: Trained
    fitted: Trained
    busy_share: float = 0.0

    @property
    def was_busy(self) -> bool:
        return self.busy_share > _BUSY_SHARE

    @property
    def margin_bytes(self) -> int:
        return self.allowance_bytes - self.budget_bytes

    @property
    def time_ratio(self) -> float | None:
        """A fitted step within the limit over an eager one without."""
        ours, theirs = self.fitted.typical_step_s, self.eager.typical_step_s
        return None if ours is None or theirs is None else ours / theirs

    @property
    def failures(self) -> tuple[str, ...]:
        """Which parts of the story did not come true, each in a sentence."""
        found = []
        if self.eager.error is not None:
            found.append(f"eager fails even without a limit: {self.eager.error}")
        if self.eager_limited.error is None:
            found.append("eager trains within the limit too: the limit is too loose for this network")
        elif not self.eager_limited.is_out_of_memory:
            found.append(f"eager within the limit fails, but not for want of memory: {self.eager_limited.error}")
        if self.fitted.error is not None:
            found.append(f"memfit does not train within the limit: {self.fitted.error}")
        elif self.eager.error is None:
            if self.fitted.losses != self.eager.losses:
                found.append("the losses of memfit DIFFER from eager's")
            if self.fitted.weights != self.eager.weights:
                found.append("the weights after training with memfit DIFFER from eager's")
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        return {
            "network": self.network,
            "batch": self.batch,
            "image": self.image,
            "steps": self.steps,
            "allowance_bytes": self.allowance_bytes,
            "budget_bytes": self.budget_bytes,
            "margin_bytes": self.margin_bytes,
            "allowed_share": self.allowance_bytes / self.eager.peak_bytes if self.eager.peak_bytes else None,
            "eager": self.eager.to_dict(),
            "eager_limited": self.eager_limited.to_dict(),
            "memfit_limited": self.fitted.to_dict(),
            "plan": dict(self.fitted.plan),
            "time_ratio": self.time_ratio,
            "busy_share": self.busy_share,
            "failures": list(self.failures),
            "holds": not self.failures,
        }


def train_limited(
    network: str,
    *,
    batch: int | None,
    image: int | None,
    steps: int,
    share: float,
    seed: int = 0,
    threads: int | None = None,
    policy: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> LimitedTraining:
    """Train three times from the same weights; the limited two may have `share` of what eager was seen to need."""
    require_linux()
    busy_share = os.getloadavg()[0] / (os.cpu_count() or 1)
    request = {"network": network, "batch": batch, "image": image, "steps": steps, "seed": seed, "threads": threads}
    progress(f"{network} in eager, without a limit")
    eager = _train(request | {"allowance_bytes": None, "fit": None})
    allowance = int(share * eager.peak_bytes)
    budget = allowance - _MARGIN_BYTES
    if eager.error is None and budget <= 0:
        raise CannotMeasure(
            f"{network} needs {eager.peak_bytes:,} bytes in eager; {share:.0%} of that is less than the "
            f"{_MARGIN_BYTES:,} that a process takes for capturing, planning and threads. Take a larger batch, image "
            "or network"
        )
    progress(f"{network} in eager, within {allowance / 2**20:,.0f} MiB")
    eager_limited = _train(request | {"allowance_bytes": allowance, "fit": None})
    options = {"budget": max(budget, 1)} | ({} if policy is None else {"policy": policy})
    progress(f"measuring what the ops of {network} cost here, without a limit")
    _train(request | {"allowance_bytes": None, "fit": options, "steps": 1})
    progress(f"{network} with memfit, within {allowance / 2**20:,.0f} MiB")
    fitted = _train(request | {"allowance_bytes": allowance, "fit": options})
    return LimitedTraining(network, batch, image, steps, allowance, budget, eager, eager_limited, fitted, busy_share)


def _train(request: dict[str, Any]) -> Trained:
    source = f"{_PIN}; from memfit.report.limited_worker import main; main()"
    # -P: the current directory must not shadow torch or us. zoo.load looks there itself.
    command = [sys.executable, "-P", "-c", source, json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0 and done.stdout:
        answer = json.loads(done.stdout)
        is_eager = request["allowance_bytes"] is None and request["fit"] is None
        if answer["losses"] or not is_eager or answer["error"] is None:
            return Trained(**{**answer, "losses": tuple(answer["losses"]), "step_s": tuple(answer["step_s"])})
        raise MemfitError(f"training {request['network']} in eager fails: {answer['error']}")
    lines = done.stderr.strip().splitlines()
    # Memory may be refused where nobody can say so in Python: in a thread, or in C++ that ends the process.
    said = lines[-1] if lines else "it said nothing"
    return Trained(0, 0, (), (), error=f"the process ended with code {done.returncode}: {said}")
