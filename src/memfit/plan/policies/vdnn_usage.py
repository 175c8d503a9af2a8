"""How much memory a plan uses on average, by each meaning the word may have.

vDNN's paper reports average usage and does not say, as far as we know, over what. So all three are computed: over time,
over layers (each layer's most bytes, forward and backward), over kernels (each op that runs one counts once). And two
ways to count: all bytes, or those that vDNN manages, which are feature maps, their gradients and workspaces: not
parameters, not their gradients, not the inputs. Managed bytes alone can be cut by nine tenths on AlexNet, whose
parameters and their gradients are two fifths of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memfit.capture.step import Kind
from memfit.cost.traffic import runs_no_kernel
from memfit.plan.ledger import KINDS, Entry
from memfit.plan.offloading.layers import Layers
from memfit.plan.program import Run
from memfit.plan.simulate import Timeline

_MANAGED = tuple(KINDS.index(kind) for kind in (Kind.SAVED, Kind.TRANSIENT))


@dataclass(frozen=True, slots=True)
class Averages:
    """Mean bytes over time, over layers and over kernels."""

    time_bytes: int
    layer_bytes: int
    kernel_bytes: int


def managed_bytes(entry: Entry) -> int:
    """Feature maps, their gradients and workspaces."""
    return sum(entry.bytes[kind] for kind in _MANAGED) + entry.workspace_bytes


def all_bytes(entry: Entry) -> int:
    return entry.total_bytes


def averages(timeline: Timeline, layers: Layers, count: Callable[[Entry], int]) -> Averages:
    """The three means of what `count` counts."""
    step = timeline.program.step
    place: dict[int, tuple[int, bool]] = {}
    for index, layer in enumerate(layers.layers):
        place |= dict.fromkeys(range(layer.start, layer.end), (index, False))
        place |= dict.fromkeys(range(layer.backward_start, layer.backward_end), (index, True))
    over_time = 0
    most: dict[tuple[int, bool], int] = {}
    kernels: list[int] = []
    spans = zip(timeline.ledger.entries, timeline.held, timeline.starts_ps, timeline.ends_ps, strict=True)
    for entry, held, start_ps, end_ps in spans:
        over_time += count(held) * (end_ps - start_ps)
        if isinstance(entry.instruction, Run) and not runs_no_kernel(step, step.ops[entry.instruction.op]):
            at = place[entry.instruction.op]
            most[at] = max(most.get(at, 0), count(entry))
            kernels.append(count(entry))
    return Averages(over_time // max(timeline.ends_ps[-1], 1), _mean(list(most.values())), _mean(kernels))


def _mean(sizes: Sequence[int]) -> int:
    return sum(sizes) // max(len(sizes), 1)
