"""Kernels stand in where they are proven, also for two ops at once, and models train with them as in eager."""

from __future__ import annotations

import copy
import ctypes
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from beside_torch import BATCH_NORM, CONVOLUTION, GRADIENTS, NORM_GRADIENTS, forbidden, needs_kernels
from equivalence import assert_same_as_eager
from torch import nn

import memfit
from memfit import stand_ins
from memfit.capture.rewrites import rewrite, trials
from memfit.capture.rewrites.proof import Proofs
from memfit.capture.step import Op, Ref
from memfit.cost.signature import signature
from memfit.run.feedback import NUM_WATCHED
from memfit.run.neighbours import additions, divisions, joined
from memfit.stand_ins import compiled
from memfit.torch_internals import StorageWatch

pytestmark = needs_kernels


class Net(nn.Module):
    """Something for each of them to do, of a size that is not left to torch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.mix = nn.Conv2d(16, 16, 1, bias=False)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        h = F.avg_pool2d(self.drop(self.mix(h).add_(h)), 2)
        return self.head(F.dropout(h, 0.1).mean((2, 3)))


class LastNet(Net):
    """The same with channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.contiguous(memory_format=torch.channels_last))


def inputs(batch: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 3, 40, 40),)


def stand_ins_of(step: memfit.Step) -> dict[str, str]:
    """By what they stand in for; a convolution in any order of sums. Not counting, which batch norm always does."""
    named = ((op.target, op.stand_in) for op in step.ops if op.stand_in not in ("", stand_ins.COUNT_UP))
    return {target: f"{name.rsplit('.', 1)[0]}.default" for target, name in named}


def all_that_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a product is faster is not asked, and nothing is remembered."""
    monkeypatch.setattr(trials, "is_faster", lambda plain, made: True)
    monkeypatch.setattr(Proofs, "_outcome", lambda self, rewrite, signature, experiment: experiment())


def test_each_stands_in_where_it_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "is_faster", lambda plain, made: True)
    step = rewrite(memfit.capture(Net(), inputs(4)), proofs=Proofs(None))
    assert stand_ins_of(step) == stand_ins.STAND_INS
    for op in step.ops:
        assert signature(step, op).startswith(f"{op.called}("), "its price is that of what is called"


def test_with_channels_last_both_halves_of_batch_norm_have_one() -> None:
    found = stand_ins_of(rewrite(memfit.capture(LastNet(), inputs(4)), proofs=Proofs(None)))
    assert found == {name: stand_ins.STAND_INS[name] for name in (BATCH_NORM, NORM_GRADIENTS)}


def test_none_stands_in_for_what_it_does_not_serve() -> None:
    in_double = rewrite(memfit.capture(Net().double(), (torch.randn(4, 3, 40, 40).double(),)))
    assert "aten.native_batch_norm.default" not in stand_ins_of(in_double)
    vectors_only = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))  # too few numbers, no maps
    assert not stand_ins_of(rewrite(memfit.capture(vectors_only, (torch.randn(40, 6),))))
    with forbidden():
        assert not stand_ins_of(rewrite(memfit.capture(Net(), inputs(4)))).keys() - {CONVOLUTION, GRADIENTS}
    assert not stand_ins_of(rewrite(memfit.capture(Net(), inputs(4)), without=frozenset({"stand-ins"})))


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_none_stands_in_where_its_bits_are_others(default: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each self-test is held against a kernel that is wrong in the least way it could be, whatever dtype is usual."""
    kernels = stand_ins.kernels()
    assert kernels is not None

    class Wrong:
        """A library whose kernels write over one result after they have run."""

        def __getattr__(self, name: str) -> Any:
            if name.endswith(("_scratch", "_has_avx512")):
                return getattr(kernels, name)

            def run(job: Any, *rest: Any) -> None:
                getattr(kernels, name)(job, *rest)
                job = job[0] if name == "memfit_add_all" else job
                made = [getattr(job, field, None) for field in ("running_var", "grad_bias", "into", "out")]
                where = rest[0] if name == "memfit_bernoulli" else next(filter(None, made))
                ctypes.cast(where, ctypes.POINTER(ctypes.c_float))[1] += 1e-3

            return run

    monkeypatch.setattr(compiled, "kernels", lambda: Wrong())
    monkeypatch.setattr(torch, "bmm", lambda one, other: (one @ other).mul_(1 + 1e-6))
    steps = [memfit.capture(net, inputs(4)) for net in (Net(), LastNet())]
    torch.set_default_dtype(default)
    try:
        assert [stand_ins_of(rewrite(step, proofs=Proofs(None))) for step in steps] == [{}, {}]
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("net", [Net, LastNet])
@pytest.mark.parametrize("policy", ["keep", pytest.param("sqrt", marks=pytest.mark.slow), "gist-lossless"])
def test_a_model_in_which_they_stand_in_trains_as_in_eager(
    net: type[Net], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_that_are_exact(monkeypatch)
    assert_same_as_eager(net(), inputs, policy=policy)


@pytest.mark.parametrize(("net", "expected"), [(Net, {*stand_ins.STAND_INS}), (LastNet, {BATCH_NORM, NORM_GRADIENTS})])
def test_a_fitted_model_calls_them(net: type[Net], expected: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    all_that_are_exact(monkeypatch)
    model = net()
    memfit.fit(model, policy="keep")
    model(*inputs(4)).sum().backward()
    text = model.memfit.code  # type: ignore[union-attr]
    assert all(re.search(rf" stand_ins\.{name.split('.')[1]}(\.sums_of_\w+)?\(", text) for name in expected)


@pytest.mark.parametrize("policy", ["keep", "sqrt"])
def test_a_relu_is_left_to_the_batch_norm_before_it(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it comes next and overwrites the result; run again, too."""
    all_that_are_exact(monkeypatch)
    norms = nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Tanh())
    model = nn.Sequential(nn.Conv2d(3, 16, 3), *norms, *(copy.deepcopy(layer) for layer in norms))
    memfit.fit(model, policy=policy)
    model(*inputs(4)).sum().backward()
    text = model.memfit.code  # type: ignore[union-attr]
    assert "aten.relu" not in text
    assert text.count("native_batch_norm(") == 4
    num_again = text.count("operators.renormalise(")
    assert (num_again > 0) == (policy == "sqrt")
    num_rectified = 2 + text.count("is_rectified=True", text.index("def backward_0"))
    assert text.count("is_rectified=True") == num_rectified and (num_rectified > 2) == (policy == "sqrt")


class Chain(nn.Sequential):
    """Batch norms with a ReLU behind each."""

    def __init__(self, memory_format: torch.memory_format) -> None:
        layers = [(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(4)]
        super().__init__(nn.Conv2d(3, 16, 3), *(layer for three in layers for layer in three), nn.Conv2d(16, 4, 1))
        self.to(memory_format=memory_format)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("policy", ["keep", pytest.param("sqrt", marks=pytest.mark.slow), "vdnn-all"])
def test_the_backward_of_a_relu_is_that_of_the_batch_norm_before_it_too(
    policy: str, memory_format: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_that_are_exact(monkeypatch)
    assert_same_as_eager(Chain(memory_format), inputs, policy=policy)
    model = memfit.fit(Chain(memory_format), policy=policy)
    model(*inputs(4)).square().sum().backward()
    text = model.memfit.code  # type: ignore[union-attr]
    assert text.count(", made = stand_ins.gate_and_go_on(") == text.count(", made=made)") > 0
    assert policy != "keep" or text.count(", made=made)") == 4


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("policy", ["keep", "gist-lossless"])
def test_the_backward_of_a_batch_norm_overwrites_a_gradient_that_nobody_reads(
    policy: str, memory_format: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    def network() -> nn.Module:
        layers = (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Tanh(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16))
        return nn.Sequential(*layers, nn.MaxPool2d(2), nn.ReLU()).to(memory_format=memory_format)

    all_that_are_exact(monkeypatch)
    assert_same_as_eager(network(), inputs, policy=policy)
    model = memfit.fit(network(), policy=policy)
    model(*inputs(4)).square().sum().backward()
    assert model.memfit.code.count("in_place=True") == 2  # type: ignore[union-attr]


def test_a_gradient_that_is_not_the_steps_own_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's, or a parameter's."""

    class Shifted(nn.Module):
        def __init__(self, has_shift: bool) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3)
            self.shift = nn.Parameter(torch.zeros(4, 16, 38, 38)) if has_shift else None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.norm(self.first(x))
            return h if self.shift is None else self.last(h + self.shift)

    all_that_are_exact(monkeypatch)
    for has_shift in (False, True):
        assert_same_as_eager(Shifted(has_shift), lambda n: inputs(4), policy="keep")
        model = memfit.fit(Shifted(has_shift), policy="keep")
        made = model(*inputs(4))
        tangent = torch.randn_like(made)
        kept = tangent.clone()
        made.backward(tangent)
        assert torch.equal(tangent, kept)
        assert "stand_ins.native_batch_norm_backward(" in model.memfit.code  # type: ignore[union-attr]
        assert "in_place" not in model.memfit.code  # type: ignore[union-attr]


def test_a_gradient_that_is_read_behind_the_batch_norm_is_left_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch norm's gradient must not take its place."""

    class Tapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3)
            self.shift = nn.Parameter(torch.zeros(4, 16, 38, 38))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.relu(self.norm(self.first(x)) + self.shift))

    all_that_are_exact(monkeypatch)
    assert_same_as_eager(Tapped(), lambda n: inputs(4), policy="keep")


def test_a_relu_that_somebody_reads_the_other_side_of_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x)
            return y.relu() * y.tanh()

    all_that_are_exact(monkeypatch)
    assert_same_as_eager(Both(), inputs, policy="keep")
    model = memfit.fit(Both(), policy="keep")
    model(*inputs(4))
    assert "is_rectified" not in model.memfit.code  # type: ignore[union-attr]


def test_without_a_compiler_torch_does_it_and_says_so(tmp_path: Path) -> None:
    script = """
import logging, torch
logging.basicConfig(level=logging.INFO, format="%(message)s")
from memfit import operators, stand_ins
from memfit.torch_internals import resolve
print(stand_ins.kernels(), resolve("memfit_ops.bernoulli_.default")(torch.empty(9999), 1.0).sum().item())
"""
    environment = {**os.environ, "MEMFIT_CACHE": str(tmp_path / "cache"), "CC": "no-such-compiler"}
    ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert ran.stdout.split() == ["None", "9999.0"], ran.stderr
    assert ran.stderr.count("torch's own kernels are used throughout: there is no C compiler 'no-such-compiler'") == 1


def test_batch_norms_are_counted_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = memfit.fit(Net(), policy="keep")
    counter = model.body[1].num_batches_tracked
    version = counter._version
    for number in range(1, 4):
        model(*inputs(4))
        assert counter.item() == number and counter._version == version + number
    assert "stand_ins.count_up(body_1_num_batches_tracked, 1)" in model.memfit.code  # type: ignore[union-attr]
    monkeypatch.setattr(stand_ins, "count_up", lambda counter, number: counter.add_(number + 1))
    without = rewrite(memfit.capture(Net(), inputs(4)), proofs=Proofs(None))
    assert not any(op.stand_in == stand_ins.COUNT_UP for op in without.ops)


class Dense(nn.Module):
    """A dense block: each layer reads all maps before it, so that backward adds up many gradients at once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.layers = nn.ModuleList(nn.Conv2d(8 + 16 * number, 16, 3, padding=1) for number in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = [self.first(x)]
        for layer in self.layers:
            maps.append(torch.tanh(layer(torch.cat(maps, 1))))
        return torch.cat(maps, 1)


@pytest.mark.parametrize("policy", ["keep", pytest.param("sqrt", marks=pytest.mark.slow)])
def test_additions_that_follow_one_another_are_made_at_once(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    all_that_are_exact(monkeypatch)
    assert_same_as_eager(Dense(), inputs, policy=policy)
    model = memfit.fit(Dense(), policy=policy)
    model(*inputs(4)).square().sum().backward()
    text = model.memfit.code  # type: ignore[union-attr]
    lines = text.splitlines()
    assert [line.count("slice_") for line in lines if "stand_ins.add_all(" in line] == [3, 2]
    assert text.count("aten.slice.") == 1 and any(", [8, 16, 16], 1)" in line for line in lines if "aten.split" in line)


def test_additions_to_what_another_one_reads_or_writes_are_not_made_with_it() -> None:
    step = memfit.capture(Dense(), inputs(4))
    index = next(i for i, op in enumerate(step.ops) if op.target == "aten.add.Tensor")
    one, two, three = (step.storage[s].values[0] for s in range(3))

    def addition(into: int, what: int) -> Op:
        stand_in = stand_ins.STAND_INS["aten.add_.Tensor"]
        return replace(step.ops[index], args=(Ref(into), Ref(what)), kwargs=(), stand_in=stand_in)

    assert len(additions([addition(one, two), addition(three, two)], step)) == 2
    for second in (addition(one, three), addition(three, one), addition(two, three)):
        assert len(additions([addition(one, two), second], step)) == 1
    assert additions([replace(addition(one, two), stand_in=""), addition(three, two)], step) == []


def test_slices_that_are_not_all_of_a_tensor_are_taken_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            gap = y[:, :4].tanh().sum() + y[:, 5:16].sum()
            beginning = y[:, 0:4].sum() * y[:, 4:8].square().sum()
            return gap + beginning + y[:, 0:8].sum() * y[:, 8:16].square().sum()

    assert_same_as_eager(Parts(), inputs, policy="keep")
    step = memfit.capture(Parts(), inputs(4))
    slices = [op for op in step.ops[: step.num_forward] if op.target == "aten.slice.Tensor"]
    spans = {op.args[2:]: op for op in slices}
    whole, parts = [spans[0, 8], spans[8, 16]], [spans[0, 4], spans[4, 8]]
    assert divisions(whole, step) == whole and divisions([*whole, *parts], step) == whole
    assert divisions(parts, step) == divisions([spans[0, 4], spans[5, 16]], step) == divisions(whole[1:], step) == []
    of_another = replace(whole[1], args=(Ref(step.ops[0].args[0].value), *whole[1].args[1:]))
    assert divisions([whole[0], of_another], step) == []


class Normalised(nn.Module):
    """A dense block with batch norms: each reads a concatenation, the last of which is an output too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        sizes = [8 + 16 * number for number in range(4)]
        self.norms = nn.ModuleList(map(nn.BatchNorm2d, sizes[1:]))
        self.layers = nn.ModuleList(nn.Conv2d(size, 16, 3, padding=1) for size in sizes)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        maps = [self.first(x)]
        maps.append(self.layers[0](maps[0]))
        for norm, layer in zip(self.norms, self.layers[1:], strict=True):
            whole = torch.cat(maps, 1)
            maps.append(layer(torch.relu(norm(whole))))
        return maps[-1], whole


@pytest.mark.parametrize(
    ("policy", "are_kept"),
    [("keep", [True] * 2), pytest.param("sqrt", [False] * 2, marks=pytest.mark.slow), ("vdnn-all", [])],
)
def test_a_concatenation_is_made_by_the_batch_norm_behind_it(
    policy: str, are_kept: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where it is made again in backward, and not where something is freed or sent between the two."""
    all_that_are_exact(monkeypatch)
    assert_same_as_eager(Normalised(), inputs, policy=policy)
    model = memfit.fit(Normalised(), policy=policy)
    one, other = model(*inputs(4))
    (one.square().sum() + other.sum()).backward()
    text = model.memfit.code  # type: ignore[union-attr]
    calls = [line for line in text.splitlines() if ", made = stand_ins.cat_and_normalise(" in line]
    assert len(calls) == text.count("is_rectified=True, made=made)")
    assert [line.endswith(", True, True)") for line in calls] == are_kept


def test_what_a_batch_norm_makes_of_a_concatenation_is_gone_when_it_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes from one call and is named by the next: neither may hold it besides."""
    all_that_are_exact(monkeypatch)
    model = memfit.fit(Normalised(), policy="sqrt")
    x = inputs(4)
    for _ in range(NUM_WATCHED):  # one of the first steps may be observed, which has no neighbours
        model(*x)[0].square().sum().backward()
    assert model.memfit.is_settled  # type: ignore[union-attr]
    watches: list[StorageWatch] = []
    alive: list[int] = []
    join = stand_ins.cat_and_normalise

    def watched(*args: Any) -> Any:
        alive.append(sum(watch.is_alive for watch in watches))
        found = join(*args)
        watches.append(StorageWatch(found[1][0]))
        return found

    monkeypatch.setattr(stand_ins, "cat_and_normalise", watched)
    model(*x)
    assert len(watches) > 1 and alive == [0] * len(watches)


def test_a_concatenation_or_batch_norm_with_channels_last_is_not_made_in_one_pass() -> None:
    """Pieces of a single channel may have either layout, and do not say which torch takes for the whole."""
    step = rewrite(memfit.capture(Normalised(), inputs(4)), proofs=Proofs(None))
    norm = next(op for op in step.ops if op.stand_in == stand_ins.STAND_INS[BATCH_NORM])
    cat = next(op for op in step.ops if op.target == "aten.cat.default" and Ref(op.made[0]) == norm.args[0])
    assert joined(cat, norm, step) is not None
    for made in (cat.made[0], norm.made[0]):
        values = list(step.values)
        _, num_channels, height, width = values[made].shape
        rows = (num_channels * height * width, 1, num_channels * width, num_channels)
        values[made] = replace(values[made], stride=rows)
        assert joined(cat, norm, SimpleNamespace(values=values)) is None  # type: ignore[arg-type]
