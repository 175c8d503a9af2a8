"""The digits of scikit-learn, split once and for all, and the order in which a seed's trainings see them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from memfit.errors import BadOption, MemfitError

_SPLIT_SEED = 20180602  # one split for all seeds: they differ in weights, order and dropout only
_LARGEST_PIXEL = 16.0
_ORDER = 0x0DE12  # added to the seed, so that the order is not drawn from the same stream as the weights


@dataclass(frozen=True)
class Digits:
    """Images of 8x8 as (N, 1, 8, 8), with mean 0 and variance 1 over the training set; labels from 0 to 9."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@functools.cache
def digits(*, num_train: int, num_test: int | None = None) -> Digits:
    """So many digits to train on and so many others to test on (None: all others), the same ones each time."""
    images, labels = _all_digits()
    left = len(images) - num_train
    num_test = left if num_test is None else num_test
    if num_train < 1 or not 1 <= num_test <= left:
        raise BadOption(
            f"{num_train} digits to train on and {num_test} to test on: there are {len(images)}, and both sets need one"
        )
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    # The test set is the end of the order, so that it does not move when the training set grows.
    train, test = order[:num_train], order[len(images) - num_test :]
    scaled = images[train]
    images = (images - scaled.mean()) / scaled.std().clamp(min=1 / _LARGEST_PIXEL)
    return Digits(images[train], labels[train], images[test], labels[test])


def batches(num_samples: int, *, batch: int, seed: int, epochs: int) -> Iterator[list[Tensor]]:
    """For each epoch the indices of its batches: shuffled anew, all of one size, what is left over left out."""
    if batch > num_samples:
        raise BadOption(f"a batch of {batch} is more than the {num_samples} digits to train on")
    random = torch.Generator().manual_seed(seed + _ORDER)
    whole = num_samples // batch * batch
    for _ in range(epochs):
        yield list(torch.randperm(num_samples, generator=random)[:whole].split(batch))


def _all_digits() -> tuple[Tensor, Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MemfitError(
            f"the accuracy study trains on the digits of scikit-learn, which cannot be imported ({error}). "
            "Install it: pip install 'memfit[bench]'"
        ) from error
    found = load_digits()
    images = torch.tensor(found.images / _LARGEST_PIXEL, dtype=torch.float32).unsqueeze(1)
    return images, torch.tensor(found.target, dtype=torch.int64)
