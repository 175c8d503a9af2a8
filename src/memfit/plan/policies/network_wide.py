"""network-wide: the account of the frameworks of 2016, which papers of that time compare with.

Every feature map of the network is allocated at once and for good; two buffers, each as large as the largest map, serve
for all gradients of maps; one workspace, as large as the largest, serves for all layers. Activations work in place.
Maps are floating-point tensors: those frameworks kept no 64-bit indices of max-pooling.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.capture.step import Kind, Origin, Step
from memfit.cost.costs import Costs
from memfit.plan.policies.policy import Policy

NETWORK_WIDE = Policy("network-wide", "all feature maps resident, shared gradient buffers (2016 frameworks)", None)


@dataclass(frozen=True)
class NetworkWide:
    """The account by its parts."""

    parameter_bytes: int
    gradient_bytes: int
    input_bytes: int
    map_bytes: int
    gradient_buffer_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.input_bytes
            + self.map_bytes
            + self.gradient_buffer_bytes
            + self.workspace_bytes
        )

    @classmethod
    def of(cls, step: Step, costs: Costs) -> NetworkWide:
        maps = [
            s.bytes
            for s in step.storages
            if s.maker is not None
            and s.maker < step.num_forward
            and all(step.values[v].dtype.is_floating_point for v in s.values)
        ]
        inputs = {step.values[s.value].storage for s in step.sources if s.origin is Origin.INPUT}
        return cls(
            parameter_bytes=sum(s.bytes for s in step.storages if s.kind is Kind.PARAMETER),
            gradient_bytes=step.gradient_bytes,
            input_bytes=sum(step.storage_bytes[s] for s in inputs),
            map_bytes=sum(maps),
            gradient_buffer_bytes=2 * max(maps, default=0),
            workspace_bytes=max((cost.workspace_bytes for cost in costs.of(step)), default=0),
        )


def layer_input_bytes(step: Step) -> dict[str, int]:
    """Bytes that convolutions and max-pools of the forward half read as their input, by kind of layer."""
    kinds = {"aten.convolution": "convolution", "aten.max_pool2d": "pooling", "aten.max_pool2d_with_indices": "pooling"}
    total = dict.fromkeys(kinds.values(), 0)
    for op in step.ops[: step.num_forward]:
        kind = kinds.get(op.target.rsplit(".", 1)[0])
        if kind is not None:
            total[kind] += step.values[next(op.reads())].bytes
    return total
