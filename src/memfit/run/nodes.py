"""The chain of autograd nodes that runs the backward half slice by slice.

    parameters of the last slice -> Link_n -> ... -> Link_0 -> Head -> outputs

The forward half has run before the chain is built. Backward enters at Head, which takes the tangents in; then each Link
runs its slice and returns the gradients it made, so that autograd accumulates (or steals) each at once, fires hooks
when eager would, and the next Link runs after that. The links carry zero-size tensors.

[Note: what is kept where]
Values that only our code can reach are in `Call.values`. What the caller can reach too (parameters, inputs, outputs) is
kept by autograd's own save_for_backward on Head: it checks versions, so that writing into such a tensor between forward
and backward is the same error as in eager, and it knows how to hold an output without a reference cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from memfit.errors import UnsupportedUse
from memfit.torch_internals import (
    at_end_of_backward,
    backward_keeps_graph,
    give_accumulation_hooks,
    no_autocast,
    take_accumulation_hooks,
)

Slice = Callable[[dict[str, Any]], tuple[Any, ...]]


class Call:
    """One forward pass waiting for its backward: the live values, and what to do with them."""

    def __init__(
        self,
        values: dict[str, Any],
        tangent_names: Sequence[str | None],
        shared: Sequence[tuple[str, torch.Tensor]],
        begin: Callable[[Call, tuple[torch.Tensor | None, ...]], Sequence[Slice]],
        devices: tuple[str, ...],
        path: str,
    ) -> None:
        self.values = values
        self.tangent_names = tangent_names
        self.shared = list(shared)
        self.shared_names = [name for name, _ in shared]
        self.begin = begin
        self.devices = devices
        self.path = path
        self.slices: Sequence[Slice] = ()
        self.watched: list[tuple[str, torch.Tensor, int]] = []
        self._quiet: list[tuple[torch.Tensor, Any]] = []
        self._reached: set[int] = set()

    def forget_shared(self) -> None:
        """Drop our references to what autograd now keeps: an output among them would otherwise hold itself alive."""
        self.shared.clear()

    def start(self, tangents: tuple[torch.Tensor | None, ...], saved: Sequence[torch.Tensor]) -> None:
        """Take in the tangents and what autograd kept for us, and choose the slices that fit them."""
        for name, tensor, version in self.watched:
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"'{name}' of the fitted module, shape {tuple(tensor.shape)}, is at version {tensor._version}; "
                    f"expected version {version} instead"
                )
        self.values.update(zip(self.shared_names, saved, strict=True))
        self.slices = self.begin(self, tangents)
        for tangent_name, tangent in zip(self.tangent_names, tangents, strict=True):
            if tangent_name is not None and tangent is not None:
                self.values[tangent_name] = tangent

    def run(self, index: int) -> tuple[Any, ...]:
        """Run one slice: the gradients it hands over."""
        with torch.no_grad(), no_autocast(self.devices):
            return self.slices[index](self.values)

    def keep_hooks_quiet(self, receivers: Sequence[torch.Tensor], gradients: Sequence[Any]) -> None:
        """Hold back the hooks of parameters that get no gradient: eager would not visit them, the engine now does."""
        for receiver, gradient in zip(receivers, gradients, strict=True):
            if gradient is not None:
                self._reached.add(id(receiver))
            elif receiver.is_leaf and id(receiver) not in self._reached:
                hooks = take_accumulation_hooks(receiver)
                if hooks:
                    self._quiet.append((receiver, hooks))
        if self._quiet:
            at_end_of_backward(self.let_hooks_fire)

    def let_hooks_fire(self) -> None:
        """Put back the hooks that were held; the engine has visited those parameters."""
        while self._quiet:
            give_accumulation_hooks(*self._quiet.pop())


class _Link(torch.autograd.Function):
    """Runs one slice of the backward half."""

    @staticmethod
    def forward(ctx: Any, call: Call, index: int, link: torch.Tensor | None, *receivers: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        ctx.index = index
        ctx.is_last = link is None
        ctx.receivers = receivers
        return receivers[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, link: torch.Tensor) -> tuple[Any, ...]:
        ctx.call.let_hooks_fire()
        gradients = ctx.call.run(ctx.index)
        ctx.call.keep_hooks_quiet(ctx.receivers, gradients)
        return (None, None, None if ctx.is_last else link, *gradients)


class _Head(torch.autograd.Function):
    """Gives the outputs a history; its backward takes the tangents in."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, outputs: list[torch.Tensor], constant: list[torch.Tensor], link: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*constant)
        ctx.save_for_backward(link, *(tensor for _, tensor in call.shared))
        call.forget_shared()
        ctx.call = call
        returned = tuple(outputs)
        outputs.clear()
        return returned

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        link, *saved = ctx.saved_tensors  # raises eager's own error if the graph was used before
        if backward_keeps_graph() or torch.is_grad_enabled():
            raise UnsupportedUse(
                f"backward through {ctx.call.path} with retain_graph=True or create_graph=True: memfit frees and "
                "reuses memory as backward goes, so it can run once. Add the losses and call backward once, or call "
                "memfit.unfit(model) where a second backward or a second derivative is needed"
            )
        ctx.call.start(tangents, saved)
        return (None, None, None, torch.zeros_like(link))


def attach(
    call: Call,
    outputs: list[torch.Tensor],
    constant: list[torch.Tensor],
    receivers: Sequence[Sequence[torch.Tensor]],
) -> tuple[torch.Tensor, ...]:
    """Build the chain behind these outputs; `receivers[k]` are the tensors whose gradients slice k makes."""
    link: torch.Tensor | None = None
    for index in reversed(range(len(receivers))):
        link = _Link.apply(call, index, link, *receivers[index])
    result = _Head.apply(call, outputs, constant, link)
    assert isinstance(result, tuple)
    return result
