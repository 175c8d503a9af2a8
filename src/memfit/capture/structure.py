"""Take nested arguments and outputs apart into their tensors, and put them together again.

Any nesting of tuples, lists, dicts, dataclasses, named tuples and plain objects is understood: model outputs of
libraries come as all of these. What is not a tensor stays where it is.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn

from memfit.errors import CaptureError

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout)
_NEVER_OPENED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, nn.Module)
_MAX_DEPTH = 24
_SIMPLE = frozenset({bool, int, float, str, type(None)})
# Settings are small; what is longer or deeper is data, and counts by identity and length.
_MAX_SETTING_ITEMS = 256
_MAX_SETTING_DEPTH = 6


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Place of the index-th tensor."""

    index: int


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Something that holds no tensor; it is put back by reference."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Branch:
    """A container: its type, the labels of its parts, the parts, and how to make one from new parts."""

    type: type
    labels: tuple[Any, ...]
    parts: tuple[Any, ...]
    make: Callable[[list[Any]], Any]


Skeleton = Leaf | Fixed | Branch


def take_apart(thing: Any) -> tuple[list[torch.Tensor], Skeleton]:
    """The distinct tensors in `thing`, in order, and the skeleton they hang on."""
    tensors: list[torch.Tensor] = []
    return tensors, _take_apart(thing, tensors, {}, 0)


def _take_apart(item: Any, tensors: list[torch.Tensor], index_of: dict[int, int], depth: int) -> Skeleton:
    # Not a closure: one that calls itself is a cycle, and would keep the tensors until the next garbage collection.
    if isinstance(item, torch.Tensor):
        index = index_of.setdefault(id(item), len(tensors))
        if index == len(tensors):
            tensors.append(item)
        return Leaf(index)
    if isinstance(item, _ATOMS):
        return Fixed(item)
    if depth > _MAX_DEPTH:
        raise CaptureError(
            f"an argument or output of type {type(item).__name__} is nested more than {_MAX_DEPTH} deep; "
            "pass its tensors in a flat tuple or dict"
        )
    opened = _open(item)
    if opened is None:
        return Fixed(item)
    labels, children, make = opened
    parts = tuple(_take_apart(child, tensors, index_of, depth + 1) for child in children)
    # A plain object without tensors is put back as it is: it may be a config, a tokenizer, anything.
    if not isinstance(item, (tuple, list, dict)) and all(isinstance(part, Fixed) for part in parts):
        return Fixed(item)
    return Branch(type(item), labels, parts, make)


def put_together(skeleton: Skeleton, tensors: list[Any]) -> Any:
    """The nested thing that the skeleton describes, with these tensors in their places."""
    if isinstance(skeleton, Leaf):
        return tensors[skeleton.index]
    if isinstance(skeleton, Fixed):
        return skeleton.value
    return skeleton.make([put_together(part, tensors) for part in skeleton.parts])


def fingerprint(skeleton: Skeleton) -> Any:
    """A hashable form: equal for equal nesting, equal labels and equal non-tensor contents."""
    if isinstance(skeleton, Leaf):
        return skeleton.index
    if isinstance(skeleton, Fixed):
        value = skeleton.value
        # Types are kept apart because 1 == 1.0 == True. NaN is unequal to itself, so it goes by its text.
        if isinstance(value, float):
            return ("float", repr(value))
        if isinstance(value, _ATOMS):
            return (type(value).__name__, value)
        return ("object", setting(value, set()))
    return (skeleton.type, skeleton.labels, tuple(fingerprint(part) for part in skeleton.parts))


def setting(value: Any, seen: set[int], depth: int = 0, *, in_object: bool = False) -> Any:
    """A hashable form of a setting: contents of containers and of plain objects, else which object it is.

    A tensor inside a plain object is a constant of the capture: another tensor there is another setting.
    `seen` holds the objects looked at already: a config shared by all layers is read once.
    """
    kind = type(value)
    if kind in _SIMPLE:
        return (kind, repr(value)) if kind is float else (kind, value)
    if isinstance(value, torch.Tensor):
        return id(value) if in_object else None  # its layout is checked where it is read
    if kind is tuple and all(type(item) is int for item in value):
        return value  # the usual case, and this runs on every call
    if depth > _MAX_SETTING_DEPTH or id(value) in seen:
        return id(value)

    def inner(item: Any) -> Any:
        return setting(item, seen, depth + 1, in_object=in_object)

    if isinstance(value, (list, tuple, set, frozenset)):
        return (kind, len(value), tuple(inner(item) for item in islice(value, _MAX_SETTING_ITEMS)))
    if isinstance(value, dict):
        items = islice(value.items(), _MAX_SETTING_ITEMS)
        return (kind, len(value), tuple((setting(k, seen, 9), inner(v)) for k, v in items))
    inside = getattr(value, "__dict__", None)
    if not inside or isinstance(value, _NEVER_OPENED) or callable(value):
        return id(value)
    seen.add(id(value))
    return (id(value), tuple((name, setting(v, seen, depth + 1, in_object=True)) for name, v in inside.items()))


def _open(item: Any) -> tuple[tuple[Any, ...], list[Any], Callable[[list[Any]], Any]] | None:
    """Labels, children and maker of a container, or None if it is not one."""
    kind = type(item)
    if isinstance(item, tuple):
        if hasattr(item, "_fields"):
            return tuple(item._fields), list(item), lambda parts: kind(*parts)
        return tuple(range(len(item))), list(item), lambda parts: kind(parts)
    if isinstance(item, list):
        return tuple(range(len(item))), list(item), lambda parts: kind(parts)
    if isinstance(item, Mapping) and isinstance(item, dict):
        keys = tuple(item)
        if kind is dict:
            return keys, list(item.values()), lambda parts: dict(zip(keys, parts, strict=True))
        if dataclasses.is_dataclass(item):  # Hugging Face's ModelOutput is both
            return keys, list(item.values()), lambda parts: kind(**dict(zip(keys, parts, strict=True)))
        shell = copy.copy(item)
        shell.clear()  # the tensors in it are not ours to keep
        return keys, list(item.values()), lambda parts: _refill(shell, keys, parts)
    if isinstance(item, _NEVER_OPENED):
        return None
    attributes = _attributes(item)
    if not attributes:
        return None
    names = tuple(attributes)
    return names, list(attributes.values()), lambda parts: _with_attributes(kind, names, parts)


def _attributes(item: Any) -> dict[str, Any]:
    """What an object holds: its dataclass fields, its slots, its __dict__."""
    found: dict[str, Any] = {}
    if dataclasses.is_dataclass(item):
        found = {f.name: getattr(item, f.name) for f in dataclasses.fields(item) if hasattr(item, f.name)}
    for base in type(item).__mro__:
        for name in base.__dict__.get("__slots__", ()):
            if isinstance(name, str) and not name.startswith("__") and hasattr(item, name):
                found.setdefault(name, getattr(item, name))
    found.update(getattr(item, "__dict__", {}))
    return found


def _refill(shell: Any, keys: tuple[Any, ...], parts: list[Any]) -> Any:
    fresh = copy.copy(shell)
    for key, part in zip(keys, parts, strict=True):
        fresh[key] = part
    return fresh


def _with_attributes(kind: type, names: tuple[str, ...], parts: list[Any]) -> Any:
    fresh: Any = object.__new__(kind)
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(fresh, name, part)
    return fresh
