"""A network with the data to run it: from the zoo by name, or a user's own as `package.module:callable`."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from memfit.errors import MemfitError
from memfit.zoo import data
from memfit.zoo.catalogue import build, spec

_RETURNS = "it must return (model, inputs) or (model, inputs, loss)"


class BadExample(MemfitError, ValueError):
    """A `package.module:callable` that cannot be found, or does not make a network and its inputs."""


@dataclass(frozen=True, eq=False)
class Example:
    """One training step, ready to run: `loss(model(*args, **kwargs), *targets)`.

    `loss` is None for a user's network that came without one.
    """

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Tensor, ...]
    loss: Callable[..., Tensor] | None


def load(
    name: str,
    *,
    batch: int | None = None,
    image: int | None = None,
    device: str | torch.device = "cpu",
    seed: int = 0,
    channels_last: bool = False,
) -> Example:
    """Make the network `name` and its example data on `device`, from `seed`.

    `name` is a network of the zoo, or `package.module:callable`, importable as usual or from the current directory.
    The callable returns `(model, inputs)` or `(model, inputs, loss)`: inputs are a tensor, a tuple or list of
    positional arguments, or a dict of keyword arguments; `loss` takes the output. It is passed those of the keywords
    `batch`, `image`, `device` and `seed` that it takes. One without `device` has what it returns moved there; one
    without `batch` or `image` cannot be loaded with that option.

    Weights are drawn on the CPU from `seed`, and the global random state is as it was afterwards. With `channels_last`
    images and the weights of convolutions are laid out that way.
    """
    if channels_last:
        return _with_channels_last(load(name, batch=batch, image=image, device=device, seed=seed))
    if ":" in name:
        return _load_own(name, batch=batch, image=image, device=device, seed=seed)
    network = spec(name)
    given: dict[str, Any] = {"batch": batch, "image": image, "device": device, "seed": seed}
    args = data.inputs(name, **given)
    with _seeded(seed):
        # On the CPU even for another device, so that one seed means the same weights everywhere.
        start = "meta" if torch.device(device).type == "meta" else "cpu"
        model = build(name, device=start, **network.fitting(image)).to(device)
    return Example(name, model, args, {}, data.targets(name, **given), data.loss(name))


def _with_channels_last(example: Example) -> Example:
    def laid_out(arg: Any) -> Any:
        is_images = isinstance(arg, Tensor) and arg.dim() == 4
        return arg.contiguous(memory_format=torch.channels_last) if is_images else arg

    args = tuple(map(laid_out, example.args))
    kwargs = {name: laid_out(arg) for name, arg in example.kwargs.items()}
    if not any(isinstance(arg, Tensor) and arg.dim() == 4 for arg in (*args, *kwargs.values())):
        raise BadExample(
            f"{example.name} is given no images (tensors of four dimensions): it has no channels to be last. "
            "Leave channels_last out."
        )
    example.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's stubs
    return replace(example, args=args, kwargs=kwargs)


def _load_own(name: str, *, batch: int | None, image: int | None, device: str | torch.device, seed: int) -> Example:
    make = _resolve(name)
    takes = _keywords(make)
    options: dict[str, Any] = {"batch": batch, "image": image}
    for option, value in options.items():
        if value is not None and not takes(option):
            raise BadExample(
                f"{option}={value} was given, but {name} takes no keyword {option!r}; "
                f"add it to the callable, or leave {option} out."
            )
    options = {option: value for option, value in options.items() if value is not None}
    options |= {option: value for option, value in (("device", device), ("seed", seed)) if takes(option)}
    _check_call(name, make, options)
    with _seeded(seed):
        made = make(**options)
    model, inputs, loss = _unpack(name, made)
    if not takes("device"):
        model, inputs = _moved_module(model, device), _moved(inputs, device)
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(inputs, Tensor):
        args = (inputs,)
    elif isinstance(inputs, Mapping):
        kwargs = {str(key): value for key, value in inputs.items()}
    else:
        args = tuple(inputs)
    return Example(name, model, args, kwargs, (), loss)


def _resolve(name: str) -> Callable[..., Any]:
    """Import what `package.module:callable` names."""
    module_name, _, path = name.partition(":")
    if module_name.endswith(".py") or "/" in module_name or os.sep in module_name:
        dotted = module_name.removesuffix(".py").strip("./").replace(os.sep, ".").replace("/", ".")
        raise BadExample(f"{name!r} names a file; name the module instead, as in `{dotted}:{path or 'callable'}`.")
    if not module_name or not path:
        raise BadExample(f"{name!r} is not of the form `package.module:callable`.")
    found: Any = _import(name, module_name)
    for part in path.split("."):
        if not hasattr(found, part):
            raise BadExample(f"cannot load {name!r}: {_called(found)} has no attribute {part!r}.{_nearby(found)}")
        found = getattr(found, part)
    if not callable(found):
        raise BadExample(f"cannot load {name!r}: {path} is {_a(found)}, not a callable; {_RETURNS}.")
    make: Callable[..., Any] = found
    return make


def _import(name: str, module_name: str) -> ModuleType:
    with _current_directory_importable():
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if module_name == missing or module_name.startswith(missing + "."):
                raise BadExample(
                    f"cannot load {name!r}: there is no module {missing!r}, neither installed nor in {os.getcwd()}."
                ) from error
            raise BadExample(f"cannot load {name!r}: {module_name} imports {missing!r}, which is missing.") from error
        except Exception as error:
            raise BadExample(
                f"cannot load {name!r}: importing {module_name} raised {type(error).__name__}: {error}"
            ) from error


@contextlib.contextmanager
def _current_directory_importable() -> Iterator[None]:
    """As `python -m` has it, and an installed command has not."""
    here = os.getcwd()
    if here in sys.path or "" in sys.path:
        yield
        return
    sys.path.insert(0, here)
    try:
        yield
    finally:
        # The imported module may have edited the path itself.
        with contextlib.suppress(ValueError):
            sys.path.remove(here)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw from `seed` on the CPU, and leave every global random state as it was."""
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: it would seed the accelerators too, which are not forked here.
        torch.default_generator.manual_seed(seed)
        yield


def _keywords(make: Callable[..., Any]) -> Callable[[str], bool]:
    """Whether `make` takes a given keyword."""
    try:
        parameters = inspect.signature(make).parameters
    except ValueError:  # some builtins have no signature
        return lambda keyword: False
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return lambda keyword: True
    by_keyword = {p.name for p in parameters.values() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return by_keyword.__contains__


def _check_call(name: str, make: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise if the callable wants arguments that were not given."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except ValueError:
        return
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    wanted = [p.name for p in parameters if p.default is p.empty and p.kind not in variadic and p.name not in options]
    if wanted:
        ours = [parameter for parameter in wanted if parameter in ("batch", "image")]
        way = f"give {' and '.join(ours)}" if ours == wanted else "give them defaults, or wrap it in a callable"
        raise BadExample(f"{name} needs arguments it was not given: {', '.join(wanted)}; {way}.")


def _unpack(name: str, made: Any) -> tuple[nn.Module, Any, Callable[..., Tensor] | None]:
    """Check what the callable returned."""
    if not isinstance(made, (tuple, list)):
        raise BadExample(f"{name} returned {_a(made)}; {_RETURNS}.")
    if len(made) not in (2, 3):
        raise BadExample(f"{name} returned {len(made)} items; {_RETURNS}.")
    model, inputs = made[0], made[1]
    loss = made[2] if len(made) == 3 else None
    if not isinstance(model, nn.Module):
        raise BadExample(f"{name} returned {_a(model)} where its model belongs; {_RETURNS}.")
    if not isinstance(inputs, (Tensor, tuple, list, Mapping)):
        raise BadExample(
            f"{name} returned {_a(inputs)} where its inputs belong; "
            "they are a tensor, a tuple or list of positional arguments, or a dict of keyword arguments."
        )
    if loss is not None and not callable(loss):
        raise BadExample(f"{name} returned {_a(loss)} where its loss belongs; it is a callable that takes the output.")
    return model, inputs, loss


def _moved_module(model: nn.Module, device: str | torch.device) -> nn.Module:
    """`model.to(device)` with tied parameters still tied: torch makes each a new Parameter on the way to meta."""
    first: dict[nn.Parameter, str] = {}
    tied = [
        (name, first[parameter])
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first.setdefault(parameter, name) != name
    ]
    model = model.to(device)
    for name, original in tied:
        path, _, attribute = name.rpartition(".")
        model.get_submodule(path).register_parameter(attribute, model.get_parameter(original))
    return model


def _moved(value: Any, device: str | torch.device) -> Any:
    """The same structure with its tensors on `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_moved(item, device) for item in value)
    return value


def _a(value: Any) -> str:
    """'a list', 'an int', 'None'."""
    if value is None:
        return "None"
    kind = type(value).__name__
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"


def _called(value: Any) -> str:
    return f"module {value.__name__!r}" if isinstance(value, ModuleType) else repr(getattr(value, "__name__", value))


def _nearby(found: Any) -> str:
    """The functions a module defines itself: most likely one of them was meant."""
    if not isinstance(found, ModuleType):
        return ""
    functions = (value for key, value in vars(found).items() if inspect.isfunction(value) and not key.startswith("_"))
    own = [function.__name__ for function in functions if function.__module__ == found.__name__]
    return f" It defines {', '.join(own[:6])}." if own else ""
