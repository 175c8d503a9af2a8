"""The statistics of the accuracy study: over seeds, and paired with the reference of the same seed.

[Note: what counts as noise]
A difference of two accuracies is taken seed by seed, and its mean stands beside its standard error. It is within noise
if it is at most two standard errors, or less than one digit of the test set; with one seed only the latter can be told.
Where there is no difference at all, two standard errors are exceeded now and then: `false_alarms` says how often, and a
table of many rows will have such rows. How small a loss would have been seen, the standard error says. One seed that
collapses widens the standard error so far that it hides itself: therefore the worst seed has a column of its own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from memfit.codecs.registry import codec
from memfit.report.accuracy_networks import FULL
from memfit.report.accuracy_training import DELAYED, IMMEDIATE, REFERENCE, Trained

NUM_STANDARD_ERRORS = 2.0
NOISE_RULE = "|mean of paired differences| <= 2 standard errors, or < one digit of the test set"
ALL = "all"
_SAMPLE_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences over seeds. See [Note: what counts as noise].

    Attributes:
        standard_error: of the mean; None with one seed.
        within_noise: too small to be told from none; None if one seed cannot tell.
        not_worse: above zero, or within noise; None if one seed cannot tell.
    """

    mean: float
    standard_error: float | None
    within_noise: bool | None
    not_worse: bool | None

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float], *, resolution: float) -> Difference:
        """Ours minus theirs, seed by seed; `resolution` is what one digit of the test set is worth."""
        differences = [our - their for our, their in zip(ours, theirs, strict=True)]
        mean = statistics.fmean(differences)
        error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else None
        # An accuracy is a count over a count: the small slack is for the roundings of subtraction and mean.
        slack = 1e-9
        if abs(mean) < resolution - slack:
            return cls(mean, error, True, True)
        if error is None:
            return cls(mean, error, None, None)
        within = abs(mean) <= NUM_STANDARD_ERRORS * error + slack
        return cls(mean, error, within, within or mean > 0)


@dataclass(frozen=True)
class Row:
    """One network, format and mode, over all seeds. Accuracies are shares of the test set.

    Attributes:
        accuracy_std: between seeds; None with one seed.
        final_loss: mean training loss of the last epoch; None if a seed's is not finite.
        curve, loss_curve: after each epoch, the mean over seeds; an epoch without a finite loss is None.
        difference: to fp32 of the same seeds; None for fp32 itself.
        difference_as_trained: the same with the test's forward rounded as in training.
    """

    network: str
    format: str
    mode: str
    bits_per_element: float
    seeds: tuple[int, ...]
    accuracy_mean: float
    accuracy_std: float | None
    accuracies: tuple[float, ...]
    accuracy_as_trained_mean: float
    final_loss: float | None
    test_loss: float | None
    curve: tuple[float, ...]
    loss_curve: tuple[float | None, ...]
    difference: Difference | None
    difference_as_trained: Difference | None
    num_rounded: int
    num_fallbacks: int
    train_s: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Duel:
    """Delayed against immediate reduction at one width, or the mean of all: delayed minus immediate, paired by seed."""

    network: str
    format: str
    difference: Difference
    difference_as_trained: Difference

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def rows_of(trained: Sequence[Trained], *, num_test: int) -> list[Row]:
    """A row for each network, format and mode, in the order of their first trainings."""
    groups = _groups(trained)
    return [_row(group, groups.get((key[0], FULL, REFERENCE)), num_test) for key, group in groups.items()]


def duels_of(trained: Sequence[Trained], *, num_test: int) -> list[Duel]:
    """For each network a duel in each format that was trained in both modes, and one of their means if there are more.

    The mean over formats is taken for each seed, so that its standard error is of independent numbers.
    """
    groups = _groups(trained)
    found = []
    for network in dict.fromkeys(network for network, _, _ in groups):
        formats = [f for n, f, mode in groups if (n, mode) == (network, DELAYED) and (n, f, IMMEDIATE) in groups]
        pairs = [(groups[network, f, DELAYED], groups[network, f, IMMEDIATE]) for f in formats]
        for format, (delayed, immediate) in zip(formats, pairs, strict=True):
            found.append(Duel(network, format, *_differences([delayed], [immediate], num_test)))
        if len(pairs) > 1:
            delayed_all, immediate_all = zip(*pairs, strict=True)
            found.append(Duel(network, ALL, *_differences(delayed_all, immediate_all, num_test)))
    return found


def false_alarms(num_seeds: int) -> float | None:
    """How often no difference at all exceeds the standard errors that are allowed: Student's distribution, two-sided.

    None with one seed.
    """
    freedom = num_seeds - 1
    if freedom < 1:
        return None
    # In the angle whose tangent is t / sqrt(freedom) its density is a power of the cosine: smooth, on a short range.
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    end = math.atan(NUM_STANDARD_ERRORS / math.sqrt(freedom))
    num_slices = 1000
    middles = ((index + 0.5) * end / num_slices for index in range(num_slices))
    return 1 - 2 * scale * sum(math.cos(angle) ** (freedom - 1) for angle in middles) * end / num_slices


def bits_per_element(format: str) -> float:
    """What a map's element takes in that format; blocks' steps are counted."""
    if format == FULL:
        return 32.0
    chosen = codec(format)
    code = chosen.encode(torch.ones(_SAMPLE_ELEMENTS), chosen.settings([]))
    return 8 * code.nbytes / _SAMPLE_ELEMENTS


def sparkline(curve: Sequence[float], *, low: float, high: float) -> str:
    """A character for each number: its height between low and high in eighths, at least one."""
    heights = "▁▂▃▄▅▆▇█"
    span = max(high - low, 1e-12)
    return "".join(heights[min(max(int((y - low) / span * len(heights)), 0), len(heights) - 1)] for y in curve)


def _groups(trained: Sequence[Trained]) -> dict[tuple[str, str, str], list[Trained]]:
    found: dict[tuple[str, str, str], list[Trained]] = {}
    for one in trained:
        found.setdefault((one.training.network, one.training.format, one.training.mode), []).append(one)
    return {key: sorted(group, key=lambda one: one.training.seed) for key, group in found.items()}


def _row(group: list[Trained], reference: list[Trained] | None, num_test: int) -> Row:
    first = group[0].training
    finals = [one.accuracies[-1] for one in group]
    is_reference = first.mode == REFERENCE or reference is None
    difference, as_trained = (None, None) if is_reference else _differences([group], [reference or []], num_test)
    return Row(
        network=first.network,
        format=first.format,
        mode=first.mode,
        bits_per_element=bits_per_element(first.format),
        seeds=tuple(one.training.seed for one in group),
        accuracy_mean=statistics.fmean(finals),
        accuracy_std=statistics.stdev(finals) if len(finals) > 1 else None,
        accuracies=tuple(finals),
        accuracy_as_trained_mean=statistics.fmean(one.accuracy_as_trained for one in group),
        final_loss=_finite_mean([one.losses[-1] for one in group]),
        test_loss=_finite_mean([one.test_loss for one in group]),
        curve=tuple(statistics.fmean(epoch) for epoch in zip(*(one.accuracies for one in group), strict=True)),
        loss_curve=tuple(_finite_mean(epoch) for epoch in zip(*(one.losses for one in group), strict=True)),
        difference=difference,
        difference_as_trained=as_trained,
        num_rounded=max(one.num_rounded for one in group),
        num_fallbacks=sum(one.num_fallbacks for one in group),
        train_s=statistics.fmean(one.train_s for one in group),
    )


def _differences(
    ours: Sequence[list[Trained]], theirs: Sequence[list[Trained]], num_test: int
) -> tuple[Difference, Difference]:
    """By the accuracies in full precision, and by those as trained; of several groups the mean for each seed."""
    seeds = [[one.training.seed for one in group] for group in (*ours, *theirs)]
    assert all(group == seeds[0] for group in seeds), "pairs have one seed"

    def of(accuracy: Callable[[Trained], float]) -> Difference:
        def by_seed(groups: Sequence[list[Trained]]) -> list[float]:
            return [statistics.fmean(map(accuracy, same_seed)) for same_seed in zip(*groups, strict=True)]

        return Difference.of(by_seed(ours), by_seed(theirs), resolution=1 / num_test)

    return of(lambda one: one.accuracies[-1]), of(lambda one: one.accuracy_as_trained)


def _finite_mean(numbers: Sequence[float]) -> float | None:
    return statistics.fmean(numbers) if all(map(math.isfinite, numbers)) else None
