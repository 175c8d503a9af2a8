"""When a fitted model captures anew, when it keeps a capture, and when the model's own forward runs."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from equivalence import bits, own_forward_calls, seeded
from small_net import net, train
from torch import nn

import memfit

# --- when the model's own forward runs -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["eval", "no_grad", "inference_mode"])
def test_evaluation_uses_the_models_own_forward(how: str) -> None:
    plain, model = net(), memfit.fit(net())
    train(plain), train(model)
    x = torch.randn(3, 6)
    captures = model.memfit.num_captures
    if how == "eval":
        plain.eval(), model.eval()
    context = {"eval": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[how]
    with context(), own_forward_calls(model) as calls:
        torch.manual_seed(0)
        expected = plain(x)
        torch.manual_seed(0)
        found = model(x)
    assert bits(found) == bits(expected)
    assert len(calls) == 1 and model.memfit.num_captures == captures


def test_gradients_in_eval_mode_are_eagers_own() -> None:
    plain, model = net().eval(), memfit.fit(net()).eval()
    for each in (plain, model):
        each(torch.ones(3, 6)).sum().backward()
    assert [bits(p.grad) for p in plain.parameters()] == [bits(p.grad) for p in model.parameters()]
    assert model.memfit.num_captures == 0


def test_a_fitted_model_can_be_exported_compiled_and_mapped_over_as_if_it_were_not() -> None:
    model = memfit.fit(seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh())))
    x = torch.randn(3, 6)
    train(model)
    expected = model(x)
    assert torch.equal(
        torch.func.functional_call(memfit.unfit(copy.deepcopy(model)), dict(model.named_parameters()), (x,)), expected
    )
    assert torch.equal(torch.vmap(model)(x[:, None])[:, 0], expected)
    traced = torch.jit.trace(model, x)
    assert torch.equal(traced(x), expected)


def test_functional_call_with_other_parameters_uses_them() -> None:
    plain, model = net(), memfit.fit(net())
    train(plain), train(model)
    others = {name: (p * 0.5).detach().requires_grad_() for name, p in plain.named_parameters()}
    results = []
    for each in (plain, model):
        torch.manual_seed(0)
        given = {name: p.clone().detach().requires_grad_() for name, p in others.items()}
        output = torch.func.functional_call(each, given, (torch.ones(3, 6),))
        gradients = torch.autograd.grad(output.square().sum(), list(given.values()), allow_unused=True)
        results.append([bits(output), *(bits(g) for g in gradients)])
    assert results[0] == results[1]


# --- changes between calls -------------------------------------------------------------------------------------------


def test_a_change_of_dtype_is_captured_anew() -> None:
    plain, model = net(), memfit.fit(net())
    assert train(model) == train(plain)
    assert train(model.double()) == train(plain.double())
    assert train(model.float()) == train(plain.float())
    assert model.memfit.num_captures == 2


def test_a_change_of_memory_format_is_captured_anew() -> None:
    def build() -> nn.Module:
        return seeded(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))

    plain, model = build(), memfit.fit(build())
    for step in range(3):
        if step == 1:
            plain, model = (m.to(memory_format=torch.channels_last) for m in (plain, model))
        outputs = []
        for each in (plain, model):
            output = each(torch.ones(2, 3, 6, 6))
            output.square().sum().backward()
            outputs.append([bits(output), *(bits(p.grad) for p in each.parameters())])
        assert outputs[0] == outputs[1]
    assert model.memfit.num_captures == 2


def test_one_capture_serves_all_steps_of_one_kind() -> None:
    model = memfit.fit(net())
    train(model, steps=6)
    assert model.memfit.num_captures == 1


def test_zeroed_or_missing_gradients_make_no_new_capture() -> None:
    model = memfit.fit(net())
    train(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    train(model)
    assert model.memfit.num_captures == 1


def test_more_kinds_of_arguments_than_max_captures_warn_once_and_stay_exact(caplog: pytest.LogCaptureFixture) -> None:
    eager = net()
    model = memfit.fit(net(), max_captures=2)
    torch.manual_seed(0)
    with caplog.at_level(logging.WARNING, logger="memfit"):
        for n in (2, 3, 4, 5, 2, 3, 4, 5):
            x = torch.randn(n, 6)
            state = torch.get_rng_state()
            expected = eager(x)
            torch.set_rng_state(state)
            assert bits(model(x)) == bits(expected)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "more than 2 kinds of arguments" in messages[0] and "max_captures" in messages[0] and "Net" in messages[0]
    assert model.memfit.num_captures == 8


def test_the_most_recently_used_kinds_are_the_ones_kept() -> None:
    model = memfit.fit(net(), max_captures=2)
    for n in (2, 3, 2, 4, 2):
        model(torch.randn(n, 6))
    assert model.memfit.num_captures == 3, "the kind used all the time was thrown away"


def test_captures_hold_no_reference_to_the_inputs() -> None:
    import gc
    import weakref

    model = memfit.fit(net())
    x = torch.randn(4, 6)
    seen = weakref.ref(x)
    model(x).sum().backward()
    del x
    gc.collect()
    assert seen() is None


def test_a_fitted_model_that_is_dropped_is_freed() -> None:
    import gc
    import weakref

    model = memfit.fit(net())
    train(model)
    gone = weakref.ref(model), weakref.ref(model.memfit), weakref.ref(model.first.bias)
    del model
    gc.collect()
    assert [reference() for reference in gone] == [None, None, None]
