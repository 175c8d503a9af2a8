"""The CIFAR-10 network that DARTS found (its second-order genotype), without auxiliary head or drop-path.

A cell is a small directed graph: four nodes, each the sum of two operations on earlier states, concatenated. It is
here because such graphs defeat checkpointing schemes that only cut chains.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# (operation, state it reads), two per node. States 0 and 1 are the outputs of the two cells before; 2 to 5 the nodes.
_Genotype = tuple[tuple[str, int], ...]

_NORMAL: _Genotype = (
    ("sep_conv_3x3", 0), ("sep_conv_3x3", 1),
    ("sep_conv_3x3", 0), ("sep_conv_3x3", 1),
    ("sep_conv_3x3", 1), ("skip_connect", 0),
    ("skip_connect", 0), ("dil_conv_3x3", 2),
)  # fmt: skip
_REDUCE: _Genotype = (
    ("max_pool_3x3", 0), ("max_pool_3x3", 1),
    ("skip_connect", 2), ("max_pool_3x3", 1),
    ("max_pool_3x3", 0), ("skip_connect", 2),
    ("skip_connect", 2), ("max_pool_3x3", 1),
)  # fmt: skip
_NUM_NODES = 4


class FactorizedReduce(nn.Module):
    """Halve the resolution by two 1x1 convolutions of stride 2, the second one pixel further down and right."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.even = nn.Conv2d(channels, width // 2, kernel_size=1, stride=2, bias=False)
        self.odd = nn.Conv2d(channels, width // 2, kernel_size=1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(x)
        out: Tensor = self.norm(torch.cat([self.even(x), self.odd(x[:, :, 1:, 1:])], dim=1))
        return out


class Cell(nn.Module):
    """One cell: reads the outputs of the two cells before it, returns its four nodes concatenated."""

    def __init__(
        self, genotype: _Genotype, older: int, newer: int, width: int, *, reduces: bool, after_reduction: bool
    ) -> None:
        super().__init__()
        # After a reduction the older of the two inputs still has twice the resolution.
        self.first = FactorizedReduce(older, width) if after_reduction else _squeeze(older, width)
        self.second = _squeeze(newer, width)
        self.sources = tuple(source for _, source in genotype)
        self.operations = nn.ModuleList(
            _operation(name, width, stride=2 if reduces and source < 2 else 1) for name, source in genotype
        )

    def forward(self, older: Tensor, newer: Tensor) -> Tensor:
        states: list[Tensor] = [self.first(older), self.second(newer)]
        edges = [(self.operations[i], source) for i, source in enumerate(self.sources)]
        for (left, left_source), (right, right_source) in zip(edges[::2], edges[1::2], strict=True):
            states.append(left(states[left_source]) + right(states[right_source]))
        return torch.cat(states[2:], dim=1)


class DARTS(nn.Module):
    """A stem, a row of cells of which two halve the resolution (at a third and two thirds), one linear layer."""

    def __init__(self, *, channels: int = 36, num_cells: int = 20, num_classes: int = 10) -> None:
        super().__init__()
        stem_width = 3 * channels
        self.stem = nn.Sequential(
            nn.Conv2d(3, stem_width, kernel_size=3, padding=1, bias=False), nn.BatchNorm2d(stem_width)
        )
        older, newer, width = stem_width, stem_width, channels
        reductions = (num_cells // 3, 2 * num_cells // 3)
        after_reduction = False
        self.cells = nn.ModuleList()
        for index in range(num_cells):
            reduces = index in reductions
            width *= 2 if reduces else 1
            genotype = _REDUCE if reduces else _NORMAL
            cell = Cell(genotype, older, newer, width, reduces=reduces, after_reduction=after_reduction)
            self.cells.append(cell)
            older, newer, after_reduction = newer, _NUM_NODES * width, reduces
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(newer, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        older = newer = self.stem(images)
        for cell in self.cells:
            older, newer = newer, cell(older, newer)
        logits: Tensor = self.head(self.pool(newer).flatten(1))
        return logits


def _squeeze(channels: int, width: int) -> nn.Sequential:
    # Out of place, as in DARTS: each input is also read elsewhere.
    return nn.Sequential(nn.ReLU(), nn.Conv2d(channels, width, kernel_size=1, bias=False), nn.BatchNorm2d(width))


def _depthwise(channels: int, *, stride: int, dilation: int = 1) -> list[nn.Module]:
    """ReLU, a 3x3 convolution per channel, a 1x1 across channels, batch norm."""
    return [
        nn.ReLU(),
        nn.Conv2d(
            channels,
            channels,
            kernel_size=3,
            stride=stride,
            padding=dilation,
            dilation=dilation,
            groups=channels,
            bias=False,
        ),
        nn.Conv2d(channels, channels, kernel_size=1, bias=False),
        nn.BatchNorm2d(channels),
    ]


def _operation(name: str, channels: int, *, stride: int) -> nn.Module:
    """The module of one edge of a cell."""
    match name:
        case "sep_conv_3x3":
            return nn.Sequential(*_depthwise(channels, stride=stride), *_depthwise(channels, stride=1))
        case "dil_conv_3x3":
            return nn.Sequential(*_depthwise(channels, stride=stride, dilation=2))
        case "max_pool_3x3":
            return nn.MaxPool2d(3, stride=stride, padding=1)
        case "skip_connect":
            return nn.Identity() if stride == 1 else FactorizedReduce(channels, channels)
    raise AssertionError(f"no operation {name!r} in this genotype")
