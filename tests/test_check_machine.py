"""What the checker accepts computes the step: an unkind interpreter runs programs on real tensors."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from check_programs import (
    LEGAL,
    insert,
    keep,
    step_of,
    swapped,
)
from equivalence import bits
from hypothesis import event, given, settings
from hypothesis import strategies as st

from memfit.capture.step import Origin, Step, map_refs
from memfit.plan.check import IllegalProgram, check
from memfit.plan.program import (
    Boundary,
    FetchStart,
    FetchWait,
    Free,
    Give,
    Instruction,
    Program,
    Run,
    SendStart,
    SendWait,
)
from memfit.torch_internals import normalised, resolve

# --- what is accepted computes the step ------------------------------------------------------------------------------


class Machine:
    """Follows a program with real tensors, as unkindly as the rules allow: arrivals are late, given sources are ruined.

    It checks nothing. What it computes, or that it fails, is the truth the checker is held against.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.copies: dict[tuple[int, str], bytes] = {}
        self.arriving: dict[int, bytes] = {}
        self.sending: dict[int, tuple[str, bytes]] = {}
        self.handed_out: dict[str, Any] = {}
        self.makers: dict[int, int] = {}
        for index, op in enumerate(step.ops):
            for value in op.made:
                self.makers.setdefault(step.values[value].storage, index)
        torch.manual_seed(0)
        self._bring([s.value for s in step.sources if s.origin is not Origin.TANGENT])

    def result(self, program: Program) -> dict[str, Any]:
        """Bits of everything the step hands out, with the storages that are left."""
        for instruction in program.instructions:
            self._follow(instruction)
        for index, value in enumerate(self.step.outputs):
            self.handed_out[f"output {index}"] = bits(self._tensor(value))
        for source in self.step.sources:
            if source.origin is not Origin.TANGENT:
                self.handed_out.setdefault(f"source {source.name}", bits(self._tensor(source.value)))
        assert not self.copies and not self.arriving and not self.sending
        return self.handed_out | {"left": set(self.storages)}

    def _follow(self, instruction: Instruction) -> None:
        match instruction:
            case Run(op, again):
                self._run(op, again)
            case Boundary():
                self._bring([s.value for s in self.step.sources if s.origin is Origin.TANGENT])
            case Free(storage):
                del self.storages[storage]
            case SendStart(storage, tier):
                self.sending[storage] = tier, bytes(self.storages[storage])
            case SendWait(storage):
                tier, content = self.sending.pop(storage)
                assert bytes(self.storages.pop(storage)) == content, "written while it was sent"
                self.copies[storage, tier] = content
            case FetchStart(storage, tier):
                assert storage not in self.storages
                self.arriving[storage] = self.copies.pop((storage, tier))
                self.storages[storage] = _ruins(len(self.arriving[storage]))
            case FetchWait(storage):
                content = self.arriving.pop(storage)
                torch.empty(0, dtype=torch.uint8).set_(self.storages[storage]).copy_(_bytes(content))
            case Give(gradient):
                self._give(gradient)

    def _run(self, index: int, again: bool) -> None:
        op = self.step.ops[index]
        args, kwargs = op.args, dict(op.kwargs)
        if (
            again
            and op.target == "aten.native_batch_norm.default"
            and normalised(op.target, args, op.kwargs)["training"]
        ):
            args = (*args[:3], None, None, *args[5:])
        with torch.no_grad():
            made = resolve(op.target)(*self._real(args), **{key: self._real(arg) for key, arg in kwargs.items()})
        for value, tensor in zip(op.outputs, made if op.returns_many else [made], strict=True):
            if value is not None and self.makers.get(self.step.values[value].storage) == index:
                assert tensor.stride() == self.step.values[value].stride
                self.storages.setdefault(self.step.values[value].storage, tensor.untyped_storage())

    def _give(self, gradient: int) -> None:
        entry = self.step.gradients[gradient]
        self.handed_out[f"gradient {gradient}"] = bits(self._tensor(entry.value))
        if not any(later.of == entry.of for later in self.step.gradients[gradient + 1 :]):
            source = self.step.source_of[entry.of]
            self.handed_out[f"source {source.name}"] = bits(self._tensor(entry.of))
            self._tensor(entry.of).fill_(float("nan"))

    def _real(self, arg: Any) -> Any:
        return map_refs(arg, lambda ref: self._tensor(ref.value))

    def _tensor(self, value: int) -> torch.Tensor:
        v = self.step.values[value]
        return torch.empty(0, dtype=v.dtype).set_(self.storages[v.storage], v.offset, v.shape, v.stride)

    def _bring(self, values: list[int]) -> None:
        for value in values:
            storage = self.step.values[value].storage
            self.storages.setdefault(storage, _ruins(self.step.storage_bytes[storage]))
            tensor = self._tensor(value)
            generator = torch.Generator().manual_seed(value)
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.1)
            else:
                tensor.zero_()


def _bytes(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _ruins(num_bytes: int) -> torch.UntypedStorage:
    return torch.full((num_bytes,), 0xFF, dtype=torch.uint8).untyped_storage()


@cache
def legal(name: str) -> Program:
    return LEGAL[name]()


@cache
def expected(model: str) -> dict[str, Any]:
    return Machine(step_of(model)).result(keep(step_of(model)))


@pytest.mark.parametrize("name", LEGAL)
def test_a_legal_program_computes_the_step(name: str) -> None:
    program = legal(name)
    result = Machine(program.step).result(program)
    assert result == expected(program.step.name)
    assert result["left"] == check(program).live


Change = tuple[str, int, int]
CHANGES = st.tuples(st.sampled_from(["drop", "double", "swap", "move"]), st.integers(0, 400), st.integers(0, 400))


def changed(program: Program, change: Change) -> Program:
    kind, first, second = change
    count = len(program.instructions)
    first, second = first % count, second % count
    moved = program.instructions[first]
    rest = Program(program.step, program.instructions[:first] + program.instructions[first + 1 :])
    match kind:
        case "drop":
            return rest
        case "double":
            return insert(program, second, moved)
        case "swap":
            return swapped(program, first, second)
        case _:
            return insert(rest, second, moved)


def verdict(program: Program) -> str:
    """What the checker says: the rule that is broken, or "legal", which must then be true to the bit."""
    try:
        proof = check(program)
    except IllegalProgram as error:
        return error.rule.name
    result = Machine(program.step).result(program)
    assert result == expected(program.step.name) and result["left"] == proof.live
    return "legal"


# Changes that can be legal: to repeat a re-run, which costs but does no harm; to let instructions change places that do
# not concern each other (two frees, a free and an op on other storages, a send and the ops meanwhile).


@settings(max_examples=300, deadline=None, derandomize=True)
@given(name=st.sampled_from(sorted(LEGAL)), change=CHANGES)
def test_a_changed_program_is_refused_or_still_computes_the_step(name: str, change: Change) -> None:
    program = legal(name)
    said = verdict(changed(program, change))
    event(f"{change[0]}: {said}")
    if change[0] in ("drop", "double") and said == "legal":
        moved = program.instructions[change[1] % len(program.instructions)]
        assert isinstance(moved, Run) and moved.again


@settings(max_examples=300, deadline=None, derandomize=True)
@given(name=st.sampled_from(sorted(LEGAL)), changes=st.lists(CHANGES, min_size=2, max_size=4))
def test_a_program_changed_often_is_refused_or_still_computes_the_step(name: str, changes: list[Change]) -> None:
    program = legal(name)
    for change in changes:
        program = changed(program, change)
    event(verdict(program))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(name=st.sampled_from(sorted(LEGAL)), data=st.data())
def test_legal_steps_away_from_a_legal_program_compute_the_step(name: str, data: st.DataObject) -> None:
    # A walk through the legal programs: each small move that the checker allows is kept, so that many add up.
    program = legal(name)
    for start in data.draw(st.lists(st.integers(0, 400), min_size=5, max_size=15)):
        near = start % (len(program.instructions) - 1)
        moved = swapped(program, near, near + 1)
        if verdict(moved) == "legal":
            program = moved
    event("moved" if program != legal(name) else "stayed")
