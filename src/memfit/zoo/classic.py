"""The networks before batch norm, other than VGG: AlexNet, OverFeat (fast) and Network in Network.

All three are plain chains, given here as layer lists. OverFeat and Network in Network follow the published layer
tables; AlexNet is the one-tower variant that torchvision has ("One weird trick", Krizhevsky 2014).
"""

from __future__ import annotations

from torch import nn


def alexnet(*, num_classes: int = 1000, hidden: int = 4096, dropout: float = 0.5) -> nn.Sequential:
    """AlexNet in one tower: five convolutions, three max-pools, three linear layers."""
    return nn.Sequential(
        nn.Conv2d(3, 64, kernel_size=11, stride=4, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(kernel_size=3, stride=2),
        nn.Conv2d(64, 192, kernel_size=5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(kernel_size=3, stride=2),
        nn.Conv2d(192, 384, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(384, 256, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(256, 256, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(kernel_size=3, stride=2),
        nn.AdaptiveAvgPool2d(6),
        nn.Flatten(),
        # Here dropout comes before each linear layer; VGG and OverFeat have it after each ReLU.
        nn.Dropout(dropout),
        nn.Linear(256 * 6 * 6, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, num_classes),
    )


def overfeat(*, num_classes: int = 1000, hidden: tuple[int, int] = (3072, 4096), dropout: float = 0.5) -> nn.Sequential:
    """OverFeat's fast model: non-overlapping pools, wide last convolutions, 231 pixels in."""
    return nn.Sequential(
        nn.Conv2d(3, 96, kernel_size=11, stride=4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(96, 256, kernel_size=5),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(256, 512, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(512, 1024, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(1024, 1024, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        # Not in the paper, and the identity at 231 pixels: it lets other image sizes through.
        nn.AdaptiveAvgPool2d(6),
        nn.Flatten(),
        nn.Linear(1024 * 6 * 6, hidden[0]),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(hidden[0], hidden[1]),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(hidden[1], num_classes),
    )


def nin(*, num_classes: int = 1000, dropout: float = 0.5) -> nn.Sequential:
    """Network in Network for ImageNet: four convolutions, each followed by two of 1x1; no linear layer."""
    return nn.Sequential(
        *_mlpconv(3, 96, 96, 96, kernel_size=11, stride=4),
        nn.MaxPool2d(kernel_size=3, stride=2, ceil_mode=True),  # Caffe, where it was published, rounds up
        *_mlpconv(96, 256, 256, 256, kernel_size=5, padding=2),
        nn.MaxPool2d(kernel_size=3, stride=2, ceil_mode=True),
        *_mlpconv(256, 384, 384, 384, kernel_size=3, padding=1),
        nn.MaxPool2d(kernel_size=3, stride=2, ceil_mode=True),
        nn.Dropout(dropout),
        *_mlpconv(384, 1024, 1024, num_classes, kernel_size=3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def _mlpconv(
    channels: int, first: int, second: int, third: int, *, kernel_size: int, stride: int = 1, padding: int = 0
) -> list[nn.Module]:
    """A convolution and two of 1x1, each with its ReLU: the paper's little network slid over the image."""
    return [
        nn.Conv2d(channels, first, kernel_size, stride=stride, padding=padding),
        nn.ReLU(inplace=True),
        nn.Conv2d(first, second, kernel_size=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(second, third, kernel_size=1),
        nn.ReLU(inplace=True),
    ]
