"""U-Net with padded convolutions and batch norm: one channel in, one class per pixel out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memfit.zoo.init import init_convolutions


class UNet(nn.Module):
    """Four levels down, a bottom, four levels up, each level up reading what the level down left.

    Ronneberger's network loses a border at every convolution and crops the skips to fit; this one pads, as nearly
    every implementation since, so that the output is as large as the input. Sides must divide by 16.
    """

    def __init__(
        self,
        *,
        in_channels: int = 1,
        num_classes: int = 2,
        width: int = 64,
        num_levels: int = 4,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        widths = [width << level for level in range(num_levels + 1)]
        inputs = [in_channels, *widths]
        self.down = nn.ModuleList(_double_conv(inputs[level], widths[level]) for level in range(num_levels))
        self.pool = nn.MaxPool2d(2)
        # "Drop-out layers at the end of the contracting path": its last level and the bottom.
        self.drop = nn.Dropout(dropout)
        self.bottom = _double_conv(widths[-2], widths[-1])
        self.widen = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, kernel_size=2, stride=2) for w in reversed(widths[:-1]))
        self.up = nn.ModuleList(_double_conv(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, num_classes, kernel_size=1)
        init_convolutions(self, mode="fan_in")

    def forward(self, images: Tensor) -> Tensor:
        skips: list[Tensor] = []
        x = images
        for index, level in enumerate(self.down):
            x = level(x)
            if index == len(self.down) - 1:
                x = self.drop(x)
            skips.append(x)
            x = self.pool(x)
        x = self.drop(self.bottom(x))
        for widen, level in zip(self.widen, self.up, strict=True):
            x = level(torch.cat([skips.pop(), widen(x)], dim=1))
        logits: Tensor = self.head(x)
        return logits


def _double_conv(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, width, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
    )
