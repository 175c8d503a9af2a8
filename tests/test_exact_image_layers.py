"""Convolutions, pooling, resizing and padding train fitted as they train eagerly, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence import Apply, assert_same_as_eager, seeded
from layer_inputs import behind_conv, check, images, lines, volumes
from torch import nn

# --- convolutions ----------------------------------------------------------------------------------------------------

CONVOLUTIONS = {
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(4, 5, 3), nn.ReLU(), nn.Conv1d(5, 3, 3)), lines),
    "conv2d": (lambda: nn.Sequential(nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Conv2d(5, 3, 3)), images),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(4, 3, 3), nn.ReLU(), nn.Conv3d(3, 2, 2)), volumes),
    "no bias": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3, bias=False), nn.Conv2d(4, 3, 3)), images),
    "1x1": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 3, 1)), images),
    "grouped": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Conv2d(8, 8, 3, groups=4)), images),
    "depthwise": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3, groups=4), nn.Conv2d(8, 3, 1)), images),
    "dilated, strided": (lambda: behind_conv(nn.Conv2d(4, 3, 2, stride=2, dilation=2, padding=1)), images),
    "same padding": (lambda: behind_conv(nn.Conv2d(4, 3, 3, padding="same")), images),
    "even kernel, same padding": (lambda: behind_conv(nn.Conv2d(4, 3, 2, padding="same")), images),
    "circular padding": (lambda: behind_conv(nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular")), images),
    "reflect padding": (lambda: behind_conv(nn.Conv2d(4, 3, 3, padding=1, padding_mode="reflect")), images),
    "replicate padding": (lambda: behind_conv(nn.Conv2d(4, 3, 3, padding=1, padding_mode="replicate")), images),
    "transposed 1d": (lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.ConvTranspose1d(4, 3, 3)), lines),
    "transposed 2d": (lambda: behind_conv(nn.ConvTranspose2d(4, 3, 3, stride=2, output_padding=1)), images),
    "transposed 3d": (lambda: nn.Sequential(nn.Conv3d(4, 4, 3), nn.ConvTranspose3d(4, 3, 2)), volumes),
    "unfold and fold": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Unfold(2, stride=2), nn.Fold((8, 8), 2, stride=2)),
        images,
    ),
    "frozen weight": (lambda: freeze(nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)), "1.weight"), images),
    "frozen bias": (lambda: freeze(nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)), "1.bias"), images),
    "all frozen but bias": (lambda: freeze(nn.Sequential(nn.Conv2d(4, 4, 3)), "0.weight"), images),
    "unbatched": (lambda: nn.Conv2d(4, 3, 3), lambda n: (torch.randn(4, 8, 8),)),
    "conv + relu + pool": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2), nn.Conv2d(4, 2, 3)),
        images,
    ),
    "conv + relu + pool, no last layer": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2)),
        images,
    ),
    "relu read beside the pool": (
        lambda: Apply(
            lambda m, x: (lambda y: (F.max_pool2d(y, 2), y.mean()))(F.relu(m.c(x))),
            c=nn.Conv2d(4, 4, 3, padding=1),
        ),
        images,
    ),
    "overlapping pool behind relu": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(4, 2, 2)),
        images,
    ),
    "padded pool behind relu": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1), nn.Conv2d(4, 2, 2)),
        images,
    ),
    "bilinear": (lambda: nn.Bilinear(6, 6, 4), lambda n: (torch.randn(n, 6), torch.randn(n, 6))),
}


def freeze(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


@check(CONVOLUTIONS)
def test_convolutions_match(build: Any, inputs: Any) -> None:
    assert_same_as_eager(seeded(build), inputs)


@pytest.mark.parametrize("name", ["conv2d", "no bias", "depthwise", "unfold and fold", "frozen weight"])
def test_convolutions_of_an_input_that_requires_grad_match(name: str) -> None:
    assert_same_as_eager(seeded(CONVOLUTIONS[name][0]), lambda n: (torch.randn(n, 4, 8, 8, requires_grad=True),))


# --- pooling ---------------------------------------------------------------------------------------------------------

POOLS = {
    "max1d": (lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.MaxPool1d(2)), lines),
    "max2d": (lambda: behind_conv(nn.MaxPool2d(2)), images),
    "max2d ceil, dilated": (lambda: behind_conv(nn.MaxPool2d(3, 2, padding=1, dilation=2, ceil_mode=True)), images),
    "max3d": (lambda: nn.Sequential(nn.Conv3d(4, 4, 3), nn.MaxPool3d(2)), volumes),
    "max2d with indices": (
        lambda: Apply(lambda m, x: F.max_pool2d(m.c(x), 2, return_indices=True), c=nn.Conv2d(4, 4, 3, padding=1)),
        images,
    ),
    "max unpool": (
        lambda: Apply(
            lambda m, x: F.max_unpool2d(*F.max_pool2d(m.c(x), 2, return_indices=True), 2),
            c=nn.Conv2d(4, 4, 3, padding=1),
        ),
        images,
    ),
    "average1d": (lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.AvgPool1d(2)), lines),
    "average2d": (lambda: behind_conv(nn.AvgPool2d(3, 2, padding=1, count_include_pad=False)), images),
    "average3d": (lambda: nn.Sequential(nn.Conv3d(4, 4, 3), nn.AvgPool3d(2)), volumes),
    "adaptive average1d": (lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.AdaptiveAvgPool1d(3)), lines),
    "adaptive average2d": (lambda: behind_conv(nn.AdaptiveAvgPool2d((3, 2))), images),
    "adaptive average to one": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)),
        images,
    ),
    "adaptive max1d": (lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.AdaptiveMaxPool1d(3)), lines),
    "adaptive max2d": (lambda: behind_conv(nn.AdaptiveMaxPool2d((3, 2))), images),
    "lp": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.LPPool2d(2, 2)), images),
    "fractional": (lambda: behind_conv(nn.FractionalMaxPool2d(2, output_size=3)), images),
}


@check(POOLS)
def test_pooling_matches(build: Any, inputs: Any) -> None:
    assert_same_as_eager(seeded(build), inputs)


# --- resizing and padding --------------------------------------------------------------------------------------------

RESIZING = {
    "nearest": (lambda: behind_conv(nn.Upsample(scale_factor=2)), images),
    "nearest-exact": (lambda: behind_conv(nn.Upsample(scale_factor=2, mode="nearest-exact")), images),
    "bilinear": (lambda: behind_conv(nn.Upsample(scale_factor=2, mode="bilinear")), images),
    "bilinear aligned": (lambda: behind_conv(nn.Upsample((5, 7), mode="bilinear", align_corners=True)), images),
    "bicubic": (lambda: behind_conv(nn.Upsample(scale_factor=1.5, mode="bicubic")), images),
    "area": (
        lambda: Apply(lambda m, x: F.interpolate(m.c(x), size=(4, 4), mode="area"), c=nn.Conv2d(4, 4, 3)),
        images,
    ),
    "antialias": (
        lambda: Apply(
            lambda m, x: F.interpolate(m.c(x), size=(4, 4), mode="bilinear", antialias=True), c=nn.Conv2d(4, 4, 3)
        ),
        images,
    ),
    "linear": (lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.Upsample(scale_factor=2, mode="linear")), lines),
    "trilinear": (lambda: nn.Sequential(nn.Conv3d(4, 4, 3), nn.Upsample(scale_factor=2, mode="trilinear")), volumes),
    "pixel shuffle": (lambda: behind_conv(nn.PixelShuffle(2)), images),
    "pixel unshuffle": (lambda: behind_conv(nn.PixelUnshuffle(2)), images),
    "channel shuffle": (lambda: behind_conv(nn.ChannelShuffle(2)), images),
    "zero pad": (lambda: behind_conv(nn.ZeroPad2d((1, 2, -1, 0))), images),
    "reflection pad": (lambda: behind_conv(nn.ReflectionPad2d(2)), images),
    "replication pad": (lambda: behind_conv(nn.ReplicationPad2d(2)), images),
    "constant pad": (lambda: behind_conv(nn.ConstantPad2d(1, 3.5)), images),
    "grid sample": (
        lambda: Apply(
            lambda m, x: F.grid_sample(
                m.c(x), F.affine_grid(m.t.expand(x.shape[0], 2, 3), [x.shape[0], 4, 5, 5], align_corners=False)
            ),
            c=nn.Conv2d(4, 4, 3),
            t=(1, 2, 3),
        ),
        images,
    ),
}


@check(RESIZING)
def test_resizing_and_padding_match(build: Any, inputs: Any) -> None:
    assert_same_as_eager(seeded(build), inputs)
