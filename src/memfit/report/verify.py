"""Run training steps both ways from the same state and compare every bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from memfit.errors import BadOption
from memfit.plan.budget import Budget
from memfit.plan.options import Options, policy_or_default
from memfit.plan.policies.registry import with_format
from memfit.report.arm import Arm, Named
from memfit.report.bits import Difference, difference
from memfit.report.gradient_error import GRADIENTS, GradientError, is_broken, worse
from memfit.report.step_module import Loss


@dataclass(frozen=True)
class Verdict:
    """What comparing two runs of the same training steps showed. True if every bit was the same.

    Attributes:
        exact: no tensor differed.
        steps: training steps taken; fewer than asked for if one differed, since nothing after it can agree.
        num_compared: tensors held against each other.
        num_different: tensors that differed in the last step taken.
        first_difference: the first of them, in the order outputs, loss, gradients, gradients of inputs, buffers,
            parameters after the update, random state.
        gradient_error: of a lossy plan, how far its gradients are from eager's in the worst step. They are then not
            among the tensors compared, nor the parameters after the update: each step starts from eager's.
    """

    exact: bool
    steps: int
    num_compared: int
    num_different: int = 0
    first_difference: Difference | None = None
    gradient_error: GradientError | None = None

    @property
    def holds(self) -> bool:
        """True if everything is exact that was promised to be: of a lossy plan all but the gradients."""
        return self.first_difference is None

    def __bool__(self) -> bool:
        return self.exact

    def __str__(self) -> str:
        counted = f"{self.steps} step{'s' * (self.steps != 1)}, {self.num_compared:,} tensors compared"
        if self.exact:
            return f"exact: {counted} bit for bit"
        if self.first_difference is None:
            return f"lossy: {counted} bit for bit, all but gradients. Gradients: {self.gradient_error}"
        others = self.num_different - 1
        also = f"; {others:,} other tensor{'s' * (others != 1)} differ in that step" if others else ""
        return f"not exact: {counted}. First difference: {self.first_difference}{also}"

    def to_dict(self) -> dict[str, Any]:
        """The verdict as JSON-able data."""
        return {
            "exact": self.exact,
            "steps": self.steps,
            "num_compared": self.num_compared,
            "num_different": self.num_different,
            "gradient_error": None if self.gradient_error is None else self.gradient_error.to_dict(),
            "first_difference": None if self.first_difference is None else self.first_difference.to_dict(),
        }


def verify(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Loss | None = None,
    targets: Sequence[Any] = (),
    steps: int = 3,
    seed: int = 0,
    lr: float = 0.01,
    without: Iterable[str] = (),
    policy: str | None = None,
    budget: int | str | None = None,
    format: str | None = None,
    allow_lossy: bool = False,
) -> Verdict:
    """Take `steps` training steps in eager and fitted, from the same state, and compare them bit for bit.

    Both run on copies: `model`, its gradients and the global random state are as before. Copies of a model that is in
    eval mode are put in training mode, since fitted models differ from others there only.

    Args:
        model: any nn.Module; if it is fitted, its copies start plain.
        args, kwargs: what its forward takes. Gradients of those that require grad are compared too.
        loss: called as `loss(output, *targets)`. Without it, a scalar output is the loss, or an output's `.loss` or
            `["loss"]`, or else the sum of the means of squares of all floating-point tensors in the output.
        steps: how many steps; between two of them each copy is updated by plain gradient descent.
        seed: what the random generators start from in both runs.
        lr: the learning rate of that update.
        without, policy, budget, format, allow_lossy: as in memfit.fit. What a lossy policy does to gradients is
            measured step by step, each from eager's state, and all else must be exact.

    Example:
        >>> assert memfit.verify(torch.nn.Linear(4, 2), (torch.randn(3, 4),))
    """
    limit = Budget.of(budget)
    name = with_format(policy_or_default(policy, limit), format)
    options = Options(limit, name, frozenset(without), allow_lossy=allow_lossy)
    eager, fitted = both_arms(model, args, kwargs, loss=loss, targets=targets, seed=seed, options=options)
    return compare(eager, fitted, steps=steps, lr=lr)


def both_arms(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Loss | None = None,
    targets: Sequence[Any] = (),
    seed: int = 0,
    options: Options | None = None,
) -> tuple[Arm, Arm]:
    """Two copies in the same state: one to train in eager, one fitted."""
    if not isinstance(model, nn.Module):
        raise BadOption(f"verify() takes an nn.Module, not {type(model).__name__}")
    eager = Arm(model, args, kwargs or {}, targets, loss, seed=seed, options=None)
    fitted = Arm(model, args, kwargs or {}, targets, loss, seed=seed, options=options or Options())
    return eager, fitted


def compare(
    eager: Arm,
    fitted: Arm,
    *,
    steps: int,
    lr: float = 0.01,
    after_step: Callable[[int], None] = lambda step: None,
    is_timed: bool = False,
) -> Verdict:
    """Step both arms in turn, `steps` times or until they differ; `after_step` is told each step once both took it.

    Where times are taken (`is_timed`), no arm steps beside the gradients of the other: see Arm.put_gradients_aside.
    """
    if steps < 1:
        raise BadOption(f"steps={steps}: must be at least 1")
    num_compared = 0
    error: GradientError | None = None
    is_lossy = fitted.options is not None and fitted.options.allow_lossy
    was_lossy = False
    for step in range(1, steps + 1):
        eager.forget()
        fitted.forget()
        # Fitted first, so that a budget that cannot be met is known before eager asks for more than that. Then in
        # turn, so that neither always finds the caches as the other left them.
        for arm in (fitted, eager) if step % 2 else (eager, fitted):
            arm.step()
            if is_timed:
                arm.put_gradients_aside()
        after_step(step)
        if is_lossy:
            was_lossy |= fitted.loses
            error = worse(error, GradientError.of(eager.made(), fitted.made()))
        found = list(_differences(step, eager.made(), fitted.made(), lossy=was_lossy))
        eager.update(lr)
        if is_lossy:
            fitted.start_from(eager)
        else:
            fitted.update(lr)
        found += _differences(step, eager.state(), fitted.state())
        num_compared += len(found)
        different = [d for d in found if d is not None]
        if different:
            return Verdict(False, step, num_compared, len(different), different[0], error)
    return Verdict(not was_lossy, steps, num_compared, gradient_error=error if was_lossy else None)


def _differences(step: int, eager: Named, fitted: Named, *, lossy: bool = False) -> Iterator[Difference | None]:
    """For each pair of tensors how they differ, or None; of a lossy plan's gradients only if they are broken."""
    nothing = ("", "", None)
    for ours, theirs in itertools.zip_longest(eager, fitted, fillvalue=nothing):
        kind, name, _ = ours if ours is not nothing else theirs
        if ours[:2] != theirs[:2]:
            shown = [f"{kind} '{name}'" if kind else "nothing more" for kind, name, _ in (ours, theirs)]
            yield Difference(step, kind, name, f"eager has {shown[0]}, fitted has {shown[1]}")
            return  # what follows is out of step
        if lossy and kind in GRADIENTS:
            if is_broken(ours[2], theirs[2]):
                yield Difference(step, kind, name, "missing, not finite or of another shape, and eager's is not")
            continue
        yield difference(step, kind, name, ours[2], theirs[2])
