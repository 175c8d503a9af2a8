"""What a caller may do around and between the calls of a fitted model: answered as eager would, or refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from equivalence import Apply
from torch import nn

import memfit
from memfit.errors import BadOption


def test_writing_into_one_of_two_outputs_that_share_memory_is_refused() -> None:
    model = memfit.fit(Apply(lambda m, x: (lambda y: (y, y[:, :2]))(x @ m.w), w=(4, 4)))
    whole, part = model(torch.randn(3, 4))
    whole.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation: 'output 0' of the fitted module"):
        (whole.sum() + part.square().sum()).backward()
    whole, part = model(torch.randn(3, 4))
    (whole.sum() + part.square().sum()).backward()  # untouched, they are fine


def test_forward_mode_derivatives_go_through_the_models_own_forward() -> None:
    layer = nn.Linear(4, 2)
    fitted = memfit.fit(copy.deepcopy(layer))
    x, tangent = torch.randn(3, 4), torch.randn(3, 4)
    with forward_ad.dual_level():
        expected = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, tangent))).tangent
        found = forward_ad.unpack_dual(fitted(forward_ad.make_dual(x, tangent))).tangent
    assert expected is not None and torch.equal(expected, found)


class Settings:
    def __init__(self) -> None:
        self.scale = torch.ones(4)
        self.more = [torch.zeros(4)]


@pytest.mark.parametrize("place", ["scale", "more"])
def test_a_tensor_inside_a_plain_object_can_be_swapped_between_calls(place: str) -> None:
    model = Apply(lambda m, x: (x @ m.w) * m.settings.scale + m.settings.more[0], w=(4, 4), settings=Settings())
    fitted = memfit.fit(copy.deepcopy(model))
    x = torch.randn(3, 4)
    for number in (2.0, 5.0, 2.0):
        for arm in (model, fitted):
            if place == "scale":
                arm.settings.scale = torch.full((4,), number)
            else:
                arm.settings.more[0] = torch.full((4,), number)
        assert torch.equal(model(x), fitted(x))


def test_writing_into_a_constant_that_backward_reads_is_refused() -> None:
    scale = torch.full((4,), 3.0)
    model = memfit.fit(Apply(lambda m, x: (x @ m.w) * scale, w=(4, 4)))
    output = model(torch.randn(3, 4))
    scale.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation: 'constant_0' of the fitted module"):
        output.square().sum().backward()


def test_a_negative_time_for_measuring_is_refused() -> None:
    with pytest.raises(BadOption, match="measure_s=-1: give seconds from 0"):
        memfit.fit(nn.Linear(2, 2), measure_s=-1)
