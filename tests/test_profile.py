"""Costs measured on this machine: every op can be run alone, nothing of the user's changes, and figures are kept."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit.capture.rewrites import rewrite
from memfit.capture.step import Op, Opaque, Ref, Step
from memfit.cost import links, profile
from memfit.cost.costs import OpCost, priced_calls
from memfit.cost.links import measure_disk
from memfit.cost.operands import Call, CannotRunAlone, Operands
from memfit.cost.price_cache import PriceCache
from memfit.cost.profile import measure, overpriced, underestimated
from memfit.cost.profile_worker import NOISE_BYTES
from memfit.cost.signature import signature
from memfit.cost.stopwatch import Stopwatch, as_in_a_step
from memfit.cost.workspaces import Workspaces

MIB = 2**20


class Pictures(nn.Module):
    """Convolution, batch norm, in-place ReLU, pooling, a linear layer, cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.head = nn.Linear(8 * 16, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = F.max_pool2d(self.body(x), 2)
        return F.cross_entropy(self.head(h.flatten(1)), y)


class Words(nn.Module):
    """A small transformer: embedding, layer norm, attention, dropout, tied output weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.words(x)
        q, k, v = (t.view(*x.shape, 2, 8).transpose(1, 2) for t in self.qkv(self.norm(h)).chunk(3, dim=-1))
        h = h + F.dropout(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(h.shape), 0.1)
        return F.cross_entropy((F.gelu(h) @ self.words.weight.T).flatten(0, 1), x.flatten())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0].square().mean()


@cache
def pictures() -> Step:
    return rewrite(memfit.capture(Pictures(), (torch.randn(2, 3, 8, 8), torch.randint(5, (2,)))))


@cache
def words() -> Step:
    return rewrite(memfit.capture(Words(), (torch.randint(50, (2, 6)),)))


@cache
def recurrent() -> Step:
    return rewrite(memfit.capture(Recurrent(), (torch.randn(2, 5, 8),)))


class Counted(Stopwatch):
    """Knows how many ops it has timed; reads no disk and no memory."""

    num_ops = 0

    def op_s(self, call: Call) -> float:
        Counted.num_ops += 1
        return super().op_s(call)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    monkeypatch.setattr(Counted, "num_ops", 0)
    monkeypatch.setattr(profile, "Stopwatch", Counted)


@pytest.fixture
def no_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the process that measures them, which takes seconds to start."""
    monkeypatch.setattr(Workspaces, "of", lambda self, call: 0)


def runnable(step: Step) -> list[tuple[Op, Call]]:
    """The ops that can be run alone. oneDNN's LSTM hands private state to its backward."""
    return [
        (op, Call.of(step, op)) for op in priced_calls(step) if op.target != "aten.mkldnn_rnn_layer_backward.default"
    ]


def num_run(step: Step) -> int:
    """How many signatures have to be run: views are not."""
    return len({signature(step, op) for op, call in runnable(step) if not call.is_view})


def calls_of(target: str, step: Step) -> list[Call]:
    return [call for op, call in runnable(step) if op.target == target]


# -- Operands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [pictures, words, recurrent])
def test_operands_have_the_layouts_of_the_step(make: Callable[[], Step]) -> None:
    step = make()
    for op, call in runnable(step):
        operands = Operands(call)
        for arg, tensor in zip(op.args, operands._args, strict=True):
            if isinstance(arg, Ref):
                value = step.values[arg.value]
                assert (tuple(tensor.shape), tensor.stride(), tensor.dtype) == (value.shape, value.stride, value.dtype)


def test_operands_that_share_a_storage_share_it() -> None:
    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x * 2
            left, right = h.chunk(2)
            return (h * h).sum() + (left * right).sum()

    step = memfit.capture(Doubled(), (torch.randn(4, 3, requires_grad=True),))
    whole, halves = _products(step)
    first, second = Operands(whole)._args
    assert first.data_ptr() == second.data_ptr()
    first, second = Operands(halves)._args
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert second.data_ptr() - first.data_ptr() == 2 * 3 * 4


def _products(step: Step) -> tuple[Call, Call]:
    """Of the forward half: the product of the whole with itself, and that of its halves."""
    calls = [call for call in calls_of("aten.mul.Tensor", step) if call.is_forward and len(call.storage_bytes) == 1]
    pairs = [call for call in calls if len(call.operands) == 2]
    return pairs[0], pairs[1]


def test_contents_are_what_kernels_accept() -> None:
    (pool,) = calls_of("aten.max_pool2d_with_indices_backward.default", pictures())
    indices = Operands(pool)._args[-1]
    assert indices.min() == 0 and 0 < indices.max() < 8 * 8
    assert indices.unique().numel() == 16
    (embedding,) = calls_of("aten.embedding.default", words())
    assert 1 < Operands(embedding)._args[1].unique().numel() <= 50
    (norm,) = calls_of("aten.native_layer_norm_backward.default", words())
    rstd = Operands(norm)._args[4]
    assert (rstd > 0).all()


def test_written_operands_are_restored() -> None:
    call = next(call for call in calls_of("aten.relu_.default", pictures()))
    operands = Operands(call)
    before = operands._args[0].clone()
    operands.run()
    assert not torch.equal(operands._args[0], before)
    operands.restore()
    assert torch.equal(operands._args[0], before)


def test_an_op_that_takes_a_generator_cannot_run_alone(no_workspaces: None) -> None:
    step = pictures()
    index, op = next((i, op) for i, op in enumerate(step.ops) if op.target == "aten.relu_.default")
    with_generator = replace(op, args=(*op.args, Opaque(0, "torch.Generator")))
    with pytest.raises(CannotRunAlone, match=r"torch\.Generator"):
        Call.of(step, with_generator)
    changed = replace(step, ops=(*step.ops[:index], with_generator, *step.ops[index + 1 :]))
    costs = measure(changed)
    assert costs.of(changed)[index].is_estimated
    assert costs.num_estimated == 1


# -- Measuring --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [pictures, words, recurrent])
def test_every_op_is_measured(make: Callable[[], Step], no_workspaces: None) -> None:
    step = make()
    state = torch.get_rng_state()
    costs = measure(step)
    assert torch.equal(torch.get_rng_state(), state)
    assert costs.num_estimated == len(list(priced_calls(step))) - len(runnable(step))
    assert Counted.num_ops == num_run(step)
    for cost in costs.of(step):
        assert 0 < cost.time_ps < 10**12
    assert costs.device == "here" and costs.memory_bytes is not None
    assert costs.link("disk").send_bytes_per_s > 1e6
    assert costs.default_codec.encode_bytes_per_s > 1e8


def test_modes_around_the_call_do_not_matter(no_workspaces: None) -> None:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert measure(words()).num_estimated == 0
        assert not torch.is_grad_enabled() and torch.is_autocast_enabled("cpu")


def test_the_model_is_not_touched(no_workspaces: None) -> None:
    model = Pictures()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    measure(rewrite(memfit.capture(model, (torch.randn(2, 3, 8, 8), torch.randint(5, (2,))))))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_progress_is_told(no_workspaces: None) -> None:
    told: list[str] = []
    measure(pictures(), progress=told.append)
    total = num_run(pictures())
    assert told[0] == f"measuring ops: 1 of {total}" and told[-1] == f"measuring ops: {total} of {total}"


def test_after_the_cap_the_rest_is_estimated() -> None:
    step = words()
    costs = measure(step, cap_s=0)
    assert Counted.num_ops == 0
    assert costs.num_estimated == num_run(step)
    assert any(
        f"{costs.num_estimated} of {len(costs.by_signature)} kinds of ops are estimated" in n for n in costs.notes
    )
    assert all(cost.time_ps > 0 for cost in costs.of(step))
    assert not PriceCache.here()._ops, "estimates are not kept"


def test_estimates_follow_measured_ops_of_the_same_target() -> None:
    step = pictures()
    convolutions = {signature(step, op): Call.of(step, op) for op in step.ops if "convolution" in op.target}
    cache = PriceCache(None)
    known = next(iter(convolutions))
    relative = replace(convolutions[known])
    cache.add(known, OpCost(7_000_000_000, relative.bytes))
    costs = measure(step, cap_s=0, cache=cache)
    assert not costs.by_signature[known].is_estimated
    for name, call in convolutions.items():
        if name != known and name.partition("(")[0] == known.partition("(")[0]:
            assert costs.by_signature[name].workspace_bytes == call.bytes


# -- Workspaces -------------------------------------------------------------------------------------------------------


def convolution_step() -> Step:
    model = nn.Conv2d(32, 32, 3, padding=1)
    return memfit.capture(model, (torch.randn(4, 32, 64, 64),))


def test_workspaces_of_real_ops_and_a_crash_between() -> None:
    """oneDNN copies plain tensors into blocked layouts; a process that dies is replaced."""
    step = convolution_step()
    (forward,) = calls_of("aten.convolution.default", step)
    workspaces = Workspaces()
    try:
        held = workspaces.of(forward)
        if workspaces.notes:
            pytest.skip(workspaces.notes[0])
        assert NOISE_BYTES <= held < 16 * MIB
        with pytest.raises(CannotRunAlone, match="RuntimeError"):
            workspaces.of(replace(forward, args=(*forward.args[:3], [0, 0], *forward.args[4:])))  # stride zero
        assert workspaces._process is not None
        workspaces._process.kill()
        workspaces._process.wait()
        with pytest.raises(CannotRunAlone, match="ended"):
            workspaces.of(forward)
        assert workspaces.of(forward) == pytest.approx(held, abs=MIB)
        assert workspaces.of(calls_of("aten.relu_.default", pictures())[0]) == 0
    finally:
        workspaces.close()


def test_a_machine_that_does_not_tell_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.cost.workspaces.PIN", "raise SystemExit('no such thing here')")
    costs = measure(pictures())
    assert costs.num_estimated == 0
    assert any("workspaces are taken to be 0" in note and "no such thing here" in note for note in costs.notes)
    assert not PriceCache.here()._ops, "zeros that were not measured are not kept"


# -- The cache --------------------------------------------------------------------------------------------------------


def test_what_was_measured_is_not_run_again(no_workspaces: None) -> None:
    first = measure(pictures())
    ran = Counted.num_ops
    second = measure(pictures())
    assert Counted.num_ops == ran > 0
    assert second.by_signature == first.by_signature and second.links == first.links


def test_threads_have_a_file_each(monkeypatch: pytest.MonkeyPatch) -> None:
    here = PriceCache.here().file
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert PriceCache.here().file != here


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 1}', '{"format": 1, "ops": {"x": 3}}', "\xff"])
def test_a_damaged_cache_is_ignored_and_written_anew(content: str, caplog: pytest.LogCaptureFixture) -> None:
    file = PriceCache.here().file
    assert file is not None
    file.write_text(content, encoding="latin-1")
    with caplog.at_level(logging.WARNING, "memfit"):
        cache = PriceCache.here()
    assert "damaged" in caplog.text and str(file) in caplog.text
    cache.add("op", OpCost(5, 6))
    cache.save()
    assert PriceCache.here().op("op") == OpCost(5, 6)


def test_two_processes_lose_nothing() -> None:
    one, other = PriceCache.here(), PriceCache.here()
    one.add("a", OpCost(1))
    one.correct("c", 10)
    one.save()
    other.add("b", OpCost(2))
    other.correct("c", 4)
    other.save()
    both = PriceCache.here()
    assert both.op("a") == OpCost(1) and both.op("b") == OpCost(2)
    assert both.corrected("c", 0) == 10
    assert len(list(one.file.parent.iterdir())) == 1  # type: ignore[union-attr]


def test_corrections_stick(no_workspaces: None) -> None:
    step = pictures()
    name = next(signature(step, op) for op in step.ops if op.target == "aten.convolution.default")
    underestimated(name, 3 * MIB)
    assert measure(step, cap_s=0).by_signature[name].workspace_bytes == 3 * MIB
    assert measure(step).by_signature[name].workspace_bytes == 3 * MIB
    underestimated(name, 5 * MIB)
    underestimated(name, 4 * MIB)
    assert measure(step).by_signature[name].workspace_bytes == 5 * MIB


def test_prices_that_were_too_high_are_forgotten_and_workspaces_are_not(no_workspaces: None) -> None:
    step = pictures()
    costs = measure(step)
    cache = PriceCache.here()
    cache.add("of another step", OpCost(7))
    cache.correct(next(iter(cache._ops)), 3 * MIB)
    cache.save()
    corrections = dict(cache._corrections)
    overpriced(costs)
    left = PriceCache.here()
    assert left._ops == {"of another step": (7, 0)} and not left._figures
    assert left._corrections == corrections and corrections
    assert measure(step).num_estimated == 0, "all of it is measured anew"


def test_an_interrupted_run_keeps_what_it_has(no_workspaces: None) -> None:
    def interrupt(text: str) -> None:
        if text.startswith("measuring ops: 4 "):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(pictures(), progress=interrupt)
    assert len(PriceCache.here()._ops) == 3


def test_a_folder_that_cannot_be_written_costs_only_the_cache(tmp_path: Path, no_workspaces: None) -> None:
    (tmp_path / "file").write_text("")
    costs = measure(pictures(), cache=PriceCache(tmp_path / "file" / "costs.json"))
    assert costs.num_estimated == 0


# -- The machine ------------------------------------------------------------------------------------------------------


def test_the_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    speed = measure_disk(str(tmp_path))
    assert speed.write_bytes_per_s > 0 and speed.read_bytes_per_s > 0 and speed.latency_s > 0
    assert not list(tmp_path.iterdir())


def test_without_a_disk_there_is_no_tier(monkeypatch: pytest.MonkeyPatch, no_workspaces: None) -> None:
    def full(folder: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profile, "measure_disk", full)
    costs = measure(pictures(), cap_s=0)
    assert not costs.links
    assert any("no disk tier" in note and "No space left" in note for note in costs.notes)


def test_without_a_thread_for_it_there_is_no_tier(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_workspaces: None
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(links, "_LOST", {})
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OSError, match="a thread for its requests cannot be started: can't start new thread"):
        measure_disk(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_what_kernels_lose_counts_for_each_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is played: a kernel takes two seconds, and three beside requests, of which there are four by its end."""
    clock_s = 0.0
    beside: list[Any] = []

    class Played:
        num_done = 0

        def __init__(self, request: Any) -> None: ...

        def __enter__(self) -> Any:
            beside.append(self)
            return self

        def __exit__(self, *_: object) -> None:
            beside.clear()

    def kernel() -> None:
        nonlocal clock_s
        clock_s += 3.0 if beside else 2.0
        for requests in beside:
            requests.num_done += 4

    monkeypatch.setattr(links, "_Requests", Played)
    monkeypatch.setattr(links, "time", SimpleNamespace(perf_counter=lambda: clock_s))
    assert links._slowdown(kernel, lambda index: None) == 1.0 / (4 * links._REQUEST_BYTES)


def test_a_disk_that_fails_beside_kernels_says_so() -> None:
    def fails(index: int) -> None:
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        links._slowdown(lambda: None, fails)


def test_a_gradient_costs_its_pages_and_its_handover(no_workspaces: None) -> None:
    step = pictures()
    cache = PriceCache(None)
    for name, value in {"handover_s": 0.5, "fresh_s_per_byte": 0.0, "copy_bytes_per_s": 1e9}.items():
        cache.figure(name, lambda: value)
    costs = measure(step, cache=cache)
    handing = {g.value for g in step.gradients}
    makers = {step.storage[step.values[v].storage].maker for v in handing}
    for index, cost in enumerate(costs.of(step)):
        assert (cost.time_ps > 400 * 10**9) == (index in makers), step.ops[index].target


def test_random_ops_leave_the_generator(no_workspaces: None) -> None:
    (call,) = calls_of("aten.bernoulli_.float", words())
    state = torch.get_rng_state()
    with as_in_a_step(call):
        Operands(call).run()
    assert torch.equal(torch.get_rng_state(), state)


def test_ops_that_are_too_large_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    step = memfit.capture(nn.Linear(64, 64), (torch.randn(1000, 64),))
    ran: list[int] = []
    run_op = Stopwatch.op_s
    monkeypatch.setattr(Stopwatch, "op_s", lambda self, call: ran.append(call.bytes) or run_op(self, call))
    costs = measure(step, max_op_bytes=100_000, cache=PriceCache(None))
    assert all(size <= 100_000 for size in ran) and costs.num_estimated >= 1
    assert any("need more than 0 MiB each: not run" in note for note in costs.notes)


def test_codecs_are_measured_once() -> None:
    step, kept = memfit.capture(nn.Linear(4, 4), (torch.randn(2, 4),)), PriceCache(None)
    first, second = (measure(step, cap_s=0, cache=kept).codecs for _ in range(2))
    assert first == second and first["mask"].encode_bytes_per_s > 0 and first["mask"].decode_bytes_per_s > 0
