"""ResNet-18 to ResNet-152, with the stride in the 3x3 convolution as torchvision has it (v1.5)."""

from __future__ import annotations

from torch import Tensor, nn

from memfit.zoo.init import init_convolutions


def _conv(channels: int, width: int, kernel_size: int, *, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, width, kernel_size, stride=stride, padding=kernel_size // 2, bias=False)


class Residual(nn.Module):
    """A chain of convolutions and a way around it, added in place and rectified in place."""

    def __init__(self, body: nn.Sequential, shortcut: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        around = self.shortcut(x)
        y: Tensor = self.body(x)
        y += around
        out: Tensor = self.relu(y)
        return out


def _block(channels: int, width: int, *, stride: int, bottleneck: bool) -> Residual:
    """Two 3x3 convolutions, or one between two of 1x1; the shortcut projects where the shape changes."""
    out_channels = 4 * width if bottleneck else width
    if bottleneck:
        body = nn.Sequential(
            _conv(channels, width, 1),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            _conv(width, width, 3, stride=stride),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            _conv(width, out_channels, 1),
            nn.BatchNorm2d(out_channels),
        )
    else:
        body = nn.Sequential(
            _conv(channels, width, 3, stride=stride),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            _conv(width, width, 3),
            nn.BatchNorm2d(width),
        )
    if stride == 1 and channels == out_channels:
        return Residual(body, nn.Identity())
    return Residual(body, nn.Sequential(_conv(channels, out_channels, 1, stride=stride), nn.BatchNorm2d(out_channels)))


class ResNet(nn.Module):
    """A stem, four stages of residual blocks at halving resolution, and one linear layer."""

    def __init__(
        self,
        *,
        stages: tuple[int, ...] = (3, 4, 6, 3),
        bottleneck: bool = True,
        width: int = 64,
        num_classes: int = 1000,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
        )
        channels = width
        self.stages = nn.Sequential()
        for index, num_blocks in enumerate(stages):
            stage_width = width << index
            blocks = nn.Sequential()
            for position in range(num_blocks):
                # The first stage follows a max-pool, so only later stages halve the resolution themselves.
                stride = 2 if index > 0 and position == 0 else 1
                blocks.append(_block(channels, stage_width, stride=stride, bottleneck=bottleneck))
                channels = 4 * stage_width if bottleneck else stage_width
            self.stages.append(blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, num_classes)
        init_convolutions(self, mode="fan_out")

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.pool(self.stages(self.stem(images))).flatten(1))
        return logits
