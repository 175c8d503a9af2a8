"""One way to train beside eager: both step by step in turn from the same state, timed, and compared bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from memfit import zoo
from memfit.report.arm import Arm
from memfit.report.bits import Difference, difference
from memfit.report.gradient_error import GRADIENTS, GradientError, worse
from memfit.report.measure import Times, in_turn, quartiles
from memfit.report.peers_setting import AUTO, EAGER, Setting
from memfit.report.step_module import TrainingStep
from memfit.run.feedback import NUM_WATCHED
from memfit.run.fitted import Fitted

NUM_COMPARED = 3
"""Steps that are compared at least."""

_NUM_WARM_UP = 2
_MAX_WARM_UP = 3 * NUM_WATCHED
LEARNING_RATE = 0.01
_LEAST_TIMED, _ENOUGH_S, _AUTO_ENOUGH_S = 6, 30.0, 180.0
"""Steps that take long are timed so many times, if more than that time has passed: their noise is a smaller part.
More of auto's, since its ratio is held against a limit and against all the others'."""
AUTO_TIMES = 4  # so many times as many of auto's are timed at most


@dataclass(frozen=True)
class Trial:
    """How training went one way, beside eager.

    Attributes:
        time_ratio: seconds of a step over eager's beside it, the median; low and high are the quartiles.
        num_steps: how many were compared. Every step starts from eager's state, whatever came of the one before.
        different: what was not eager's, bit for bit, in any step: loss, gradient, buffer, rng.
        gradient_error: how far the gradients were from eager's in the worst step; None if they were the same.
        own_gradient_error: of torch.compile with a memory budget, how far those of its first step are from those it
            gives itself without that budget, from the same state and seed; None where that was not in doubt.
        own_loss_is_same: whether the losses of these two are the same bits: then their forward passes drew the same.
    """

    time_ratio: float
    time_ratio_low: float
    time_ratio_high: float
    step_s: float
    eager_step_s: float
    num_timed: int
    num_steps: int
    different: tuple[str, ...]
    first_difference: str | None
    gradient_error: dict[str, Any] | None
    own_gradient_error: dict[str, Any] | None = None
    own_loss_is_same: bool | None = None

    @property
    def exact(self) -> bool:
        return not self.different

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Trial:
        return cls(**{**plain, "different": tuple(plain["different"])})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def try_out(setting: Setting, network: str, *, steps: int, seed: int, **loaded: Any) -> Trial:
    """Train `network` in eager and by that setting, `steps` timed steps and some before them."""
    model, call = TrainingStep.of(zoo.load(network, seed=seed, **loaded))
    eager, tried = arm_by(Setting(EAGER), model, call, seed=seed), arm_by(setting, model, call, seed=seed)
    first: list[tuple[str, str, Any]] = []

    def after_step(step: int) -> None:
        if step == 1:
            first.extend((kind, name, _copied(value)) for kind, name, value in tried.made())

    log = _Log()
    while not is_warm(tried.fitted, log.num_steps):
        log.step(eager, tried, after_step)
    num_warm_up = log.num_steps
    steps, enough_s = (AUTO_TIMES * steps, _AUTO_ENOUGH_S) if setting.peer == AUTO else (steps, _ENOUGH_S)
    for _ in rounds(max(steps, NUM_COMPARED - num_warm_up), enough_s):
        log.step(eager, tried, after_step)
    own_error, own_loss = None, None
    if setting.unbudgeted not in (None, setting) and log.gradient_error is not None and _drops_out(model):
        eager.forget()
        tried.forget()
        # The first arm's code would be found to fit this one too, whatever its budget.
        torch.compiler.reset()
        own = arm_by(setting.unbudgeted, model, call, seed=seed)
        own.step()
        own_error = GradientError.of(own.made(), first)
        own_loss = _loss_is_same(list(own.made()), first)
    return log.trial(num_warm_up, own_error, own_loss)


def arm_by(setting: Setting, model: TrainingStep, call: tuple[Any, ...], *, seed: int) -> Arm:
    """A copy of the training step that runs that way."""
    arm = Arm(model, call, {}, (), None, seed=seed, options=setting.options)
    if arm.options is None:
        assert isinstance(arm.model, TrainingStep)
        setting.apply(arm.model)
    return arm


def rounds(num: int, enough_s: float) -> Iterator[None]:
    """So many times, or fewer where they take long: _LEAST_TIMED at least, and no more once enough_s have passed."""
    start_s = time.perf_counter()
    for number in range(num):
        if number >= _LEAST_TIMED and time.perf_counter() - start_s > enough_s:
            return
        yield


def is_warm(fitted: Fitted | None, num_steps: int) -> bool:
    """True once what makes the first steps unlike all others is over: compiling, caches, memfit's own watching."""
    if fitted is None or not fitted.options.asks_costs:
        return num_steps >= _NUM_WARM_UP
    if num_steps < NUM_WATCHED:
        return False
    feedback = fitted.newest.feedback
    return feedback is None or feedback.is_settled or num_steps >= _MAX_WARM_UP


class _Log:
    """What the steps have shown so far."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.gradient_error: GradientError | None = None
        self._pairs: list[tuple[float, float]] = []
        self._different: dict[str, Difference] = {}

    def step(self, eager: Arm, tried: Arm, after_step: Callable[[int], None]) -> None:
        """One step of both arms, in turn the one or the other first."""
        eager.forget()
        tried.forget()
        self.num_steps += 1
        for arm in (tried, eager) if self.num_steps % 2 else (eager, tried):
            arm.step()
            arm.put_gradients_aside()
        self._pairs.append((tried.step_s, eager.step_s))
        after_step(self.num_steps)
        found = self._compare(eager, tried)
        eager.update(LEARNING_RATE)
        if found:
            start_from(tried, eager)
        else:
            tried.update(LEARNING_RATE)

    def _compare(self, eager: Arm, tried: Arm) -> bool:
        """Note what differs; True if anything does."""
        made = [(*ours, theirs[2]) for ours, theirs in zip(eager.made(), tried.made(), strict=True)]
        made += [("rng", d, state, tried.randomness.torch[d]) for d, state in eager.randomness.torch.items()]
        differences = [difference(self.num_steps, kind, name, ours, theirs) for kind, name, ours, theirs in made]
        found = [d for d in differences if d is not None]
        for one in found:
            self._different.setdefault(one.kind, one)
        if any(one.kind in GRADIENTS for one in found):
            self.gradient_error = worse(self.gradient_error, GradientError.of(eager.made(), tried.made()))
        return bool(found)

    def trial(self, num_warm_up: int, own_error: GradientError | None, own_loss: bool | None) -> Trial:
        timed = in_turn(self._pairs[num_warm_up:])
        times = Times.of(timed)
        low, high = quartiles(timed)
        first = min(self._different.values(), key=lambda one: one.step, default=None)
        return Trial(
            time_ratio=times.time_ratio,
            time_ratio_low=low,
            time_ratio_high=high,
            step_s=times.step_s,
            eager_step_s=times.eager_step_s,
            num_timed=len(timed),
            num_steps=self.num_steps,
            different=tuple(self._different),
            first_difference=None if first is None else str(first),
            gradient_error=None if self.gradient_error is None else self.gradient_error.to_dict(),
            own_gradient_error=None if own_error is None else own_error.to_dict(),
            own_loss_is_same=own_loss,
        )


def start_from(tried: Arm, right: Arm) -> None:
    """The next step starts from the state of what is right, so that each shows its own error and not those before."""
    tried.start_from(right)
    with torch.no_grad():
        for ours, theirs in zip(tried.model.buffers(), right.model.buffers(), strict=True):
            ours.copy_(theirs)
    tried.randomness = right.randomness


def _drops_out(model: nn.Module) -> bool:
    """True if the network draws random numbers as it trains, as far as its modules show."""
    return any(getattr(module, "p", 0) > 0 for module in model.modules() if "Dropout" in type(module).__name__)


def _loss_is_same(own: list[tuple[str, str, Any]], first: list[tuple[str, str, Any]]) -> bool:
    losses = [[value for kind, _, value in made if kind == "loss"] for made in (own, first)]
    return all(difference(1, "loss", "loss", a, b) is None for a, b in zip(*losses, strict=True))


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
