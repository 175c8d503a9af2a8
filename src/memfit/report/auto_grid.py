"""What must hold of `auto` over networks, devices and budgets: never worse than a single technique, near the bound."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from memfit.cost.costs import PS_PER_S
from memfit.report.frontier import AUTO, Frontier, Limit, Point

GAP_FROM_SHARE = 0.4
"""Closeness to the bound is asked for from this share of the keep plan's activations up."""
MEDIAN_GAP, WORST_GAP = 0.005, 0.03


@dataclass(frozen=True)
class Case:
    """One network on one device."""

    network: str
    batch: int | None
    image: int | None
    device: str

    def __str__(self) -> str:
        return f"{self.network} at {self.batch} on {self.device}"


@dataclass(frozen=True)
class Cell:
    """One budget of one case: auto, the other policies, the bound."""

    case: Case
    limit: Limit
    auto: Point
    others: tuple[Point, ...]

    @property
    def best_other(self) -> Point | None:
        """The fastest of the others that fit."""
        fitting = [(point.step_ps, index) for index, point in enumerate(self.others) if point.fits]
        return self.others[min(fitting)[1]] if fitting else None

    @property
    def gap(self) -> float | None:
        """How much more than the bound auto's overhead is; None if it does not fit, or nothing is proven."""
        bound = self.limit.lower_bound_overhead
        return (
            self.auto.overhead - bound
            if self.auto.fits and self.auto.overhead is not None and bound is not None
            else None
        )

    @property
    def faults(self) -> tuple[str, ...]:
        """What must hold of one budget and does not, each in a sentence."""
        found = []
        where = f"{self.case} within {self.limit.budget}"
        best = self.best_other
        if self.auto.error is not None:
            found.append(f"{where}: auto makes no plan: {self.auto.error}")
        elif best is not None and not self.auto.fits:
            found.append(f"{where}: '{best.policy}' fits and auto does not")
        elif best is not None and best.step_ps is not None and self.auto.step_ps is not None:
            behind_ps = self.auto.step_ps - best.step_ps
            if behind_ps > 0:
                found.append(f"{where}: '{best.policy}' is faster by {behind_ps / PS_PER_S * 1e6:.1f} us a step")
        if best is not None and self.limit.certificate:
            found.append(f"{where}: '{best.policy}' fits what is proven to be impossible: {self.limit.certificate}")
        bound = self.limit.lower_bound_overhead
        if bound is not None:
            fitting = [p for p in (self.auto, *self.others) if p.fits and p.overhead is not None]
            # A float of picoseconds: the bound and the overhead are divided by the same number, one by one.
            below = [p for p in fitting if p.overhead is not None and p.overhead < bound - 1e-9]
            found += [f"{where}: '{p.policy}' at {p.overhead:+.4%} is below the bound of {bound:+.4%}" for p in below]
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        best = self.best_other
        return {
            "network": self.case.network,
            "batch": self.case.batch,
            "image": self.case.image,
            "device": self.case.device,
            "budget": self.limit.budget,
            "budget_bytes": self.limit.budget_bytes,
            "share": self.limit.share,
            "fits": self.auto.fits,
            "peak_bytes": self.auto.peak_bytes,
            "overhead": self.auto.overhead,
            "lower_bound_overhead": self.limit.lower_bound_overhead,
            "gap": self.gap,
            "certificate": self.limit.certificate,
            "plan_s": self.auto.plan_s,
            "note": self.auto.note,
            "best_other": None if best is None else best.policy,
            "best_other_overhead": None if best is None else best.overhead,
            "others": {point.policy: point.overhead if point.fits else None for point in self.others},
            "faults": list(self.faults),
        }


def cells_of(case: Case, found: Frontier) -> tuple[Cell, ...]:
    """The cells of one case, the smallest budget first."""
    cells = []
    for limit in found.limits:
        within = [point for point in found.points if point.budget_bytes == limit.budget_bytes]
        (auto,) = (point for point in within if point.policy == AUTO)
        cells.append(Cell(case, limit, auto, tuple(point for point in within if point.policy != AUTO)))
    return tuple(cells)


def rises(cells: Iterable[Cell]) -> list[str]:
    """Where a larger budget got a slower plan, or none, each in a sentence."""
    found = []
    for case, group in groupby(cells, key=lambda cell: cell.case):
        for less, more in pairwise(sorted(group, key=lambda cell: cell.limit.budget_bytes)):
            if not less.auto.fits:
                continue
            said = f"{case}: {less.limit.budget} fits at {less.auto.overhead:+.3%}, {more.limit.budget}"
            if not more.auto.fits:
                found.append(f"{said} does not")
            elif less.auto.step_ps is not None and (more.auto.step_ps or 0) > less.auto.step_ps:
                found.append(f"{said} at {more.auto.overhead:+.3%}")
    return found


@dataclass(frozen=True)
class Gaps:
    """How far auto is from the bound over all cells where that is asked for."""

    median: float | None
    worst: float | None
    worst_cell: Cell | None
    num_cells: int

    @classmethod
    def of(cls, cells: Sequence[Cell]) -> Gaps:
        asked = [cell for cell in cells if cell.limit.share >= GAP_FROM_SHARE - 1e-9]
        known = [(cell.gap, index) for index, cell in enumerate(asked) if cell.gap is not None]
        if not known:
            return cls(None, None, None, 0)
        worst, index = max(known)
        return cls(statistics.median(gap for gap, _ in known), worst, asked[index], len(known))

    @property
    def holds(self) -> bool:
        """True where there is nothing to hold against the limits."""
        return (self.median or 0.0) <= MEDIAN_GAP and (self.worst or 0.0) <= WORST_GAP

    def to_dict(self) -> dict[str, Any]:
        worst = self.worst_cell
        return {
            "from_share": GAP_FROM_SHARE,
            "num_cells": self.num_cells,
            "median": self.median,
            "worst": self.worst,
            "worst_at": None if worst is None else f"{worst.case} within {worst.limit.budget}",
            "median_at_most": MEDIAN_GAP,
            "worst_at_most": WORST_GAP,
            "holds": self.holds,
        }


@dataclass(frozen=True)
class Aim:
    """A figure to reach on paper: this network at this batch, within this budget, at most this overhead.

    Attributes:
        budget: in all, such as "12GB" or "40%"; None where `activation_bytes` are given beside what no plan can change.
        source: what it is held against.
    """

    network: str
    batch: int
    budget: str | None
    at_most: float
    source: str
    activation_bytes: int | None = None

    @property
    def title(self) -> str:
        room = self.budget if self.activation_bytes is None else f"{self.activation_bytes / 1e6:.0f} MB of activations"
        return f"{self.network} at {self.batch} in {room}"


@dataclass(frozen=True)
class Reached:
    """How far an aim was reached."""

    aim: Aim
    auto: Point
    limit: Limit

    @property
    def is_met(self) -> bool:
        return self.auto.fits and self.auto.overhead is not None and self.auto.overhead <= self.aim.at_most

    @property
    def is_impossible(self) -> bool:
        """True if the bound proves that no plan reaches it."""
        bound = self.limit.lower_bound_overhead
        return bool(self.limit.certificate) or (bound is not None and bound > self.aim.at_most)

    @property
    def verdict(self) -> str:
        if self.is_met:
            return "met"
        return "impossible: the bound shows why" if self.is_impossible else "NOT met"

    def to_dict(self) -> dict[str, Any]:
        return {
            "aim": self.aim.title,
            "network": self.aim.network,
            "batch": self.aim.batch,
            "budget_bytes": self.limit.budget_bytes,
            "at_most": self.aim.at_most,
            "source": self.aim.source,
            "fits": self.auto.fits,
            "overhead": self.auto.overhead,
            "lower_bound_overhead": self.limit.lower_bound_overhead,
            "certificate": self.limit.certificate,
            "plan_s": self.auto.plan_s,
            "verdict": self.verdict,
            "holds": self.is_met or self.is_impossible,
        }


AIMS = (
    Aim("vgg19", 64, "40%", 0.01, "Hascoet et al. 2019: -35 % of memory at +21 %"),
    Aim("vgg16", 256, "12GB", 0.01, "vDNN, MICRO 2016: 18 % slower in 12 GB"),
    Aim("resnet152", 16, None, 0.06, "Feng and Huang, CVPR 2021: 526 MB at +37 %", activation_bytes=526_000_000),
    Aim("densenet201", 16, None, 0.14, "Feng and Huang, CVPR 2021: 474 MB at +53 %", activation_bytes=474_000_000),
    Aim("resnet50", 64, "25%", 0.06, "ours"),
)
"""On titan-x. Feng and Huang's figures are without weights, and their MB are taken to be 10**6 bytes."""
