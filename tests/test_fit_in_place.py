"""fit() and unfit(): in place, undone without a trace, and in nobody's way."""

from __future__ import annotations

import copy
import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F
from equivalence import bits, own_forward_calls, seeded
from small_net import Net, net, train
from torch import nn

import memfit
from memfit.errors import MemfitError

# --- in place --------------------------------------------------------------------------------------------------------


def test_fit_returns_the_very_object_with_its_own_parameters_and_keys() -> None:
    model = net()
    parameters = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    modules = {name: id(m) for name, m in model.named_modules()}
    keys = list(model.state_dict())
    kind = type(model)
    fitted = memfit.fit(model)
    train(fitted)
    assert fitted is model and type(model) is kind and isinstance(model, Net)
    assert {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)} == parameters
    assert {name: id(m) for name, m in model.named_modules()} == modules
    assert list(model.state_dict()) == keys
    assert model.second.weight is model.first.weight


def test_an_optimizer_made_before_fit_keeps_working() -> None:
    traces = []
    for fit in (False, True):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if fit:
            memfit.fit(model)
        torch.manual_seed(0)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
        traces.append([bits(t) for t in model.state_dict().values()])
    assert traces[0] == traces[1]


def test_a_state_dict_goes_from_eager_to_fitted_and_back() -> None:
    eager, fitted = net(), memfit.fit(seeded(Net, 1))
    train(eager)
    fitted.load_state_dict(eager.state_dict())
    assert train(fitted) == train(eager)
    other = net()
    other.load_state_dict(fitted.state_dict())
    assert train(other) == train(fitted)


def test_loading_by_assignment_after_a_capture_is_seen() -> None:
    eager, fitted = net(), memfit.fit(seeded(Net, 1))
    train(fitted)
    state = {name: tensor.clone() for name, tensor in eager.state_dict().items()}
    fitted.load_state_dict(state, assign=True)
    twin = net()
    twin.load_state_dict({name: tensor.clone() for name, tensor in state.items()}, assign=True)
    assert train(fitted) == train(twin)


def test_the_signature_and_the_text_of_forward_stay_visible() -> None:
    plain, fitted = net(), memfit.fit(net())
    assert inspect.signature(fitted.forward) == inspect.signature(plain.forward)
    assert list(inspect.signature(fitted.forward).parameters) == ["x", "shift"]


def test_arguments_are_checked_as_the_models_own_forward_checks_them() -> None:
    fitted = memfit.fit(net())
    with pytest.raises(TypeError, match="shfit"):
        fitted(torch.randn(4, 6), shfit=1.0)
    with pytest.raises(TypeError):
        fitted()


def test_keywords_and_defaults_are_those_of_the_model() -> None:
    assert train(memfit.fit(net()), shift=1.5) == train(net(), shift=1.5)


def test_the_window_shows_code_step_and_ledger_of_the_last_call() -> None:
    model = memfit.fit(net())
    with pytest.raises(MemfitError, match=r"nothing is captured yet.*Run one step first"):
        model.memfit.code
    train(model)
    assert "def forward(" in model.memfit.code and "def backward_0(" in model.memfit.code
    assert "# first" in model.memfit.code and "small_net.py" in model.memfit.code
    assert isinstance(model.memfit.step, memfit.Step)
    assert model.memfit.ledger.peak_bytes > 0
    assert "Net" in repr(model.memfit) and "1 captured" in repr(model.memfit)
    assert "Net" in repr(model)


# --- undone ----------------------------------------------------------------------------------------------------------


def test_unfit_gives_back_what_was_there() -> None:
    model = net()
    before = dict(model.__dict__)
    memfit.fit(model)
    train(model)
    assert memfit.unfit(model) is model
    assert "memfit" not in model.__dict__ and "forward" not in model.__dict__
    assert model.__dict__.keys() == before.keys()
    assert model.forward.__func__ is Net.forward
    with own_forward_calls(model) as calls:
        train(model, steps=2)
    assert len(calls) == 2


def test_unfit_gives_back_a_forward_that_was_set_on_the_instance() -> None:
    model = net()

    def forward(x: torch.Tensor) -> torch.Tensor:
        return model.first(x) * 3

    model.forward = forward
    expected = train(copy.deepcopy(model))
    memfit.fit(model)
    assert list(inspect.signature(model.forward).parameters) == ["x"]
    memfit.unfit(model)
    assert model.__dict__["forward"] is forward
    assert len(expected) == len(train(model))


def test_a_bound_method_set_as_forward_on_the_instance_trains_the_same() -> None:
    class Other(Net):
        def tripled(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x) * 3

    plain, fitted = seeded(Other), seeded(Other)
    plain.forward = plain.tripled
    fitted.forward = fitted.tripled
    memfit.fit(fitted)
    assert train(fitted) == train(plain)
    assert fitted.memfit.num_captures == 1
    memfit.unfit(fitted)
    assert fitted.__dict__["forward"].__func__ is Other.tripled


def test_unfit_of_a_model_that_is_not_fitted_does_nothing() -> None:
    model = net()
    before = dict(model.__dict__)
    assert memfit.unfit(model) is model
    assert model.__dict__ == before


def test_fit_twice_fits_once_with_the_newer_options() -> None:
    model = memfit.fit(net(), max_captures=3)
    train(model)
    first = model.memfit
    memfit.fit(model, max_captures=5)
    assert model.memfit is not first and model.memfit.options.max_captures == 5
    assert train(model) == train(_trained())
    memfit.unfit(model)
    assert "forward" not in model.__dict__


def _trained() -> nn.Module:
    model = net()
    train(model)
    return model


def test_a_backward_that_is_still_to_come_survives_unfit() -> None:
    gradients = []
    for fit in (False, True):
        model = net()
        if fit:
            memfit.fit(model)
        torch.manual_seed(0)
        loss = model(torch.randn(4, 6)).sum()
        memfit.unfit(model)
        loss.backward()
        gradients.append([bits(p.grad) for p in model.parameters()])
    assert gradients[0] == gradients[1]


# --- in nobody's way -------------------------------------------------------------------------------------------------


def test_nothing_is_printed_and_no_warning_is_raised(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(memfit.fit(net()))
    assert capsys.readouterr() == ("", "")


def test_the_readme_in_two_lines_works() -> None:
    model = memfit.fit(torch.nn.Linear(4, 2))
    model(torch.randn(3, 4)).sum().backward()
    assert model.weight.grad is not None


def test_modules_with_a_forward_of_their_class_replaced_train_the_same() -> None:
    """Libraries patch classes; what counts is the forward at the time of the call."""

    class Patched(Net):
        pass

    plain, model = seeded(Patched), memfit.fit(seeded(Patched))
    Patched.forward = lambda self, x: F.relu(self.first(x))
    assert train(model) == train(plain)
