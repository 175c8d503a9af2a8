"""What a step has saved dies with its backward or its output: nothing stays behind."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from equivalence import tensors_in, weighted_sum
from torch import nn
from training_models import each_model

import memfit
from memfit.run.nodes import Call


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
