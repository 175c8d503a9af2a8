"""Settings of the model and of torch, changed between steps or around them: as eager, bit for bit."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from codec_cases import num_threads
from equivalence import Apply, assert_same_as_eager, bits, seeded
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from training_models import autocast, both_ways, convnet, images, mlp, rows, tied, tokens, transformer

# --- settings of the model -------------------------------------------------------------------------------------------


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


# --- what surrounds a step -------------------------------------------------------------------------------------------


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


@contextlib.contextmanager
def deterministic() -> Any:
    torch.backends.mkldnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.mkldnn.deterministic = False


@pytest.mark.parametrize(
    "switched",
    [lambda: num_threads(1), lambda: num_threads(3), lambda: torch.backends.mkldnn.flags(enabled=False), deterministic],
    ids=["one thread", "three threads", "oneDNN off", "deterministic"],
)
def test_a_switch_of_torch_turned_between_forward_and_backward_matches(switched: Any) -> None:
    """What stands in for kernels was tested with the settings of the forward half."""

    def build() -> nn.Module:
        body = [nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 48, 1, bias=False)]
        last = [nn.ReLU(), nn.Conv2d(48, 16, 3, padding=1)]
        return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), *body, *last)

    def script(model: nn.Module, trace: dict[str, Any]) -> None:
        for step in range(3):
            loss = model(torch.randn(4, 3, 28, 28)).square().mean()
            with switched() if step else contextlib.nullcontext():
                loss.backward()
            trace[f"{step}"] = [bits(weight.grad) for weight in model.parameters()]

    with num_threads(2):
        both_ways(seeded(build), script)


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


# --- between forward and backward, and evaluation --------------------------------------------------------------------


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
