"""The state of a module tree: written out anew when anything in it has changed, and only then."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memfit.run.module_state import ModuleState


class Config:
    def __init__(self) -> None:
        self.eps = 1e-5
        self.sizes = [1, 2]


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.config = config
        self.scale = 0.5
        self.names: list[Any] = []
        self.table: dict[str, Any] = {}
        self.last: Any = None


def model() -> nn.Sequential:
    config = Config()
    return nn.Sequential(Block(config), nn.ReLU(), Block(config), nn.Dropout(0.1))


def replace_with_equal_table(net: nn.Sequential) -> None:
    net[0].conv.__dict__["_parameters"] = {"weight": nn.Parameter(torch.zeros(4, 3, 5, 5)), "bias": None}


CHANGES: dict[str, Callable[[nn.Sequential], Any]] = {
    "eval": lambda net: net[2].norm.eval(),
    "a number": lambda net: setattr(net[0], "scale", 0.25),
    "a number of a layer": lambda net: setattr(net[3], "p", 0.2),
    "a tuple": lambda net: setattr(net[0].conv, "stride", (2, 2)),
    "a string": lambda net: setattr(net[0].conv, "padding_mode", "reflect"),
    "a number in a shared object": lambda net: setattr(net[0].config, "eps", 1e-3),
    "a list in a shared object": lambda net: net[2].config.sizes.append(3),
    "a list": lambda net: net[2].names.append("new"),
    "a dict": lambda net: net[2].table.update(new=1),
    "a new attribute": lambda net: setattr(net[1], "extra", 1),
    "an attribute in the place of another": lambda net: (delattr(net[0], "last"), setattr(net[0], "later", None)),
    "an attribute gone": lambda net: delattr(net[0], "scale"),
    "a forward hook": lambda net: net[1].register_forward_hook(lambda *given: None),
    "a backward hook": lambda net: net[0].conv.register_full_backward_hook(lambda *given: None),
    "frozen": lambda net: net[0].conv.weight.requires_grad_(False),
    "another dtype": lambda net: net[0].conv.double(),
    "another layout": lambda net: net[0].conv.to(memory_format=torch.channels_last),
    "data of another shape": lambda net: setattr(net[0].conv.weight, "data", torch.zeros(5, 3, 3, 3)),
    "a bias gone": lambda net: setattr(net[0].conv, "bias", None),
    "a buffer more": lambda net: net[1].register_buffer("seen", torch.zeros(2)),
    "a buffer that is not saved": lambda net: net[1].register_buffer("seen", torch.zeros(2), persistent=False),
    "a module more": lambda net: net.append(nn.Tanh()),
    "a module gone": lambda net: net[0].__dict__["_modules"].pop("norm"),
    "another module": lambda net: net.__setitem__(1, nn.ReLU()),
    "another table of parameters": replace_with_equal_table,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_whatever_changes_is_another_state(change: Callable[[nn.Sequential], Any]) -> None:
    net = model()
    state = ModuleState(net)
    before = state.read()
    assert state.read() is before
    change(net)
    after = state.read()
    assert after is not before and after != before
    assert state.read() is after
    assert after == ModuleState(net).read()


def test_what_changes_back_is_the_same_state() -> None:
    net = model()
    state = ModuleState(net)
    training = state.read()
    net.eval()
    assert state.read() != training
    net.train()
    again = state.read()
    assert again is not training and again == training and hash(again) == hash(training)


def test_another_tensor_of_the_same_layout_is_the_same_state() -> None:
    net = model()
    net[0].last = torch.zeros(3)
    state = ModuleState(net)
    before = state.read()
    net[0].conv.weight = nn.Parameter(torch.ones_like(net[0].conv.weight))
    net[0].last = torch.ones(5)  # what hangs there is checked where it is read
    net[0].conv.weight.grad = torch.ones(4, 3, 3, 3)
    assert state.read() == before


def test_nothing_large_is_held() -> None:
    net = model()
    net[0].last = torch.zeros(1000)
    net[0].names.append(torch.zeros(1000))
    state = ModuleState(net)
    state.read()
    held = [weakref.ref(net[0].last), weakref.ref(net[0].names[0])]
    net[0].last = None
    net[0].names = []
    assert [reference() for reference in held] == [None, None]


def test_two_equal_models_are_not_the_same() -> None:
    assert ModuleState(model()).read() != ModuleState(model()).read()
