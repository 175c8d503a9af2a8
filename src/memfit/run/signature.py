"""What a captured step depends on besides the data: layouts, flags, structure. Another signature, another capture."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memfit.capture.structure import Skeleton, fingerprint, setting
from memfit.precision import float32_precisions
from memfit.torch_internals import autocast_state

_ATOMS = frozenset({bool, int, float, str, type(None)})
_TREE = frozenset({"_parameters", "_buffers", "_modules", "forward", "memfit"})


def signature(model: nn.Module, inputs: list[torch.Tensor], skeleton: Skeleton) -> Any:
    """A hashable key: equal if and only if a step captured under one call may serve the other."""
    return (
        tuple(_layout(tensor) for tensor in inputs),
        fingerprint(skeleton),
        autocast_state(device_types(inputs)),
        _switches(),
        _module_state(model, set()),
    )


def device_types(inputs: list[torch.Tensor]) -> tuple[str, ...]:
    """The device types whose autocast matters: the inputs' and the CPU."""
    return tuple(sorted({"cpu", *(tensor.device.type for tensor in inputs)}))


def _switches() -> Any:
    """torch's own settings that choose ops or kernels."""
    return (
        torch.is_autocast_cache_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        float32_precisions(),
        torch.get_num_threads(),
        torch.backends.mkldnn.enabled,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    )


def _layout(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided:
        return (tensor.layout, tensor.shape, tensor.dtype)
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_leaf)


def _module_state(module: nn.Module, seen: set[int]) -> Any:
    """Flags, settings, hooks and tensor layouts of a module tree: what a user may change between two steps."""
    seen.add(id(module))
    held = module.__dict__
    return (
        id(module),
        tuple(
            (name, value if type(value) in _ATOMS else setting(value, seen))
            for name, value in held.items()
            if name not in _TREE and not (isinstance(value, dict) and not value)
        ),
        tuple(
            (name, p.shape, p.dtype, p.device, p.requires_grad, p.stride() if p.layout is torch.strided else None)
            for table in (held["_parameters"], held["_buffers"])
            for name, p in table.items()
            if p is not None
        ),
        tuple(
            (name, _module_state(child, seen) if id(child) not in seen else id(child))
            for name, child in held["_modules"].items()
            if child is not None
        ),
    )
