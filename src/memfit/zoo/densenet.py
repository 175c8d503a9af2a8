"""DenseNet-121, -161, -169 and -201, with every layer concatenating all the features before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memfit.zoo.init import init_convolutions


class DenseLayer(nn.Module):
    """Concatenate all features so far, squeeze them by 1x1, and make `growth` new channels by 3x3."""

    def __init__(self, channels: int, *, growth: int, bottleneck: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, bottleneck * growth, kernel_size=1, bias=False),
            nn.BatchNorm2d(bottleneck * growth),
            nn.ReLU(inplace=True),
            nn.Conv2d(bottleneck * growth, growth, kernel_size=3, padding=1, bias=False),
        )

    def forward(self, features: list[Tensor]) -> Tensor:
        new: Tensor = self.body(torch.cat(features, dim=1))
        return new


class DenseBlock(nn.ModuleList):
    """Dense layers in a row: layer n reads the block's input and the n outputs before it.

    Each layer makes its own concatenation, as in the usual implementations. That is what makes the memory of a naive
    DenseNet quadratic in depth, and the network a favourite of papers on recomputation.
    """

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self:
            features.append(layer(features))
        return torch.cat(features, dim=1)


class DenseNet(nn.Module):
    """A stem, four dense blocks with a halving transition between them, and one linear layer."""

    def __init__(
        self,
        *,
        blocks: tuple[int, ...] = (6, 12, 24, 16),
        growth: int = 32,
        stem_channels: int = 64,
        bottleneck: int = 4,
        num_classes: int = 1000,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, stem_channels, kernel_size=7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(stem_channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
        ]
        channels = stem_channels
        for index, num_layers in enumerate(blocks):
            if index > 0:
                layers.append(_transition(channels))
                channels //= 2
            layers.append(
                DenseBlock(
                    DenseLayer(channels + n * growth, growth=growth, bottleneck=bottleneck) for n in range(num_layers)
                )
            )
            channels += num_layers * growth
        layers.append(nn.BatchNorm2d(channels))
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, num_classes)
        init_convolutions(self, mode="fan_in")
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        features = F.relu(self.features(images), inplace=True)
        logits: Tensor = self.head(F.adaptive_avg_pool2d(features, 1).flatten(1))
        return logits


def _transition(channels: int) -> nn.Sequential:
    """Halve the channels and the resolution between two dense blocks."""
    return nn.Sequential(
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels, channels // 2, kernel_size=1, bias=False),
        nn.AvgPool2d(2),
    )
