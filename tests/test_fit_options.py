"""The options of fit(): understood, refused with the way out, and kept to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equivalence import assert_same_as_eager, bits, seeded
from small_net import net, train
from torch import nn

import memfit
from memfit.errors import BadOption, DoesNotFit

SIZES = {
    6_000_000_000: 6_000_000_000,
    "6000000000": 6_000_000_000,
    "6GB": 6_000_000_000,
    "6GiB": 6 * 2**30,
    "6 gib": 6 * 2**30,
    " 1.5 MiB ": 3 * 2**19,
    "800MB": 800_000_000,
    "10KB": 10_000,
    "10kib": 10_240,
    "2TiB": 2 * 2**40,
}


@pytest.mark.parametrize("budget", SIZES, ids=repr)
def test_budgets_are_understood(budget: Any) -> None:
    assert memfit.fit(net(), budget=budget).memfit.options.budget.num_bytes == SIZES[budget]


@pytest.mark.parametrize("budget", ["", "six", "6 giraffes", "-1", -1, 0, "0GB", 1.5, True, [], "1e9", "GB"], ids=repr)
def test_budgets_that_are_none_are_refused_with_an_example(budget: Any) -> None:
    model = net()
    with pytest.raises(BadOption, match=r"budget=.*(bytes|size|GiB)"):
        memfit.fit(model, budget=budget)
    assert "memfit" not in model.__dict__ and "forward" not in model.__dict__


def test_a_budget_too_small_says_what_is_needed_and_where_the_peak_is() -> None:
    model = memfit.fit(
        seeded(lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))), budget=10_000, policy="keep"
    )
    with pytest.raises(DoesNotFit) as caught:
        model(torch.randn(8, 64))
    text = str(caught.value)
    assert "policy 'keep' needs" in text and "the budget is 10,000" in text and "Give a budget of at least" in text
    needed = int(text.split("at least ")[1].split(" bytes")[0].replace(",", ""))
    memfit.fit(model, budget=needed, policy="keep")
    model(torch.randn(8, 64)).sum().backward()
    memfit.fit(model, budget=needed - 1, policy="keep")
    with pytest.raises(DoesNotFit):
        model(torch.randn(8, 64))


def test_a_model_that_does_not_fit_still_trains_eagerly_after_unfit() -> None:
    model = memfit.fit(net(), budget=100, policy="keep")
    state = torch.get_rng_state()
    before = [bits(t) for t in model.state_dict().values()]
    for _ in range(2):
        with pytest.raises(DoesNotFit):
            model(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))
    assert [bits(t) for t in model.state_dict().values()] == before
    assert torch.equal(torch.get_rng_state(), state)
    assert train(memfit.unfit(model)) == train(net())


def test_with_a_budget_the_default_mixes_all_techniques_and_without_one_nothing_is_done() -> None:
    assert memfit.fit(net()).memfit.options.policy == "keep"
    assert memfit.fit(net(), budget="1GiB").memfit.options.policy == "auto"
    assert memfit.fit(net(), budget="50%").memfit.options.policy == "auto"
    assert memfit.fit(net(), budget="1GiB", policy="sqrt").memfit.options.policy == "sqrt"
    assert memfit.fit(net(), policy="auto").memfit.options.policy == "auto"


def test_a_format_needs_a_policy_that_has_one() -> None:
    with pytest.raises(BadOption, match=r"format='fp16': policy 'auto' stores nothing in a format"):
        memfit.fit(net(), budget="1GiB", format="fp16")


def test_strict_without_a_budget_is_refused() -> None:
    model = net()
    with pytest.raises(BadOption, match="strict=True: there is no budget that a step could exceed"):
        memfit.fit(model, strict=True)
    assert "memfit" not in model.__dict__
    assert memfit.fit(model, budget="1GiB", strict=True).memfit.options.strict


def test_unknown_policies_are_refused_with_the_known_ones() -> None:
    with pytest.raises(BadOption, match=r"policy='swap': unknown. Known policies: .*keep"):
        memfit.fit(net(), policy="swap")


def test_unknown_rewrites_are_refused_with_the_known_ones() -> None:
    with pytest.raises(BadOption, match=r"without=\['magic'\]: no such rewrite. Rewrites: .*reinplace"):
        memfit.fit(net(), without=["magic"])


@pytest.mark.parametrize("without", [[name] for name in memfit.REWRITES] + [list(memfit.REWRITES)], ids=str)
def test_each_rewrite_can_be_left_out(without: list[str]) -> None:
    def build() -> nn.Module:
        return seeded(
            lambda: nn.Sequential(
                nn.Conv2d(3, 4, 3, padding=1),
                nn.BatchNorm2d(4),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(4, 4, 3),
                nn.ReLU(True),
                nn.Flatten(),
                nn.Dropout(0.2),
                nn.Linear(16, 4),
                nn.LogSoftmax(1),
            )
        )

    fitted = assert_same_as_eager(build(), lambda n: (torch.randn(n, 3, 8, 8),), without=without)
    assert not set(fitted.memfit.step.rewrites) & set(without)


@pytest.mark.parametrize("number", [0, -1])
def test_max_captures_must_be_positive(number: int) -> None:
    with pytest.raises(BadOption, match=f"max_captures={number}: must be at least 1"):
        memfit.fit(net(), max_captures=number)


def test_something_that_is_no_module_is_refused() -> None:
    with pytest.raises(BadOption, match=r"fit\(\) takes an nn.Module, not function"):
        memfit.fit(lambda x: x)


def test_a_model_that_uses_the_name_itself_is_refused_and_left_alone() -> None:
    model = net()
    model.register_buffer("memfit", torch.zeros(1))
    with pytest.raises(BadOption, match="already has an attribute 'memfit'"):
        memfit.fit(model)
    assert "forward" not in model.__dict__
