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

A storage that has been dropped can come back: a re-run makes its base value again, or a tier brings its bytes. In such
a later life the base alone is carried from function to function, and views are rebuilt on it where they are read.

Neighbours that are done in one pass are written as one call, see neighbours.py.

Observed code also calls `P(number, tensors)` after every instruction: its number, and what it made by storage. P is
`S['P']`, so that each call has an observer of its own.
"""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from memfit import operators, stand_ins
from memfit.capture.ghosts import make_ghost
from memfit.capture.rerun_form import RENORMALISE, rerun_form
from memfit.capture.step import Ghost, Op, Opaque, Ref, Step
from memfit.left_memory import taking
from memfit.plan.program import (
    Boundary,
    FetchStart,
    FetchWait,
    Free,
    Give,
    Program,
    Run,
    SendStart,
    SendWait,
)
from memfit.run import kernels
from memfit.run.aliases import alias, as_captured
from memfit.run.heirs import Heirs
from memfit.run.lives import Lives
from memfit.run.neighbours import (
    additions,
    divisions,
    is_counting,
    is_rectified,
    joined,
    normalised_behind,
    overwrites_gradient,
)
from memfit.run.slices import Numbered, Slice, slices_of
from memfit.tiers.tier import Tier


class Observer(Protocol):
    """Told of every instruction: its number, and the tensors it made by the storage each looks at."""

    def __call__(self, number: int, made: Mapping[int, torch.Tensor] | None = None) -> None: ...


@dataclass(frozen=True)
class Code:
    """Generated Python and its compiled functions."""

    text: str
    forward: Callable[[dict[str, Any], list[Any]], tuple[Any, ...]]
    backward: tuple[Callable[[dict[str, Any]], tuple[Any, ...]], ...]
    slices: tuple[Slice, ...]
    carried: frozenset[int]
    trailing: tuple[int, ...]  # instructions after the last handing-over: there is nothing left for them to do


def away_name(step: Step, storage: int) -> str:
    """Where in S a storage that is away is found: by its first value, whose name backward has no part in."""
    return f"away_{step.values[step.storage[storage].values[0]].name}"


def generate(
    program: Program,
    opaque: tuple[Any, ...] = (),
    *,
    tiers: Mapping[str, Tier] | None = None,
    observed: bool = False,
) -> Code:
    """Write the program as Python and compile it."""
    step = program.step
    slices = tuple(slices_of(program))
    total = len(program.instructions)
    forward = tuple(enumerate(program.instructions[: program.boundary]))
    plan = Lives.of(step, [forward, *(part.instructions for part in slices)], slices)
    names: dict[str, Any] = {
        "torch": torch,
        "aten": torch.ops.aten,
        "ops": torch.ops,
        "memfit": kernels,
        "operators": operators,
        "stand_ins": stand_ins,
        "alias": alias,
        "as_captured": as_captured,
        "taking": taking,
        "tiers": tiers or {},
    }
    names |= {f"opaque_{index}": thing for index, thing in enumerate(opaque)}
    writer = _Writer(step, plan, names, Heirs() if observed else Heirs.found_in(program), observed)
    lines = writer.forward(forward)
    for index, part in enumerate(slices):
        lines += ["", *writer.backward(index, part, program.boundary)]
    text = "\n".join(lines) + "\n"
    file = f"<memfit {step.name} {step.digest}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)  # for tracebacks
    exec(compile(text, file, "exec"), names)
    return Code(
        text=text,
        forward=names["forward"],
        backward=tuple(names[f"backward_{index}"] for index in range(len(slices))),
        slices=slices,
        carried=frozenset(value for value, reader in plan.last_reader.items() if reader > 0),
        trailing=tuple(range(max((n for part in slices for n in part.give_numbers), default=-1) + 1, total)),
    )


class _Writer:
    """Writes functions; knows which values are in local variables and which are in S."""

    def __init__(self, step: Step, lives: Lives, names: dict[str, Any], heirs: Heirs, observed: bool) -> None:
        self.step = step
        self.lives = lives
        self.names = names
        self.heirs = heirs
        self.left: dict[int, str] = {}  # what an instruction's result takes the memory of
        self.observed = observed
        self.ghosts: dict[Ghost, str] = {}
        self.local: set[int] = set()
        self.local_bases: set[int] = set()
        self.life: dict[int, int] = {}
        self.live: set[int] = set()
        self.bases: dict[int, str] = {}
        self.place = 0
        self.lines: list[str] = []

    def forward(self, body: tuple[Numbered, ...]) -> list[str]:
        self._begin("def forward(S, I):", 0)
        read = {v for _, i in body if isinstance(i, Run) for v in self.step.ops[i.op].reads()} | {*self.step.outputs}
        for index, source in enumerate(self.step.sources):
            if source.value in read:
                self._line(f"{self._name(source.value)} = I[{index}]")
                self.local.add(source.value)
        self._body(body)
        made = [self._name(value) for value in self.step.outputs]
        self._line(f"return ({', '.join(made)}{',' if len(made) == 1 else ''})")
        return self.lines

    def backward(self, index: int, part: Slice, boundary: int) -> list[str]:
        self._begin(f"def backward_{index}(S):", index + 1)
        if index == 0:
            tangents = {v: self._name(v) for v in self.step.tangents if v is not None and v in self.lives.last_reader}
            self._observe(boundary, {self.step.values[v].storage: f"S[{name!r}]" for v, name in tangents.items()})
        self._body(part.instructions)
        given = []
        for gradient in part.gives:
            value = self.step.gradients[gradient].value
            self._fetch(value)
            given.append(self._name(value))
        for number in part.give_numbers:
            self._observe(number)
        self._line(f"return ({', '.join(given)}{',' if len(given) == 1 else ''})")
        return self.lines

    def _begin(self, header: str, place: int) -> None:
        self.lines = [header]
        if self.observed:
            self._line("P = S['P']")
        self.local = set()
        self.local_bases = set()
        self.place = place

    def _line(self, text: str) -> None:
        self.lines.append("    " + text)

    def _observe(self, number: int, made: dict[int, str] | None = None) -> None:
        if self.observed:
            table = "" if made is None else f", {{{', '.join(f'{s}: {name}' for s, name in made.items())}}}"
            self._line(f"P({number}{table})")

    def _body(self, body: tuple[Numbered, ...]) -> None:
        where = None
        rectified: int | None = None  # the value that the ReLU that comes next has nothing left to do to
        ahead: Op | None = None  # a batch norm, or the backward of one, that has been made
        num_done = 0  # of the ops that come next
        for place, (number, instruction) in enumerate(body):
            match instruction:
                case Run(index, _) if rectified is not None:
                    self._rename(rectified, self.step.ops[index])
                    rectified = None
                case Run() if num_done > 0:
                    num_done -= 1
                case Run(index, again):
                    op = self.step.ops[index]
                    if (op.path, op.source, again) != where:
                        where = (op.path, op.source, again)
                        note = "  (again)" if again else ""
                        self._line(f"# {op.path or '(root)'}  {op.source}".rstrip() + note)
                    form = rerun_form(op) if again else op
                    following, freed = (None, []) if self.observed else self._following(body, place)
                    if (operands := normalised_behind(form, following, freed, self.step)) is not None:
                        self._gate(form, operands)
                        ahead = following
                        continue
                    if not (self.observed or again) and (normalised := self._join(body, place)) is not None:
                        ahead = normalised
                        continue
                    if not self.observed and (num_done := self._at_once(body, place) - 1) > 0:
                        continue
                    num_done = 0
                    # Not to what is there twice, and forgotten.
                    is_first = bool(form.made) and self.step.values[form.made[0]].storage not in self.live
                    rectified = form.made[0] if is_first and is_rectified(form, following) else None
                    more = ["is_rectified=True"] * (rectified is not None) + ["made=made"] * (op is ahead)
                    if not self.observed and op is not ahead:
                        freed = list(_freed_behind(body, place))
                        is_in_place = number in self.heirs.in_place or overwrites_gradient(form, freed, self.step)
                        more += ["in_place=True"] * is_in_place
                    self._run(number, index, form, more)
                    if op is ahead:
                        self._line("del made")
                        ahead = None
                case Free(storage):
                    self._leave(number, storage)
                    self._free(storage)
                    self._observe(number)
                case SendStart(storage, tier):
                    self._send(storage, tier)
                    self._observe(number)
                case SendWait(storage):
                    self._forget(storage)
                    self._line(f"S[{away_name(self.step, storage)!r}].sent()")
                    self.live.discard(storage)
                    self._observe(number)
                case FetchStart(storage):
                    self._come(storage, f"back_{storage}")
                    self._line(f"{self.bases[storage]} = S[{away_name(self.step, storage)!r}].fetch()")
                    self._observe(number, {storage: self.bases[storage]})
                    self._line(f"del {self.bases[storage]}")
                case FetchWait(storage):
                    self._line(f"{self.bases[storage]} = S.pop({away_name(self.step, storage)!r}).fetched()")
                    self._carry_base(storage)
                    self._observe(number)
                case Give() | Boundary():
                    raise AssertionError(instruction)

    def _following(self, body: tuple[Numbered, ...], place: int) -> tuple[Op | None, list[int]]:
        """The op that comes next, if all that comes before it is freeing, and the storages that are freed behind it."""
        following: Op | None = None
        freed: list[int] = []
        for after in range(place + 1, len(body)):
            match body[after][1]:
                case Free(storage):
                    freed.append(storage)
                case Run(index) if following is None:
                    following = self.step.ops[index]
                    freed.clear()
                case _:
                    break
        return following, freed

    def _at_once(self, body: tuple[Numbered, ...], place: int) -> int:
        """Write ops that are done by one call, if there are any from there on; how many they are."""
        for find, write in ((additions, self._add), (divisions, self._divide)):
            ops = find(self._ops_from(body, place), self.step)
            if len(ops) > 1:
                write(ops)
                return len(ops)
        return 0

    def _ops_from(self, body: tuple[Numbered, ...], place: int) -> Iterator[Op]:
        """The op there and those behind it, up to any other instruction."""
        for at in range(place, len(body)):
            instruction = body[at][1]
            if not isinstance(instruction, Run) or instruction.again:
                return
            yield self.step.ops[instruction.op]

    def _join(self, body: tuple[Numbered, ...], place: int) -> Op | None:
        """Write a concatenation and the batch norm that follows on it, if that is what comes there; that batch norm."""
        op, *others = itertools.islice(self._ops_from(body, place), 3)
        at = place + 1 + (bool(others) and is_counting(others[0]))
        normalised = others[at - place - 1] if at - place - 1 < len(others) else None
        told = joined(op, normalised, self.step)
        if normalised is None or told is None:
            return None
        for value in dict.fromkeys((*op.reads(), *(v for v in normalised.reads() if v not in op.made))):
            self._fetch(value)
        whole = op.made[0]
        storage = self.step.values[whole].storage
        is_kept = storage not in _freed_behind(body, at)
        following, _ = self._following(body, at)
        given = [self._text(arg) for arg in (op.args[0], *told, is_rectified(normalised, following), is_kept)]
        self._come(storage, self._name(whole))
        self._line(f"{self._name(whole)}, made = stand_ins.cat_and_normalise({', '.join(given)})")
        self.local.add(whole)
        self._carry(whole)
        return normalised

    def _rename(self, value: int, op: Op) -> None:
        """What an op that has been done made of a value: the value itself."""
        made = op.made[0]
        self._line(f"{self._name(made)} = {self._name(value)}")
        self.local.add(made)
        self._carry(made)

    def _add(self, ops: list[Op]) -> None:
        """Additions in place, all at once."""
        for op in ops:
            for value in op.reads():
                self._fetch(value)
        into, what = (", ".join(self._text(op.args[position]) for op in ops) for position in range(2))
        self._line(f"stand_ins.add_all([{into}], [{what}])")
        for op in ops:
            self._rename(op.args[0].value, op)

    def _divide(self, ops: list[Op]) -> None:
        """Slices of one tensor, all at once."""
        base, dim, _, _ = ops[0].args
        self._fetch(base.value)
        sizes = [end - begin for _, _, begin, end in (op.args for op in ops)]
        names = ", ".join(self._name(op.made[0]) for op in ops)
        self._line(f"{names} = aten.split_with_sizes.default({self._name(base.value)}, {sizes}, {dim})")
        for op in ops:
            self.local.add(op.made[0])
            self._carry(op.made[0])

    def _gate(self, op: Op, operands: tuple[Ref, ...]) -> None:
        """The backward of a ReLU, in place, and of a batch norm that reads these besides."""
        for value in dict.fromkeys((*op.reads(), *(ref.value for ref in operands))):
            self._fetch(value)
        given = ", ".join(self._text(arg) for arg in (*op.args, *operands))
        self._line(f"{self._name(op.made[0])}, made = stand_ins.gate_and_go_on({given})")
        self.local.add(op.made[0])
        self._carry(op.made[0])

    def _run(self, number: int, index: int, op: Op, more: list[str]) -> None:
        """Write the call of an op, with these arguments behind its own."""
        for value in dict.fromkeys(op.reads()):
            self._fetch(value)
        arguments = [self._text(arg) for arg in op.args]
        arguments += [f"{key}={self._text(arg)}" for key, arg in op.kwargs] + more
        called = self._function(op)
        if number in self.left:
            called, arguments = "taking", ["S", repr(self.left.pop(number)), called, *arguments]
        call = f"{called}({', '.join(arguments)})"
        names: list[str] = []
        made: dict[int, str] = {}
        for position, out in enumerate(op.outputs):
            names.append(f"_{position}")
            if out is None:
                continue
            storage = self.step.values[out].storage
            is_new = self.step.storage[storage].maker == index and storage not in made
            if is_new and storage in self.live:
                made[storage] = names[-1]  # a second copy: not wanted
                continue
            if is_new:
                self._come(storage, self._name(out))
                made[storage] = self._name(out)
            # What begins a life is named even if nobody reads it: its Free ends it.
            if is_new or out in self.lives.last_reader or out in self.step.outputs or self.life.get(storage, 0) > 0:
                names[-1] = self._name(out)
                self.local.add(out)
        dropped = [name for name in names if name.startswith("_") and name[1:].isdigit()]
        if op.returns_many:
            if len(dropped) == len(names) and not self.observed:
                self._line(call)
                dropped = []
            else:
                self._line(f"{', '.join(names)}{',' if len(names) == 1 else ''} = {call}")
        elif op.made and (not dropped or self.observed):
            self._line(f"{names[0]} = {call}")
        else:
            self._line(call)
            dropped = []
        self._observe(number, made)
        if dropped:
            self._line(f"del {', '.join(dropped)}")
        for value in op.made:
            if value in self.local:
                self._carry(value)

    def _function(self, op: Op) -> str:
        if op.stand_in:  # a function of ours: torch would take its time to find it
            return "stand_ins." + op.stand_in.split(".", 1)[1].removesuffix(".default")
        if op.target == RENORMALISE:
            return "operators.renormalise"
        return op.called if op.called.startswith(("aten.", "memfit.")) else f"ops.{op.called}"

    def _carry(self, value: int) -> None:
        """Put a value that was just made where later functions find it."""
        storage = self.step.values[value].storage
        if self.life.get(storage, 0) == 0:
            if self.lives.last_reader.get(value, -1) > self.place:
                self._line(f"S[{self._name(value)!r}] = {self._name(value)}")
        elif self.bases[storage] == self._name(value):
            self._carry_base(storage)

    def _carry_base(self, storage: int) -> None:
        self.local_bases.add(storage)
        if self.lives.last_reader_of_base.get((storage, self.life[storage]), -1) > self.place:
            self._line(f"S[{self.bases[storage]!r}] = {self.bases[storage]}")

    def _come(self, storage: int, base: str) -> None:
        """A storage begins a life, under the name of its base."""
        self.live.add(storage)
        self.life[storage] = self.life.get(storage, -1) + 1
        self.bases[storage] = base

    def _fetch(self, value: int) -> None:
        """Make sure the value is in a local variable; what is read for the last time leaves S."""
        if value in self.local:
            return
        name, known = self._name(value), self.step.values[value]
        if self.life.get(known.storage, 0) == 0:
            take = f"S.pop({name!r})" if self.lives.last_reader[value] == self.place else f"S[{name!r}]"
            self._line(f"{name} = {take}")
        else:
            base = self.bases[known.storage]
            if known.storage not in self.local_bases:
                is_last = self.lives.last_reader_of_base[known.storage, self.life[known.storage]] == self.place
                self._line(f"{base} = S.pop({base!r})" if is_last else f"{base} = S[{base!r}]")
                self.local_bases.add(known.storage)
            if base != name:
                layout = f"{known.dtype}, {known.shape}, {known.stride}, {known.offset}"
                self._line(f"{name} = alias({base}, {layout})")
        self.local.add(value)

    def _send(self, storage: int, tier: str) -> None:
        """Hand the storage to its tier, which holds it from here on; ops may still read it."""
        value = min(v for v in self.local if self.step.values[v].storage == storage)
        made = self.step.ops[self.step.storage[storage].maker or 0]
        name = f"{self._name(value)}, made by {made.target} in module '{made.path or '(root)'}'"
        known = self.step.values[value]
        checked = f"as_captured({self._name(value)}, {known.dtype}, {known.shape}, {known.stride}, {name!r})"
        if made.target == "memfit.encode":  # ours, and larger than planned where it is a dense copy
            checked = self._name(value)
        self._line(f"S[{away_name(self.step, storage)!r}] = tiers[{tier!r}].send({checked}, {name!r})")

    def _leave(self, number: int, storage: int) -> None:
        """Keep the memory of a storage for its heir, if it has one."""
        heir = self.heirs.of.get(number)
        names = [self._name(v) for v in sorted(self.local) if self.step.values[v].storage == storage]
        if heir is not None and names:
            self.left[heir] = f"left {number}"  # no name that a value could have
            self._line(f"S[{self.left[heir]!r}] = {names[0]}")

    def _free(self, storage: int) -> None:
        self._forget(storage)
        self.live.discard(storage)

    def _forget(self, storage: int) -> None:
        """Delete every local variable that looks at the storage."""
        dead = {self._name(v) for v in self.local if self.step.values[v].storage == storage}
        if storage in self.local_bases:
            dead.add(self.bases[storage])
        if dead:
            self._line(f"del {', '.join(sorted(dead))}")
        self.local = {v for v in self.local if self.step.values[v].storage != storage}
        self.local_bases.discard(storage)

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


def _freed_behind(body: tuple[Numbered, ...], place: int) -> Iterator[int]:
    """The storages that are freed as soon as the instruction there is done."""
    for at in range(place + 1, len(body)):
        instruction = body[at][1]
        if not isinstance(instruction, Free):
            return
        yield instruction.storage
