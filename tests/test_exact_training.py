"""Ways of training: accumulation, several forwards, other orders, other precisions, threads. As eager, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence import (
    Apply,
    assert_same_as_eager,
    assert_same_trace,
    bits,
    record_state,
    seeded,
    tensors_in,
    weighted_sum,
)
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.run.nodes import Call


def rows(n: int) -> tuple[torch.Tensor]:
    return (torch.randn(n, 6),)


def images(n: int) -> tuple[torch.Tensor]:
    return (torch.randn(n, 3, 8, 8),)


def mlp() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4)))


def convnet() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3),
            nn.GroupNorm(2, 6),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(6, 4),
        )
    )


def transformer() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(
            nn.Embedding(11, 8),
            nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True),
            nn.LayerNorm(8),
            nn.Linear(8, 11),
        )
    )


def tied() -> nn.Module:
    return seeded(
        lambda: Apply(lambda m, x: F.linear(torch.tanh(m.l(torch.tanh(m.l(x)))), m.l.weight), l=nn.Linear(6, 6))
    )


def tokens(n: int) -> tuple[torch.Tensor]:
    return (torch.randint(0, 11, (n, 5)),)


MODELS = {"mlp": (mlp, rows), "convnet": (convnet, images), "transformer": (transformer, tokens), "tied": (tied, rows)}
each_model = pytest.mark.parametrize(("build", "inputs"), list(MODELS.values()), ids=list(MODELS))


# --- precision and layout -------------------------------------------------------------------------------------------


def autocast(**options: Any) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    return lambda: torch.autocast("cpu", dtype=torch.bfloat16, **options)


@each_model
@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
def test_autocast_matches(build: Any, inputs: Any, inside: bool) -> None:
    assert_same_as_eager(build(), inputs, around=autocast(), backward_inside=inside)


@each_model
def test_autocast_without_its_weight_cache_matches(build: Any, inputs: Any) -> None:
    assert_same_as_eager(build(), inputs, around=autocast(cache_enabled=False))


def test_autocast_to_half_matches() -> None:
    assert_same_as_eager(mlp(), rows, around=lambda: torch.autocast("cpu", dtype=torch.float16))


def test_autocast_switched_on_and_off_between_steps_matches() -> None:
    states = iter([True, False, True, True, False, True] * 2)
    model = mlp()
    fitted = assert_same_as_eager(
        model, rows, steps=6, other_batch=None, around=lambda: torch.autocast("cpu", torch.bfloat16, next(states))
    )
    assert fitted.memfit.num_captures == 2


class LocallyOff(nn.Module):
    """Computes a sensitive part in float32 although autocast is on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        with torch.autocast("cpu", enabled=False):
            y = self.second(y.float()).softmax(1)
        return self.first(y)


class LocallyOn(nn.Module):
    """Switches autocast on by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.first(self.first(x))
        return self.second(y.float())


@pytest.mark.parametrize("around", [contextlib.nullcontext, autocast()], ids=["plain", "in autocast"])
@pytest.mark.parametrize("build", [LocallyOff, LocallyOn])
def test_autocast_switched_inside_the_model_matches(build: Any, around: Any) -> None:
    assert_same_as_eager(seeded(build), rows, around=around)


def test_the_first_backward_inside_autocast_and_the_next_outside_match() -> None:
    model = mlp()
    expected, found = (_alternate(copy.deepcopy(model), fit) for fit in (False, True))
    assert_same_trace(expected, found)


def _alternate(model: nn.Module, fit: bool) -> dict[str, Any]:
    trace: dict[str, Any] = {}
    if fit:
        memfit.fit(model)
    torch.manual_seed(3)
    for step in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(3, 6)).square().sum()
            if step % 2 == 0:
                loss.backward()
        if step % 2:
            loss.backward()
        for name, parameter in model.named_parameters():
            trace[f"{step} {name}"] = bits(parameter.grad)
    return trace


@each_model
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_parameter_types_match(build: Any, inputs: Any, dtype: torch.dtype) -> None:
    def cast(n: int) -> tuple[torch.Tensor]:
        (x,) = inputs(n)
        return (x.to(dtype) if x.is_floating_point() else x,)

    assert_same_as_eager(build().to(dtype), cast)


@pytest.mark.parametrize("what", ["model", "input", "both"])
def test_channels_last_matches(what: str) -> None:
    model = convnet()
    if what != "input":
        model = model.to(memory_format=torch.channels_last)

    def inputs(n: int) -> tuple[torch.Tensor]:
        (x,) = images(n)
        return (x.to(memory_format=torch.channels_last) if what != "model" else x,)

    assert_same_as_eager(model, inputs)


def test_channels_last_3d_matches() -> None:
    model = seeded(lambda: nn.Sequential(nn.Conv3d(3, 4, 3), nn.BatchNorm3d(4), nn.ReLU(True), nn.MaxPool3d(2)))
    model = model.to(memory_format=torch.channels_last_3d)
    assert_same_as_eager(model, lambda n: (torch.randn(n, 3, 6, 6, 6).to(memory_format=torch.channels_last_3d),))


def test_complex_parameters_match() -> None:
    model = seeded(
        lambda: nn.Sequential(nn.Linear(6, 5, dtype=torch.complex64), nn.Linear(5, 2, dtype=torch.complex64))
    )
    assert_same_as_eager(model, lambda n: (torch.randn(n, 6, dtype=torch.complex64),))


def test_deterministic_algorithms_match() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert_same_as_eager(convnet(), images)
        assert_same_as_eager(seeded(lambda: nn.Embedding(11, 4)), tokens)
    finally:
        torch.use_deterministic_algorithms(False)


# --- optimizers, freezing, accumulation -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop], ids=lambda k: k.__name__
)
def test_optimizers_match(kind: Any) -> None:
    assert_same_as_eager(mlp(), rows, optimizer=lambda ps: kind(ps, lr=0.01))


@each_model
def test_gradient_accumulation_matches(build: Any, inputs: Any) -> None:
    assert_same_as_eager(build(), inputs, micro_batches=3, other_batch=None)


@each_model
def test_frozen_parameters_match(build: Any, inputs: Any) -> None:
    model = build()
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 2 == 0)
    assert_same_as_eager(model, inputs)


@each_model
def test_a_frozen_beginning_matches(build: Any, inputs: Any) -> None:
    model = build()
    parameters = list(model.parameters())
    for parameter in parameters[: len(parameters) // 2]:
        parameter.requires_grad_(False)
    assert_same_as_eager(model, inputs)


def test_all_parameters_frozen_with_an_input_that_requires_grad_match() -> None:
    model = convnet().requires_grad_(False)
    assert_same_as_eager(model, lambda n: (torch.randn(n, 3, 8, 8, requires_grad=True),))


def test_all_parameters_frozen_and_no_gradient_wanted_matches() -> None:
    model = convnet().requires_grad_(False).train()
    eager, fitted = copy.deepcopy(model), memfit.fit(copy.deepcopy(model))
    x = torch.randn(2, 3, 8, 8)
    for _ in range(3):
        torch.manual_seed(1)
        expected = eager(x)
        torch.manual_seed(1)
        found = fitted(x)
        assert bits(expected) == bits(found) and not found.requires_grad
    expected_state: dict[str, Any] = {}
    found_state: dict[str, Any] = {}
    record_state(expected_state, "end", eager)
    record_state(found_state, "end", fitted)
    assert_same_trace(expected_state, found_state)


def test_requires_grad_toggled_between_steps_matches() -> None:
    def between(model: nn.Module, step: int) -> None:
        for index, parameter in enumerate(model.parameters()):
            parameter.requires_grad_((index + step) % 3 != 0)

    assert_same_as_eager(convnet(), images, between=between, steps=4)


def test_dropout_probability_changed_between_steps_matches() -> None:
    def between(model: nn.Module, step: int) -> None:
        model[2].p = [0.2, 0.7, 0.0, 0.5][step]

    assert_same_as_eager(mlp(), rows, between=between)


def test_a_submodule_put_into_eval_between_steps_matches() -> None:
    def between(model: nn.Module, step: int) -> None:
        model[1].train(step % 2 == 0)

    assert_same_as_eager(convnet(), images, between=between)


class Configured(nn.Module):
    """Reads settings that are no plain numbers: a list, a dict, an object, a function."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.scales = [1.0, 2.0]
        self.options = {"shift": 1.0}
        self.config = Settings()
        self.activation = F.relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.activation(self.layer(x) * self.scales[0] + self.options["shift"])
        return y * self.config.factor


class Settings:
    def __init__(self) -> None:
        self.factor = 2.0


def _set_list(model: Any) -> None:
    model.scales[0] = 5.0


def _set_dict(model: Any) -> None:
    model.options["shift"] = -0.5


def _set_object(model: Any) -> None:
    model.config.factor = 7.0


def _set_function(model: Any) -> None:
    model.activation = torch.tanh


def _swap_parameter(model: Any) -> None:
    model.layer.weight = nn.Parameter(model.layer.weight.detach() * 2)


def _swap_data(model: Any) -> None:
    model.layer.weight.data = model.layer.weight.data * 2


def _swap_module(model: Any) -> None:
    model.layer = seeded(lambda: nn.Linear(6, 6), 5)


def _tie(model: Any) -> None:
    model.layer.bias = nn.Parameter(model.layer.weight.detach()[0])


CHANGES = [_set_list, _set_dict, _set_object, _set_function, _swap_parameter, _swap_data, _swap_module, _tie]


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__.strip("_").replace("_", " "))
def test_a_setting_of_the_model_changed_between_steps_matches(change: Any) -> None:
    def between(model: nn.Module, step: int) -> None:
        if step == 2:
            change(model)

    assert_same_as_eager(
        seeded(Configured), rows, between=between, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.0), steps=4
    )


def test_a_loss_term_on_the_parameters_matches() -> None:
    def loss(output: torch.Tensor, model: nn.Module) -> torch.Tensor:
        return output.square().sum() + 0.01 * sum(p.square().sum() for p in model.parameters())

    assert_same_as_eager(mlp(), rows, loss=loss)
    assert_same_as_eager(convnet(), images, loss=loss)


def test_a_loss_term_on_tied_parameters_matches() -> None:
    def loss(output: torch.Tensor, model: nn.Module) -> torch.Tensor:
        return output.square().sum() + 0.01 * sum(p.square().sum() for p in model.parameters())

    assert_same_as_eager(tied(), rows, loss=loss)


# --- several forwards, several backwards ----------------------------------------------------------------------------


def both_ways(model: nn.Module, script: Callable[[Any, dict[str, Any]], None]) -> None:
    """Run a training script on an eager and on a fitted copy; what it writes into its dict must be the same."""
    traces: list[dict[str, Any]] = []
    for fit in (False, True):
        arm = copy.deepcopy(model).train()
        if fit:
            memfit.fit(arm)
        trace: dict[str, Any] = {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(17)
            script(arm, trace)
            for name, parameter in arm.named_parameters():
                trace[f"gradient of {name}"] = bits(parameter.grad)
            record_state(trace, "end", arm)
        traces.append(trace)
        if fit:
            assert arm.memfit.num_captures >= 1
    assert_same_trace(*traces)


@each_model
def test_two_forwards_before_one_backward_match(build: Any, inputs: Any) -> None:
    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        (weighted_sum(model(*inputs(3))) + weighted_sum(model(*inputs(3))).square()).backward()

    both_ways(build(), script)


@each_model
def test_three_forwards_before_one_backward_match(build: Any, inputs: Any) -> None:
    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        sum(weighted_sum(model(*inputs(n))) for n in (3, 2, 3)).backward()

    both_ways(build(), script)


@each_model
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_backwards_in_any_order_match(build: Any, inputs: Any, order: tuple[int, ...]) -> None:
    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        losses = [weighted_sum(model(*inputs(3))) for _ in range(3)]
        for index in order:
            losses[index].backward()
            for name, parameter in model.named_parameters():
                trace[f"after {index}: {name}"] = bits(parameter.grad)

    both_ways(build(), script)


def test_a_model_fed_its_own_output_matches() -> None:
    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        y = torch.randn(3, 6)
        for _ in range(3):
            y = model(y)
        y.square().sum().backward()

    both_ways(seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))), script)


def test_backward_of_each_output_in_turn_matches_where_eager_allows_it() -> None:
    """Two outputs behind separate graphs: eager can go back through each once."""

    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        a, b = model(torch.randn(3, 6))
        (a.sum() + b.square().sum()).backward()

    both_ways(seeded(lambda: Apply(lambda m, x: (m.l(x), m.k(x)), l=nn.Linear(6, 6), k=nn.Linear(6, 6))), script)


def test_gradients_from_autograd_grad_for_a_few_parameters_match() -> None:
    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        parameters = list(model.parameters())
        for count, chosen in enumerate([parameters[:1], parameters[-1:], parameters[1::2], parameters]):
            x = torch.randn(3, 3, 8, 8, requires_grad=True)
            found = torch.autograd.grad(weighted_sum(model(x)), [*chosen, x])
            for index, gradient in enumerate(found):
                trace[f"{count}.{index}"] = bits(gradient)
        assert all(p.grad is None for p in parameters)

    both_ways(convnet(), script)


def test_backward_with_inputs_accumulates_into_those_only() -> None:
    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        parameters = list(model.parameters())
        weighted_sum(model(torch.randn(3, 3, 8, 8))).backward(inputs=parameters[2:5])

    both_ways(convnet(), script)


def test_autograd_grad_of_an_unused_parameter_matches() -> None:
    model = seeded(lambda: Apply(lambda m, x: m.l(x), l=nn.Linear(6, 6), unused=(3,)))

    def script(model: Any, trace: dict[str, Any]) -> None:
        loss = weighted_sum(model(torch.randn(3, 6)))
        found = torch.autograd.grad(loss, [model.unused, model.l.weight], allow_unused=True)
        trace["unused"], trace["used"] = (bits(g) for g in found)

    both_ways(model, script)


GIVEN = {
    "contiguous": lambda y: torch.randn(y.shape),
    "transposed": lambda y: torch.randn(y.shape[::-1]).t(),
    "expanded": lambda y: torch.randn(1, 1).expand(y.shape),
    "strided": lambda y: torch.randn(y.shape[0], 2 * y.shape[1])[:, ::2],
    "zeros": lambda y: torch.zeros(y.shape),
    "ones": lambda y: torch.ones_like(y),
    "nan": lambda y: torch.full(y.shape, float("nan")),
    "the output itself": lambda y: y.detach(),
    "row": lambda y: torch.randn(y.shape[1]).expand(y.shape),
}


@pytest.mark.parametrize("gradient", list(GIVEN.values()), ids=list(GIVEN))
@each_model
def test_gradients_given_to_backward_in_any_layout_match(build: Any, inputs: Any, gradient: Any) -> None:
    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        for step in range(2):
            y = model(*inputs(3))
            y = y.reshape(-1, y.shape[-1]) if y.dim() > 2 else y
            given = gradient(y)
            before = bits(given)
            y.backward(gradient=given)
            assert bits(given) == before, "backward wrote into the gradient it was given"
            trace[f"given {step}"] = before

    both_ways(build(), script)


@pytest.mark.parametrize("gradient", list(GIVEN.values()), ids=list(GIVEN))
def test_gradients_given_to_the_raw_output_in_any_layout_match(gradient: Any) -> None:
    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        for _ in range(2):
            y = model(torch.randn(3, 6))
            given = gradient(y)
            before = bits(given)
            y.backward(gradient=given)
            assert bits(given) == before, "backward wrote into the gradient it was given"

    both_ways(mlp(), script)
    both_ways(seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU())), script)
    both_ways(seeded(lambda: nn.Linear(6, 6)), script)
    both_ways(seeded(lambda: Apply(lambda m, x: x + m.b, b=(6,))), script)


@pytest.mark.parametrize("reduce", [lambda y: y.sum(), lambda y: y.mean(), lambda y: y.flatten()[0], lambda y: y.max()])
@each_model
def test_reductions_with_expanded_or_sparse_gradients_match(build: Any, inputs: Any, reduce: Any) -> None:
    assert_same_as_eager(build(), inputs, loss=lambda output, model: reduce(output))


def test_the_gradient_flows_on_to_what_made_the_input() -> None:
    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        torch.manual_seed(5)
        before, after = nn.Linear(6, 6), nn.Linear(4, 2)
        after(model(before(torch.randn(3, 6)).relu_())).square().sum().backward()
        for name, parameter in (*before.named_parameters("before"), *after.named_parameters("after")):
            trace[name] = bits(parameter.grad)

    both_ways(mlp(), script)


def test_a_residual_around_a_fitted_block_that_reads_its_input_three_times_matches() -> None:
    def script(model: Any, trace: dict[str, Any]) -> None:
        torch.manual_seed(5)
        before = nn.Linear(8, 8)
        x = before(torch.randn(3, 5, 8))
        (x + model(x, x, x)[0]).square().sum().backward()
        trace["before"] = bits(before.weight.grad)

    both_ways(seeded(lambda: nn.MultiheadAttention(8, 2, batch_first=True)), script)


# --- what eager refuses, and how -------------------------------------------------------------------------------------


def error_of(action: Callable[[], Any]) -> str:
    with pytest.raises(RuntimeError) as caught:
        action()
    return str(caught.value)


@each_model
def test_backward_twice_raises_eagers_own_error(build: Any, inputs: Any) -> None:
    texts = []
    for fit in (False, True):
        model = build().train()
        if fit:
            memfit.fit(model)
        loss = weighted_sum(model(*inputs(3)))
        loss.backward()
        before = [bits(p.grad) for p in model.parameters()]
        texts.append(error_of(loss.backward))
        assert [bits(p.grad) for p in model.parameters()] == before
    assert texts[0] == texts[1]


def test_backward_through_two_outputs_one_after_the_other_raises_eagers_own_error() -> None:
    texts = []
    for fit in (False, True):
        model = seeded(lambda: Apply(lambda m, x: (lambda y: (y.sum(), y.exp().sum()))(m.l(x)), l=nn.Linear(6, 6)))
        if fit:
            memfit.fit(model)
        a, b = model(torch.randn(3, 6))
        a.backward()
        texts.append(error_of(b.backward))
    assert "second time" in texts[0] and "second time" in texts[1]


WRITES = {
    "a parameter": lambda model, x, y: model[0].weight.add_(1),
    "another parameter": lambda model, x, y: model[3].weight.mul_(2),
    "the input": lambda model, x, y: x.add_(1),
    "the output": lambda model, x, y: y.mul_(2),
}


@pytest.mark.parametrize("write", list(WRITES.values()), ids=list(WRITES))
def test_writing_between_forward_and_backward_is_judged_as_eager_judges_it(write: Any) -> None:
    results = []
    for fit in (False, True):
        model = seeded(
            lambda: nn.Sequential(nn.Linear(6, 8), nn.Sigmoid(), nn.Dropout(0.2), nn.Linear(8, 4), nn.Tanh())
        )
        if fit:
            memfit.fit(model)
        torch.manual_seed(3)
        x = torch.randn(3, 6)
        y = model(x)
        loss = weighted_sum(y)
        with torch.no_grad():
            write(model, x, y)
        try:
            loss.backward()
            results.append([bits(p.grad) for p in model.parameters()])
        except RuntimeError as error:
            results.append("modified by an inplace operation" in str(error))
    assert results[0] == results[1]


# --- nothing stays behind -------------------------------------------------------------------------------------------


def live_tensors() -> int:
    gc.collect()
    return sum(type(thing) in (torch.Tensor, nn.Parameter) for thing in gc.get_objects())


def calls_alive() -> list[Call]:
    """What holds the saved values of forwards whose backward has not come."""
    return [thing for thing in gc.get_objects() if type(thing) is Call]


@each_model
def test_forwards_whose_backward_never_comes_leave_nothing_behind(build: Any, inputs: Any) -> None:
    model = memfit.fit(build())
    for _ in range(2):
        weighted_sum(model(*inputs(3)))
    before = live_tensors()
    for _ in range(5):
        weighted_sum(model(*inputs(3)))
    assert live_tensors() <= before


@each_model
def test_training_steps_leave_nothing_behind(build: Any, inputs: Any) -> None:
    model = memfit.fit(build())

    def step() -> None:
        weighted_sum(model(*inputs(3))).backward()
        model.zero_grad()

    for _ in range(2):
        step()
    before = live_tensors()
    for _ in range(5):
        step()
    assert live_tensors() <= before


@each_model
def test_activations_die_with_the_output_without_the_garbage_collector(build: Any, inputs: Any) -> None:
    model = memfit.fit(build())
    weighted_sum(model(*inputs(3))).backward()
    gc.collect()
    gc.disable()
    try:
        before = {id(call) for call in calls_alive()}
        output = model(*inputs(3))
        (call,) = [weakref.ref(call) for call in calls_alive() if id(call) not in before]
        references = [weakref.ref(tensor) for tensor in tensors_in(output)]
        del output
        assert call() is None and all(reference() is None for reference in references)
    finally:
        gc.enable()


@each_model
def test_activations_die_with_backward_without_the_garbage_collector(build: Any, inputs: Any) -> None:
    model = memfit.fit(build())
    weighted_sum(model(*inputs(3))).backward()
    gc.collect()
    gc.disable()
    try:
        before = {id(call) for call in calls_alive()}
        loss = weighted_sum(model(*inputs(3)))
        (call,) = [weakref.ref(call) for call in calls_alive() if id(call) not in before]
        loss.backward()
        assert call() is None or not call().values
        del loss
        assert call() is None
    finally:
        gc.enable()


def test_saved_values_are_freed_during_backward_not_after_it() -> None:
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())]
    model = memfit.fit(nn.Sequential(*layers))
    model(torch.randn(3, 8)).square().sum().backward()
    before = {id(call) for call in calls_alive()}
    loss = model(torch.randn(3, 8)).square().sum()
    (call,) = [call for call in calls_alive() if id(call) not in before]
    held: list[int] = []
    for layer in model[::2]:
        layer.weight.register_post_accumulate_grad_hook(lambda _: held.append(len(call.values)))
    loss.backward()
    assert held == sorted(held, reverse=True) and len(set(held)) == 4
    assert not call.values


# --- several models, several threads --------------------------------------------------------------------------------


def test_two_fitted_models_in_one_graph_match() -> None:
    traces = []
    for fit in (False, True):
        pair = seeded(lambda: nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Sequential(nn.Linear(6, 6), nn.Dropout())}))
        if fit:
            memfit.fit(pair["a"]), memfit.fit(pair["b"])
        trace: dict[str, Any] = {}
        torch.manual_seed(2)
        for _ in range(3):
            x = torch.randn(3, 6)
            (pair["a"](x) * pair["b"](pair["a"](x))).square().sum().backward()
        for name, parameter in pair.named_parameters():
            trace[name] = bits(parameter.grad)
        traces.append(trace)
    assert_same_trace(*traces)


def test_gan_training_with_two_fitted_models_matches() -> None:
    traces = []
    for fit in (False, True):
        maker = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6)))
        judge = seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(6, 1)))
        if fit:
            memfit.fit(maker), memfit.fit(judge)
        makes, judges = torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())
        torch.manual_seed(2)
        trace: dict[str, Any] = {}
        for step in range(3):
            real, noise = torch.randn(5, 6), torch.randn(5, 4)
            judges.zero_grad()
            made = maker(noise)
            (F.softplus(-judge(real)).mean() + F.softplus(judge(made.detach())).mean()).backward()
            judges.step()
            makes.zero_grad()
            F.softplus(-judge(made)).mean().backward()
            makes.step()
            record_state(trace, f"{step} maker", maker)
            record_state(trace, f"{step} judge", judge)
        traces.append(trace)
    assert_same_trace(*traces)


def _train_quietly(model: nn.Module, inputs: Any, steps: int, seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        model(torch.randn(3, 6, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [bits(p) for p in model.parameters()]


def quiet_mlp(seed: int = 0) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4)), seed)


def in_threads(*actions: Callable[[], Any]) -> list[Any]:
    results: list[Any] = [None] * len(actions)

    def run(index: int) -> None:
        try:
            results[index] = actions[index]()
        except BaseException as error:  # handed to the test below
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def test_threads_that_train_models_of_their_own_match() -> None:
    expected = [_train_quietly(quiet_mlp(seed), rows, 10, seed) for seed in range(4)]
    models = [memfit.fit(quiet_mlp(seed)) for seed in range(4)]  # built here: threads share the generator
    found = in_threads(*(lambda seed=seed: _train_quietly(models[seed], rows, 10, seed) for seed in range(4)))
    assert found == expected


def test_threads_that_call_one_fitted_model_at_once_get_their_own_results() -> None:
    model = memfit.fit(quiet_mlp())
    reference = quiet_mlp()

    def gradients(model: nn.Module, seed: int, rows: int) -> list[Any]:
        found = []
        generator = torch.Generator().manual_seed(seed)
        for _ in range(10):
            x = torch.randn(rows, 6, generator=generator, requires_grad=True)
            found += [bits(g) for g in torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])]
        return found

    sizes = (2, 3, 3, 4)
    expected = [gradients(reference, seed, n) for seed, n in enumerate(sizes)]
    found = in_threads(*(lambda seed=seed, n=n: gradients(model, seed, n) for seed, n in enumerate(sizes)))
    assert found == expected


def test_backward_in_another_thread_than_forward_matches() -> None:
    traces = []
    for fit in (False, True):
        model = quiet_mlp()
        if fit:
            memfit.fit(model)
        loss = model(torch.ones(3, 6)).square().sum()
        in_threads(loss.backward)
        traces.append([bits(p.grad) for p in model.parameters()])
    assert traces[0] == traces[1]


# --- custom functions and checkpoints -------------------------------------------------------------------------------


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        gate = x.sigmoid()
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, gate = ctx.saved_tensors
        return gradient * (gate + x * gate * (1 - gate))


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -ctx.scale * gradient, None


class TwoOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        top, where = x.max(1)
        ctx.mark_non_differentiable(where)
        ctx.save_for_backward(where)
        ctx.shape = x.shape
        return top, where

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> torch.Tensor:
        (where,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.shape).scatter_(1, where[:, None], gradient[:, None])


class InPlaceDouble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


CUSTOM = {
    "saves": lambda m, x: Swish.apply(m.l(x)),
    "reverses": lambda m, x: m.k(Reverse.apply(m.l(x), 0.3)),
    "two outputs": lambda m, x: TwoOut.apply(m.l(x)),
    "in place": lambda m, x: InPlaceDouble.apply(m.l(x) * 1),
    "of a parameter": lambda m, x: x @ Swish.apply(m.l.weight),
}


@pytest.mark.parametrize("body", list(CUSTOM.values()), ids=list(CUSTOM))
def test_custom_autograd_functions_match(body: Any) -> None:
    assert_same_as_eager(seeded(lambda: Apply(body, l=nn.Linear(6, 6), k=nn.Linear(6, 6))), rows)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.second = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(checkpoint(self.first, x, use_reentrant=False))


def test_a_checkpoint_without_randomness_inside_the_model_matches() -> None:
    assert_same_as_eager(seeded(Checkpointed), lambda n: (torch.randn(n, 6, requires_grad=True),))


def test_gradients_taken_inside_forward_match() -> None:
    """Forces as the gradient of an energy, inside forward; without create_graph they are data."""

    def forces(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(m.l(x).square().sum(), x)
        return m.k(gradient)

    assert_same_as_eager(seeded(lambda: Apply(forces, l=nn.Linear(6, 6), k=nn.Linear(6, 6))), rows)


def test_second_derivatives_taken_inside_forward_match() -> None:
    def penalty(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(torch.tanh(m.l(x)).sum(), x, create_graph=True)
        return gradient.square().sum() + m.l(x).sum()

    assert_same_as_eager(seeded(lambda: Apply(penalty, l=nn.Linear(6, 6))), rows)


def test_a_hook_on_an_activation_that_only_computes_matches() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.l(x)
        y.register_hook(lambda gradient: gradient * 0.5 + 1)
        return m.k(y.relu())

    assert_same_as_eager(seeded(lambda: Apply(body, l=nn.Linear(6, 6), k=nn.Linear(6, 6))), rows)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_fitted_model_inside_a_checkpoint_matches(reentrant: bool) -> None:
    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        for step in range(3):
            x = torch.randn(3, 6, requires_grad=True)
            checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
            trace[f"input {step}"] = bits(x.grad)

    both_ways(mlp(), script)


# --- what surrounds a step ------------------------------------------------------------------------------------------


def attention() -> nn.Module:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        q = m.l(x).view(x.shape[0], 2, 3, -1)
        return F.scaled_dot_product_attention(q, q, q)

    return seeded(lambda: Apply(body, l=nn.Linear(6, 6)))


SURROUNDINGS = {
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True, check_nan=True),
    "saved on cpu": lambda: torch.autograd.graph.save_on_cpu(),
    "saved through hooks": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor.detach().numpy().copy(order="K"), lambda kept: torch.from_numpy(kept)
    ),
    "multithreading off": lambda: torch.autograd.set_multithreading_enabled(False),
    "profiler": lambda: torch.profiler.profile(),
    "record function": lambda: torch.profiler.record_function("step"),
    "another default dtype": lambda: default_dtype(torch.float64),
    "oneDNN off": lambda: torch.backends.mkldnn.flags(enabled=False),
}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("around", list(SURROUNDINGS.values()), ids=list(SURROUNDINGS))
@pytest.mark.parametrize(
    ("build", "inputs"), [(convnet, images), (transformer, tokens)], ids=["convnet", "transformer"]
)
def test_steps_match_whatever_surrounds_them(build: Any, inputs: Any, around: Any) -> None:
    assert_same_as_eager(build(), inputs, around=around, backward_inside=True, steps=2)


SWITCHES: dict[str, tuple[Any, Any, Any]] = {
    "attention kernels": (attention, lambda n: (torch.randn(n, 4, 6),), lambda: sdpa_kernel([SDPBackend.MATH])),
    "oneDNN": (
        lambda: seeded(lambda: nn.LSTM(6, 5)),
        lambda n: (torch.randn(n, 4, 6),),
        lambda: torch.backends.mkldnn.flags(enabled=False),
    ),
    "default dtype": (
        lambda: seeded(lambda: Apply(lambda m, x: m.l(x) * torch.ones(6), l=nn.Linear(6, 6))),
        rows,
        lambda: default_dtype(torch.float64),
    ),
    "autocast's weight cache": (
        tied,
        rows,
        lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    ),
}


@pytest.mark.parametrize(("build", "inputs", "switched"), list(SWITCHES.values()), ids=list(SWITCHES))
def test_a_switch_of_torch_turned_between_steps_matches(build: Any, inputs: Any, switched: Any) -> None:
    calls = {"n": 0}
    plain = autocast() if build is tied else contextlib.nullcontext

    def around() -> Any:
        calls["n"] += 1
        return switched() if calls["n"] % 2 == 0 else plain()

    assert_same_as_eager(build(), inputs, around=around, steps=4, other_batch=None)


def test_the_number_of_threads_changed_between_steps_matches() -> None:
    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        for step, count in enumerate((1, 2, 1)):
            torch.set_num_threads(count)
            trace[f"{step}"] = bits(model(torch.randn(2, 3, 24, 24)))
            model(torch.randn(2, 3, 24, 24)).square().sum().backward()
        torch.set_num_threads(1)

    both_ways(
        seeded(
            lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, bias=False))
        ),
        script,
    )


# --- gradients that others look at too ------------------------------------------------------------------------------


def test_a_gradient_shared_with_another_branch_is_not_overwritten() -> None:
    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        other = seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU()), 3)
        for fit in (False, True):
            if fit:
                memfit.fit(other)
            x = torch.randn(3, 6)
            (model(x) + other(x) + model(x)).backward(torch.randn(3, 6))
            trace[f"other {fit}"] = bits(other[0].weight.grad)

    both_ways(seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU())), script)


def test_a_gradient_kept_by_a_hook_on_the_output_is_not_overwritten() -> None:
    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        kept: list[torch.Tensor] = []
        y = model(torch.randn(3, 6))
        y.retain_grad()
        y.register_hook(lambda gradient: kept.append(gradient))
        y.backward(torch.randn(3, 6))
        trace["retained"], trace["kept"] = bits(y.grad), bits(kept[0])

    both_ways(seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU())), script)


def test_an_output_kept_by_the_caller_is_not_overwritten_by_the_next_step() -> None:
    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        kept = []
        for _ in range(3):
            y = model(torch.randn(3, 6))
            y.square().sum().backward()
            kept.append(y.detach())
        for index, tensor in enumerate(kept):
            trace[f"{index}"] = bits(tensor)

    both_ways(seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True))), script)


def test_a_model_given_its_own_parameter_matches() -> None:
    def script(model: Any, trace: dict[str, Any]) -> None:
        model(model.b[None]).square().sum().backward()
        model(model.b).square().sum().backward()

    both_ways(seeded(lambda: Apply(lambda m, x: m.l(x) * m.b + x, l=nn.Linear(6, 6), b=(6,))), script)


class HoldsLeaves(nn.Module):
    """Trains tensors that are no parameters: a plain attribute and a buffer that require grad."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.plain = torch.ones(6, requires_grad=True)
        self.register_buffer("held", torch.ones(6, requires_grad=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.plain + self.held


def test_leaves_that_are_no_parameters_get_their_gradients() -> None:
    def script(model: Any, trace: dict[str, Any]) -> None:
        for step in range(2):
            model(torch.randn(3, 6)).square().sum().backward()
            trace[f"plain {step}"], trace[f"held {step}"] = bits(model.plain.grad), bits(model.held.grad)

    both_ways(seeded(HoldsLeaves), script)


def test_requires_grad_switched_off_between_forward_and_backward_matches() -> None:
    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        for _ in range(2):
            y = model(torch.randn(3, 6))
            model.requires_grad_(False)
            y.sum().backward()
            model.requires_grad_(True)

    both_ways(mlp(), script)


def test_the_model_may_turn_to_eval_between_forward_and_backward() -> None:
    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        for _ in range(2):
            y = model(torch.randn(3, 3, 8, 8))
            model.eval()
            y.sum().backward()
            model.train()

    both_ways(convnet(), script)


def test_evaluation_between_training_steps_matches() -> None:
    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        for step in range(3):
            model(torch.randn(3, 3, 8, 8)).square().sum().backward()
            model.eval()
            with torch.no_grad():
                trace[f"eval {step}"] = bits(model(torch.randn(2, 3, 8, 8)))
            model.train()
            with torch.no_grad():
                trace[f"no grad {step}"] = bits(model(torch.randn(2, 3, 8, 8)))

    both_ways(convnet(), script)
