"""One training of the accuracy study: a network, a format, when its maps are rounded, and a seed.

Trainings of one seed start from the same weights, see the same batches in the same order and draw the same dropout, so
that what differs between them comes from the rounding alone.

[Note: rates at which a nudge stays small]
Training amplifies differences: at too high a rate one unit in the last place of the first weights ends as points of
accuracy. So each network has a rate at which such a nudge moves fp32's accuracy by less than half a point (standard
deviation over 8 seeds from 100 on): without batch norm 0.02 (0.33 points; at 0.05 it was 1.16), with it 0.05 (0.13).
The first study had 0.05 for both. There one of ten delayed int8 trainings without batch norm fell to 60 %, though at
every step its gradients were within 1.2 % of those that eager makes of the same weights.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memfit.api import fit
from memfit.codecs import dense
from memfit.codecs.registry import codec
from memfit.errors import BadOption, MemfitError
from memfit.report.accuracy_data import Digits, batches, digits
from memfit.report.accuracy_networks import FULL, build, marks, reduce_immediately

REFERENCE, NUDGED, DELAYED, IMMEDIATE = "reference", "nudged", "delayed", "immediate"
MODES = {
    REFERENCE: "plain PyTorch, nothing rounded",
    NUDGED: "the same, with every first weight one unit in its last place higher: what chance alone makes of it",
    DELAYED: "memfit's gist-lossy: forward computes in full precision, backward reads rounded maps",
    IMMEDIATE: "the same maps rounded as soon as they are made: forward goes on with rounded numbers",
}


LEARNING_RATES = {"alexnet": 0.02, "resnet": 0.05}


@dataclass(frozen=True)
class Recipe:
    """How every network is trained. Chosen on fp32 alone, with seeds that the study does not use.

    A third of the digits is for training: an accuracy below its ceiling, and a test set of 1,197 of which one digit is
    0.08 points. After so many epochs both networks have stopped to gain. The rate falls to zero along a cosine, which
    takes out most of the noise that the last few batches make. See [Note: rates at which a nudge stays small].
    """

    epochs: int = 15
    batch: int = 32
    num_train: int = 600
    num_test: int | None = None
    learning_rate: float | None = None
    momentum: float = 0.9

    def rate_of(self, network: str) -> float:
        """The first learning rate, which is the network's own unless one is given."""
        return LEARNING_RATES[network] if self.learning_rate is None else self.learning_rate


@dataclass(frozen=True)
class Training:
    """One training to be done."""

    network: str
    format: str
    mode: str
    seed: int

    @property
    def title(self) -> str:
        return f"{self.network}, {self.format} {self.mode}, seed {self.seed}"


@dataclass(frozen=True)
class Trained:
    """How it went.

    Attributes:
        first_loss: of the first batch, before any update.
        losses: mean training loss of each epoch; inf or NaN if the training went astray.
        accuracies: share of the test set after each epoch, computed in full precision whatever the mode.
        accuracy_as_trained: after the last epoch, with forward rounded as in training; other than in the mode
            `immediate` it is the same.
        test_loss: after the last epoch, in full precision.
        num_rounded: how many maps of a step are rounded.
        num_fallbacks: how many codes had to be dense copies, so that nothing was rounded, over all steps.
    """

    training: Training
    first_loss: float
    losses: tuple[float, ...]
    accuracies: tuple[float, ...]
    accuracy_as_trained: float
    test_loss: float
    num_rounded: int
    num_fallbacks: int
    train_s: float


def train(training: Training, recipe: Recipe) -> Trained:
    """Train once, on one thread; threads and the global random state are as before afterwards."""
    data = digits(num_train=recipe.num_train, num_test=recipe.num_test)
    model = prepare(training)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.rate_of(training.network), momentum=recipe.momentum)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=recipe.epochs)
    losses, accuracies, first_loss = [], [], math.nan
    fallbacks_before, start_s = dense.num_fallbacks(), time.perf_counter()
    with _one_thread(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.default_generator.manual_seed(training.seed)
        orders = batches(recipe.num_train, batch=recipe.batch, seed=training.seed, epochs=recipe.epochs)
        for epoch, order in enumerate(orders):
            model.train()
            made = [_step(model, optimizer, data.train_images[i], data.train_labels[i]) for i in order]
            schedule.step()
            if epoch == 0:
                first_loss = made[0]
            losses.append(sum(made) / len(made))
            accuracies.append(_tested(model, data)[0])
        num_rounded = _num_rounded(model, training)
        test_loss = _tested(model, data)[1]
        for mark in marks(model):
            mark.rounds_in_eval = True
        accuracy_as_trained = _tested(model, data)[0]
    return Trained(
        training,
        first_loss,
        tuple(losses),
        tuple(accuracies),
        accuracy_as_trained,
        test_loss,
        num_rounded,
        dense.num_fallbacks() - fallbacks_before,
        time.perf_counter() - start_s,
    )


def prepare(training: Training) -> nn.Module:
    """The network with its first weights, set up for the mode."""
    model = build(training.network, seed=training.seed)
    match training.mode:
        case "reference":
            pass
        case "nudged":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.nextafter(parameter, torch.full_like(parameter, math.inf)))
        case "delayed":
            fit(model, policy="gist-lossy", format=training.format, allow_lossy=True)
        case "immediate":
            reduce_immediately(model, training.format)
        case _:
            raise BadOption(f"mode {training.mode!r}: unknown. Modes: {', '.join(MODES)}")
    if training.mode in (REFERENCE, NUDGED) and training.format != FULL:
        raise BadOption(f"mode {training.mode!r} rounds nothing: its format is {FULL!r}, not {training.format!r}")
    return model


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> float:
    """One update; the loss before it."""
    optimizer.zero_grad(set_to_none=True)
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def _tested(model: nn.Module, data: Digits) -> tuple[float, float]:
    """The share of the test set that is told rightly, and the loss on it."""
    model.eval()
    with torch.no_grad():
        logits: Tensor = model(data.test_images)
        num_right = int((logits.argmax(1) == data.test_labels).sum())
        return num_right / len(data.test_labels), F.cross_entropy(logits, data.test_labels).item()


def _num_rounded(model: nn.Module, training: Training) -> int:
    """How many maps the step rounded. None at all in a mode that should is an error: it would be fp32 by that name."""
    if training.mode in (REFERENCE, NUDGED):
        return 0
    if training.mode == IMMEDIATE:
        return 0 if training.format == FULL else len(marks(model))
    fitted: Any = model.__dict__["memfit"]
    names = [op.args[-1] for op in fitted.step.ops if op.target == "memfit.encode"]
    num_rounded = sum(codec(name).is_lossy for name in names)
    if not num_rounded:
        raise MemfitError(
            f"{training.title}: the plan encodes nothing by a lossy codec (it has {', '.join(names) or 'no codes'}), "
            "so this training would say nothing about the format"
        )
    return num_rounded


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """So that sums have one order: two trainings that should be equal are, bit for bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
