"""Predictions against the first real steps, and workspaces that correct themselves."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.cost.costs import Costs, OpCost
from memfit.cost.price_cache import PriceCache
from memfit.cost.profile import measure
from memfit.cost.signature import signature
from memfit.plan.program import FetchStart, FetchWait, Program, Run
from memfit.resident import CannotMeasure, require_linux
from memfit.run import feedback
from memfit.run.observe import LedgerBroken, LiveBytes, Transients

_FIGURES: dict[str, float] = {}
"""What the first test found out about this machine: measuring that again would take most of the time of the others."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    spill = str(tmp_path / "spill")
    monkeypatch.setenv("MEMFIT_SPILL_DIR", spill)
    cache = PriceCache.here()
    for name, figure in _FIGURES.items():
        cache.figure(name.replace("SPILL", spill), lambda figure=figure: figure)
    cache.save()
    yield
    _FIGURES.update({name.replace(spill, "SPILL"): figure for name, figure in PriceCache.here()._figures.items()})


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 4))


def train(model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(2, 3, 16, 16)).square().sum().backward()
        model.zero_grad()


def test_after_three_steps_one_line_compares_prediction_and_measurement(caplog: pytest.LogCaptureFixture) -> None:
    model = memfit.fit(net(), budget="1GiB", policy="keep")
    with caplog.at_level(logging.INFO, logger="memfit"):
        train(model, 2)
        assert model.memfit.measured is None
        train(model, 3)
    lines = [r.getMessage() for r in caplog.records if "predicted growth" in r.getMessage()]
    assert len(lines) == 1, "once for each capture"
    assert lines[0].startswith("fitted Sequential: predicted growth ") and "; predicted step " in lines[0]
    found = model.memfit.measured
    assert found.predicted_growth_bytes == model.memfit.planned.timeline.ledger.growth_bytes
    assert found.step_s > 0 and found.predicted_step_s == model.memfit.planned.step_s > 0


@pytest.mark.parametrize(
    ("times", "change", "is_found_out"),
    [
        (10_000.0, {}, True),
        (0.0001, {}, False),
        (10_000.0, {"device": "elsewhere"}, False),
        (10_000.0, {"is_estimated": True}, False),
    ],
    ids=["too high", "too low", "of another device", "only estimated"],
)
def test_prices_of_a_busy_machine_are_found_out_and_forgotten(
    times: float,
    change: dict[str, Any],
    is_found_out: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def busy(step: Any, **options: Any) -> Costs:
        found = measure(step, **options)
        is_estimated = change.get("is_estimated", False)
        prices = {
            key: replace(cost, time_ps=int(cost.time_ps * times), is_estimated=is_estimated)
            for key, cost in found.by_signature.items()
        }
        return replace(found, by_signature=prices, device=change.get("device", found.device))

    monkeypatch.setattr("memfit.run.fitted.measure", busy)
    model = memfit.fit(net(), budget="1GiB", policy="keep")
    train(model, 4)
    warned = [r.getMessage() for r in caplog.records if "measured while the machine was busy" in r.getMessage()]
    if not is_found_out:
        assert not warned and PriceCache.here()._ops
    else:
        assert len(warned) == 1 and warned[0].startswith("fitted Sequential: a step takes 0.")
        assert "call memfit.fit again when the machine is quiet" in warned[0]
        assert not PriceCache.here()._ops


def test_without_a_budget_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.run.fitted.measure", lambda step, **_: pytest.fail("measured"))
    model = memfit.fit(net())
    train(model, 4)
    assert model.memfit.measured is None


def test_a_workspace_that_was_too_small_is_corrected_and_the_next_plan_uses_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The resident set is played: the process grows by far more than planned, and the convolution is to blame.

    The budget is large enough for it, so that the plan in use stays (tests/test_fit_budget.py has the others).
    """
    extra, now = 50 << 20, 1 << 30

    class Played:
        def __init__(self, program: Any, tell: Any) -> None:
            self.program, self.tell, self.growth_bytes = program, tell, 0

        def __call__(self, number: int, made: Any = None) -> None:
            instruction = self.program.instructions[number]
            op = getattr(instruction, "op", None)
            if op is not None and self.program.step.ops[op].target == "aten.convolution.default":
                self.tell(op, extra)

        def look(self) -> int:
            self.growth_bytes = extra + 40_000_000
            return 0

        def go_on(self) -> None: ...

    monkeypatch.setattr(feedback, "Transients", Played)
    monkeypatch.setattr(feedback, "reset_high_water", lambda: None)
    monkeypatch.setattr(feedback, "resident_bytes", lambda: now)
    monkeypatch.setattr(feedback, "high_water_bytes", lambda: now + extra + 80_000_000)
    model = memfit.fit(net(), budget="1GiB", policy="keep")
    with caplog.at_level(logging.INFO, logger="memfit"):
        train(model, 5)
    before = model.memfit.planned.peak_bytes
    assert model.memfit.measured.num_corrected == 1 and model.memfit.num_revisions == 0
    assert model.memfit.measured.growth_bytes == extra + 40_000_000, "as it was observed"
    assert any(
        "workspace of aten.convolution.default in '0' corrected to 52,428,800 bytes" in r.getMessage()
        for r in caplog.records
    )
    step = model.memfit.step
    key = next(signature(step, op) for op in step.ops if op.target == "aten.convolution.default")
    assert PriceCache.here().op(key).workspace_bytes == extra
    again = memfit.fit(net(), budget="1GiB", policy="keep")
    train(again, 1)
    assert again.memfit.planned.peak_bytes >= before + extra // 2
    with pytest.raises(memfit.MemfitError, match=r"workspace 50\.0"):
        train(memfit.fit(net(), budget=before, policy="keep"), 1)


def test_a_step_that_grew_less_than_planned_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feedback, "high_water_bytes", lambda: 0)
    monkeypatch.setattr(feedback, "Transients", lambda *_: pytest.fail("observed"))
    train(memfit.fit(net(), budget="1GiB", policy="keep"), 5)


def test_where_growth_cannot_be_read_time_is_still_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot() -> None:
        raise CannotMeasure("not here")

    monkeypatch.setattr(feedback, "reset_high_water", cannot)
    model = memfit.fit(net(), budget="1GiB", policy="keep")
    train(model, 3)
    assert model.memfit.measured.growth_bytes is None and model.memfit.measured.step_s > 0
    assert "measured" in model.memfit.measured.line


def test_what_an_op_holds_is_seen_from_outside() -> None:
    """A real one: 64 MiB are allocated, touched and given back while the op is said to run."""
    try:
        require_linux()
    except CannotMeasure:
        pytest.skip("growth cannot be read here")
    model = nn.Linear(4, 4)
    step = memfit.capture(model, (torch.randn(2, 4),))
    told: dict[int, int] = {}
    watch = Transients(Program(step, (Run(0), Run(1))), told.__setitem__)
    # Straight from the kernel: malloc might have 64 MiB in reserve, which are resident already.
    with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as waste:
        waste[:: mmap.PAGESIZE] = b"x" * ((64 << 20) // mmap.PAGESIZE)
    watch(0, {})
    watch(1, {})
    assert 60 << 20 <= told[0] <= 80 << 20
    assert told[1] < 8 << 20


def test_what_a_tier_brings_back_is_not_blamed_on_the_op_beside_it() -> None:
    """Its pages come from another thread, while whatever op runs."""
    try:
        require_linux()
    except CannotMeasure:
        pytest.skip("growth cannot be read here")
    num_bytes = 64 << 20
    step = memfit.capture(nn.Linear(4, 4), (torch.empty(num_bytes // 16, 4),))
    storage = next(known.id for known in step.storages if known.bytes == num_bytes and known.maker is not None)
    told: dict[int, int] = {}
    program = Program(step, (FetchStart(storage, "disk"), Run(0), FetchWait(storage), Run(1)))
    watch = Transients(program, told.__setitem__)
    for number in range(4):
        with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
            if isinstance(program.instructions[number], Run):
                pages[:: mmap.PAGESIZE] = b"x" * (num_bytes // mmap.PAGESIZE)
            watch(number, {})
    assert told[0] < 16 << 20, "the op ran beside it"
    assert told[1] > 48 << 20, "this one runs when all is there: what comes now is its own"


def test_holding_on_to_a_tensor_breaks_the_ledger_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Any] = []
    watch = LiveBytes.__call__

    def hoard(self: LiveBytes, number: int, made: Any = None) -> None:
        held.extend((made or {}).values())
        watch(self, number, made)

    monkeypatch.setattr(LiveBytes, "__call__", hoard)
    model = memfit.fit(net(), debug=True)
    with pytest.raises(LedgerBroken, match=r"after instruction \d+, .* bytes of the step's own are alive"):
        train(model, 1)


def test_a_price_is_what_it_was_until_it_is_corrected(tmp_path: Path) -> None:
    cache = PriceCache(tmp_path / "prices.json")
    cache.add("op()", OpCost(5, 10))
    cache.correct("op()", 7)
    assert cache.op("op()") == OpCost(5, 10), "never downwards"
    cache.correct("op()", 70)
    cache.save()
    assert PriceCache(tmp_path / "prices.json").op("op()") == OpCost(5, 70)
