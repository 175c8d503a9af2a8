"""Real values behind small integer tensors, so that a model may branch on them while it is captured.

Models ask things of their masks and positions (`(mask == 1).all()`) and choose a path by the answer. Floating-point
data is never looked at, but small integer and boolean tensors that come from factories, buffers or integer inputs are
computed for real beside their fakes. Where an answer depends on an input it becomes a Guard: the same few integer ops
are run again on each call's inputs, and another answer means another capture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from memfit.torch_internals import (
    OpOverload,
    has_effect,
    normalised,
    real_tensors,
    storage_key,
    target_of,
    written_arguments,
)

_MAX_ELEMENTS = 1 << 20
_ASKING = {"aten._local_scalar_dense.default", "aten.equal.default", "aten.is_nonzero.default"}
_DTYPES = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


@dataclass(frozen=True)
class Given:
    """An operand of a guard's program: the input of that index."""

    index: int


@dataclass(frozen=True)
class Made:
    """An operand of a guard's program: the result of an earlier line."""

    line: int


@dataclass(frozen=True)
class Line:
    """One real call: the operator and its operands."""

    func: OpOverload
    args: Any
    kwargs: Any


@dataclass(frozen=True)
class Guard:
    """A question the model asked of its integer inputs, and the answer it got."""

    lines: dict[int, Line]
    question: Line
    answer: Any

    def holds(self, inputs: list[torch.Tensor]) -> bool:
        """True if these inputs give the same answer."""
        results: dict[int, Any] = {}
        if any(written_arguments(target_of(line.func)) for line in self.lines.values()):
            inputs = [tensor.clone() for tensor in inputs]

        def fill(arg: Any) -> Any:
            if isinstance(arg, Given):
                return inputs[arg.index]
            if isinstance(arg, Made):
                return results[arg.line]
            if isinstance(arg, (list, tuple)):
                return type(arg)(fill(item) for item in arg)
            return arg

        with torch.no_grad():
            for index, line in self.lines.items():
                results[index] = line.func(*fill(line.args), **{k: fill(v) for k, v in line.kwargs.items()})
            question = self.question
            answer = question.func(*fill(question.args), **{k: fill(v) for k, v in question.kwargs.items()})
        return bool(answer == self.answer)


@dataclass
class _Shadow:
    fake: torch.Tensor  # held, so that its id stays its own
    real: torch.Tensor
    name: Given | Made
    inputs: frozenset[int]


class Shadows:
    """The real values known so far, by the fake tensor they stand behind."""

    def __init__(self) -> None:
        self.guards: list[Guard] = []
        self._known: dict[int, _Shadow] = {}
        self._lines: list[Line] = []

    def know(self, fake: torch.Tensor, real: torch.Tensor, *, input_index: int) -> None:
        """Remember the value of an integer input (a copy: the model may write to it)."""
        if real.dtype in _DTYPES and real.numel() <= _MAX_ELEMENTS and real.device.type != "meta":
            with real_tensors():
                copy = real.detach().clone()
            self._put(fake, _Shadow(fake, copy, Given(input_index), frozenset({input_index})))

    def know_constant(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Remember the value of a small integer literal that the model makes on each call."""
        if real.dtype in _DTYPES and real.numel() <= _MAX_ELEMENTS:
            with real_tensors():
                copy, kept = real.detach().clone(), real.detach().clone()
            self._lines.append(Line(torch.ops.aten.clone.default, (kept,), {}))
            self._put(fake, _Shadow(fake, copy, Made(len(self._lines) - 1), frozenset()))

    def forget(self) -> None:
        """Let go of every tensor; the guards stay."""
        self._known.clear()

    def ask(self, func: OpOverload, args: Any, kwargs: Any) -> tuple[bool, Any]:
        """(True, answer) if this is a question about data and the data is known."""
        if target_of(func) not in _ASKING:
            return False, None
        found = self._operands(args, kwargs)
        if found is None:
            return False, None
        line, inputs = found
        answer = self._run(func, args, kwargs)
        if inputs:
            self.guards.append(Guard(self._lines_behind(line(func)), line(func), answer))
        return True, answer

    def follow(self, func: OpOverload, args: Any, kwargs: Any, out: Any) -> None:
        """Compute the real value behind `out` if all operands are known and it is small and integer."""
        target = target_of(func)
        outs = out if isinstance(out, (list, tuple)) else [out]
        tensors = [t for t in outs if isinstance(t, torch.Tensor)]
        small = tensors and all(t.dtype in _DTYPES and t.numel() <= _MAX_ELEMENTS for t in tensors)
        found = self._operands(args, kwargs) if small else None
        writes = written_arguments(target)
        if found is None or (has_effect(target) and not writes):
            self._forget(target, args, kwargs, writes)
            return
        line, inputs = found
        result = self._run(func, args, kwargs)
        results = result if isinstance(result, (list, tuple)) else [result]
        index = len(self._lines)
        self._lines.append(line(func))
        if isinstance(result, (list, tuple)):
            return  # several results: no name for each; nobody has needed it
        self._put(tensors[0], _Shadow(tensors[0], results[0], Made(index), inputs))

    def _lines_behind(self, question: Line) -> dict[int, Line]:
        """The lines the question depends on; all of them if any writes, since a view may see a write made elsewhere."""
        lines = dict(enumerate(self._lines))
        if any(written_arguments(target_of(line.func)) for line in self._lines):
            return lines
        wanted: set[int] = set()

        def visit(arg: Any) -> None:
            if isinstance(arg, Made) and arg.line not in wanted:
                wanted.add(arg.line)
                visit(lines[arg.line].args)
                visit(tuple(lines[arg.line].kwargs.values()))
            elif isinstance(arg, (list, tuple)):
                for item in arg:
                    visit(item)

        visit((question.args, tuple(question.kwargs.values())))
        return {index: line for index, line in lines.items() if index in wanted}

    def _forget(self, target: str, args: Any, kwargs: Any, writes: frozenset[str]) -> None:
        """A write we cannot follow makes what we knew of that tensor, and of its views, stale."""
        named = normalised(target, tuple(args), tuple(kwargs.items())) if writes else {}
        touched = {
            storage_key(tensor)
            for name in writes
            for tensor in (named[name] if isinstance(named[name], (list, tuple)) else [named[name]])
            if isinstance(tensor, torch.Tensor)
        }
        if touched:
            self._known = {key: s for key, s in self._known.items() if storage_key(s.fake) not in touched}

    def _put(self, fake: torch.Tensor, shadow: _Shadow) -> None:
        self._known[id(fake)] = shadow

    def _operands(self, args: Any, kwargs: Any) -> tuple[Any, frozenset[int]] | None:
        """A maker of the call's Line and the inputs it depends on, or None if some operand is not known."""
        inputs: set[int] = set()
        unknown = False

        def name(arg: Any) -> Any:
            nonlocal unknown
            if isinstance(arg, torch.Tensor):
                shadow = self._known.get(id(arg))
                if shadow is None:
                    unknown = True
                    return None
                inputs.update(shadow.inputs)
                return shadow.name
            if isinstance(arg, (list, tuple)):
                return type(arg)(name(item) for item in arg)
            return arg

        named_args, named_kwargs = name(tuple(args)), {k: name(v) for k, v in kwargs.items()}
        if unknown:
            return None
        return (lambda func: Line(func, named_args, named_kwargs)), frozenset(inputs)

    def _run(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        def real(arg: Any) -> Any:
            if isinstance(arg, torch.Tensor):
                return self._known[id(arg)].real
            if isinstance(arg, (list, tuple)):
                return type(arg)(real(item) for item in arg)
            return arg

        with real_tensors(), torch.no_grad():
            return func(*real(tuple(args)), **{k: real(v) for k, v in kwargs.items()})
