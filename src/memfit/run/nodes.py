r"""The autograd nodes that run the backward half slice by slice.

    parameters of the last slice -> Link_n -> ... -> Link_0 -> Head_a -> output a
                                                           \-> Head_b -> output b

The forward half has run before the nodes are built. Backward enters at the Heads of the outputs that the loss used,
each of which takes its tangent in; then each Link runs its slice and returns the gradients it made, so that autograd
accumulates (or steals) each at once, fires hooks when eager would, and the next Link runs after that. The links carry
zero-size tensors.

[Note: groups]
Parameters that are reached from the same outputs form a group with a chain of its own, behind the Heads of just those
outputs: a parameter that the loss does not reach is not visited by the engine, as in eager. Links are made from the
last slice to the first, and the engine prefers what was made later, so the chains together keep the order of the
slices, and all Heads run before the first Link.

[Note: what is kept where]
Values of the step are in `Call.values`. Parameters, buffers and inputs, which the caller can write to, are kept by
autograd's own save_for_backward: it checks versions, so that writing into one between forward and backward is the same
error as in eager. Outputs are kept as aliases that share the version counter; the output itself would make a cycle.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from memfit.errors import UnsupportedUse
from memfit.precision import cpu_settings
from memfit.stand_ins import torchs_own
from memfit.torch_internals import (
    apply_outside_transforms,
    backward_keeps_graph,
    no_autocast,
    will_run_in_this_backward,
)

Slice = Callable[[dict[str, Any]], tuple[Any, ...]]
Tangents = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class Handover:
    """What one Link does: run up to a slice, and hand over some of its gradients to these sources."""

    slice: int
    slots: tuple[int, ...]
    receivers: tuple[int, ...]
    group: int


class StepWatch(Protocol):
    """Told when the two halves of a call run; what the caller does between them is not ours."""

    def begin(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def end(self) -> None: ...


class Call:
    """One forward pass waiting for its backward: the live values, and what to do with them."""

    def __init__(
        self,
        values: dict[str, Any],
        tangent_names: Sequence[str | None],
        watched: Sequence[tuple[str, torch.Tensor]],
        begin: Callable[[Call, Tangents], Sequence[Slice]],
        devices: tuple[str, ...],
        path: str,
        watch: StepWatch | None = None,
    ) -> None:
        self._watch = watch
        self.values = values
        self.path = path
        self._tangent_names = tangent_names
        self._watched = [(name, tensor, tensor._version) for name, tensor in watched]
        self._begin = begin
        self._devices = devices
        self._heads: list[tuple[int, weakref.ref[Any]]] = []
        self._tangents: dict[int, torch.Tensor | None] = {}
        self._slices: Sequence[Slice] | None = None
        self._next = 0
        self._settings = cpu_settings()
        self.told_otherwise = ""  # what torch has been told since the forward half
        self._held: dict[tuple[int, int], Any] = {}

    def add_head(self, position: int, node: Any) -> None:
        """Remember the node behind an output, without keeping it alive."""
        self._heads.append((position, weakref.ref(node)))

    def take_tangent(self, position: int, tangent: torch.Tensor | None) -> None:
        self._tangents[position] = tangent

    @property
    def has_started(self) -> bool:
        return self._slices is not None

    def take_shared(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """Put what autograd kept for us with the other values."""
        self.values.update(zip(names, tensors, strict=True))

    def hand_over(self, handover: Handover) -> list[Any]:
        """Run the slices up to this one, and return the gradients asked for."""
        if self._slices is None:
            if self._watch is not None:
                self._watch.resume()
            self.told_otherwise = self._settings.difference(cpu_settings())
            self._slices = self._start()
        if self.told_otherwise:
            # The forward half, and what stands in for kernels of torch, is of other settings. Eager would go on too.
            with torchs_own():
                return self._hand_over(self._slices, handover)
        return self._hand_over(self._slices, handover)

    def _hand_over(self, slices: Sequence[Slice], handover: Handover) -> list[Any]:
        # As a rule backward is called that way, and to see to it takes longer than to look.
        if torch.is_grad_enabled() or any(map(torch.is_autocast_enabled, self._devices)):
            with torch.no_grad(), no_autocast(self._devices):
                made = self._run_up_to(slices, handover)
        else:
            made = self._run_up_to(slices, handover)
        if self._watch is not None and self._next == len(slices):
            self._watch.end()
            self._watch = None
        return made

    def _run_up_to(self, slices: Sequence[Slice], handover: Handover) -> list[Any]:
        while self._next <= handover.slice:
            made = slices[self._next](self.values)
            self._next += 1
            if self._next > handover.slice and len(made) == len(handover.slots):
                return [made[slot] for slot in handover.slots]
            self._held.update({(self._next - 1, slot): gradient for slot, gradient in enumerate(made)})
            del made
        return [self._held.pop((handover.slice, slot)) for slot in handover.slots]

    def _start(self) -> Sequence[Slice]:
        """Check that nothing was written to, take in the tangents, and choose the slices that fit them."""
        for name, tensor, version in self._watched:
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"'{name}' of the fitted module, shape {tuple(tensor.shape)}, is at version {tensor._version}; "
                    f"expected version {version} instead"
                )
        self._watched.clear()
        for position, reference in self._heads:
            node = reference()
            if node is not None and position not in self._tangents and will_run_in_this_backward(node):
                raise UnsupportedUse(
                    f"backward through {self.path} began before the gradient of output {position} was there. "
                    "Call backward on one loss, from one thread"
                )
        tangents = tuple(self._tangents.pop(position, None) for position in range(len(self._tangent_names)))
        slices = self._begin(self, tangents)
        for tangent_name, tangent in zip(self._tangent_names, tangents, strict=True):
            if tangent_name is not None and tangent is not None:
                self.values[tangent_name] = tangent
        return slices


class _Link(torch.autograd.Function):
    """Runs slices of the backward half and hands over gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        handover: Handover,
        shared: Sequence[tuple[str, torch.Tensor]],
        link: torch.Tensor | None,
        *receivers: torch.Tensor,
    ) -> torch.Tensor:
        ctx.call = call
        ctx.handover = handover
        ctx.is_last = link is None
        ctx.shared_names = [name for name, _ in shared]
        ctx.was_used = False
        made = receivers[0].new_empty(0)
        ctx.save_for_backward(made, *(tensor for _, tensor in shared))
        return made

    @staticmethod
    def backward(ctx: Any, link: torch.Tensor) -> tuple[Any, ...]:
        # Not on every pass: once backward has started, hooks may have written to parameters.
        if ctx.was_used or (ctx.shared_names and not ctx.call.has_started):
            _, *saved = ctx.saved_tensors  # raises eager's own error if the graph was used before
            ctx.call.take_shared(ctx.shared_names, saved)
        ctx.was_used = True
        return (None, None, None, None if ctx.is_last else link, *ctx.call.hand_over(ctx.handover))


class _Head(torch.autograd.Function):
    """Gives an output a history; its backward takes the tangent in."""

    @staticmethod
    def forward(ctx: Any, call: Call, position: int, holder: list[torch.Tensor], *links: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(links[0])
        ctx.num_links = len(links)
        ctx.call = call
        ctx.position = position
        return holder.pop()  # not an argument: autograd would take the output for a view of an input

    @staticmethod
    def backward(ctx: Any, tangent: torch.Tensor | None) -> tuple[Any, ...]:
        (link,) = ctx.saved_tensors  # raises eager's own error if the graph was used before
        if backward_keeps_graph() or torch.is_grad_enabled():
            raise UnsupportedUse(
                f"backward through {ctx.call.path} with retain_graph=True or create_graph=True: memfit frees and "
                "reuses memory as backward goes, so it can run once. Add the losses and call backward once, or call "
                "memfit.unfit(model) where a second backward or a second derivative is needed"
            )
        ctx.call.take_tangent(ctx.position, tangent)
        return (None, None, None, *([torch.zeros_like(link)] * ctx.num_links))


def attach(
    call: Call,
    outputs: list[torch.Tensor],
    groups_of_output: Sequence[Sequence[int] | None],
    handovers: Sequence[Handover],
    sources: Sequence[Any],
    shared: Sequence[tuple[str, torch.Tensor]],
) -> None:
    """Build the nodes behind the outputs that have groups (None: not differentiable), and give those a history."""
    links: dict[int, torch.Tensor] = {}
    add_link = apply_outside_transforms(_Link)
    first = {handover.group: index for index, handover in reversed(list(enumerate(handovers)))}
    for index in reversed(range(len(handovers))):
        handover = handovers[index]
        # The first link of a group brings along what autograd keeps for us.
        kept = shared if first[handover.group] == index else ()
        receivers = [sources[receiver] for receiver in handover.receivers]
        links[handover.group] = add_link(call, handover, kept, links.get(handover.group), *receivers)
    for position, groups in enumerate(groups_of_output):
        if groups is not None:
            holder = [outputs[position]]
            # An output whose backward reaches nothing of ours requires grad all the same.
            behind = [links[group] for group in groups] or [holder[0].new_empty(0).requires_grad_()]
            outputs[position] = _Head.apply(call, position, holder, *behind)
            call.add_head(position, outputs[position].grad_fn)
