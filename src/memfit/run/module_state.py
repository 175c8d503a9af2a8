"""What of a module tree a captured step depends on: flags, settings, hooks, the layouts of its tensors.

[Note: unchanged]
To write all of it out takes milliseconds for a model of some hundred modules, and it is asked for at every call. So
what was written out last is kept with what it was read from, and served again while that is found to be the same: by
identity where a thing cannot change in itself, by its contents where it can. Whatever differs, if only in who it is,
has the tree written out anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import nn

from memfit.capture.structure import setting

_ATOMS = frozenset({bool, int, float, str, type(None)})
_TABLES = ("_parameters", "_buffers", "_modules")
_TREE = frozenset({*_TABLES, "forward", "memfit"})
_PROPERTIES = attrgetter("shape", "dtype", "device", "requires_grad")


class Written:
    """A module tree's state as a key that is hashed once: it is long, and looked up at every call."""

    __slots__ = ("_hash", "_key")

    def __init__(self, key: Any) -> None:
        self._key, self._hash = key, hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Written) and self._hash == other._hash and bool(self._key == other._key)
        )


class ModuleState:
    """The state of one module tree, written out when it has changed; see [Note: unchanged]."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._last: tuple[Written, _Seen] | None = None

    def read(self) -> Written:
        """A key: equal if and only if a step captured in one state may serve the other."""
        last = self._last  # once: another thread may put another there
        if last is not None and last[1].is_as_it_was():
            return last[0]
        # First what it is read from: what changes in between, another thread's doing, is noticed at the next call.
        seen = _Seen.of(self._model)
        written = Written(_write(self._model, set()))
        self._last = (written, seen)
        return written


def _write(module: nn.Module, seen: set[int]) -> Any:
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
            (name, _layout(tensor))
            for table in (held["_parameters"], held["_buffers"])
            for name, tensor in table.items()
            if tensor is not None
        ),
        tuple(
            (name, _write(child, seen) if id(child) not in seen else id(child))
            for name, child in held["_modules"].items()
            if child is not None
        ),
    )


def _layout(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    return _PROPERTIES(tensor), tensor.stride() if tensor.layout is torch.strided else None


def _is_fixed(value: Any) -> bool:
    """True if it cannot change in itself, nor hold on to much."""
    kind = type(value)
    return kind in _ATOMS or (kind is tuple and all(type(item) in _ATOMS for item in value))


@dataclass(frozen=True, slots=True)
class _SeenModule:
    """One module as it was.

    Attributes:
        names: of all it holds.
        pick, picked: what of it is compared by identity: what is fixed, and the tables every module has.
        opened: the names of what is compared by its contents.
        tensors: its tables of parameters and buffers, each with names and layouts.
        children: its table of modules, and who was in it.
    """

    held: dict[str, Any]
    names: tuple[str, ...]
    pick: Callable[[dict[str, Any]], tuple[Any, ...]]
    picked: tuple[Any, ...]
    opened: tuple[str, ...]
    tensors: tuple[tuple[dict[str, Any], tuple[str, ...], list[Any]], ...]
    children: tuple[dict[str, Any], tuple[str, ...], tuple[Any, ...]]

    @classmethod
    def of(cls, module: nn.Module) -> _SeenModule:
        held = module.__dict__
        own = {name for name, value in held.items() if name in _OWN and (name in _TABLES or not value)}
        fixed = {name for name, value in held.items() if _is_fixed(value)}
        by_identity = tuple(name for name in held if name in own | fixed)
        pick = itemgetter(*by_identity)
        children = held["_modules"]
        tables = [held[name] for name in _TABLES[:2]]  # a scripted module's are no dicts
        return cls(
            held,
            tuple(held),
            pick,
            pick(held),
            tuple(name for name in held if name not in _TREE | own | fixed),
            tuple((table, tuple(table.keys()), [*map(_layout, table.values())]) for table in tables),
            (children, tuple(children.keys()), tuple(children.values())),
        )

    def is_as_it_was(self) -> bool:
        held = self.held
        if tuple(held) != self.names or not all(map(is_, self.pick(held), self.picked)):
            return False
        table, names, modules = self.children
        if (table or names) and (tuple(table.keys()) != names or not all(map(is_, table.values(), modules))):
            return False
        return all(
            tuple(table.keys()) == names and [*map(_layout, table.values())] == layouts
            for table, names, layouts in self.tensors
            if table or names
        )

    def empty(self) -> Iterator[Any]:
        """Its own containers that had nothing in them."""
        return (self.held[name] for name in self.names if name in _OWN and name not in _TABLES and not self.held[name])


@dataclass(frozen=True, slots=True)
class _Seen:
    """A module tree as it was."""

    modules: tuple[_SeenModule, ...]
    empty: tuple[Any, ...]
    contents: list[Any]

    @classmethod
    def of(cls, model: nn.Module) -> _Seen:
        modules = tuple(_SeenModule.of(module) for module in model.modules())
        return cls(modules, tuple(thing for module in modules for thing in module.empty()), _contents(modules))

    def is_as_it_was(self) -> bool:
        return (
            all(module.is_as_it_was() for module in self.modules)
            and not any(self.empty)
            and _contents(self.modules) == self.contents
        )


def _contents(modules: tuple[_SeenModule, ...]) -> list[Any]:
    seen: set[int] = set()
    return [setting(module.held[name], seen) for module in modules for name in module.opened]


# Containers that every module has: hooks by kind, mostly, which are empty.
_OWN = frozenset(name for name, value in nn.Module().__dict__.items() if isinstance(value, (dict, set, list)))
