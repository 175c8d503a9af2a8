"""Write a Program out as Python: one function for the forward half, one for each slice of the backward half.

    def forward(S, I):
        # features.0  vgg.py:31
        convolution = aten.convolution.default(input_0, features_0_weight, ...)
        S['convolution'] = convolution                    # the backward half reads it
        ...
    def backward_0(S):
        convolution = S.pop('convolution')                # its last slice
        ...
        return weight_gradient

Values live in local variables; what another function reads goes through the dict `S` and leaves it in the last
function that reads it. `del` frees a storage at its last use.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memfit.capture.step import Ghost, Opaque, Ref, Step
from memfit.plan.program import Boundary, Free, Give, Instruction, Program, Run
from memfit.run import kernels
from memfit.run.ghosts import make_ghost

# The autograd engine keeps the order of two gradients returned together; of more it may not.
_MAX_GIVES = 2


@dataclass(frozen=True)
class Slice:
    """A stretch of the backward half that ends in handing over gradients."""

    instructions: tuple[Instruction, ...]
    gives: tuple[int, ...]


@dataclass(frozen=True)
class Code:
    """Generated Python and its compiled functions."""

    text: str
    forward: Callable[[dict[str, Any], list[Any]], tuple[Any, ...]]
    backward: tuple[Callable[[dict[str, Any]], tuple[Any, ...]], ...]
    slices: tuple[Slice, ...]
    carried: frozenset[int]


def slices_of(program: Program) -> Iterator[Slice]:
    """Cut the backward half after each handing-over."""
    held: list[Instruction] = []
    gives: list[int] = []
    for instruction in program.instructions[program.boundary + 1 :]:
        if isinstance(instruction, Give):
            if len(gives) == _MAX_GIVES:
                yield Slice(tuple(held), tuple(gives))
                held, gives = [], []
            gives.append(instruction.gradient)
        elif gives:
            yield Slice(tuple(held), tuple(gives))
            held, gives = [instruction], []
        else:
            held.append(instruction)
    if gives:
        yield Slice(tuple(held), tuple(gives))


def generate(program: Program, opaque: tuple[Any, ...] = ()) -> Code:
    """Write the program as Python and compile it."""
    step = program.step
    slices = tuple(slices_of(program))
    bodies = [program.instructions[: program.boundary], *(s.instructions for s in slices)]
    last_reader = _last_readers(step, bodies, slices)
    names: dict[str, Any] = {
        "torch": torch,
        "aten": torch.ops.aten,
        "ops": torch.ops,
        "memfit": kernels,
    }
    names |= {f"opaque_{index}": thing for index, thing in enumerate(opaque)}
    writer = _Writer(step, last_reader, names)
    lines = writer.forward(bodies[0])
    for index, part in enumerate(slices):
        lines += ["", *writer.backward(index, part)]
    text = "\n".join(lines) + "\n"
    file = f"<memfit {step.name} {step.digest}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # for tracebacks
    exec(compile(text, file, "exec"), names)
    return Code(
        text=text,
        forward=names["forward"],
        backward=tuple(names[f"backward_{index}"] for index in range(len(slices))),
        slices=slices,
        carried=frozenset(value for value, reader in last_reader.items() if reader > 0),
    )


def _last_readers(step: Step, bodies: list[tuple[Instruction, ...]], slices: tuple[Slice, ...]) -> dict[int, int]:
    """For each value the last function that reads it: 0 is the forward half, k + 1 the k-th slice."""
    found: dict[int, int] = {}
    for index, body in enumerate(bodies):
        for instruction in body:
            if isinstance(instruction, Run):
                for value in step.ops[instruction.op].reads():
                    found[value] = index
        if index:
            for gradient in slices[index - 1].gives:
                found[step.gradients[gradient].value] = index
    return found


class _Writer:
    """Writes functions; knows which values are in local variables and which are in S."""

    def __init__(self, step: Step, last_reader: dict[int, int], names: dict[str, Any]) -> None:
        self.step = step
        self.last_reader = last_reader
        self.names = names
        self.ghosts: dict[Ghost, str] = {}
        self.local: set[int] = set()
        self.place = 0
        self.lines: list[str] = []

    def forward(self, body: tuple[Instruction, ...]) -> list[str]:
        self._begin("def forward(S, I):", 0)
        for index, source in enumerate(self.step.sources):
            if self.last_reader.get(source.value) is not None and self._read_in(source.value, body):
                self._line(f"{self._name(source.value)} = I[{index}]")
                self.local.add(source.value)
        self._body(body)
        made = [self._name(value) for value in self.step.outputs]
        self._line(f"return ({', '.join(made)}{',' if len(made) == 1 else ''})")
        return self.lines

    def backward(self, index: int, part: Slice) -> list[str]:
        self._begin(f"def backward_{index}(S):", index + 1)
        self._body(part.instructions)
        given = []
        for gradient in part.gives:
            value = self.step.gradients[gradient].value
            self._fetch(value)
            given.append(self._name(value))
        self._line(f"return ({', '.join(given)}{',' if len(given) == 1 else ''})")
        return self.lines

    def _begin(self, header: str, place: int) -> None:
        self.lines = [header]
        self.local = set()
        self.place = place

    def _line(self, text: str) -> None:
        self.lines.append("    " + text)

    def _body(self, body: tuple[Instruction, ...]) -> None:
        where = None
        for instruction in body:
            if isinstance(instruction, Run):
                op = self.step.ops[instruction.op]
                if (op.path, op.source) != where:
                    where = (op.path, op.source)
                    self._line(f"# {op.path or '(root)'}  {op.source}".rstrip())
                self._run(instruction.op)
            elif isinstance(instruction, Free):
                self._free(instruction.storage)
            else:
                assert not isinstance(instruction, Boundary)

    def _run(self, index: int) -> None:
        op = self.step.ops[index]
        for value in dict.fromkeys(op.reads()):
            self._fetch(value)
        arguments = [self._text(arg) for arg in op.args]
        arguments += [f"{key}={self._text(arg)}" for key, arg in op.kwargs]
        prefix = "" if op.target.startswith(("aten.", "memfit.")) else "ops."
        call = f"{prefix}{op.target}({', '.join(arguments)})"
        if op.returns_many:
            names = [self._name(out) if out is not None and self._is_wanted(out) else "_" for out in op.outputs]
            if not any(name != "_" for name in names):
                self._line(call)
            else:
                self._line(f"{', '.join(names)}{',' if len(names) == 1 else ''} = {call}")
                if "_" in names:
                    self._line("del _")
        elif op.made and self._is_wanted(op.made[0]):
            self._line(f"{self._name(op.made[0])} = {call}")
        else:
            self._line(call)
        for value in op.made:
            if self._is_wanted(value):
                self.local.add(value)
                if self.last_reader.get(value, -1) > self.place:
                    self._line(f"S[{self._name(value)!r}] = {self._name(value)}")

    def _is_wanted(self, value: int) -> bool:
        return value in self.last_reader or value in self.step.outputs

    def _read_in(self, value: int, body: tuple[Instruction, ...]) -> bool:
        return (
            any(isinstance(i, Run) and value in self.step.ops[i.op].reads() for i in body) or value in self.step.outputs
        )

    def _fetch(self, value: int) -> None:
        """Make sure the value is in a local variable; take it out of S in its last function."""
        if value in self.local:
            return
        name = self._name(value)
        take = f"S.pop({name!r})" if self.last_reader[value] == self.place else f"S[{name!r}]"
        self._line(f"{name} = {take}")
        self.local.add(value)

    def _free(self, storage: int) -> None:
        dead = sorted(v for v in self.local if self.step.values[v].storage == storage)
        if dead:
            self._line(f"del {', '.join(self._name(value) for value in dead)}")
            self.local -= set(dead)

    def _name(self, value: int) -> str:
        return self.step.values[value].name

    def _text(self, arg: Any) -> str:
        if isinstance(arg, Ref):
            return self._name(arg.value)
        if isinstance(arg, Ghost):
            if arg not in self.ghosts:
                self.ghosts[arg] = f"ghost_{len(self.ghosts)}"
                self.names[self.ghosts[arg]] = make_ghost(arg)
            return self.ghosts[arg]
        if isinstance(arg, Opaque):
            return f"opaque_{arg.index}"
        if isinstance(arg, (tuple, list)):
            return f"[{', '.join(self._text(item) for item in arg)}]"
        if isinstance(arg, torch.device):
            return f"torch.device({str(arg)!r})"
        if isinstance(arg, float) and arg - arg != 0:
            return f"float({str(arg)!r})"
        return repr(arg)
