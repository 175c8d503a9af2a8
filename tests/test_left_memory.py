"""Results in the memory of what was freed just before: which, that nobody else reads it, and the same bits."""

from __future__ import annotations

import array
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from beside_torch import needs_kernels
from equivalence import assert_same_as_eager
from test_stand_ins_in_steps import Chain, LastNet, Net, all_that_are_exact, inputs
from torch import nn

import memfit
from memfit import stand_ins
from memfit.left_memory import let_go, new_empty, taking
from memfit.plan.program import FetchWait, Free, Give, Program, Run, SendWait
from memfit.run import codegen, heirs
from memfit.run.heirs import Heirs

DONOR = torch.zeros(6, 4)
_NOTHING_COMES_TO_BE = (Free, Give, SendWait, FetchWait)


def poisoned(values: dict[str, Any], name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As taking(), but whoever still reads what was there reads nonsense, as who reads what is not written yet."""
    torch.empty(0, dtype=torch.uint8).set_(values[name].untyped_storage()).fill_(255)
    return taking(values, name, function, *args, **kwargs)


def placed(memory: torch.Tensor, *args: Any) -> torch.Tensor:
    """Room that may be in this memory."""
    values = {"left": memory}
    made = taking(values, "left", new_empty, *args)
    assert not values
    return made


@pytest.fixture
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small storages leave their memory too, and nothing sensible is in it."""
    all_that_are_exact(monkeypatch)
    monkeypatch.setattr(heirs, "LEAST_BYTES", 1)
    monkeypatch.setattr(codegen, "taking", poisoned)


def test_a_result_of_that_size_is_made_there() -> None:
    memory = torch.zeros(6, 4)
    made = placed(memory, (4, 6), None, DONOR)
    assert made.data_ptr() == memory.data_ptr() and made.shape == (4, 6) and made.is_contiguous()
    turned = placed(memory, (4, 6), (1, 4), DONOR)
    assert turned.data_ptr() == memory.data_ptr() and turned.stride() == (1, 4)
    double = placed(memory, (12,), None, torch.zeros(1, dtype=torch.float64))
    assert double.data_ptr() == memory.data_ptr() and double.dtype is torch.float64


def test_any_other_result_is_made_elsewhere() -> None:
    memory = torch.zeros(6, 4)
    assert placed(memory, (6, 5), None, DONOR).data_ptr() != memory.data_ptr()
    gaps = placed(memory, (12, 2), (4, 1), DONOR)
    assert gaps.data_ptr() != memory.data_ptr() and gaps.stride() == (4, 1)
    assert new_empty((6, 4), None, DONOR).data_ptr() != memory.data_ptr()


@pytest.mark.parametrize("asked", [lambda: new_empty((6, 5), None, DONOR), let_go])
def test_what_is_of_no_use_goes_at_once(asked: Callable[[], Any]) -> None:
    buffer = array.array("f", [0.0] * 24)
    values = {"left": torch.frombuffer(buffer, dtype=torch.float32)}
    gone = weakref.ref(buffer)
    del buffer
    there = [gone() is not None]

    def look() -> None:
        asked()
        there.append(gone() is not None)

    taking(values, "left", look)
    assert there == [True, False]


def test_only_one_result_is_made_there_and_none_after_an_error() -> None:
    memory = torch.zeros(6, 4)
    first, second = taking({"left": memory}, "left", lambda: [new_empty((6, 4), None, DONOR) for _ in range(2)])
    assert first.data_ptr() == memory.data_ptr() != second.data_ptr()

    def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        taking({"left": memory}, "left", fails)
    assert new_empty((6, 4), None, DONOR).data_ptr() != memory.data_ptr()


@needs_kernels
@pytest.mark.parametrize("policy", ["keep", "sqrt", "gist-lossless", "vdnn-all"])
@pytest.mark.parametrize(
    "net", [Net, LastNet, lambda: Chain(torch.contiguous_format), lambda: Deep(), lambda: Pooled()]
)
def test_models_train_as_in_eager(net: Callable[[], nn.Module], policy: str, every_size: None) -> None:
    assert_same_as_eager(net(), inputs, policy=policy)


class Deep(nn.Module):
    """Maps of one size, one after the other, and one that is read long after it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, size, padding=size // 2))
            for size in (3, 1, 3, 3)
        )
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = early = self.first(x)
        for block in self.blocks:
            h = block(h)
        return self.pool(h + early.tanh())


class Pooled(nn.Sequential):
    """Two convolutions in front of each pool."""

    def __init__(self) -> None:
        layers = [
            (nn.Conv2d(num_in, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), *pool)
            for first in (3, 16, 16)
            for num_in, pool in ((first, ()), (16, (nn.MaxPool2d(2),)))
        ]
        super().__init__(*(layer for several in layers for layer in several))


@needs_kernels
@pytest.mark.parametrize("policy", ["sqrt", "checkpoint-search", "gist-lossless"])
def test_code_says_who_takes_what(policy: str, every_size: None) -> None:
    model = memfit.fit(Pooled(), policy=policy)
    model(*inputs(4)).square().sum().backward()
    program = model.memfit.newest.program  # type: ignore[union-attr]
    found = Heirs.found_in(program).of
    code = model.memfit.code  # type: ignore[union-attr]
    assert 0 < code.count(" = taking(S, 'left ") == code.count("    S['left ") <= len(found)
    assert_may_take(program, found)
    for number, heir in found.items():
        for between in program.instructions[number + 1 : heir]:
            if isinstance(between, Run):
                op = program.step.ops[between.op]
                made = {program.step.values[value].storage for value in op.made}
                assert all(program.step.storage[storage].maker != between.op for storage in made), op.called
                assert op.called in (stand_ins.COUNT_UP, "aten.relu_.default", "aten.threshold_backward.grad_input")
            else:
                assert isinstance(between, _NOTHING_COMES_TO_BE)


def assert_may_take(program: Program, found: Mapping[int, int]) -> None:
    """What is taken has the size, nobody else has it, and nobody takes two."""
    step, instructions = program.step, program.instructions
    theirs = {step.values[v].storage for v in (*step.outputs, *(g.value for g in step.gradients))}
    for number, heir in found.items():
        freed, run = instructions[number], instructions[heir]
        assert isinstance(freed, Free) and isinstance(run, Run) and number < heir
        made = step.values[step.ops[run.op].made[0]].storage
        assert step.storage[made].bytes == step.storage[freed.storage].bytes
        assert freed.storage not in theirs and step.storage[freed.storage].maker is not None
        assert not number < program.boundary < heir, "the caller has its turn in between"
    assert len(set(found.values())) == len(found)


@needs_kernels
def test_counting_in_between_is_passed_over(every_size: None) -> None:
    """Each batch norm counts its batches before it runs: what was freed before that is its to take."""
    model = memfit.fit(Pooled(), policy="gist-lossless")
    model(*inputs(4)).square().sum().backward()
    program = model.memfit.newest.program  # type: ignore[union-attr]
    step, found = program.step, Heirs.found_in(program).of
    runs = [(number, each) for number, each in enumerate(program.instructions) if isinstance(each, Run)]
    counting = {number for number, run in runs if step.ops[run.op].stand_in == stand_ins.COUNT_UP}
    assert any(counting.intersection(range(number, heir)) for number, heir in found.items())


@needs_kernels
@pytest.mark.parametrize("policy", ["keep", "sqrt"])
def test_a_batch_norm_overwrites_an_input_that_nobody_reads_any_more(policy: str, every_size: None) -> None:
    """By sqrt a convolution's result goes with the batch norm that reads it; by keep it is needed in backward."""
    model = memfit.fit(Pooled(), policy=policy)
    model(*inputs(4)).square().sum().backward()
    program = model.memfit.newest.program  # type: ignore[union-attr]
    found = Heirs.found_in(program)
    forward = model.memfit.code.split("def backward_0")[0]  # type: ignore[union-attr]
    assert bool(found.in_place) == (policy == "sqrt") == ("in_place=True" in forward)
    for number in found.in_place:
        run, freed = program.instructions[number : number + 2]
        assert isinstance(run, Run) and isinstance(freed, Free) and number + 1 not in found.of


@needs_kernels
def test_small_ones_and_observed_steps_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    all_that_are_exact(monkeypatch)
    model = memfit.fit(Pooled(), policy="gist-lossless")
    model(*inputs(4)).square().sum().backward()
    assert "taking" not in model.memfit.code  # type: ignore[union-attr]
    monkeypatch.setattr(heirs, "LEAST_BYTES", 1)
    model = memfit.fit(Pooled(), policy="gist-lossless", debug=True)
    model(*inputs(4)).square().sum().backward()
    assert "taking" not in model.memfit.newest.observed_code.text  # type: ignore[union-attr]
