"""One network trained both ways: is it exact, how much does it need, how long does it take."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from memfit import zoo
from memfit.codecs import dense
from memfit.cost.profile import measure as measure_costs
from memfit.plan.encode import lossy_storages
from memfit.plan.options import Options
from memfit.plan.planner import Planned
from memfit.plan.simulate import simulate
from memfit.report.measure import measure_peak, measure_times
from memfit.report.step_module import TrainingStep
from memfit.report.verify import Verdict, both_arms

_PREDICTION_CAP_S = 300.0


@dataclass(frozen=True)
class LossyTensor:
    """A tensor that backward reads with loss, in which form, and who made it."""

    tensor: str
    codec: str
    bytes: int
    op: str
    module: str


@dataclass(frozen=True)
class Comparison:
    """A training step fitted, beside the same step in eager.

    Peaks are growths of a process of each arm's own (memfit.report.measure.Peak says of which steps); the ledger's are
    what the plan says: `ledger_peak_bytes` with parameters and inputs, `ledger_growth_bytes` without. The predicted
    ones, if asked for, are those of the simulator at measured costs: growth with workspaces, seconds. `num_fallbacks`
    counts the tensors, over all steps taken here, that did not fit into their codes and were kept as they were.
    `budget_bytes` is the budget, if there was one, and `base_bytes` what is there before the step, which it counts too.
    """

    network: str
    batch: int | None
    image: int | None
    policy: str
    steps: int
    verdict: Verdict
    peak_bytes: int
    eager_peak_bytes: int
    accumulating_peak_bytes: int
    eager_accumulating_peak_bytes: int
    activation_peak_bytes: int
    eager_activation_peak_bytes: int
    ledger_peak_bytes: int
    ledger_growth_bytes: int
    step_s: float
    eager_step_s: float
    time_ratio: float
    capture_s: float
    threads: int
    torch: str
    lossy: tuple[LossyTensor, ...] = ()
    num_fallbacks: int = 0
    base_bytes: int = 0
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_step_s: float | None = None

    @property
    def exact(self) -> bool:
        return self.verdict.exact

    @property
    def needed_bytes(self) -> int:
        """What a budget has to have room for: what was there before, and by how much the process grew."""
        return self.base_bytes + self.peak_bytes

    @property
    def within_budget(self) -> bool | None:
        """None if there was no budget."""
        return None if self.budget_bytes is None else self.needed_bytes <= self.budget_bytes

    @property
    def peak_ratio(self) -> float:
        return self.peak_bytes / max(self.eager_peak_bytes, 1)

    @property
    def accumulating_peak_ratio(self) -> float:
        return self.accumulating_peak_bytes / max(self.eager_accumulating_peak_bytes, 1)

    @property
    def activation_peak_ratio(self) -> float:
        return self.activation_peak_bytes / max(self.eager_activation_peak_bytes, 1)

    @property
    def predicted_peak_ratio(self) -> float | None:
        """Predicted over measured growth."""
        return None if self.predicted_peak_bytes is None else self.predicted_peak_bytes / max(self.peak_bytes, 1)

    @property
    def predicted_time_ratio(self) -> float | None:
        """Predicted over measured seconds."""
        return None if self.predicted_step_s is None else self.predicted_step_s / self.step_s

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON-able data."""
        found = asdict(self)
        del found["verdict"]
        return {
            "exact": self.exact,
            **found,
            "needed_bytes": self.needed_bytes,
            "within_budget": self.within_budget,
            "peak_ratio": self.peak_ratio,
            "accumulating_peak_ratio": self.accumulating_peak_ratio,
            "activation_peak_ratio": self.activation_peak_ratio,
            "predicted_peak_ratio": self.predicted_peak_ratio,
            "predicted_time_ratio": self.predicted_time_ratio,
            "verdict": self.verdict.to_dict(),
        }


def lossy_tensors(planned: Planned) -> Iterator[LossyTensor]:
    """The tensors that a plan stores with loss, largest first."""
    assert planned.plan is not None
    step = planned.step
    found = lossy_storages(planned.plan.decisions)
    for storage in sorted(found, key=lambda s: -step.storage_bytes[s]):
        known = step.storage[storage]
        assert known.maker is not None
        maker = step.ops[known.maker]
        name = step.values[known.values[-1]].name
        yield LossyTensor(name, found[storage], known.bytes, maker.target, maker.path)


def compare_network(
    network: str,
    *,
    batch: int | None = None,
    image: int | None = None,
    steps: int = 5,
    seed: int = 0,
    options: Options | None = None,
    predict: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Train `network` both ways and measure it: bits and times in this process, each peak in one of its own.

    With `predict`, its ops are measured one by one as well, and the simulator's figures stand beside the real ones.
    Model and loss are one module in both arms, so that the loss is part of the fitted step too.
    """
    options = options or Options()
    threads = torch.get_num_threads()
    progress(f"building {network}")
    model, call = TrainingStep.of(zoo.load(network, batch=batch, image=image, seed=seed))
    eager, fitted = both_arms(model, call, seed=seed, options=options)
    del model, call
    progress("capturing")
    fallbacks_before = dense.num_fallbacks()
    times, verdict, capture_s = measure_times(eager, fitted, steps=steps, progress=progress)
    num_fallbacks = dense.num_fallbacks() - fallbacks_before
    assert fitted.fitted is not None
    ledger = fitted.fitted.ledger
    planned = fitted.fitted.planned
    lossy = tuple(lossy_tensors(planned))
    program = fitted.fitted.newest.program
    # The children need the memory more than we do.
    eager.forget()
    fitted.forget()
    del eager, fitted

    timeline = None
    if predict:  # right after the steps were timed: the machine may be busier later
        timeline = simulate(program, measure_costs(program.step, cap_s=_PREDICTION_CAP_S, progress=progress))
    progress("measuring the peak in eager")
    peak_of = functools.partial(measure_peak, network, batch=batch, image=image, seed=seed, threads=threads)
    eager_peak = peak_of()
    progress("measuring the peak fitted")
    fitted_peak = peak_of(options=options)
    published = None if ":" in network else zoo.spec(network)
    return Comparison(
        network=network,
        batch=batch if batch is not None or published is None else published.batch,
        image=image if image is not None or published is None else published.image,
        policy=options.policy,
        steps=steps,
        verdict=verdict,
        peak_bytes=fitted_peak.peak_bytes,
        eager_peak_bytes=eager_peak.peak_bytes,
        accumulating_peak_bytes=fitted_peak.accumulating_peak_bytes,
        eager_accumulating_peak_bytes=eager_peak.accumulating_peak_bytes,
        activation_peak_bytes=fitted_peak.activation_peak_bytes,
        eager_activation_peak_bytes=eager_peak.activation_peak_bytes,
        ledger_peak_bytes=ledger.peak_bytes,
        ledger_growth_bytes=ledger.growth_bytes,
        step_s=times.step_s,
        eager_step_s=times.eager_step_s,
        time_ratio=times.time_ratio,
        capture_s=capture_s,
        threads=threads,
        torch=torch.__version__,
        lossy=lossy,
        num_fallbacks=num_fallbacks,
        base_bytes=ledger.base_bytes,
        budget_bytes=None if options.budget is None else planned.budget_bytes,
        predicted_peak_bytes=None if timeline is None else timeline.ledger.growth_bytes,
        predicted_step_s=None if timeline is None else timeline.step_s,
    )
