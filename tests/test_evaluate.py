"""The native evaluator against its twin in Python: the same instructions and the same figures, whatever is asked."""

from __future__ import annotations

import logging
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import memfit
from memfit import zoo
from memfit.capture.rewrites import rewrite
from memfit.capture.rewrites.proof import AssumedProofs
from memfit.cost.costs import Link, OpCost, free_of_charge, priced_calls
from memfit.cost.signature import signature
from memfit.errors import BadOption
from memfit.native import library
from memfit.plan import evaluate
from memfit.plan.evaluate import Evaluator, NativeEvaluator, PythonEvaluator
from memfit.plan.ledger import Ledger
from memfit.plan.problem import AWAY, DROP, KEEP, Problem
from memfit.plan.program import Program, Run

HAS_COMPILER = library._find_compiler(os.environ.get("CC")) is not None
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="there is no C compiler")

HOST = Link("host", "out", "back", 12e9, 11e9, 1e-5)
DISK = Link("disk", "disk", "disk", 2e9, 3e9, 1e-4)
BUSES = {  # which transfers wait for each other
    "no tier": {},
    "one tier": {"host": HOST},
    "one tier, one channel": {"disk": DISK},
    "two tiers": {"disk": DISK, "host": HOST},
    "two tiers, one bus": {
        "disk": replace(DISK, send_channel="bus", fetch_channel="bus"),
        "host": replace(HOST, send_channel="bus", fetch_channel="bus"),
    },
    "two tiers, crossed": {
        "disk": replace(DISK, send_channel="a", fetch_channel="b"),
        "host": replace(HOST, send_channel="b", fetch_channel="a"),
    },
    "one tier, compute slows": {"disk": replace(DISK, send_drag=0.3, fetch_drag=0.6)},
    "two tiers, compute slows": {"disk": replace(DISK, send_drag=1.0), "host": replace(HOST, fetch_drag=0.5)},
    # Whole picoseconds per byte and no latency: many transfers end at the same time as others, or as an op.
    "ties": {"disk": Link("disk", "a", "b", 1e9, 1e9), "host": Link("host", "c", "d", 1e9, 1e9)},
}


# --- problems --------------------------------------------------------------------------------------------------------


def small(name: str, *, batch: int = 2, image: int, num_classes: int | None = None, **options: Any) -> memfit.Step:
    """A network of the zoo, captured on meta at a size that captures quickly."""
    model = zoo.build(name, **zoo.spec(name).fitting(image), **options)
    shape = {"batch": batch, "image": image, "num_classes": num_classes, "device": "meta"}
    step = memfit.capture(
        model, zoo.inputs(name, **shape), loss=zoo.loss(name), targets=zoo.targets(name, **shape), device="cpu"
    )
    return rewrite(step, proofs=AssumedProofs())


NETWORKS: dict[str, Callable[[], memfit.Step]] = {
    "vgg16": lambda: small("vgg16", image=32),
    "resnet18": lambda: small("resnet18", image=32),
    "densenet": lambda: small("densenet121", image=32, blocks=(3, 4, 3, 2)),
    "googlenet": lambda: small("googlenet", image=64),
    "gpt2": lambda: small("gpt2", image=16, num_layers=2, vocab_size=99, width=48, num_classes=99),
    "unet": lambda: small("unet", image=32, num_levels=3),
    "darts": lambda: small("darts", image=32, num_cells=3),
    "vit": lambda: small("vit_b16", image=32, depth=2),
}


@cache
def step_of(name: str) -> memfit.Step:
    return NETWORKS[name]()


def priced(step: memfit.Step, links: Mapping[str, Link], rng: random.Random) -> Problem:
    """The step at random prices; some ops take no time, many as long as others, and some need a workspace."""
    largest = max(step.storage_bytes, default=0)
    some_bytes = rng.choice(step.storage_bytes)  # what a transfer takes at a gigabyte per second, an op may take too
    times_ps, workspaces = (0, 1000, 10**6, rng.randrange(10**9), some_bytes * 1000), (0, 0, largest // 3)
    prices = {signature(step, op): OpCost(rng.choice(times_ps), rng.choice(workspaces)) for op in priced_calls(step)}
    return Problem.of(step, replace(free_of_charge(step), by_signature=prices, links=links))


def drawn_states(problem: Problem, rng: random.Random) -> list[int]:
    """States that can be carried out, from almost all kept to almost none."""
    reruns = problem.reruns
    states, share = problem.default_states(), rng.random()
    for storage in reruns.owned:
        if rng.random() < share:
            options = [KEEP]
            options += [DROP] * (storage in reruns.recomputable)
            back_by = rng.choice([0, rng.randrange(problem.num_forward, problem.num_ops)])
            options += [
                problem.away_state(tier, back_by) for tier in problem.tiers if not reruns.why_not_offload(storage)
            ]
            states[storage] = rng.choice(options)
    return states


def drawn_budget(evaluator: Evaluator, states: list[int], rng: random.Random) -> int | None:
    """None, far too little, what some op needs to the byte, or more than there is."""
    program = Program(evaluator.problem.step, PythonEvaluator(evaluator.problem).instructions(states))
    entries = Ledger.of(program, evaluator.problem.workspace_bytes).entries
    exact = rng.choice(entries).total_bytes
    return rng.choice([None, 0, exact, exact - 1, int(exact * rng.random()), 1 << 80])


def assert_twins(native: Evaluator, states: list[int], budget_bytes: int | None) -> None:
    assert native.is_native
    twin = PythonEvaluator(native.problem)
    assert native.instructions(states, budget_bytes) == twin.instructions(states, budget_bytes)
    assert native.evaluate(states, budget_bytes) == twin.evaluate(states, budget_bytes)


# --- the same instructions, the same figures -------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "googlenet" else ()) for name in NETWORKS]
)
def test_networks_of_the_zoo(name: str) -> None:
    rng = random.Random(name)
    step = step_of(name)
    for links in BUSES.values():
        problem = priced(step, links, rng)
        native = Evaluator.of(problem)
        assert_twins(native, problem.default_states(), None)
        for _ in range(5):
            states = drawn_states(problem, rng)
            assert_twins(native, states, drawn_budget(native, states, rng))


class Drawn(nn.Module):
    """Runs (name, a, b) one after the other; a and b count back among the tensors made so far."""

    def __init__(self, program: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.program = program
        self.own = nn.ModuleDict()
        for index, (name, _, _) in enumerate(program):
            if name == "conv":
                self.own[f"conv{index}"] = nn.Conv2d(4, 4, 3, padding=1)
            elif "norm" in name:
                self.own[f"norm{index}"] = nn.BatchNorm2d(4).train(name != "eval norm")
        self.shared = nn.Conv2d(4, 4, 1)
        self.narrow = nn.Conv2d(8, 4, 1, bias=False)
        self.linear = nn.Linear(6, 6)
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.linear.weight  # tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [self.shared(x)]
        for index, (name, i, j) in enumerate(self.program):
            a, b = made[-1 - i % len(made)], made[-1 - j % len(made)]
            made.append(self.apply_one(name, index, a, b))
        return self.head(self.linear(made[-1])) + made[len(made) // 2]

    def apply_one(self, name: str, index: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        match name:
            case "conv":
                return self.own[f"conv{index}"](a)
            case "norm" | "eval norm":
                return self.own[f"norm{index}"](a)
            case "shared":
                return self.shared(a)
            case "cat":
                return self.narrow(torch.cat([a, b], 1))
            case "split":
                left, right = a.split(2, 1)
                return torch.cat([right, left.sigmoid()], 1)
            case "add":
                return a + b
            case "add_":
                return (a * 1.5).add_(b)
            case "relu_":
                return F.relu_(a + 1)
            case "norm relu_":
                return F.relu_(self.own[f"norm{index}"](a))
            case "norm add_":  # its statistics may be wanted again without what add_ made of it
                return self.own[f"norm{index}"](a).add_(b)
            case "pool":
                return F.max_pool2d(a, 3, 1, 1)
            case "dropout":
                return F.dropout(a, 0.3)
            case "linear":
                return self.linear(a)
            case _:
                return a.softmax(1) * b.tanh()


PLAIN = ("conv", "shared", "cat", "split", "add", "add_", "relu_", "pool", "dropout", "linear", "softmax")
LAYERS = (*PLAIN, "norm", "eval norm", "norm relu_", "norm add_")
PROGRAMS = st.lists(st.tuples(st.sampled_from(LAYERS), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=8)


@needs_compiler
@settings(max_examples=75, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(PROGRAMS, st.sampled_from(sorted(BUSES)), st.booleans(), st.integers(0, 2**32))
def test_random_networks(program: list[tuple[str, int, int]], bus: str, has_loss: bool, seed: int) -> None:
    rng = random.Random(seed)
    with torch.device("meta"):
        model, x = Drawn(program), torch.empty(2, 4, 6, 6)
    step = memfit.capture(model, (x,), loss=torch.Tensor.sum if has_loss else None, device="cpu")
    problem = priced(rewrite(step, proofs=AssumedProofs()), BUSES[bus], rng)
    native = Evaluator.of(problem)
    for _ in range(6):
        states = drawn_states(problem, rng)
        assert_twins(native, states, drawn_budget(native, states, rng))
    # States that nobody would choose are still lowered the same way.
    wild = [rng.randrange(AWAY + len(problem.tiers)) for _ in problem.step.storage_bytes]
    assert_twins(native, wild, drawn_budget(native, wild, rng))


@needs_compiler
def test_what_a_burst_makes_only_in_part_does_not_live_on() -> None:
    """The statistics of the norm are made again; its result is not, as add_ is not run again."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(4)
            self.w = nn.Parameter(torch.zeros(4, 1, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.norm(x * self.w).add_(1) + x).sum()

    step = memfit.capture(Shifted(), (torch.zeros(2, 4, 6, 6),))
    problem = Problem.of(step, free_of_charge(step))
    reruns = problem.reruns
    states = [DROP if s in reruns.recomputable else KEEP for s in range(len(step.storage_bytes))]
    assert_twins(Evaluator.of(problem), states, None)
    again = {i.op for i in Evaluator.of(problem).instructions(states) if isinstance(i, Run) and i.again}
    assert any(again & set(ops) and not again >= set(ops) for s, ops in reruns.writers.items() if states[s] == DROP)


@needs_compiler
def test_a_forward_pass_without_anything_to_differentiate() -> None:
    step = memfit.capture(nn.ReLU(), (torch.zeros(3, requires_grad=True),))
    problem = Problem.of(step, free_of_charge(step))
    assert_twins(Evaluator.of(problem), problem.default_states(), None)


# --- how it is called ------------------------------------------------------------------------------------------------


@cache
def chain() -> Problem:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.ReLU())
    step = memfit.capture(model, (torch.zeros(2, 3, 16, 16),))
    return Problem.of(step, replace(free_of_charge(step), links={"disk": DISK, "host": HOST}))


EVALUATORS = [PythonEvaluator, pytest.param(lambda problem: Evaluator.of(problem), marks=needs_compiler, id="native")]


@pytest.mark.parametrize("make", EVALUATORS)
def test_lists_and_arrays_give_the_same(make: Callable[[Problem], Evaluator]) -> None:
    problem = chain()
    evaluator = make(problem)
    states = problem.default_states()
    expected = evaluator.evaluate(states, 10**5)
    array = evaluator.array(states)
    assert array.dtype == np.int32
    wide = np.zeros((len(states), 2), dtype=np.int32)
    wide[:, 0] = states
    for form in (tuple(states), array, np.array(states), np.array(states, dtype=np.uint8), wide[:, 0]):
        assert evaluator.evaluate(form, 10**5) == expected


@pytest.mark.parametrize("make", EVALUATORS)
def test_what_is_changed_in_place_is_seen(make: Callable[[Problem], Evaluator]) -> None:
    problem = chain()
    evaluator = make(problem)
    states = problem.default_states()
    array = evaluator.array(states)
    before = evaluator.evaluate(array)
    assert evaluator.evaluate(states) == before
    storage = max(problem.reruns.recomputable, key=lambda s: problem.step.storage_bytes[s] * (states[s] == KEEP))
    array[storage] = states[storage] = DROP
    after = evaluator.evaluate(array)
    assert after == evaluator.evaluate(states)
    assert after.num_reruns > before.num_reruns == 0 and after.step_ps > before.step_ps


@pytest.mark.parametrize("make", EVALUATORS)
def test_wrong_states_are_refused(make: Callable[[Problem], Evaluator]) -> None:
    problem = chain()
    evaluator = make(problem)
    states = problem.default_states()
    with pytest.raises(BadOption, match=f"{len(states) - 1} states were given, but the step has {len(states)}"):
        evaluator.evaluate(states[1:])
    none = AWAY + len(problem.tiers) * problem.num_ops
    for wrong in (-300, none, none + 300, 1 << 70):
        with pytest.raises(BadOption, match=r"storage 2: there is no state|flat list of whole numbers"):
            evaluator.evaluate([*states[:2], wrong, *states[3:]])
    array = evaluator.array(states)
    array[2] = none
    with pytest.raises(
        BadOption, match=rf"storage 2: there is no state {none}; .* 2 \(away in 'disk'\), .* \(back by backward op N\)"
    ):
        evaluator.evaluate(array)
    array[2] = none - 1
    evaluator.instructions(array)
    for form in (np.array(states, dtype=float), np.array([states]).T):
        with pytest.raises(BadOption, match="flat list of whole numbers"):
            evaluator.evaluate(form)  # type: ignore[arg-type]
    with pytest.raises(BadOption, match="a budget of -1 bytes"):
        evaluator.evaluate(states, -1)


@needs_compiler
def test_an_array_is_not_copied() -> None:
    evaluator = Evaluator.of(chain())
    assert isinstance(evaluator, NativeEvaluator)
    array = evaluator.array(chain().default_states())
    evaluator.evaluate(array)
    assert evaluator._states is array
    assert evaluator._address == array.ctypes.data


@needs_compiler
def test_threads_may_share_an_evaluator() -> None:
    problem = chain()
    evaluator, rng = Evaluator.of(problem), random.Random(0)
    cases = [drawn_states(problem, rng) for _ in range(4)]
    expected = [PythonEvaluator(problem).evaluate(states, 10**5) for states in cases]
    wrong = []

    def work(states: list[int], outcome: evaluate.Outcome) -> None:
        wrong.extend(i for i in range(300) if evaluator.evaluate(states, 10**5) != outcome)

    threads = [threading.Thread(target=work, args=case) for case in zip(cases, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_numbers_too_large_for_c_are_evaluated_in_python() -> None:
    problem = chain()
    costs = problem.costs
    huge = replace(costs, by_signature={key: OpCost(1 << 61) for key in costs.by_signature})
    evaluator = Evaluator.of(Problem.of(problem.step, huge))
    assert not evaluator.is_native
    assert evaluator.evaluate(problem.default_states()).step_ps == len(problem.step.ops) << 61


# --- how it is compiled ----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, in which nothing is yet."""
    made = tmp_path / "cache"
    monkeypatch.setenv("MEMFIT_CACHE", str(made))
    monkeypatch.delenv("MEMFIT_NATIVE", raising=False)
    library._explain.cache_clear()
    return made


def hide_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)


def assert_falls_back(caplog: pytest.LogCaptureFixture, why: str) -> None:
    problem = chain()
    states = drawn_states(problem, random.Random(1))
    with caplog.at_level(logging.INFO, logger="memfit"):
        evaluator = Evaluator.of(problem)
        Evaluator.of(problem)
    assert not evaluator.is_native
    assert [why in record.getMessage() for record in caplog.records] == [True], "said once"
    assert evaluator.evaluate(states, 10**5) == PythonEvaluator(problem).evaluate(states, 10**5)


def test_the_environment_can_forbid_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MEMFIT_NATIVE", "0")
    assert_falls_back(caplog, "MEMFIT_NATIVE=0 is set")
    assert not folder.exists()


def test_without_a_compiler_python_does_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hide_compilers(tmp_path, monkeypatch)
    assert_falls_back(caplog, "there is no C compiler")


def test_with_a_compiler_that_fails_python_does_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\necho no such target >&2\nexit 3\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CC", f"{failing} --target=moon")
    assert_falls_back(caplog, "exit status 3.: no such target")
    assert not list(folder.glob("*"))


@cache
def compiled() -> Path:
    """The library in the cache that all tests share."""
    assert library.native_library() is not None
    found = sorted(library.cache_folder().glob(f"native-{library._hash_of_sources(library._sources())}-*.so"))
    return found[0]


@needs_compiler
def test_a_compiled_library_needs_no_compiler(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMFIT_CACHE")
    made = compiled()
    monkeypatch.setenv("MEMFIT_CACHE", str(folder))
    folder.mkdir()
    shutil.copy(made, folder)
    hide_compilers(tmp_path, monkeypatch)
    assert_twins(Evaluator.of(chain()), drawn_states(chain(), random.Random(2)), 10**5)


@needs_compiler
@pytest.mark.parametrize("keep", [0, 100, 9000])
def test_a_damaged_library_is_compiled_anew(folder: Path, monkeypatch: pytest.MonkeyPatch, keep: int) -> None:
    monkeypatch.delenv("MEMFIT_CACHE")
    made = compiled()
    monkeypatch.setenv("MEMFIT_CACHE", str(folder))
    folder.mkdir()
    damaged = folder / made.name
    damaged.write_bytes(made.read_bytes()[:keep])
    assert Evaluator.of(chain()).is_native
    whole = list(library._kept(folder, "*.so"))
    assert whole == list(folder.iterdir()) and len(whole) == 1


@needs_compiler
def test_a_cache_that_cannot_be_written_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "file" / "cache"))
    assert_twins(Evaluator.of(chain()), drawn_states(chain(), random.Random(3)), 10**5)


@needs_compiler
def test_two_processes_may_compile_at_once(folder: Path) -> None:
    script = "from memfit.native.library import native_library as f; raise SystemExit(f() is None)"
    processes = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(2)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    assert list(library._kept(folder, "*.so")) == sorted(folder.iterdir()), "whole libraries and nothing else"
    assert Evaluator.of(chain()).is_native


@needs_compiler
def test_the_c_compiles_without_a_warning(tmp_path: Path) -> None:
    compiler = library._find_compiler(os.environ.get("CC"))
    assert compiler is not None
    sources = [str(path) for path in library._sources() if path.suffix == ".c"]
    strict = [*compiler, *library.FLAGS, "-Wall", "-Wextra", "-Werror", *sources, "-o", str(tmp_path / "strict.so")]
    done = subprocess.run(strict, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
