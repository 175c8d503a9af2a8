"""What a captured step depends on besides the data: layouts, flags, structure. Another signature, another capture."""

from __future__ import annotations

from typing import Any

import torch

from memfit.capture.structure import Skeleton, fingerprint
from memfit.precision import cpu_settings
from memfit.run.module_state import ModuleState
from memfit.torch_internals import autocast_state


def signature(model: ModuleState, inputs: list[torch.Tensor], skeleton: Skeleton) -> Any:
    """A hashable key: equal if and only if a step captured under one call may serve the other."""
    return (
        tuple(_layout(tensor) for tensor in inputs),
        fingerprint(skeleton),
        autocast_state(device_types(inputs)),
        _switches(),
        model.read(),
    )


def device_types(inputs: list[torch.Tensor]) -> tuple[str, ...]:
    """The device types whose autocast matters: the inputs' and the CPU."""
    return tuple(sorted({"cpu", *(tensor.device.type for tensor in inputs)}))


def _switches() -> Any:
    """torch's own settings that choose ops or kernels."""
    return (
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        cpu_settings(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    )


def _layout(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided:
        return (tensor.layout, tensor.shape, tensor.dtype)
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_leaf)
