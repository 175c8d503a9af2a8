"""When autograd hands over which gradient, and in which parts.

A leaf that is used several times gets several gradients; the engine adds them in the order they arrive. What arrives
from outside the step (a second forward pass, a loss term on the parameter itself) is added in the same sum, so the
parts must be handed over one by one: floating-point addition is not associative.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from memfit.torch_internals import hook_directly


class GradientParts:
    """Watches a backward pass over fakes: the order of the gradients of `wanted`, part by part."""

    def __init__(self, outputs: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
        self._events: list[tuple[int, torch.Tensor | None]] = []
        receiver_of: dict[Any, int] = {}
        for index, leaf in enumerate(wanted):
            receiver_of[torch.autograd.graph.get_gradient_edge(leaf).node] = index
            hook_directly(leaf, partial(self._done, index))
        self._leaf_of = dict(receiver_of)
        self._num_leaves = len(wanted)
        nodes = list(_nodes([t.grad_fn for t in outputs if t.grad_fn is not None]))
        receiver_of |= self._behind_inputs(nodes, receiver_of)
        arrivals: dict[int, int] = {}
        edges: dict[Any, list[tuple[int, int]]] = {}
        for node in nodes:
            for position, (target, _) in enumerate(node.next_functions):
                receiver = receiver_of.get(target)
                if receiver is not None and node not in receiver_of:
                    arrivals[receiver] = arrivals.get(receiver, 0) + 1
                    edges.setdefault(node, []).append((position, receiver))
        self._several = {receiver for receiver, count in arrivals.items() if count > 1}
        for node, found in edges.items():
            several = [(position, receiver) for position, receiver in found if receiver in self._several]
            if several:
                node.register_hook(lambda made, _, several=several: self._arrived(made, several))

    def _done(self, index: int, total: torch.Tensor) -> None:
        self._events.append((index, None))

    @staticmethod
    def _behind_inputs(nodes: list[Any], receiver_of: dict[Any, int]) -> dict[Any, int]:
        """The nodes that stand between an input that is no leaf and the leaf we take its gradient of."""
        return {
            node: receiver_of[node.next_functions[0][0]]
            for node in nodes
            if node.name() == "_NotALeafBackward" and node.next_functions[0][0] in receiver_of
        }

    def _arrived(self, made: tuple[torch.Tensor | None, ...], several: list[tuple[int, int]]) -> None:
        for position, receiver in several:
            part = made[position]
            if part is not None:
                self._events.append((receiver, part))

    def reached_from(self, outputs: Sequence[torch.Tensor]) -> list[frozenset[int]]:
        """For each leaf the indices of the outputs whose graph it is in."""
        found: list[set[int]] = [set() for _ in range(self._num_leaves)]
        for index, output in enumerate(outputs):
            for node in _nodes([output.grad_fn]):
                leaf = self._leaf_of.get(node)
                if leaf is not None:
                    found[leaf].add(index)
        return [frozenset(indices) for indices in found]

    def in_order(self, sums: Sequence[torch.Tensor | None]) -> Iterator[tuple[int, torch.Tensor]]:
        """Index of the leaf and the part handed over, in order; the last part goes when the engine is done with it."""
        last: dict[int, torch.Tensor] = {}
        for index, part in self._events:
            if part is not None:
                if index in last:
                    yield index, last[index]
                last[index] = part
            elif index in last:
                yield index, last.pop(index)
            else:
                total = sums[index]
                if total is not None:
                    yield index, total


def _nodes(roots: Sequence[Any]) -> Iterator[Any]:
    """Every node of the graph behind these, once."""
    seen = set(roots)
    waiting = list(seen)
    while waiting:
        node = waiting.pop()
        yield node
        for target, _ in node.next_functions:
            if target is not None and target not in seen:
                seen.add(target)
                waiting.append(target)
