"""What commands plan: a network captured without a byte of it, and what its ops cost on a device."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from memfit import zoo
from memfit.capture.rewrites import NAMES, rewrite
from memfit.capture.rewrites.proof import PROOFS, AssumedProofs
from memfit.capture.rewrites.tight import tighten
from memfit.capture.step import Step
from memfit.capture.step_cache import StepCache
from memfit.capture.trace import capture
from memfit.cli.screen import Screen
from memfit.cost.costs import HERE, Costs
from memfit.cost.devices import Device, device
from memfit.cost.profile import measure
from memfit.cost.roofline import FASTEST, roofline
from memfit.errors import BadOption
from memfit.plan.policies.policy import Policy
from memfit.report.step_module import loss_of

MEASURED = "measured"
_CAP_S = 60.0
# Planning must not need what it plans for: with its workspace, an op of that size takes about a GiB.
_MAX_OP_BYTES = 384 << 20


@dataclass(frozen=True)
class Target:
    """A network and its training step; `step` is as captured, before any rewrite.

    `capture_s` is how long it took to have the step: `was_kept` says that it was captured before and is from disk.
    """

    network: str
    batch: int | None
    image: int | None
    step: Step
    capture_s: float
    was_kept: bool = False

    @classmethod
    def capture(
        cls,
        network: str,
        *,
        batch: int | None,
        image: int | None,
        device: str = "cpu",
        with_loss: bool = True,
        anew: bool = False,
    ) -> Target:
        """Capture on the meta device: nothing of the network's size is allocated, whatever its batch.

        Steps of the zoo's networks are kept on disk, and taken from there unless they are to be captured `anew`; a
        network of the user's own always is (see [Note: whose captures are kept] in capture/step_cache.py).
        """

        took_s = 0.0

        def now() -> Step:
            nonlocal took_s
            example = zoo.load(network, batch=batch, image=image, device="meta")
            if not example.model.training:
                example.model.train()
            start_s = time.perf_counter()
            step = capture(
                example.model,
                example.args,
                example.kwargs,
                loss=(lambda output, *targets: loss_of(output, example.loss, targets)) if with_loss else None,
                targets=example.targets if with_loss else (),
                device=device,
                name=network,
            )
            took_s = time.perf_counter() - start_s
            return step

        if ":" in network:
            step = now()
            return cls(network, batch, image, step, took_s)
        known = zoo.spec(network)  # first: it refuses what is not in the zoo
        sizes = batch or known.batch, image or known.image
        if anew or device != "cpu":  # whether another device can be captured for is asked every time
            step = now()
            return cls(network, *sizes, step, took_s)
        start_s = time.perf_counter()
        step, was_kept = StepCache().step(network, {"batch": batch, "image": image, "with_loss": with_loss}, now)
        return cls(network, *sizes, step, time.perf_counter() - start_s if was_kept else took_s, was_kept)

    @cached_property
    def rewritten(self) -> Step:
        """The step with all rewrites, taken to hold: testing them would run ops of the network's size."""
        return rewrite(self.step, proofs=AssumedProofs())

    def step_for(self, policy: Policy) -> Step:
        """The step that a policy plans: rewritten, but as captured for accounts of frameworks that rewrote nothing."""
        if policy.decide is None:
            return rewrite(self.step, without=frozenset(NAMES), proofs=AssumedProofs())
        return self.rewritten

    @property
    def title(self) -> str:
        """'vgg16, batch 64, image 224'."""
        sizes = (("batch", self.batch), ("image", self.image))
        return self.network + "".join(f", {name} {value}" for name, value in sizes if value)


class Pricing:
    """Prices steps on the device that was asked for: measured here, by a roofline elsewhere."""

    def __init__(self, name: str, *, workspace: str | None, cap_s: float | None, screen: Screen) -> None:
        self.device: Device | None = None if name == HERE else device(name)
        if self.device is not None and cap_s is not None:
            raise BadOption(
                f"--cap {cap_s:g}: nothing is measured for '{self.device.name}', whose costs are computed. Leave it "
                f"out, or plan for this machine (--device {HERE})"
            )
        if self.device is None and workspace not in (None, FASTEST):
            raise BadOption(
                f"--workspace {workspace}: on this machine torch chooses the algorithms, and their workspaces are "
                "measured. Leave it out, or name a device of the catalogue (`memfit devices`)"
            )
        self.workspace = MEASURED if self.device is None else workspace or FASTEST
        self._left_s = _CAP_S if cap_s is None else cap_s
        self._screen = screen

    @classmethod
    def of(cls, arguments: argparse.Namespace, screen: Screen) -> Pricing:
        return cls(arguments.device, workspace=arguments.workspace, cap_s=arguments.cap, screen=screen)

    @property
    def name(self) -> str:
        return HERE if self.device is None else self.device.name

    def costs(self, step: Step, *, ways: bool = False) -> Costs:
        """What the step's ops cost; steps priced one after the other share the time there is for measuring.

        `ways`: other ways to compute them, and forms of the step that hold less, are priced too.
        """
        also = [tighten(step, proofs=AssumedProofs() if self.device is not None else PROOFS)] if ways else []
        if self.device is not None:
            return roofline(step, self.device, workspace=self.workspace, also=also)
        start_s = time.perf_counter()
        try:
            return measure(
                step,
                cap_s=self._left_s,
                max_op_bytes=_MAX_OP_BYTES,
                progress=self._screen.progress,
                ways=ways,
                also=also,
            )
        finally:
            self._left_s = max(self._left_s - (time.perf_counter() - start_s), 0.0)


def costs_summary(costs: Costs) -> dict[str, Any]:
    """Where prices come from, for JSON."""
    return {
        "source": costs.source,
        "notes": list(costs.notes),
        "num_estimated": costs.num_estimated,
        "num_signatures": len(costs.by_signature),
    }


def costs_facts(costs: Costs) -> list[tuple[str, str]]:
    """The same for people: what was assumed is always said."""
    return [("costs", costs.source), *(("  note", note) for note in costs.notes)]
