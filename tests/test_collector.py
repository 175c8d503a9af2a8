"""Python's collector of cycles is held off in rewriting and planning, and afterwards is as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from planning import chain

from memfit.collector import collector_paused
from memfit.cost.devices import device
from memfit.cost.roofline import roofline
from memfit.errors import BadOption
from memfit.plan.budget import Budget
from memfit.plan.planner import plan_step


@pytest.fixture(autouse=True)
def _collector_on() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_it_is_off_in_the_block_and_on_afterwards() -> None:
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the inner block is not the one that turned it off"
    assert gc.isenabled()


def test_who_has_it_off_keeps_it_off() -> None:
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()


def test_an_error_turns_it_on_again() -> None:
    @collector_paused()
    def fails() -> None:
        assert not gc.isenabled()
        raise ValueError("on purpose")

    for _ in range(2):
        with pytest.raises(ValueError, match="on purpose"):
            fails()
        assert gc.isenabled()


def test_planning_holds_it_off_and_gives_it_back() -> None:
    step = chain(6)
    costs = roofline(step, device("v100-16gb"))
    seen: list[bool] = []
    plan_step(step, costs, policy="auto", budget=Budget.parse("60%"), progress=lambda _: seen.append(gc.isenabled()))
    assert seen and not any(seen)
    assert gc.isenabled()
    with pytest.raises(BadOption):
        plan_step(step, costs, policy="no such policy")
    assert gc.isenabled()
