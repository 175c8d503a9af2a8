"""Objects that a model holds, neither modules nor tensors: a forward pass may read them, not change them."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from memfit.capture.structure import Branch, Fixed, Skeleton
from memfit.errors import CaptureError

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CLOSED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, nn.Module)
_TREE = frozenset({"_parameters", "_buffers", "_modules", "forward", "memfit"})
_BOXES = (list, dict, set)
_MAX_DEPTH = 6


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Raise if a plain object that the model holds is changed inside; put it back as it was in any case."""
    holders = [(where, holder, dict(holder.__dict__)) for where, holder in _holders(model)]
    boxes = [(where, box, box.copy()) for where, _, held in holders for box in held.values() if type(box) in _BOXES]
    changed: list[tuple[str, Any]] = []
    try:
        yield
    finally:
        for where, holder, before in holders:
            _accept_first_settings(holder.__dict__, before)
            if _differs(holder.__dict__, before):
                holder.__dict__.clear()
                holder.__dict__.update(before)
                changed.append((where, holder))
        for where, box, before in boxes:
            if _differs(box, before):
                box.clear()
                box.extend(before) if isinstance(box, list) else box.update(before)
                changed.append((where, box))
    for where, thing in changed[:1]:
        raise CaptureError(
            f"the forward pass changes '{where}' (a {type(thing).__name__}), so replaying it would not. Keep such "
            "state in a buffer (register_buffer) or outside forward"
        )


def _accept_first_settings(now: dict[str, Any], before: dict[str, Any]) -> None:
    """Let a setting that was None be decided in the first forward pass, as transformers does."""
    for name, value in now.items():
        if before.get(name, ...) is None and isinstance(value, _ATOMS):
            before[name] = value


def _differs(now: Any, before: Any) -> bool:
    """True if a container holds other things than before, or in another order; compared by identity."""
    if isinstance(now, dict):
        return now.keys() != before.keys() or any(now[key] is not before[key] for key in before)
    if isinstance(now, set):
        return bool(now != before)
    return len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True))


def held_objects(model: nn.Module, skeleton: Skeleton) -> set[int]:
    """Ids of the generators that exist before the call: one made in the forward pass is new each time."""
    found = {id(torch.default_generator)}
    for module in model.modules():
        found |= {id(value) for value in module.__dict__.values() if isinstance(value, torch.Generator)}

    def visit(part: Skeleton) -> None:
        if isinstance(part, Fixed) and isinstance(part.value, torch.Generator):
            found.add(id(part.value))
        elif isinstance(part, Branch):
            for inside in part.parts:
                visit(inside)

    visit(skeleton)
    return found


def _holders(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Plain objects with attributes, as far as they can be reached from the modules' attributes."""
    seen: set[int] = set()

    def visit(where: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
        if isinstance(value, (*_ATOMS, torch.Tensor)) or depth > _MAX_DEPTH or id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, (list, tuple, set, frozenset)):
            for index, item in enumerate(value):
                yield from visit(f"{where}.{index}", item, depth + 1)
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from visit(f"{where}.{key}", item, depth + 1)
        elif not isinstance(value, _CLOSED) and type(getattr(value, "__dict__", None)) is dict and not callable(value):
            yield where, value
            for name, item in list(value.__dict__.items()):
                yield from visit(f"{where}.{name}", item, depth + 1)

    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            if name not in _TREE:
                yield from visit(".".join(p for p in (path, name) if p), value, 0)
