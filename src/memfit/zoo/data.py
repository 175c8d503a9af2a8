"""Example inputs, targets and losses for the networks of the zoo: random, reproducible, free on the meta device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from memfit.errors import BadOption
from memfit.zoo.catalogue import Network, spec

_LABELS = 0x1ABE1  # added to the seed, so that labels are not drawn from the same stream as images


def inputs(
    name: str,
    *,
    batch: int | None = None,
    image: int | None = None,
    device: str | torch.device = "cpu",
    seed: int = 0,
    num_classes: int | None = None,
) -> tuple[Tensor, ...]:
    """The positional arguments of the network's forward: published batch and size, unless given.

    `image` is the sequence length for gpt2. `num_classes` bounds gpt2's token ids, for one that was built with a
    smaller `vocab_size`; images have no use for it. The same seed gives the same data on every device, and the
    global random state is left alone.
    """
    network, batch, image, num_classes = _resolve(name, batch, image, num_classes)
    if network.task == "next_token":
        return (_sequence(batch, image, num_classes, device, seed)[0],)
    shape = (batch, network.channels, image, image)
    if torch.device(device).type == "meta":
        return (torch.empty(shape, device=device),)
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device),)


def targets(
    name: str,
    *,
    batch: int | None = None,
    image: int | None = None,
    device: str | torch.device = "cpu",
    seed: int = 0,
    num_classes: int | None = None,
) -> tuple[Tensor, ...]:
    """What `loss(name)` takes after the output: a class per image (per pixel for unet), or the next token of each.

    Give the same arguments as to `inputs`; for gpt2 these are then the same sequences, one token on.
    """
    network, batch, image, num_classes = _resolve(name, batch, image, num_classes)
    if network.task == "next_token":
        return (_sequence(batch, image, num_classes, device, seed)[1],)
    shape = (batch, image, image) if network.task == "segment" else (batch,)
    return (_integers(num_classes, shape, device, seed + _LABELS),)


def loss(name: str) -> Callable[..., Tensor]:
    """The loss of the network, called as `loss(output, *targets)`: the mean cross entropy."""
    return _token_cross_entropy if spec(name).task == "next_token" else _cross_entropy


def _resolve(name: str, batch: int | None, image: int | None, num_classes: int | None) -> tuple[Network, int, int, int]:
    """Fill in what was published for what was not given, and check what was."""
    network = spec(name)
    batch = network.batch if batch is None else batch
    image = network.image if image is None else image
    num_classes = network.num_classes if num_classes is None else num_classes
    if batch < 1:
        raise BadOption(f"{name} needs a batch of at least 1, not {batch}.")
    if num_classes < 1:
        raise BadOption(f"{name} needs at least 1 class, not {num_classes}.")
    network.check_image(image)
    return network, batch, image, num_classes


def _sequence(batch: int, length: int, vocab_size: int, device: str | torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Token ids and the ids that follow them, each in storage of its own."""
    ids = _integers(vocab_size, (batch, length + 1), device, seed)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _integers(high: int, shape: tuple[int, ...], device: str | torch.device, seed: int) -> Tensor:
    if torch.device(device).type == "meta":
        return torch.empty(shape, dtype=torch.int64, device=device)
    # Drawn on the CPU and then moved: each device has its own random stream for one seed.
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed)).to(device)


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def _token_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
