"""A stand-in for a module tree that holds fake tensors, so that capture never touches the user's module.

The twin has the same classes, attributes and nesting; every tensor is replaced by its fake, everything else is shared.
Whatever a forward pass does to the twin (assigning an attribute, appending to a list) is visible afterwards and has
not happened to the user's module.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memfit.capture.libraries import HARMLESS_ATTRIBUTES, is_pure_hook
from memfit.capture.step import Origin
from memfit.errors import CaptureError

# Instance attributes that fit() adds; a twin runs the model's own forward.
FITTED_ATTRIBUTES = ("forward", "memfit")


@dataclass(frozen=True)
class Slot:
    """Where in the module tree a tensor hangs: in which module's which dict, under which keys."""

    owner: nn.Module
    path: str
    table: str
    keys: tuple[Any, ...]
    origin: Origin

    @property
    def name(self) -> str:
        return ".".join(part for part in (self.path, *map(str, self.keys)) if part)

    def read(self) -> Any:
        """What hangs there now, or None if the place is gone."""
        if self.table and len(self.keys) == 1:  # nearly all, and read at every call
            return self.owner.__dict__[self.table].get(self.keys[0])
        found: Any = self.owner.__dict__ if self.table == "" else self.owner.__dict__[self.table]
        try:
            for key in self.keys:
                found = found[key]
        except (KeyError, IndexError, TypeError):
            return None
        return found


def slots_of(model: nn.Module) -> Iterator[tuple[Slot, torch.Tensor]]:
    """Every tensor in the module tree with its place: parameters, buffers, and plain attributes."""
    for path, module in model.named_modules():
        for table, origin in (("_parameters", Origin.PARAMETER), ("_buffers", Origin.BUFFER)):
            for key, tensor in module.__dict__[table].items():
                if tensor is not None:
                    yield Slot(module, path, table, (key,), origin), tensor
        for key, value in module.__dict__.items():
            if key not in ("_parameters", "_buffers", "_modules", *FITTED_ATTRIBUTES):
                for keys, tensor in _tensors_in(value, (key,)):
                    yield Slot(module, path, "", keys, Origin.ATTRIBUTE), tensor


def _tensors_in(value: Any, keys: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield keys, value
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _tensors_in(item, (*keys, index))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors_in(item, (*keys, key))


def make_twin(model: nn.Module, fake_of: dict[int, torch.Tensor], enter: Callable[..., Any] | None = None) -> nn.Module:
    """Copy the module tree with `fake_of[id(tensor)]` for each tensor.

    `enter(path, forward, *args, **kwargs)` is called in place of each module's forward, so that the caller knows which
    module is running.
    """
    copies: dict[int, Any] = {}

    def twin_of(value: Any) -> Any:
        if id(value) in fake_of:
            return fake_of[id(value)]
        if id(value) in copies:
            return copies[id(value)]
        if isinstance(value, nn.Module):
            return twin_module(value)
        kind = type(value)
        if kind in (list, tuple, set):
            return kind(twin_of(item) for item in value)
        if isinstance(value, dict):
            fresh = copy.copy(value)  # keeps the factory of a defaultdict
            fresh.clear()
            copies[id(value)] = fresh
            for key, item in value.items():
                fresh[key] = twin_of(item)
            return fresh
        if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
            return types.MethodType(value.__func__, twin_of(value.__self__))
        if isinstance(value, weakref.ref):
            target = value()  # recurrent layers hold their weights weakly beside the strong references
            return weakref.ref(fake_of[id(target)]) if id(target) in fake_of else value
        if isinstance(value, functools.partial):
            return functools.partial(twin_of(value.func), *map(twin_of, value.args), **twin_of(value.keywords))
        return value

    def twin_module(module: nn.Module) -> nn.Module:
        fresh = module.__class__.__new__(module.__class__)
        copies[id(module)] = fresh
        held = dict(module.__dict__)
        if "memfit" in held:
            own_forward = held.pop("memfit").own_forward
            held.pop("forward", None)
            if own_forward is not None:
                held["forward"] = own_forward
        for key, value in held.items():
            fresh.__dict__[key] = twin_of(value)
        return fresh

    root = twin_module(model)
    if enter is not None:
        for path, module in root.named_modules():
            module.__dict__["forward"] = functools.partial(enter, path, module.forward)
    return root


def refuse_modules(model: nn.Module) -> None:
    """Raise if a module is compiled, or one below the root has hooks: they would run once, at capture, never again."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"module '{path or '(root)'}' is compiled by TorchScript, which cannot be captured. Use the module it "
                "was made from"
            )
        if not path:
            continue  # the root's hooks run around our forward, as they do around its own
        for table in _HOOK_TABLES:
            for hook in (getattr(module, table, None) or {}).values():
                if is_pure_hook(hook):
                    continue
                name = getattr(hook, "__qualname__", type(hook).__qualname__)
                raise CaptureError(
                    f"module '{path}' ({type(module).__name__}) has a hook, {name}, that would run at capture only. "
                    "Remove it (handle.remove()), or register it on the fitted module itself"
                )


_HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


def changed_attributes(twin: nn.Module, before: dict[tuple[str, str], Any]) -> Iterator[tuple[str, str, Any]]:
    """Module path, attribute and new content of whatever the forward pass assigned on the twin."""
    after = snapshot(twin)
    for key, value in after.items():
        if key not in before or not _same(before[key], value):
            if key[1] in _HOOK_TABLES and all(map(is_pure_hook, value.values())):
                continue  # transformers installs hooks of its own in the first forward pass
            yield (*key, value)
    for path, name in before.keys() - after.keys():
        yield path, name, None


def snapshot(twin: nn.Module) -> dict[tuple[str, str], Any]:
    """What every module of the twin holds now, containers copied one level."""
    held: dict[tuple[str, str], Any] = {}
    for path, module in twin.named_modules():
        for name, value in module.__dict__.items():
            if name in ("_parameters", "_buffers", "_modules"):
                held.update({(path, f"{name}.{key}"): item for key, item in value.items()})
            elif name != "forward" and name not in HARMLESS_ATTRIBUTES:
                held[path, name] = _copied(value)
    return held


def _copied(value: Any) -> Any:
    """The value, containers copied all the way down."""
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return value.copy() if isinstance(value, set) else value


def _same(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor) or type(old) is not type(new):
        return False
    if isinstance(old, (list, tuple)):
        return len(old) == len(new) and all(map(_same, old, new))
    if isinstance(old, dict):
        return old.keys() == new.keys() and all(_same(old[key], new[key]) for key in old)
    if isinstance(old, (bool, int, float, str, bytes, set, frozenset)):
        return bool(old == new)
    return False
