"""fit() and unfit(): in place, undone without a trace, and in nobody's way."""

from __future__ import annotations

import copy
import inspect
import io
import logging
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence import assert_same_as_eager, bits, own_forward_calls, seeded
from torch import nn

import memfit
from memfit.errors import BadOption, DoesNotFit, MemfitError


class Net(nn.Module):
    """Small, with everything: parameters, buffers, a tied weight, dropout, an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.2)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.scale = 2.0

    def forward(self, x: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        """Double twice."""
        return self.second(self.drop(self.norm(self.first(x)).relu())) * self.scale + shift


def net() -> Net:
    return seeded(Net)  # type: ignore[return-value]


def train(model: nn.Module, steps: int = 3, seed: int = 0, **kwargs: Any) -> list[Any]:
    """Everything that can be seen of a few training steps."""
    seen: list[Any] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dtype = next(model.parameters()).dtype
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for _ in range(steps):
            output = model(torch.randn(4, 6, dtype=dtype), **kwargs)
            output.square().mean().backward()
            seen += [bits(output), *(bits(p.grad) for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
    return seen + [bits(t) for t in model.state_dict().values()]


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
    assert "# first" in model.memfit.code and "test_fit.py" in model.memfit.code
    assert isinstance(model.memfit.step, memfit.Step)
    assert model.memfit.ledger.peak_bytes > 0
    assert "Net" in repr(model.memfit) and "1 captured" in repr(model.memfit)
    assert "Net" in repr(model)


# --- copies ----------------------------------------------------------------------------------------------------------


def through_deepcopy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [through_deepcopy, through_pickle, through_torch_save])
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "after training"])
def test_a_copy_is_fitted_too_and_trains_by_itself(copied: Any, used: bool) -> None:
    original, eager = memfit.fit(net()), net()
    if used:
        train(original)
        train(eager)
    other = copied(original)
    assert other.memfit is not original.memfit and other.memfit.model is other
    assert other.memfit.num_captures == 0
    before = [bits(p) for p in original.parameters()]
    with own_forward_calls(other) as calls:
        assert train(other, seed=1) == train(eager, seed=1)
    assert not calls and other.memfit.num_captures == 1
    assert [bits(p) for p in original.parameters()] == before
    assert other.second.weight is other.first.weight


def test_a_copy_of_a_parent_keeps_its_fitted_child_apart() -> None:
    parent = nn.Sequential(memfit.fit(net()), nn.Linear(6, 2))
    other = copy.deepcopy(parent)
    assert other[0].memfit.model is other[0] is not parent[0]
    train(other)
    assert other[0].memfit.num_captures == 1 and parent[0].memfit.num_captures == 0


def test_a_state_dict_saved_from_a_fitted_model_loads_anywhere() -> None:
    model = memfit.fit(net())
    train(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = net()
    other.load_state_dict(torch.load(file, weights_only=True))
    assert [bits(t) for t in other.state_dict().values()] == [bits(t) for t in model.state_dict().values()]


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


# --- parts and nests -------------------------------------------------------------------------------------------------


def parent() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(6, 6), Net(), nn.ReLU(), nn.Linear(6, 2)))


def test_a_fitted_submodule_trains_the_same() -> None:
    plain, part = parent(), parent()
    memfit.fit(part[1])
    assert train(part) == train(plain)
    assert part[1].memfit.num_captures == 1


def test_a_fitted_module_in_a_fitted_module_is_captured_once_by_the_outer_one() -> None:
    plain, nested = parent(), parent()
    memfit.fit(nested[1])
    memfit.fit(nested)
    assert train(nested) == train(plain)
    assert nested.memfit.num_captures == 1 and nested[1].memfit.num_captures == 0
    memfit.unfit(nested)
    assert train(nested, seed=1) == train(plain, seed=1)
    assert nested[1].memfit.num_captures == 1


def test_the_inner_one_may_be_fitted_after_the_outer_one_and_taken_away() -> None:
    plain, nested = parent(), parent()
    memfit.fit(nested)
    assert train(nested) == train(plain)
    memfit.fit(nested[1])
    assert train(nested, seed=1) == train(plain, seed=1)
    memfit.unfit(nested[1])
    assert train(nested, seed=2) == train(plain, seed=2)


def test_every_layer_fitted_by_itself_trains_the_same() -> None:
    plain, parts = parent(), parent()
    for child in parts.modules():
        if not list(child.children()):
            memfit.fit(child)
    assert train(parts) == train(plain)


def test_a_fitted_model_inside_data_parallel_like_wrappers_trains_the_same() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

    assert train(Wrapper(memfit.fit(net()))) == train(Wrapper(net()))
    assert train(memfit.fit(Wrapper(net()))) == train(Wrapper(net()))


def test_the_averaged_model_of_swa_works_on_a_fitted_model() -> None:
    model = memfit.fit(net())
    averaged = torch.optim.swa_utils.AveragedModel(model)
    train(model)
    averaged.update_parameters(model)
    assert averaged.eval()(torch.randn(2, 6)).shape == (2, 6)


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


# --- hooks on the root -----------------------------------------------------------------------------------------------


def test_hooks_on_the_fitted_module_itself_run_once_per_call_with_real_tensors() -> None:
    plain, model = net(), memfit.fit(net())
    logs = []
    for each in (plain, model):
        log: list[Any] = []

        def before(module: nn.Module, args: Any, log: list[Any] = log) -> Any:
            log.append(("before", bits(args[0])))
            return (args[0] * 2,)

        def after(module: nn.Module, args: Any, output: Any, log: list[Any] = log) -> Any:
            log.append(("after", bits(output)))
            return output + 1

        each.register_forward_pre_hook(before)
        each.register_forward_hook(after)
        each.register_full_backward_hook(lambda m, gi, go, log=log: log.append(("backward", bits(go[0]))))
        log.append(train(each))
        logs.append(log)
    assert logs[0] == logs[1]


def test_a_hook_added_to_a_submodule_after_a_capture_is_not_overlooked() -> None:
    model = memfit.fit(net())
    train(model)
    handle = model.first.register_forward_hook(lambda m, a, o: o * 2)
    with pytest.raises(MemfitError, match=r"module 'first'.*hook"):
        train(model)
    handle.remove()
    train(model)


# --- options ---------------------------------------------------------------------------------------------------------

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
    model = memfit.fit(seeded(lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))), budget=10_000)
    with pytest.raises(DoesNotFit) as caught:
        model(torch.randn(8, 64))
    text = str(caught.value)
    assert "policy 'keep' needs" in text and "the budget is 10,000" in text and "Give a budget of at least" in text
    needed = int(text.split("at least ")[1].split(" bytes")[0].replace(",", ""))
    memfit.fit(model, budget=needed)
    model(torch.randn(8, 64)).sum().backward()
    memfit.fit(model, budget=needed - 1)
    with pytest.raises(DoesNotFit):
        model(torch.randn(8, 64))


def test_a_model_that_does_not_fit_still_trains_eagerly_after_unfit() -> None:
    model = memfit.fit(net(), budget=100)
    state = torch.get_rng_state()
    before = [bits(t) for t in model.state_dict().values()]
    for _ in range(2):
        with pytest.raises(DoesNotFit):
            model(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))
    assert [bits(t) for t in model.state_dict().values()] == before
    assert torch.equal(torch.get_rng_state(), state)
    assert train(memfit.unfit(model)) == train(net())


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
