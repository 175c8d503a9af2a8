"""One of two copies of a model that take the same training steps, one in eager and one fitted."""

from __future__ import annotations

import copy
import gc
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn

from memfit.api import fit, unfit
from memfit.capture.structure import Branch, Fixed, Leaf, Skeleton, put_together, take_apart
from memfit.errors import BadOption, MemfitError
from memfit.plan.encode import lossy_storages
from memfit.plan.options import Options
from memfit.report.step_module import Loss, TrainingStep, loss_of
from memfit.run.fitted import Fitted

Named = Iterator[tuple[str, str, Any]]


@dataclass(frozen=True)
class Randomness:
    """The state of every global random generator: torch's, one per device, Python's and numpy's."""

    torch: Mapping[str, torch.Tensor]
    python: Any
    numpy: Any

    @classmethod
    def now(cls, devices: Sequence[str]) -> Randomness:
        states = {"cpu": torch.get_rng_state()}
        states |= {device: torch.get_device_module(device).get_rng_state(device) for device in devices}
        return cls(states, random.getstate(), numpy.random.get_state())

    @classmethod
    def seeded(cls, seed: int, devices: Sequence[str]) -> Randomness:
        """The state after seeding every generator; the present state is left alone."""
        present = cls.now(devices)
        try:
            torch.default_generator.manual_seed(seed)
            for device in devices:
                with torch.get_device_module(device).device(device):
                    torch.get_device_module(device).manual_seed(seed)
            random.seed(seed)
            numpy.random.seed(seed % 2**32)
            return cls.now(devices)
        finally:
            present.restore()

    def restore(self) -> None:
        for device, state in self.torch.items():
            if device == "cpu":
                torch.set_rng_state(state)
            else:
                torch.get_device_module(device).set_rng_state(state, device)
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)


class Arm:
    """A copy of a model with its own inputs and random state, and what its last step made."""

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        targets: Sequence[Any],
        loss: Loss | None,
        *,
        seed: int,
        options: Options | None,
    ) -> None:
        self.model, self.call, self.loss, self.inputs = _copy(model, (tuple(args), dict(kwargs), tuple(targets)), loss)
        self.options = options
        if not self.model.training:
            self.model.train()
        if options is not None:
            fit(
                self.model,
                budget=None if options.budget is None else options.budget.text,
                policy=options.policy,
                without=options.without,
                max_captures=options.max_captures,
                allow_lossy=options.allow_lossy,
            )
        tensors = [*self.inputs, *self.model.parameters(), *self.model.buffers()]
        self.devices = sorted({str(t.device) for t in tensors} - {"cpu", "meta"})
        self.randomness = Randomness.seeded(seed, self.devices)
        self.output: Any = None
        self.loss_value: torch.Tensor | None = None
        self.forward_s = 0.0
        self.step_s = 0.0
        self._aside: dict[int, torch.Tensor] = {}

    @property
    def fitted(self) -> Fitted | None:
        """What memfit made of this copy; None in the eager arm."""
        return self.model.__dict__.get("memfit")

    @property
    def loses(self) -> bool:
        """True if the newest plan stores anything with loss."""
        plan = None if self.fitted is None else self.fitted.planned.plan
        return plan is not None and bool(lossy_storages(plan.decisions))

    def forget(self) -> None:
        """Drop the gradients and the results of the last step."""
        self.output = self.loss_value = None
        for tensor in (*self.model.parameters(), *self.inputs):
            tensor.grad = None

    def put_gradients_aside(self) -> None:
        """Move gradients in CPU memory to where they stay from step to step; all that reads them finds them there.

        Where times are taken: gradients of the arm that goes first would keep malloc from giving their pages to the
        other, which would fault in new ones. On vgg16_bn that is a fifth of a step.
        """
        for number, tensor in enumerate((*self.model.parameters(), *self.inputs)):
            grad = tensor.grad
            if grad is None or grad.device.type != "cpu" or grad.layout is not torch.strided:
                continue
            place = self._aside.get(number)
            if place is None or (place.shape, place.stride(), place.dtype) != (grad.shape, grad.stride(), grad.dtype):
                place = self._aside[number] = torch.empty_like(grad)
            tensor.grad = place.copy_(grad)

    def step(self) -> None:
        """Forward, loss and backward with this arm's own random state; notes how long they took."""
        args, kwargs, targets = self.call
        outside = Randomness.now(self.devices)
        self.randomness.restore()
        gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with torch.enable_grad():
                start_s = self._clock_s()
                output = self.model(*args, **kwargs)
                self.forward_s = self._clock_s() - start_s
                loss = loss_of(output, self.loss, targets)
                if not loss.requires_grad:
                    raise BadOption(
                        f"nothing in the loss of {type(self.model).__name__} requires grad, so there is no training "
                        "step. Unfreeze a parameter, or give an input that requires grad"
                    )
                loss.backward()
                self.step_s = self._clock_s() - start_s
            self.randomness = Randomness.now(self.devices)
        finally:
            outside.restore()
            if was_enabled:
                gc.enable()
        if self.fitted is not None and not self.fitted.num_captures:
            raise MemfitError(
                f"the fitted copy of {type(self.model).__name__} ran its own forward, so there is nothing to compare. "
                "Its forward pass must run in training mode with gradients enabled"
            )
        self.output, self.loss_value = output, loss

    def update(self, lr: float) -> None:
        """One step of plain gradient descent, so that the next step starts elsewhere."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-lr)

    def start_from(self, other: Arm) -> None:
        """Take over another arm's parameters; all else is equal already, or a difference that has been seen."""
        with torch.no_grad():
            for ours, theirs in zip(self.model.parameters(), other.model.parameters(), strict=True):
                ours.copy_(theirs)

    def made(self) -> Named:
        """What the last step made and changed, in the order it is compared: kind, name, tensor."""
        tensors, skeleton = take_apart(self.output)
        if isinstance(self.model, TrainingStep):
            yield "loss", "loss", self.loss_value
        else:
            for name, value in _named(skeleton, tensors, "output"):
                yield "output", name, value
            yield "loss", "loss", self.loss_value
        for name, parameter in self.model.named_parameters():
            yield "gradient", self._own(name), parameter.grad
        for index, tensor in enumerate(self.inputs):
            if tensor.requires_grad:
                yield "input gradient", f"input {index}", tensor.grad
        for name, buffer in self.model.named_buffers():
            yield "buffer", self._own(name), buffer

    def state(self) -> Named:
        """What the next step starts from: every parameter and the random state."""
        for name, parameter in self.model.named_parameters():
            yield "parameter", self._own(name), parameter
        for device, state in self.randomness.torch.items():
            yield "rng", device, state

    def _own(self, name: str) -> str:
        """The name in the user's model, which a TrainingStep holds one level down."""
        return name.removeprefix("model.") if isinstance(self.model, TrainingStep) else name

    def _clock_s(self) -> float:
        for device in self.devices:
            torch.get_device_module(device).synchronize(device)
        return time.perf_counter()


def _copy(
    model: nn.Module, call: tuple[Any, Any, Any], loss: Loss | None
) -> tuple[nn.Module, tuple[Any, Any, Any], Loss | None, list[torch.Tensor]]:
    """Copies that share nothing with the originals, with aliases among them kept: one memo for all."""
    inputs, skeleton = take_apart(call)
    memo: dict[int, Any] = {}
    try:
        model_copy = copy.deepcopy(model, memo)
        loss_copy = copy.deepcopy(loss, memo)
        # Detached first: torch copies leaves only. The copy is a leaf, so its gradient can be compared.
        fresh = [copy.deepcopy(t.detach(), memo).requires_grad_(t.requires_grad) for t in inputs]
    except (RuntimeError, TypeError) as error:
        raise BadOption(
            f"the steps are run on copies, and {type(model).__name__} or its arguments cannot be copied by "
            f"copy.deepcopy: {error}"
        ) from error
    for module in model_copy.modules():
        unfit(module)
    return model_copy, put_together(skeleton, fresh), loss_copy, fresh


def _named(skeleton: Skeleton, tensors: list[torch.Tensor], name: str) -> Iterator[tuple[str, Any]]:
    """Every tensor and plain value in a nested output, named as one would write it."""
    if isinstance(skeleton, Leaf):
        yield name, tensors[skeleton.index]
    elif isinstance(skeleton, Fixed):
        # Other objects have no equality to rely on.
        if isinstance(skeleton.value, (bool, int, float, str)):
            yield name, skeleton.value
    else:
        assert isinstance(skeleton, Branch)
        for label, part in zip(skeleton.labels, skeleton.parts, strict=True):
            is_item = issubclass(skeleton.type, (list, dict)) or isinstance(label, int)
            yield from _named(part, tensors, f"{name}[{label!r}]" if is_item else f"{name}.{label}")
