"""A model and its loss as one module, so that a whole training step can be fitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from memfit.capture.structure import take_apart
from memfit.errors import BadOption
from memfit.zoo import Example

Loss = Callable[..., torch.Tensor]


class TrainingStep(nn.Module):
    """`model` and `loss` in one forward: `step(args, kwargs, targets)` is the loss, ready for backward().

    The three arguments are whole, not unpacked, so that no keyword of the model can clash with ours.
    """

    def __init__(self, model: nn.Module, loss: Loss | None = None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    @classmethod
    def of(cls, example: Example) -> tuple[TrainingStep, tuple[Any, ...]]:
        """The example's step, in training mode, and the arguments to call it with."""
        if not example.model.training:
            example.model.train()
        return cls(example.model, example.loss), (example.args, example.kwargs, example.targets)

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: tuple[Any, ...]) -> torch.Tensor:
        # One expression: a name for the output would hold its bytes while the loss is computed.
        return loss_of(self.model(*args, **kwargs), self.loss, targets)


def loss_of(output: Any, loss: Loss | None = None, targets: tuple[Any, ...] = ()) -> torch.Tensor:
    """The scalar to start the backward pass from.

    With `loss`: `loss(output, *targets)`. Without: the output itself if it is a floating-point scalar; else its `.loss`
    or `["loss"]`, which is what Hugging Face models given labels return; else the sum, over all floating-point tensors
    in it, of the mean of their squares: no loss anyone trains with, but one that every output has a gradient from.
    """
    if loss is not None:
        found: Any = loss(output, *targets)
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            shown = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise BadOption(f"the loss must be a tensor of one element, not {shown}. Reduce it, for example by .mean()")
        return found
    named: Any = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    for scalar in (output, named):
        if isinstance(scalar, torch.Tensor) and scalar.numel() == 1 and scalar.is_floating_point():
            return scalar
    tensors = [tensor for tensor in take_apart(output)[0] if tensor.is_floating_point() or tensor.is_complex()]
    if not tensors:
        raise BadOption("the model returns no floating-point tensor to take a gradient of. Give loss=")
    terms = [(t.abs() if t.is_complex() else t).square().mean() for t in tensors]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
