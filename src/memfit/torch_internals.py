"""The only file that touches torch's private API, so that a new torch release is one file's work.

Everything here is a thin name for one thing torch does not export: fake tensors, dispatch modes, operator schemas,
the autograd engine's position. Written against torch 2.13.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "AUTOCAST_DEVICES",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "OpOverload",
    "StorageWatch",
    "TorchDispatchMode",
    "UnsupportedFakeTensorException",
    "UnsupportedOperatorException",
    "argument_names",
    "autocast_state",
    "backward_keeps_graph",
    "below_autograd",
    "calling_module",
    "current_backward_name",
    "current_backward_sequence",
    "fake_mode",
    "fills_by_a_differentiable_value",
    "has_effect",
    "hook_directly",
    "is_nested_capture",
    "is_random",
    "next_forward_sequence",
    "no_autocast",
    "normalised",
    "real_tensors",
    "resolve",
    "saved_tensors_hooks_removed",
    "set_activation_memory_budget",
    "storage_key",
    "target_of",
    "thread_team",
    "will_run_in_this_backward",
    "without_mode",
    "written_arguments",
]

# Device types whose autocast may be on around a call.
AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")

# Kernels that write an argument although their schema does not say so.
_HIDDEN_WRITES = {
    "aten.native_batch_norm.default": ("running_mean", "running_var"),
    "aten.cudnn_batch_norm.default": ("running_mean", "running_var"),
    "aten.miopen_batch_norm.default": ("running_mean", "running_var"),
}


def fake_mode() -> FakeTensorMode:
    """A mode under which tensors have shapes but no bytes; real tensors may meet fake ones (the recorder maps them)."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Compute with real tensors although a fake mode is on."""
    with _disable_current_modes():
        yield


@contextlib.contextmanager
def without_mode(mode: TorchDispatchMode) -> Iterator[None]:
    """Inside the mode that was entered last, do something it does not see."""
    mode.__exit__(None, None, None)
    try:
        yield
    finally:
        mode.__enter__()


@contextlib.contextmanager
def saved_tensors_hooks_removed() -> Iterator[None]:
    """Take the hooks that surround the call off autograd's stack for a while.

    Identity hooks on top of them would not do: with hooks autograd does not compare versions.
    """
    taken = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(False)) is not None:
        taken.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(taken):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def storage_key(tensor: torch.Tensor) -> int:
    """What two tensors share if and only if they look at the same storage (while both are alive)."""
    return int(tensor.untyped_storage()._cdata)


class StorageWatch:
    """Tells whether a storage is still alive, without keeping it so."""

    def __init__(self, tensor: torch.Tensor, num_bytes: int | None = None) -> None:
        storage = tensor.untyped_storage()
        self.num_bytes = storage.nbytes() if num_bytes is None else num_bytes
        self._reference = StorageWeakRef(storage)

    @property
    def is_alive(self) -> bool:
        return not self._reference.expired()

    def watches(self, tensor: torch.Tensor) -> bool:
        """True if the tensor looks at this very storage."""
        return self.is_alive and self._reference.cdata == storage_key(tensor)


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set what autograd takes for the number of writes to a tensor: for writes that have been undone."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def next_forward_sequence() -> int:
    """The number autograd will give to the next node; the op now being dispatched belongs to the one before."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def current_backward_sequence() -> int | None:
    """The number of the autograd node that is running its backward now, if one is."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """Run kernels as autograd would call them: no graph is made, but grad mode stays on, which some kernels ask for."""
    with torch._C._AutoDispatchBelowAutograd():
        yield


def current_backward_name() -> str | None:
    """The name of the autograd node that is running its backward now, if one is."""
    node = torch._C._current_autograd_node()
    return None if node is None else str(node.name())


def fills_by_a_differentiable_value() -> bool:
    """True in the backward of masked_fill whose value, a tensor, requires grad: real tensors go another way there."""
    node = torch._C._current_autograd_node()
    return node is not None and node.name() == "MaskedFillBackward1" and node.next_functions[1][0] is not None


def apply_outside_transforms(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Its `apply` without the look at every argument for what torch.func wraps: there is none outside of torch.func."""
    if torch._C._are_functorch_transforms_active():
        return function.apply
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def backward_keeps_graph() -> bool:
    """True inside a backward pass that was started with retain_graph=True."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def calling_module() -> torch.nn.Module | None:
    """The module whose __call__ called the caller of this function as its forward, if one did."""
    frame = sys._getframe(2)
    return frame.f_locals.get("self") if frame.f_code is torch.nn.Module._call_impl.__code__ else None


def is_nested_capture() -> bool:
    """True where tensors are not real or not alone: under a fake mode, a compiler, a tracer, forward derivatives."""
    return (
        torch.compiler.is_compiling()
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._functorch.maybe_current_level() is not None
        or torch._C._get_tracing_state() is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    )


_register_hook = torch.Tensor.register_hook  # before anybody stands in for it


def hook_directly(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> None:
    """Register a hook on a tensor, past whoever watches registrations."""
    _register_hook(tensor, hook)


def will_run_in_this_backward(node: Any) -> bool:
    """Inside a backward pass: True if it will come to that node, or has."""
    return bool(torch._C._will_engine_execute_node(node))


def autocast_state(devices: tuple[str, ...]) -> tuple[tuple[str, bool, torch.dtype], ...]:
    """For each device type whether autocast is on, and to what."""
    return tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices)


@contextlib.contextmanager
def no_autocast(devices: tuple[str, ...]) -> Iterator[None]:
    """Autocast off: recorded ops stand below it, their casts are ops of their own."""
    on = [device for device in devices if torch.is_autocast_enabled(device)]
    for device in on:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device in on:
            torch.set_autocast_enabled(device, True)


def target_of(func: OpOverload) -> str:
    """The printable name of an operator: `aten.relu.default`."""
    return str(func)


@cache
def resolve(target: str) -> OpOverload:
    """The operator of that printable name."""
    import memfit.operators
    import memfit.stand_ins  # both register ours

    namespace, name, overload = target.rsplit(".", 2) if target.count(".") == 2 else target.split(".", 2)
    if namespace == "memfit_ops":
        memfit.stand_ins.define(target)
    found = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    assert isinstance(found, OpOverload), target
    return found


@cache
def argument_names(target: str) -> tuple[str, ...]:
    """Names of the operator's arguments, positional first, as its schema has them."""
    return tuple(argument.name for argument in resolve(target)._schema.arguments)


@cache
def written_arguments(target: str) -> frozenset[str]:
    """Names of the arguments the operator writes into, hidden writes included."""
    schema = resolve(target)._schema
    declared = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    return frozenset(declared) | frozenset(_HIDDEN_WRITES.get(target, ()))


@cache
def is_random(target: str) -> bool:
    """True if running the operator twice draws other numbers."""
    return torch.Tag.nondeterministic_seeded in resolve(target).tags


@cache
def has_effect(target: str) -> bool:
    """True if dropping a call whose results nobody reads would change anything."""
    return bool(written_arguments(target)) or is_random(target) or not resolve(target)._schema.returns


def normalised(target: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """The call's arguments by schema name, defaults filled in."""
    named: dict[str, Any] = {}
    for argument in resolve(target)._schema.arguments:
        if argument.has_default_value():
            named[argument.name] = argument.default_value
    named.update(zip(argument_names(target), args, strict=False))
    named.update(kwargs)
    return named


@cache
def thread_team() -> int | None:
    """The address of the function that gives work to the threads torch computes on, or None where there is no such.

    It is the entry into OpenMP that compiled code uses, GCC's as well as Intel's and LLVM's runtime have it.
    """
    folder = Path(torch.__file__).parent
    loaded_only = getattr(os, "RTLD_NOLOAD", None)  # a second runtime would have threads of its own
    if loaded_only is None:
        return None
    for path in [*folder.glob("lib/lib*omp*"), *folder.parent.glob("torch.libs/lib*omp*")]:
        try:
            found = ctypes.CDLL(str(path), mode=loaded_only | os.RTLD_NOW).GOMP_parallel
        except (OSError, AttributeError):  # another runtime than the one in use
            continue
        return ctypes.cast(found, ctypes.c_void_p).value
    return None


def set_activation_memory_budget(share: float) -> None:
    """How much of what backward wants torch.compile may save from now on: 1 is all, 0 recomputes whatever it can."""
    import torch._functorch.config  # not with the others: it is for comparisons only

    torch._functorch.config.activation_memory_budget = share
