"""What each trick of sending activations to the disk is worth, for real: one network trained by every combination.

The page cache or past it, one thread or two, what backward needs fetched on demand or one ahead. Every step stands
beside a step in eager from the same state, taken right before or after it in the same process.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

from memfit import zoo
from memfit.errors import MemfitError
from memfit.plan.options import Options
from memfit.report.arm import Arm
from memfit.report.measure import Times
from memfit.report.step_module import TrainingStep
from memfit.report.verify import both_arms, compare
from memfit.run.feedback import NUM_WATCHED
from memfit.tiers.disk import DiskTier
from memfit.tiers.registry import TIERS

_RELOADS = {"on demand": "overlap-on-demand", "prefetch": "overlap"}
"""How what was sent comes back, and the policy that does it so."""

# The first step after the tier has changed makes the file: it is not timed. Then each arm goes first once.
_NUM_UNTIMED = 1
_NUM_PAIRS = 2


@dataclass(frozen=True)
class Setting:
    """One way for the disk tier to work."""

    direct: bool
    num_threads: int

    @property
    def title(self) -> str:
        threads = f"{self.num_threads} thread{'s' * (self.num_threads != 1)}"
        return f"{'direct' if self.direct else 'buffered'}, {threads}"


SETTINGS = tuple(Setting(direct, num_threads) for direct, num_threads in product((False, True), (1, 2)))


@dataclass(frozen=True)
class Trained:
    """How training went by one combination of tricks.

    Attributes:
        direct: past the page cache; what was asked for.
        is_direct: what the file system did.
        reload: "on demand" or "prefetch".
        steps: how many were timed, each with a step in eager.
        time_ratio: the median of the ratios.
        bytes_out, bytes_in: of one step; what was used where it is counts as neither.
        waited_s: how long compute stood still for the disk, the median of the steps.
        planned_cut: by how much the planned peak is below that of keeping everything; parameters are in both.
    """

    direct: bool
    is_direct: bool | None
    num_threads: int
    reload: str
    steps: int
    exact: bool
    step_s: float
    eager_step_s: float
    time_ratio: float
    bytes_out: int
    bytes_in: int
    waited_s: float
    planned_cut: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def disk_ablation(
    network: str = "vgg19",
    *,
    batch: int | None = None,
    image: int | None = None,
    steps: int = 4,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Trained]:
    """Train the network by every combination, at least `steps` timed steps each, and compare every bit with eager.

    Settings take turns, so that a machine that slows down for a while slows all of them. Once a step differs from
    eager's, those after it start from another state, and are not exact either.
    """
    tier = TIERS["disk"]
    if not isinstance(tier, DiskTier):
        raise MemfitError(f"tier 'disk' is a {type(tier).__name__} here, and this compares settings of a DiskTier")
    before = tier.settings
    progress(f"building {network}")
    model, call = TrainingStep.of(zoo.load(network, batch=batch, image=image, seed=seed))
    found: list[Trained] = []
    try:
        for reload, policy in _RELOADS.items():
            progress(f"capturing {network}, fetching {reload}")
            eager, fitted = both_arms(model, call, seed=seed, options=Options(policy=policy))
            # Feedback watches the first steps, and may observe one op by op.
            compare(eager, fitted, steps=NUM_WATCHED)
            logs = {setting: _Log() for setting in SETTINGS}
            for turn in range(1, -(-steps // _NUM_PAIRS) + 1):
                for setting, log in logs.items():
                    progress(f"training {network}, fetching {reload}, {setting.title}, turn {turn}")
                    # None: past the page cache where the file system can.
                    direct = None if setting.direct else False
                    tier.configure(replace(before, direct=direct, num_threads=setting.num_threads))
                    log.train(tier, eager, fitted)
            assert fitted.fitted is not None
            planned = fitted.fitted.planned
            cut = 1 - planned.peak_bytes / max(planned.keep_peak_bytes, 1)
            found += [log.trained(setting, reload, cut) for setting, log in logs.items()]
    finally:
        tier.configure(before)
    return found


@dataclass
class _Log:
    """What one setting has shown so far."""

    pairs: list[tuple[float, float]] = field(default_factory=list)
    bytes_out: list[int] = field(default_factory=list)
    bytes_in: list[int] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    exact: bool = True
    is_direct: bool | None = None

    def train(self, tier: DiskTier, eager: Arm, fitted: Arm) -> None:
        """Take some steps in both arms, and log all but the first."""
        traffic = tier.traffic
        last = (traffic.bytes_out, traffic.bytes_in, traffic.waited_s)

        def after_step(step: int) -> None:
            nonlocal last
            now = (traffic.bytes_out, traffic.bytes_in, traffic.waited_s)
            if step > _NUM_UNTIMED:
                self.pairs.append((fitted.step_s, eager.step_s))
                self.bytes_out.append(now[0] - last[0])
                self.bytes_in.append(now[1] - last[1])
                self.waited_s.append(now[2] - last[2])
            last = now

        verdict = compare(eager, fitted, steps=_NUM_UNTIMED + _NUM_PAIRS, after_step=after_step, is_timed=True)
        self.exact = self.exact and verdict.exact
        self.is_direct = tier.is_direct

    def trained(self, setting: Setting, reload: str, planned_cut: float) -> Trained:
        """The figures of the steps that were logged."""
        if not self.pairs:
            raise MemfitError(f"no step was timed, {setting.title}: the first one differed from eager's")
        times = Times.of(self.pairs)
        return Trained(
            direct=setting.direct,
            is_direct=self.is_direct,
            num_threads=setting.num_threads,
            reload=reload,
            steps=len(self.pairs),
            exact=self.exact,
            step_s=times.step_s,
            eager_step_s=times.eager_step_s,
            time_ratio=times.time_ratio,
            bytes_out=max(self.bytes_out),
            bytes_in=max(self.bytes_in),
            waited_s=statistics.median(self.waited_s),
            planned_cut=planned_cut,
        )
