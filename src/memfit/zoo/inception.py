"""GoogLeNet and Inception v3, both with batch norm and without their auxiliary classifiers.

Both are sequences of blocks, and each block is a set of branches run on the same input and concatenated, so the code
is two building blocks (`ConvNormReLU`, `Branches`) and then the published tables.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_Size = int | tuple[int, int]


class ConvNormReLU(nn.Module):
    """Convolution without bias, batch norm, ReLU in place."""

    def __init__(self, channels: int, width: int, kernel_size: _Size, *, stride: int = 1, padding: _Size = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, width, kernel_size, stride=stride, padding=padding, bias=False)
        self.norm = nn.BatchNorm2d(width, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)), inplace=True)


class Branches(nn.ModuleList):
    """Runs each branch on the same input and concatenates what they return, by channel."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self], dim=1)


def googlenet(*, num_classes: int = 1000, dropout: float = 0.2) -> nn.Sequential:
    """GoogLeNet as torchvision has it: batch norm, no auxiliary heads, 3x3 where the paper has 5x5."""
    return nn.Sequential(
        ConvNormReLU(3, 64, 7, stride=2, padding=3),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        ConvNormReLU(64, 64, 1),
        ConvNormReLU(64, 192, 3, padding=1),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        _google_block(192, 64, (96, 128), (16, 32), 32),
        _google_block(256, 128, (128, 192), (32, 96), 64),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        _google_block(480, 192, (96, 208), (16, 48), 64),
        _google_block(512, 160, (112, 224), (24, 64), 64),
        _google_block(512, 128, (128, 256), (24, 64), 64),
        _google_block(512, 112, (144, 288), (32, 64), 64),
        _google_block(528, 256, (160, 320), (32, 128), 128),
        nn.MaxPool2d(2, stride=2, ceil_mode=True),
        _google_block(832, 256, (160, 320), (32, 128), 128),
        _google_block(832, 384, (192, 384), (48, 128), 128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(1024, num_classes),
    )


def inception_v3(*, num_classes: int = 1000, dropout: float = 0.5) -> nn.Sequential:
    """Inception v3 as torchvision has it, without the auxiliary head: 299 pixels in."""
    return nn.Sequential(
        ConvNormReLU(3, 32, 3, stride=2),
        ConvNormReLU(32, 32, 3),
        ConvNormReLU(32, 64, 3, padding=1),
        nn.MaxPool2d(3, stride=2),
        ConvNormReLU(64, 80, 1),
        ConvNormReLU(80, 192, 3),
        nn.MaxPool2d(3, stride=2),
        _v3_35x35(192, pool_width=32),
        _v3_35x35(256, pool_width=64),
        _v3_35x35(288, pool_width=64),
        _v3_35_to_17(288),
        _v3_17x17(768, inner=128),
        _v3_17x17(768, inner=160),
        _v3_17x17(768, inner=160),
        _v3_17x17(768, inner=192),
        _v3_17_to_8(768),
        _v3_8x8(1280),
        _v3_8x8(2048),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(2048, num_classes),
    )


def _google_block(channels: int, single: int, middle: tuple[int, int], deep: tuple[int, int], pooled: int) -> Branches:
    """One row of the GoogLeNet paper's table; a pair is (width of the 1x1 before, width after)."""
    return Branches(
        [
            ConvNormReLU(channels, single, 1),
            nn.Sequential(ConvNormReLU(channels, middle[0], 1), ConvNormReLU(middle[0], middle[1], 3, padding=1)),
            nn.Sequential(ConvNormReLU(channels, deep[0], 1), ConvNormReLU(deep[0], deep[1], 3, padding=1)),
            nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1, ceil_mode=True), ConvNormReLU(channels, pooled, 1)),
        ]
    )


def _v3_35x35(channels: int, *, pool_width: int) -> Branches:
    return Branches(
        [
            ConvNormReLU(channels, 64, 1),
            nn.Sequential(ConvNormReLU(channels, 48, 1), ConvNormReLU(48, 64, 5, padding=2)),
            nn.Sequential(
                ConvNormReLU(channels, 64, 1),
                ConvNormReLU(64, 96, 3, padding=1),
                ConvNormReLU(96, 96, 3, padding=1),
            ),
            _averaged(channels, pool_width),
        ]
    )


def _v3_35_to_17(channels: int) -> Branches:
    return Branches(
        [
            ConvNormReLU(channels, 384, 3, stride=2),
            nn.Sequential(
                ConvNormReLU(channels, 64, 1),
                ConvNormReLU(64, 96, 3, padding=1),
                ConvNormReLU(96, 96, 3, stride=2),
            ),
            nn.MaxPool2d(3, stride=2),
        ]
    )


def _v3_17x17(channels: int, *, inner: int) -> Branches:
    """The block whose 7x7 convolutions are split into a row and a column."""
    row: dict[str, tuple[int, int]] = {"kernel_size": (1, 7), "padding": (0, 3)}
    column: dict[str, tuple[int, int]] = {"kernel_size": (7, 1), "padding": (3, 0)}
    return Branches(
        [
            ConvNormReLU(channels, 192, 1),
            nn.Sequential(
                ConvNormReLU(channels, inner, 1),
                _strip(inner, inner, **row),
                _strip(inner, 192, **column),
            ),
            nn.Sequential(
                ConvNormReLU(channels, inner, 1),
                _strip(inner, inner, **column),
                _strip(inner, inner, **row),
                _strip(inner, inner, **column),
                _strip(inner, 192, **row),
            ),
            _averaged(channels, 192),
        ]
    )


def _v3_17_to_8(channels: int) -> Branches:
    return Branches(
        [
            nn.Sequential(ConvNormReLU(channels, 192, 1), ConvNormReLU(192, 320, 3, stride=2)),
            nn.Sequential(
                ConvNormReLU(channels, 192, 1),
                _strip(192, 192, kernel_size=(1, 7), padding=(0, 3)),
                _strip(192, 192, kernel_size=(7, 1), padding=(3, 0)),
                ConvNormReLU(192, 192, 3, stride=2),
            ),
            nn.MaxPool2d(3, stride=2),
        ]
    )


def _v3_8x8(channels: int) -> Branches:
    """The widest block: two of its branches end in a row and a column side by side."""
    return Branches(
        [
            ConvNormReLU(channels, 320, 1),
            nn.Sequential(ConvNormReLU(channels, 384, 1), _row_and_column(384)),
            nn.Sequential(
                ConvNormReLU(channels, 448, 1),
                ConvNormReLU(448, 384, 3, padding=1),
                _row_and_column(384),
            ),
            _averaged(channels, 192),
        ]
    )


def _strip(channels: int, width: int, *, kernel_size: tuple[int, int], padding: tuple[int, int]) -> ConvNormReLU:
    return ConvNormReLU(channels, width, kernel_size, padding=padding)


def _row_and_column(width: int) -> Branches:
    return Branches(
        [
            _strip(width, width, kernel_size=(1, 3), padding=(0, 1)),
            _strip(width, width, kernel_size=(3, 1), padding=(1, 0)),
        ]
    )


def _averaged(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), ConvNormReLU(channels, width, 1))
