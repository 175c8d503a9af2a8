"""A Step as JSON and back, whole: the same ops, operands, values and lines, to the type of every literal.

`Step.to_dict` is for hashes and people, and leaves out what a hash need not see. This is for keeping a step.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from memfit.capture.step import Ghost, Gradient, Half, Op, Opaque, Origin, Ref, Source, Step, Value
from memfit.errors import MemfitError

_FORMAT = 2  # raised when the same text would mean another step

_DTYPES = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_LAYOUTS = {str(x): x for x in vars(torch).values() if isinstance(x, torch.layout)}
_MEMORY_FORMATS = {str(x): x for x in vars(torch).values() if isinstance(x, torch.memory_format)}


class WrongStep(MemfitError):
    """A text that is no step, or one of another format."""


def step_to_json(step: Step) -> str:
    """The step as JSON. Raises WrongStep if an operand is something that has no text form."""
    return json.dumps(step_to_lists(step))


def step_from_json(text: str) -> Step:
    """The step that step_to_json wrote, or WrongStep."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WrongStep(f"not a step: {error}") from error
    return step_from_lists(data)


def step_to_lists(step: Step) -> dict[str, Any]:
    """The step as JSON-able data; texts that occur again and again are listed once."""
    texts: dict[str, int] = {}

    def text(of: str) -> int:
        return texts.setdefault(of, len(texts))

    return {
        "format": _FORMAT,
        "name": step.name,
        "rewrites": list(step.rewrites),
        "values": [
            [v.name, v.storage, list(v.shape), list(v.stride), v.offset, text(str(v.dtype)), text(v.device)]
            for v in step.values
        ],
        "ops": [
            [
                text(op.target),
                [_written(arg) for arg in op.args],
                [[name, _written(arg)] for name, arg in op.kwargs],
                list(op.outputs),
                op.returns_many,
                op.half is Half.FORWARD,
                text(op.path),
                text(op.source),
                list(op.writes),
                op.random,
                text(op.again),
                text(op.stand_in),
            ]
            for op in step.ops
        ],
        "sources": [[s.value, s.origin.value, s.name, s.requires_grad] for s in step.sources],
        "outputs": list(step.outputs),
        "tangents": list(step.tangents),
        "gradients": [[g.of, g.value] for g in step.gradients],
        "storage_bytes": list(step.storage_bytes),
        "texts": list(texts),
    }


def step_from_lists(data: Any) -> Step:
    """The step that step_to_lists took apart, or WrongStep."""
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise WrongStep(f"not a step of format {_FORMAT}. Steps are what step_to_json() writes")
    try:
        step = _read_step(data)
        _require_references(step)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        raise WrongStep(f"the step '{data.get('name', '')}' is damaged: {type(error).__name__}: {error}") from error
    return step


def _read_step(data: dict[str, Any]) -> Step:
    texts = [str(text) for text in data["texts"]]
    return Step(
        ops=tuple(
            Op(
                target=texts[target],
                args=tuple(_read(arg) for arg in args),
                kwargs=tuple((str(name), _read(arg)) for name, arg in kwargs),
                outputs=tuple(outputs),
                returns_many=bool(many),
                half=Half.FORWARD if is_forward else Half.BACKWARD,
                path=texts[path],
                source=texts[source],
                writes=tuple(writes),
                random=bool(random),
                again=texts[again],
                stand_in=texts[stand_in],
            )
            for (
                *(target, args, kwargs, outputs, many, is_forward, path, source, writes, random, again, stand_in),
            ) in data["ops"]
        ),
        values=tuple(
            Value(index, str(name), storage, tuple(shape), tuple(stride), offset, _DTYPES[texts[dtype]], texts[device])
            for index, (name, storage, shape, stride, offset, dtype, device) in enumerate(data["values"])
        ),
        sources=tuple(Source(v, Origin(origin), str(name), bool(grad)) for v, origin, name, grad in data["sources"]),
        outputs=tuple(data["outputs"]),
        tangents=tuple(data["tangents"]),
        gradients=tuple(Gradient(of, value) for of, value in data["gradients"]),
        storage_bytes=tuple(data["storage_bytes"]),
        name=str(data["name"]),
        rewrites=tuple(data["rewrites"]),
    )


def _require_references(step: Step) -> None:
    """Raise if anything refers to a value or storage that is not there."""
    values: set[int | None] = set(range(len(step.values)))
    storages = set(range(len(step.storage_bytes)))
    named: list[int | None] = [*step.outputs, *(s.value for s in step.sources)]
    named += [value for value in step.tangents if value is not None]
    named += [value for gradient in step.gradients for value in (gradient.of, gradient.value)]
    written = [value.storage for value in step.values]
    for op in step.ops:
        named += [*op.reads(), *op.made]
        written += op.writes
    if not values.issuperset(named) or not storages.issuperset(written):
        raise ValueError("it refers to values or storages that it does not have")
    if not all(isinstance(size, int) and size >= 0 for size in step.storage_bytes):
        raise ValueError("a storage's bytes are no whole number")


def _written(arg: Any) -> Any:
    """An operand: literals that JSON has as they are, everything else as an object with one key, its kind."""
    if arg is None or isinstance(arg, (bool, int, float, str)):
        return arg  # infinity and NaN too: Python's JSON writes and reads them
    match arg:
        case Ref(value):
            return {"v": value}
        case tuple():
            return [_written(item) for item in arg]
        case list():
            return {"list": [_written(item) for item in arg]}
        case Ghost(shape, stride, dtype, device):
            return {"ghost": [list(shape), list(stride), str(dtype), device]}
        case Opaque(index, text):
            return {"opaque": [index, text]}
        case complex():
            return {"complex": [arg.real, arg.imag]}
        case torch.dtype():
            return {"dtype": str(arg)}
        case torch.device():
            return {"device": str(arg)}
        case torch.layout():
            return {"layout": str(arg)}
        case torch.memory_format():
            return {"memory_format": str(arg)}
    raise WrongStep(f"an operand of type {type(arg).__name__} has no JSON form; steps that have one are not kept")


def _read(arg: Any) -> Any:
    if isinstance(arg, list):
        return tuple(_read(item) for item in arg)
    if not isinstance(arg, dict):
        return arg
    ((kind, content),) = arg.items()
    match kind:
        case "v":
            return Ref(content)
        case "list":
            return [_read(item) for item in content]
        case "ghost":
            shape, stride, dtype, device = content
            return Ghost(tuple(shape), tuple(stride), _DTYPES[dtype], device)
        case "opaque":
            return Opaque(*content)
        case "complex":
            return complex(*content)
        case "dtype":
            return _DTYPES[content]
        case "device":
            return torch.device(content)
        case "layout":
            return _LAYOUTS[content]
        case "memory_format":
            return _MEMORY_FORMATS[content]
    raise ValueError(f"unknown kind of operand {kind!r}")
