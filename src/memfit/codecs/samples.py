"""For each codec a tensor that it is made for, and how backward reads it: to measure codecs on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from memfit.capture.needs import Gate, Need
from memfit.codecs.codec import Reading, Settings
from memfit.codecs.pool import Pool
from memfit.codecs.registry import codec

RELU = Gate(((-math.inf, 0.0, 0.0),), otherwise=1.0)
_SHARE_OF_ZEROS = 0.6  # what ReLU leaves in the networks of Gist
_CAPACITY = 0.5
_SIDE = 56


@dataclass(frozen=True)
class Sample:
    """A tensor, and the settings under which the codec takes it."""

    tensor: torch.Tensor
    settings: Settings


def sample(name: str, num_bytes: int) -> Sample:
    """A tensor of about so many bytes: max-pool indices for `window`, labels for `narrow-int`, else a ReLU's output."""
    random = torch.Generator().manual_seed(0)
    if name == "window":
        pool = Pool((_SIDE, _SIDE), (3, 3), (2, 2), (1, 1), (1, 1))
        planes = max(num_bytes // (2 * _SIDE * _SIDE), 1)  # eight bytes to an index, a quarter as many as elements
        inputs = torch.randn(1, planes, _SIDE, _SIDE, generator=random)
        _, indices = torch.nn.functional.max_pool2d(inputs, 3, 2, 1, return_indices=True)
        return Sample(indices, codec(name).settings([Reading(Need.WINDOW, pool=pool)]))
    if name == "narrow-int":
        labels = torch.randint(0, 1000, (num_bytes // 8,), generator=random)
        return Sample(labels, codec(name).settings([Reading(Need.VALUE, bounds=(0, 999))]))
    outputs = torch.randn(num_bytes // 4, generator=random).sub_(_threshold()).relu_()
    has_capacity = name == "csr" or name.startswith("sparse")
    chosen = codec(f"{name}:{_CAPACITY}" if has_capacity else name)
    return Sample(outputs, chosen.settings([Reading(Need.SIGN, RELU)]))


def _threshold() -> float:
    """What has that share of normal numbers below it."""
    return math.sqrt(2) * float(torch.erfinv(torch.tensor(2 * _SHARE_OF_ZEROS - 1)))
