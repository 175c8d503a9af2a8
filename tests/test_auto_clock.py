"""The clock ends a search that takes far too long: with what it has by then, and later if that is nothing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from planning import planned_network

from memfit.cost.devices import device
from memfit.cost.roofline import roofline
from memfit.plan.auto.planner import Mix, MixPlanner
from memfit.plan.auto.search import Effort

MANY = 10**6
CAP_S = 30.0


class Clock:
    """Time goes on by a second whenever somebody looks."""

    now_s = 0.0

    def perf_counter(self) -> float:
        self.now_s += 1.0
        return self.now_s


def searched(share: float, effort: Effort) -> tuple[Mix, int]:
    """What a search for resnet18 comes to without other policies, and the budget."""
    step = planned_network("resnet18", batch=64)
    mix = MixPlanner(step, roofline(step, replace(device("titan-x"), launch_s=0.0), workspace="fastest"), {})
    mix.__dict__["_singles"] = SimpleNamespace(plans=lambda budget_bytes, known_ps: iter(()))
    budget_bytes = int(share * mix.keep.peak_bytes)
    return mix.finish(mix.begin(budget_bytes, effort)), budget_bytes


def test_what_fits_by_then_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = searched(0.6, Effort(num_evaluations=3_000, cap_s=600))
    assert not whole.is_cut_short
    monkeypatch.setattr("memfit.plan.auto.search.time", Clock())
    found, budget_bytes = searched(0.6, Effort(MANY, CAP_S))
    assert found.is_cut_short and found.plan.peak_bytes <= budget_bytes
    # A descent alone would try thousands: it ends in the midst of them.
    assert found.num_evaluations < 500
    assert found.plan.step_ps >= whole.plan.step_ps >= whole.bound.keep_ps + (whole.bound.over_ps or 0)


def test_what_does_not_fit_is_searched_longer_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("memfit.plan.auto.search.time", clock)
    found, budget_bytes = searched(0.01, Effort(MANY, CAP_S))
    assert found.plan.peak_bytes > budget_bytes and found.bound.certificate is not None
    assert found.is_cut_short and found.num_evaluations < 5_000
    assert clock.now_s > 4 * CAP_S
