"""The zoo at small sizes: three steps fitted are three steps eager, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equivalence import assert_same_as_eager, seeded

from memfit import zoo

# About an eighth of the published widths, all multiples of 16, which convolution kernels like to work on.
_NARROW_VGG: dict[str, Any] = {"widths": (16, 16, 32, 64, 64), "hidden": 32}

# Options of `build`, batch, image (None: the smallest the network takes). Each is the published graph, made narrow.
SMALL: dict[str, tuple[dict[str, Any], int, int | None]] = {
    "alexnet": ({"hidden": 32}, 2, 63),
    "overfeat": ({"hidden": (8, 8)}, 1, None),
    "nin": ({}, 2, 39),
    "googlenet": ({}, 2, 32),
    "inception_v3": ({}, 2, None),
    "vgg11": (_NARROW_VGG, 2, 32),
    "vgg16": (_NARROW_VGG, 1, 32),
    "vgg11_bn": (_NARROW_VGG, 2, 32),
    "vgg16_bn": (_NARROW_VGG, 2, 32),
    "resnet18": ({"width": 8}, 2, 32),
    "resnet50": ({"width": 8}, 2, 32),
    "densenet121": ({"blocks": (3, 3, 3, 3)}, 2, 32),
    "darts": ({"channels": 4, "num_cells": 5}, 2, 16),
    "unet": ({"width": 4}, 2, 32),
    "vit_b16": ({"image": 32, "depth": 2, "width": 64, "num_heads": 4, "mlp_width": 128}, 2, 32),
    "gpt2": ({"num_layers": 2, "width": 64, "num_heads": 4, "vocab_size": 101, "context": 32}, 2, 16),
}

# The deeper ones of the same families, narrow: for tests that look at the plan rather than at the kernels.
_VGG = ({"widths": (4, 4, 4, 4, 4), "hidden": 16}, 1, 32)
DEEPER: dict[str, tuple[dict[str, Any], int, int | None]] = {
    **dict.fromkeys(("vgg13", "vgg19", "vgg13_bn", "vgg19_bn", "vgg116", "vgg216", "vgg316", "vgg416"), _VGG),
    **dict.fromkeys(("resnet34", "resnet101", "resnet152"), ({"width": 4}, 2, 32)),
    **dict.fromkeys(("densenet161", "densenet169", "densenet201"), ({"growth": 4, "stem_channels": 8}, 2, 32)),
}
ALL = SMALL | DEEPER


def small_sizes(name: str) -> dict[str, Any]:
    """Image side and number of classes that inputs and targets are made for."""
    options, _, image = ALL[name]
    return {"image": image or zoo.spec(name).minimum, "num_classes": options.get("vocab_size")}


def small(name: str) -> tuple[torch.nn.Module, Any, Any]:
    """The network, its inputs as a function of the batch, and its loss."""
    options = ALL[name][0]
    sizes = small_sizes(name)

    def inputs(n: int) -> tuple[torch.Tensor, ...]:
        seed = int(torch.randint(0, 1000, ()))
        return zoo.inputs(name, batch=n, seed=seed, **sizes)

    def loss(output: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
        return zoo.loss(name)(output, *zoo.targets(name, batch=output.shape[0], seed=1, **sizes))

    return seeded(lambda: zoo.build(name, device="cpu", **options)), inputs, loss


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "inception_v3")) for n in SMALL])
def test_networks_of_the_zoo_match(name: str) -> None:
    model, inputs, loss = small(name)
    steps = 2 if name in ("inception_v3", "overfeat") else 3  # these two cannot be made small
    assert_same_as_eager(model, inputs, batch=SMALL[name][1], other_batch=None, loss=loss, steps=steps)


@pytest.mark.parametrize("name", ["vgg11_bn", "resnet18", "densenet121", "unet", "gpt2"])
def test_networks_of_the_zoo_match_over_micro_batches(name: str) -> None:
    model, inputs, loss = small(name)
    assert_same_as_eager(model, inputs, batch=2, other_batch=None, steps=2, micro_batches=2, loss=loss)


@pytest.mark.parametrize("name", ["vgg11", "resnet18", "densenet121", "vit_b16", "gpt2"])
def test_networks_of_the_zoo_match_under_autocast(name: str) -> None:
    model, inputs, loss = small(name)
    around = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    assert_same_as_eager(model, inputs, batch=2, other_batch=None, steps=2, loss=loss, around=around)


@pytest.mark.parametrize("name", ["vgg16_bn", "resnet18", pytest.param("googlenet", marks=pytest.mark.slow), "unet"])
def test_networks_of_the_zoo_match_in_channels_last(name: str) -> None:
    model, inputs, loss = small(name)
    model = model.to(memory_format=torch.channels_last)

    def last(n: int) -> tuple[torch.Tensor, ...]:
        return tuple(t.to(memory_format=torch.channels_last) for t in inputs(n))

    assert_same_as_eager(model, last, batch=2, other_batch=None, steps=2, loss=loss)


@pytest.mark.parametrize("name", ["vgg11", "resnet18", "densenet121", "gpt2"])
def test_networks_of_the_zoo_match_with_every_rewrite_left_out(name: str) -> None:
    import memfit

    model, inputs, loss = small(name)
    assert_same_as_eager(model, inputs, batch=2, other_batch=None, steps=2, loss=loss, without=memfit.REWRITES)
