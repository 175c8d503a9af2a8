"""The layers of a Step, as vDNN speaks of them: what is a convolution or a pool, and which backward ops belong to it.

The head of a layer is a forward op that computes a new tensor from others that depend on the inputs. Views and in-place
ops on what depends on the inputs belong to the layer in front of them: so an in-place ReLU is part of its layer, and
has no buffer of its own. All else (the draw of a dropout's mask, a transposed weight) belongs to the layer that
follows.

The backward half runs the layers in reverse. An op of it belongs to the layer of its module and source line. Where
rewrites or autograd moved one ahead, it belongs to the layer that is still under way: the layers' backward steps
follow each other and never mix. Layers of one module and line that follow each other come back as one step.

[Note: the classifier]
vDNN manages feature extraction; the classifier stays where it is. Here that is the tail of the network from its first
fully-connected layer on: after it nothing but fully-connected layers, activations, dropout and the loss. Fully
connected layers further in front (transformers, auxiliary heads) are layers like any other. If there is no such tail,
or if it is the whole network, it is the last layer before the loss.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from memfit.capture.needs import Need
from memfit.capture.schemas import operand_needs
from memfit.capture.step import Op, Origin, Step
from memfit.cost.traffic import runs_no_kernel
from memfit.plan.rerun import Reruns


class LayerKind(enum.Enum):
    """What vDNN's rules tell apart."""

    CONVOLUTION = "convolution"
    POOL = "pool"
    FULLY_CONNECTED = "fully connected"
    OTHER = "other"


_CONVOLUTIONS = frozenset({"convolution", "_convolution", "convolution_overrideable"})
_FULLY_CONNECTED = frozenset({"addmm", "mm", "linear"})
_LOSSES = (
    "_log_softmax _softmax nll_loss_forward nll_loss2d_forward nll_loss_nd mse_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits smooth_l1_loss huber_loss"
)
_ACTIVATIONS = "relu relu_ gelu tanh tanh_ sigmoid sigmoid_ hardtanh hardtanh_ silu leaky_relu threshold elu"
_DROPOUT = "empty_like bernoulli_ div_ div mul mul_ native_dropout dropout"
_LOSS_OPS = frozenset(_LOSSES.split())
# What may stand behind the first fully-connected layer of a classifier, besides views.
_TAIL_OPS = _FULLY_CONNECTED | _LOSS_OPS | frozenset(f"{_ACTIVATIONS} {_DROPOUT}".split())


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: its forward ops, and the stretch of the backward half that is its own.

    Attributes:
        head: the forward op that makes it a layer.
        start, end: the forward ops from `start` up to, not including, `end`.
        backward_start, backward_end: the same of its backward step; equal if it has none.
    """

    kind: LayerKind
    head: int
    start: int
    end: int
    backward_start: int
    backward_end: int


@dataclass(frozen=True, slots=True)
class FeatureMap:
    """A storage that vDNN may send: what a layer reads and its backward needs again.

    Attributes:
        storage: its number.
        last_reader: the forward op it is sent beside: its last consumer. None for what nobody reads, the indices of a
            pool: they are whole when that layer ends, and travel beside the next.
        layer: where it is sent from: the layer of its last consumer.
        needed_by: the layer in whose backward step it is needed first.
        feeds_convolution: a convolution is among its consumers.
    """

    storage: int
    last_reader: int | None
    layer: int
    needed_by: int
    feeds_convolution: bool


@dataclass(frozen=True)
class Layers:
    """All layers of a step, in forward order."""

    step: Step
    layers: tuple[Layer, ...]

    @classmethod
    def of(cls, step: Step) -> Layers:
        if not step.num_forward:
            return cls(step, ())
        heads, flowing = _heads(step)
        # Each begins where the one in front of it has done its last.
        starts = [0, *(max(f for f in flowing if f < head) + 1 for head in heads[1:])]
        ends = [*starts[1:], step.num_forward]
        spans = _backward_spans(step, starts, flowing)
        return cls(
            step,
            tuple(
                Layer(_kind(step.ops[head]), head, start, end, *span)
                for head, start, end, span in zip(heads, starts, ends, spans, strict=True)
            ),
        )

    @cached_property
    def layer_of(self) -> tuple[int, ...]:
        """For each forward op its layer."""
        return tuple(index for index, layer in enumerate(self.layers) for _ in range(layer.start, layer.end))

    @cached_property
    def classifier(self) -> int:
        """The first layer that stays where it is. See [Note: the classifier]."""
        tail = len(self.layers)
        while tail > 0 and all(_packet(op) in _TAIL_OPS for op in self._kernels(tail - 1)):
            tail -= 1
        connected = [i for i in range(tail, len(self.layers)) if self.layers[i].kind is LayerKind.FULLY_CONNECTED]
        if connected and tail > 0:
            return connected[0]
        if connected:
            return connected[-1]
        before_loss = [
            i for i in range(len(self.layers)) if _packet(self.step.ops[self.layers[i].head]) not in _LOSS_OPS
        ]
        return max(before_loss, default=0)

    @cached_property
    def feature_maps(self) -> tuple[FeatureMap, ...]:
        """Everything that vDNN may send, in the order of the layers it is sent from."""
        reruns = Reruns(self.step)
        found = [self._feature_map(s, reruns.writers[s][-1]) for s in reruns.owned if not reruns.why_not_offload(s)]
        return tuple(sorted((f for f in found if f is not None), key=lambda f: (f.layer, f.storage)))

    def _feature_map(self, storage: int, last_write: int) -> FeatureMap | None:
        """What is known of it as a feature map, or None: not read again in backward, or part of the classifier."""
        step, life = self.step, self.step.storage[storage]
        if life.first_backward is None or life.last_forward is None:
            return None
        readers = {r for v in life.values for r in step.readers.get(v, ()) if last_write < r < step.num_forward}
        is_floating = all(step.values[v].dtype.is_floating_point for v in life.values)
        is_index = not readers and not is_floating and self.layers[self.layer_of[last_write]].kind is LayerKind.POOL
        if not is_index and not (readers and is_floating):
            return None
        layer = self.layer_of[life.last_forward] + is_index
        if layer >= self.classifier:
            return None
        return FeatureMap(
            storage,
            None if is_index else life.last_forward,
            layer,
            self._needed_by(life.first_backward),
            any(_packet(step.ops[r]) in _CONVOLUTIONS for r in readers),
        )

    def _needed_by(self, op: int) -> int:
        return next(i for i, layer in enumerate(self.layers) if layer.backward_start <= op < layer.backward_end)

    def _kernels(self, layer: int) -> Iterator[Op]:
        for index in range(self.layers[layer].start, self.layers[layer].end):
            if not runs_no_kernel(self.step, self.step.ops[index]):
                yield self.step.ops[index]


def layer_to_prefetch(kinds: Sequence[LayerKind], pending: Collection[int], current: int) -> int | None:
    """vDNN's findPrefetchLayer: the nearest layer in front of the current one whose maps are still away.

    The window ends with the first convolution, which may be the one: at most one transfer is hidden by one long kernel,
    and what is fetched too early takes the memory that sending it made.
    """
    for layer in reversed(range(current)):
        if layer in pending:
            return layer
        if kinds[layer] is LayerKind.CONVOLUTION:
            return None
    return None


def _heads(step: Step) -> tuple[list[int], list[int]]:
    """The forward ops that make layers, and all forward ops that read what depends on the inputs."""
    flows = {step.values[s.value].storage for s in step.sources if s.origin is Origin.INPUT}
    heads, flowing = list[int](), list[int]()
    for index, op in enumerate(step.ops[: step.num_forward]):
        read = {step.values[v].storage for _, v, need in operand_needs(op, step.values) if need is not Need.SHAPE}
        if not read & flows:
            continue
        flowing.append(index)
        made = {step.values[v].storage for v in op.made}
        if made - flows and not runs_no_kernel(step, op):
            heads.append(index)
        flows |= made
    return heads or [0], flowing or [0]


def _kind(op: Op) -> LayerKind:
    packet = _packet(op)
    if packet in _CONVOLUTIONS:
        return LayerKind.CONVOLUTION
    if "pool" in packet:
        return LayerKind.POOL
    return LayerKind.FULLY_CONNECTED if packet in _FULLY_CONNECTED else LayerKind.OTHER


def _backward_spans(step: Step, starts: Sequence[int], flowing: Sequence[int]) -> list[tuple[int, int]]:
    """For each layer the stretch of the backward half that is its own: layers in reverse, none mixed."""
    by_line: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index in flowing:
        op = step.ops[index]
        if not runs_no_kernel(step, op):
            by_line[op.path, op.source].append(bisect_right(starts, index) - 1)
    # From the end, where the first layer is: an op of a layer that has been left already was moved ahead.
    current, end = 0, len(step.ops)
    spans = [(step.num_forward, step.num_forward)] * len(starts)
    for index in reversed(range(step.num_forward, len(step.ops))):
        op = step.ops[index]
        known = [layer for layer in by_line.get((op.path, op.source), ()) if layer >= current]
        if known and known[0] > current:
            current, end = known[0], index + 1
        spans[current] = (index, end)
    return spans


def _packet(op: Op) -> str:
    """`aten.convolution.default` -> `convolution`."""
    return op.target.split(".")[1]
