"""The small networks of the accuracy study, with marks where a map is made whose numbers backward reads.

Without immediate reduction a mark does nothing, and the network is an ordinary one. With it, what passes a mark is
encoded and decoded on the spot, so that all later layers compute with rounded numbers; delayed reduction, which is what
memfit does, lets them compute in full precision and rounds the same maps for backward only. Maps of which backward
reads signs, winners or masks have no mark: these are kept by lossless codecs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memfit.capture.needs import Need
from memfit.codecs.codec import Reading
from memfit.codecs.registry import codec
from memfit.errors import BadOption
from memfit.zoo.init import init_convolutions

FULL = "fp32"
"""The format that rounds nothing."""

NUM_CLASSES = 10
_SHARE_DROPPED = 0.25  # AlexNet's half is for layers of 4096, not of 64


class Mark(nn.Module):
    """A place where a map is made that backward reads.

    Attributes:
        rounds_in_eval: for a test in the precision of immediate training; else eval mode computes in full precision.
    """

    def __init__(self) -> None:
        super().__init__()
        self.format: str | None = None
        self.rounds_in_eval = False

    def forward(self, x: Tensor) -> Tensor:
        if self.format is None or not (self.training or self.rounds_in_eval):
            return x
        rounded: Tensor = _StraightThrough.apply(x, self.format)
        return rounded


class _StraightThrough(torch.autograd.Function):
    """What a codec leaves of a tensor; its gradient is passed on as if nothing had been rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, format: str) -> Tensor:
        return round_trip(x, format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def round_trip(x: Tensor, format: str) -> Tensor:
    """A copy of `x`, encoded and decoded again."""
    if format == FULL:
        return x.clone()
    chosen = codec(format)
    settings = chosen.settings([Reading(Need.VALUE)])
    return chosen.decode(chosen.encode(x, settings), torch.empty_like(x), settings)


def digits_alexnet() -> nn.Sequential:
    """AlexNet for 8x8: four convolutions, two max-pools that overlap, dropout before each of two linear layers."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        Mark(),
        nn.Conv2d(8, 16, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
        Mark(),
        nn.Conv2d(16, 24, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        Mark(),
        nn.Conv2d(24, 24, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
        nn.Flatten(),
        nn.Dropout(_SHARE_DROPPED),
        Mark(),
        nn.Linear(24 * 2 * 2, 64),
        nn.ReLU(inplace=True),
        nn.Dropout(_SHARE_DROPPED),
        Mark(),
        nn.Linear(64, NUM_CLASSES),
    )
    init_convolutions(model, mode="fan_in")
    return model


class _Block(nn.Module):
    """Two convolutions with batch norm and a way around them, which projects where the shape changes."""

    def __init__(self, channels: int, width: int, *, stride: int, is_last: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_conv_norm(channels, width, 3, stride),
            nn.ReLU(inplace=True),
            Mark(),
            *_conv_norm(width, width, 3, 1),
        )
        is_same = stride == 1 and channels == width
        self.shortcut = nn.Identity() if is_same else nn.Sequential(*_conv_norm(channels, width, 1, stride))
        self.relu = nn.ReLU(inplace=True)
        # Behind the last block is the average, whose backward reads no numbers.
        self.made = nn.Identity() if is_last else Mark()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        y += self.shortcut(x)
        made: Tensor = self.made(self.relu(y))
        return made


def _conv_norm(channels: int, width: int, kernel_size: int, stride: int) -> list[nn.Module]:
    """A convolution and its batch norm, whose backward reads what it normalised."""
    return [
        nn.Conv2d(channels, width, kernel_size, stride=stride, padding=kernel_size // 2, bias=False),
        Mark(),
        nn.BatchNorm2d(width),
    ]


def digits_resnet(*, widths: tuple[int, ...] = (8, 16, 32)) -> nn.Sequential:
    """A ResNet for 8x8: a stem, a block at each of three resolutions, one linear layer."""
    layers: list[nn.Module] = [*_conv_norm(1, widths[0], 3, 1), nn.ReLU(inplace=True), Mark()]
    channels = widths[0]
    for index, width in enumerate(widths):
        is_last = index == len(widths) - 1
        layers.append(_Block(channels, width, stride=1 if index == 0 else 2, is_last=is_last))
        channels = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), Mark(), nn.Linear(channels, NUM_CLASSES)]
    model = nn.Sequential(*layers)
    init_convolutions(model, mode="fan_out")
    return model


NETWORKS: dict[str, Callable[[], nn.Module]] = {"alexnet": digits_alexnet, "resnet": digits_resnet}


def build(network: str, *, seed: int) -> nn.Module:
    """The network with the weights of that seed; the global random state is left alone."""
    if network not in NETWORKS:
        raise BadOption(f"network {network!r}: the accuracy study has {', '.join(NETWORKS)}")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return NETWORKS[network]()


def marks(model: nn.Module) -> list[Mark]:
    """The places of the maps that backward reads, in the order of the modules."""
    return [module for module in model.modules() if isinstance(module, Mark)]


def reduce_immediately(model: nn.Module, format: str) -> None:
    """Let every map that backward reads be rounded as soon as it is made, in training mode."""
    for mark in marks(model):
        mark.format = format
