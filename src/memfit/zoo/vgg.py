"""VGG-11 to VGG-19, with and without batch norm, and vDNN's very deep VGG-116 to VGG-416."""

from __future__ import annotations

from torch import Tensor, nn

from memfit.zoo.init import init_convolutions

_WIDTHS = (64, 128, 256, 512, 512)

VGG11 = (1, 1, 2, 2, 2)
VGG13 = (2, 2, 2, 2, 2)
VGG16 = (2, 2, 3, 3, 3)
VGG19 = (2, 2, 4, 4, 4)


def deeper(groups: tuple[int, ...], *, by: int) -> tuple[int, ...]:
    """The same groups with `by` more convolutions in each, which is how vDNN deepens VGG-16."""
    return tuple(num + by for num in groups)


class VGG(nn.Module):
    """Five groups of 3x3 convolutions, a max-pool after each group, and three linear layers."""

    def __init__(
        self,
        *,
        groups: tuple[int, ...] = VGG16,
        widths: tuple[int, ...] = _WIDTHS,
        batch_norm: bool = False,
        num_classes: int = 1000,
        hidden: int = 4096,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for num_convolutions, width in zip(groups, widths, strict=True):
            for _ in range(num_convolutions):
                # The bias stays under batch norm too, useless as it is: torchvision's counts include it.
                layers.append(nn.Conv2d(channels, width, kernel_size=3, padding=1))
                if batch_norm:
                    layers.append(nn.BatchNorm2d(width))
                layers.append(nn.ReLU(inplace=True))
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(channels * 7 * 7, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, num_classes),
        )
        init_convolutions(self, mode="fan_out")
        for module in self.classifier:
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.pool(self.features(images)).flatten(1))
        return logits
