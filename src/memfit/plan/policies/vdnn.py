"""vdnn-all and vdnn-conv: send the inputs of layers away, one layer at a time (Rhu et al. 2016).

What travels are the inputs of layers that backward needs again, up to the classifier (plan/offloading/layers.py); all
of them, or those of convolutions only. A pool of ATen needs no input in backward but the indices of the winners: those
travel in its stead, beside the layer that follows, since the pool itself makes them.

- Forward: the copy starts with the last op that reads the map, so once however many layers read it, and after any
  in-place activation. Compute waits for it at the end of that layer. Nothing spills into the next.
- Backward: while a layer's step runs, the maps of one other layer come back: the nearest that is still away, if no
  convolution lies between (layer_to_prefetch). Compute waits for them at the end of that step. What nobody fetched is
  fetched when it is needed, while compute waits.

These are the published rules, also where others are better. A network without convolutions (a transformer) has windows
without end: each step fetches the nearest maps that are away. vdnn-conv has nothing to send there, and keeps all.
"""

from __future__ import annotations

from collections import defaultdict

from memfit.capture.step import Step
from memfit.cost.costs import Costs
from memfit.plan.decisions import Decisions, Moments, Offload
from memfit.plan.offloading.layers import FeatureMap, Layers, layer_to_prefetch
from memfit.plan.offloading.way_out import tier_of
from memfit.plan.policies.policy import Policy


def decide_all(step: Step, costs: Costs, budget_bytes: int | None) -> Decisions:
    """Every feature map."""
    return offloads(Layers.of(step), tier_of(costs), convolutions_only=False)


def decide_conv(step: Step, costs: Costs, budget_bytes: int | None) -> Decisions:
    """The feature maps that convolutions read."""
    return offloads(Layers.of(step), tier_of(costs), convolutions_only=True)


def offloads(layers: Layers, tier: str, *, convolutions_only: bool) -> Decisions:
    """The decisions with the moments of vDNN's schedule."""
    maps = [m for m in layers.feature_maps if m.feeds_convolution or not convolutions_only]
    fetches = _fetches(layers, maps)
    decided = {}
    for feature_map in maps:
        layer = layers.layers[feature_map.layer]
        send = layer.start if feature_map.last_reader is None else feature_map.last_reader
        decided[feature_map.storage] = Offload(tier, Moments(send, layer.end, *fetches[feature_map.storage]))
    return decided


def _fetches(layers: Layers, maps: list[FeatureMap]) -> dict[int, tuple[int, int]]:
    """For each storage in front of which backward op its copy back begins, and in front of which compute waits."""
    kinds = [layer.kind for layer in layers.layers]
    pending: dict[int, list[int]] = defaultdict(list)
    for feature_map in maps:
        pending[feature_map.needed_by].append(feature_map.storage)
    found: dict[int, tuple[int, int]] = {}
    for index in reversed(range(len(kinds))):
        layer = layers.layers[index]
        if layer.backward_start == layer.backward_end:
            continue  # no kernel of it runs, and nothing is hidden behind it
        for storage in pending.pop(index, ()):
            first_use = layers.step.storage[storage].first_backward
            assert first_use is not None
            found[storage] = (first_use, first_use)
        ahead = layer_to_prefetch(kinds, pending, index)
        if ahead is not None:
            for storage in pending.pop(ahead):
                found[storage] = (layer.backward_start, layer.backward_end)
    return found


VDNN_ALL = Policy("vdnn-all", "send the inputs of all layers away (vDNN, Rhu et al. 2016)", decide_all)
VDNN_CONV = Policy("vdnn-conv", "send the inputs of convolutions away (vDNN, Rhu et al. 2016)", decide_conv)
