"""Plans on disk: found where nothing has changed, proven again, and made anew in every other case."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memfit
from memfit.capture.rewrites import rewrite
from memfit.capture.rewrites.proof import AssumedProofs
from memfit.cost.costs import CodecRate, Costs, Link, free_of_charge
from memfit.cost.densities import assumed_densities
from memfit.errors import BadOption
from memfit.json_folder import JsonFolder
from memfit.plan import plan_cache
from memfit.plan.budget import Budget
from memfit.plan.decisions import Encode
from memfit.plan.plan_cache import cached_plan
from memfit.plan.planner import Planned, plan_step


def network() -> nn.Module:
    """Some convolutions in a row, and a small one at the end."""
    convolutions = [nn.Conv2d(8 if index else 3, 8, 3, padding=1) for index in range(6)]
    layers = [layer for convolution in convolutions for layer in (convolution, nn.ReLU())]
    return nn.Sequential(*layers, nn.MaxPool2d(4), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2))


STEP = rewrite(memfit.capture(network(), (torch.zeros(4, 3, 32, 32),)), proofs=AssumedProofs())
COSTS = replace(free_of_charge(STEP, tiers=("disk",)), densities=assumed_densities(STEP))


@pytest.fixture
def folder(tmp_path: Path) -> JsonFolder:
    return JsonFolder(tmp_path / "plans", max_files=20, max_bytes=1 << 24)


class Planner:
    """cached_plan with a folder, counting how often a plan is really made."""

    def __init__(self, folder: JsonFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.num_made = 0
        monkeypatch.setattr(plan_cache, "plan_step", self._plan_step)

    def _plan_step(self, *args: Any, **kwargs: Any) -> Planned:
        self.num_made += kwargs["policy"] != "keep"
        return plan_step(*args, **kwargs)

    def __call__(self, costs: Costs = COSTS, **options: Any) -> Planned:
        given: dict[str, Any] = {"policy": "checkpoint-search", "budget": Budget.of("100%"), "least_plan_s": 0.0}
        return cached_plan(STEP, costs, folder=self.folder, **(given | options))

    @property
    def file(self) -> Path:
        (file,) = self.folder.folder.iterdir()
        return file


@pytest.fixture
def plan(folder: JsonFolder, monkeypatch: pytest.MonkeyPatch) -> Planner:
    return Planner(folder, monkeypatch)


def figures(planned: Planned) -> Any:
    return (
        planned.policy,
        planned.plan.decisions,
        planned.plan.budget_bytes,
        planned.program.instructions,
        planned.peak_bytes,
        planned.average_bytes,
        planned.step_s,
        planned.parts,
        planned.keep_peak_bytes,
        planned.budget_bytes,
        planned.overhead,
        planned.note,
        planned.bound_s,
        planned.simulated.ledger.entries,
    )


@pytest.mark.parametrize("policy", ["checkpoint-search", "rotor", "gist-lossless", "offload-greedy"])
@pytest.mark.parametrize("optimizer", ["none", "adam"])
def test_a_plan_comes_back_with_all_its_figures(plan: Planner, policy: str, optimizer: str) -> None:
    first = plan(policy=policy, optimizer=optimizer)
    again = plan(policy=policy, optimizer=optimizer)
    assert plan.num_made == 1
    assert figures(again) == figures(first)
    assert again.plan.program.step.digest == first.plan.program.step.digest
    assert again.costs.of(again.program.step) == first.costs.of(first.program.step)


def test_bound_and_note_are_kept_as_plain_numbers(plan: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    make = plan_cache.plan_step

    def with_bound(*args: Any, **kwargs: Any) -> Planned:
        return replace(make(*args, **kwargs), bound_s=0.125, note="by hand", certificate="")

    monkeypatch.setattr(plan_cache, "plan_step", with_bound)
    plan()
    monkeypatch.setattr(plan_cache, "plan_step", make)
    found = plan()
    assert plan.num_made == 1 and (found.bound_s, found.note) == (0.125, "by hand")
    assert json.loads(plan.file.read_text())["content"]["figures"]["bound_s"] == 0.125


def test_the_file_is_json_and_says_what_it_is_for(plan: Planner) -> None:
    planned = plan()
    found = json.loads(plan.file.read_text())
    assert found["key"]["step"] == STEP.digest and found["key"]["policy"] == "checkpoint-search"
    assert found["key"]["torch"] == torch.__version__ and found["key"]["budget"] == "100%"
    assert found["content"]["plan"] == json.loads(planned.plan.to_json())


def dearer(costs: Costs, **changes: Any) -> Costs:
    name = next(iter(costs.by_signature))
    return replace(costs, by_signature=dict(costs.by_signature) | {name: replace(costs.by_signature[name], **changes)})


CHANGES: dict[str, Callable[[Costs], tuple[Costs, dict[str, Any]]]] = {
    "a time": lambda c: (dearer(c, time_ps=7), {}),
    "a workspace": lambda c: (dearer(c, workspace_bytes=8), {}),
    "a link": lambda c: (replace(c, links={"disk": Link("disk", "disk", "disk", 2e9, 1e9)}), {}),
    "no link": lambda c: (replace(c, links={}), {}),
    "a codec's rate": lambda c: (replace(c, codecs={"mask": CodecRate(1e9, 1e9)}), {}),
    "ways": lambda c: (replace(c, algorithms={"op()": {"whole": next(iter(c.by_signature.values()))}}), {}),
    "a layout": lambda c: (replace(c, unforeseen=frozenset({3})), {}),
    "the device": lambda c: (replace(c, device="moon"), {}),
    "its memory": lambda c: (replace(c, memory_bytes=1 << 40), {}),
    "the budget": lambda c: (c, {"budget": Budget.of("101%")}),
    "no budget": lambda c: (c, {"budget": None}),
    "the policy": lambda c: (c, {"policy": "sqrt"}),
    "the optimizer": lambda c: (c, {"optimizer": "sgd"}),
    "the headroom": lambda c: (c, {"headroom": False}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_decides_a_plan_is_in_its_key(plan: Planner, change: str) -> None:
    plan()
    costs, options = CHANGES[change](COSTS)
    plan(costs, **options)
    assert plan.num_made == 2


def test_the_order_of_prices_and_where_they_are_from_make_no_difference(plan: Planner) -> None:
    plan()
    turned = dict(reversed(list(COSTS.by_signature.items())))
    plan(replace(COSTS, by_signature=turned, source="elsewhere", notes=("a note",)))
    assert plan.num_made == 1


@pytest.mark.parametrize("what", ["torch", "memfit"])
def test_other_versions_plan_anew(plan: Planner, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    plan()
    if what == "torch":
        monkeypatch.setattr(torch, "__version__", "9.9")
    else:
        monkeypatch.setattr(plan_cache, "sources_digest", lambda *_: "another draft")
    plan()
    assert plan.num_made == 2


def drop_a_gift(content: Any) -> None:
    instructions = content["plan"]["instructions"]
    instructions.remove(next(entry for entry in instructions if entry[0] == "give"))


def forget_a_free(content: Any) -> None:
    """Legal, but it holds more than was promised: what backward does not need stays to the end."""
    instructions = content["plan"]["instructions"]
    frees = [entry for entry in instructions if entry[0] == "free"]
    largest = max(frees, key=lambda entry: STEP.storage[entry[1]].bytes)
    instructions.remove(largest)
    instructions.append(largest)


DAMAGES: dict[str, Callable[[Any], Any]] = {
    "no plan": lambda c: c.pop("plan"),
    "no figures": lambda c: c.pop("figures"),
    "no densities": lambda c: c.pop("densities"),
    "another policy": lambda c: c["plan"].update(policy="rotor"),
    "another step": lambda c: c["plan"].update(step="0" * 16),
    "an illegal program": drop_a_gift,
    "a program that holds more": forget_a_free,
    "a smaller peak": lambda c: c["plan"].update(peak_bytes=c["plan"]["peak_bytes"] - 1),
    "figures of another version": lambda c: c["figures"].update(colour="red"),
    "a figure too few": lambda c: c["figures"].pop("note"),
    "densities that are none": lambda c: c["densities"].update({"3": "many"}),
    "decisions that are none": lambda c: c["plan"].update(decisions=[1]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_plan_is_ignored_and_replaced(plan: Planner, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    first = plan()
    whole = json.loads(plan.file.read_text())
    damaged = json.loads(json.dumps(whole))
    DAMAGES[damage](damaged["content"])
    plan.file.write_text(json.dumps(damaged))
    with caplog.at_level(logging.DEBUG, logger="memfit"):
        again = plan()
    assert plan.num_made == 2 and figures(again) == figures(first)
    assert any(r.levelno == logging.DEBUG and f"ignoring {plan.file}" in r.getMessage() for r in caplog.records)
    assert json.loads(plan.file.read_text()) == whole
    plan()
    assert plan.num_made == 2


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"key": {}}'])
def test_a_file_that_is_no_plan_is_replaced(plan: Planner, text: str) -> None:
    plan()
    plan.file.write_text(text)
    plan()
    plan()
    assert plan.num_made == 2


def test_a_plan_that_does_not_fit_is_not_kept(plan: Planner) -> None:
    assert not plan(budget=Budget.of(1000)).fits
    assert not plan.folder.folder.exists()


def test_a_plan_that_took_no_time_is_not_kept(plan: Planner) -> None:
    plan(least_plan_s=60.0)
    assert not plan.folder.folder.exists()


def test_a_lossy_plan_comes_back_only_to_those_who_allow_it(plan: Planner) -> None:
    for _ in range(2):
        plan(policy="gist-lossy", allow_lossy=True)
    assert plan.num_made == 1
    with pytest.raises(BadOption, match="gradients will differ"):
        plan(policy="gist-lossy")


# ---- densities: they differ from run to run ----


def moved(by: float) -> Costs:
    return replace(COSTS, densities={s: min(share + by, 1.0) for s, share in COSTS.densities.items()})


@pytest.mark.parametrize(("by", "num_made"), [(0.0, 1), (1e-6, 1), (-1e-3, 1), (0.01, 1), (0.05, 2), (-0.1, 2)])
def test_a_plan_is_for_tensors_about_as_dense(plan: Planner, by: float, num_made: int) -> None:
    plan(policy="gist-lossless")
    plan(moved(by), policy="gist-lossless")
    assert plan.num_made == num_made


def test_a_code_that_became_too_small_is_planned_anew(plan: Planner) -> None:
    """The tensor is so small that the average hardly moves; all the same its code would have to be a dense copy."""
    first = plan(policy="gist-lossless")
    coded = [s for s, d in first.plan.decisions.items() if isinstance(d, Encode) and d.codec.startswith("sparse:")]
    smallest = min(coded, key=lambda s: STEP.storage[s].bytes)
    capacity = float(first.plan.decisions[smallest].codec.partition(":")[2])
    total = sum(STEP.storage[s].bytes for s in COSTS.densities)
    assert STEP.storage[smallest].bytes * 0.1 < 0.02 * total, "else this tests the average"
    plan(replace(COSTS, densities=dict(COSTS.densities) | {smallest: capacity - 0.001}), policy="gist-lossless")
    assert plan.num_made == 2


def test_a_code_of_unknown_density_is_planned_anew(plan: Planner) -> None:
    first = plan(policy="gist-lossless")
    coded = [s for s, d in first.plan.decisions.items() if isinstance(d, Encode) and d.codec.startswith("sparse:")]
    smallest = min(coded, key=lambda s: STEP.storage[s].bytes)
    plan(replace(COSTS, densities={s: d for s, d in COSTS.densities.items() if s != smallest}), policy="gist-lossless")
    assert plan.num_made == 2


# ---- fit() ----


def test_a_fitted_model_takes_its_plan_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    monkeypatch.setattr("memfit.run.fitted.measure", lambda step, **_: free_of_charge(step, tiers=("disk",)))
    monkeypatch.setattr(plan_cache, "_LEAST_PLAN_S", 0.0)
    monkeypatch.setitem(cached_plan.__kwdefaults__, "least_plan_s", 0.0)
    made: list[str] = []

    def counted(*args: Any, **kwargs: Any) -> Planned:
        made.append(kwargs["policy"])
        return plan_step(*args, **kwargs)

    monkeypatch.setattr(plan_cache, "plan_step", counted)
    gradients = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())))
        memfit.fit(model, budget="1GiB", policy="checkpoint-search")
        model(torch.randn(32, 16)).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert made.count("checkpoint-search") == 1
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
