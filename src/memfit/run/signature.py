"""What a captured step depends on besides the data: layouts, flags, structure. Another signature, another capture."""

from __future__ import annotations

from itertools import islice
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from memfit.capture.structure import Skeleton, fingerprint
from memfit.torch_internals import autocast_state

_ATOMS = frozenset({bool, int, float, str, type(None)})
_TREE = frozenset({"_parameters", "_buffers", "_modules", "forward", "memfit"})
# Settings are small; what is longer or deeper is data, and counts by identity and length.
_MAX_ITEMS = 256
_MAX_DEPTH = 6


def signature(model: nn.Module, inputs: list[torch.Tensor], skeleton: Skeleton) -> Any:
    """A hashable key: equal if and only if a step captured under one call may serve the other."""
    return (
        tuple(_layout(tensor) for tensor in inputs),
        fingerprint(skeleton),
        autocast_state(device_types(inputs)),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        _module_state(model, set()),
    )


def device_types(inputs: list[torch.Tensor]) -> tuple[str, ...]:
    """The device types whose autocast matters: the inputs' and the CPU."""
    return tuple(sorted({"cpu", *(tensor.device.type for tensor in inputs)}))


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
            (name, value if type(value) in _ATOMS else _setting(value, seen, 0))
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


def _setting(value: Any, seen: set[int], depth: int) -> Any:
    """A hashable form of an attribute: contents of containers and of plain objects, else which object it is."""
    kind = type(value)
    if kind in _ATOMS:
        return value if kind is not float else repr(value)
    if isinstance(value, torch.Tensor):
        return None  # its layout is checked where it is read
    if depth > _MAX_DEPTH or id(value) in seen:
        return id(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return (kind, len(value), tuple(_setting(item, seen, depth + 1) for item in islice(value, _MAX_ITEMS)))
    if isinstance(value, dict):
        items = islice(value.items(), _MAX_ITEMS)
        return (kind, len(value), tuple((_setting(k, seen, 9), _setting(v, seen, depth + 1)) for k, v in items))
    inside = getattr(value, "__dict__", None)
    if not inside or isinstance(value, (nn.Module, type, FunctionType, MethodType)) or callable(value):
        return id(value)
    seen.add(id(value))  # a config shared by all layers is looked at once
    return (id(value), tuple((name, _setting(item, seen, depth + 1)) for name, item in inside.items()))
