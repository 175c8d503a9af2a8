"""Ways of computing ops chosen by the evaluator, trials that end early, and storages made again more than once."""

from __future__ import annotations

import os
import random
import struct
import subprocess
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_evaluate import BUSES, EVALUATORS, PROGRAMS, Drawn, chain, drawn_states, needs_compiler, priced, step_of

import memfit
from memfit.capture.rewrites import rewrite
from memfit.capture.rewrites.proof import AssumedProofs
from memfit.cost.costs import OpCost
from memfit.cost.signature import signature
from memfit.native import library
from memfit.plan import flat_problem
from memfit.plan.checkpointing import pool as pool_file
from memfit.plan.checkpointing.pool import Pool
from memfit.plan.decisions import Recompute
from memfit.plan.evaluate import Evaluator, NativeEvaluator, Outcome, PythonEvaluator, Rank
from memfit.plan.ledger import Ledger
from memfit.plan.lower import lower
from memfit.plan.problem import DROP, KEEP, Problem
from memfit.plan.program import Program, Run
from memfit.plan.simulate import simulate

SETTINGS = {
    "deadline": None,
    "phases": [Phase.explicit, Phase.generate],
    "suppress_health_check": [HealthCheck.too_slow],
}
CASES = st.tuples(PROGRAMS, st.sampled_from(sorted(BUSES)), st.integers(0, 2**32))


def with_ways(problem: Problem, rng: random.Random) -> Problem:
    """Some ops can be computed in one to four ways at random prices; some of them have one picked."""
    step, costs = problem.step, problem.costs
    largest = max(step.storage_bytes, default=0)
    prices = (0, 1000, 10**6, rng.randrange(10**9))
    algorithms = {
        key: {
            f"way{number}": OpCost(rng.choice(prices), rng.choice((0, largest // 3, rng.randrange(2 * largest + 1))))
            for number in range(rng.randint(1, 4))
        }
        for key in sorted({signature(step, op) for op in step.ops if not op.target.startswith("memfit.")})
        if rng.random() < 0.6
    }
    offered = replace(costs, algorithms=algorithms)
    choices = offered.choices(step)
    picked = {op: rng.choice(sorted(ways)) for op, ways in choices.items() if rng.random() < 0.1}
    return Problem.of(step, offered.picking(picked))


def drawn_again(problem: Problem, rng: random.Random) -> list[int]:
    """States of which some are made again more than once."""
    states = drawn_states(problem, rng)
    first, last = problem.num_forward, problem.num_ops
    return [-rng.randint(first, last) if state == DROP and rng.random() < 0.5 else state for state in states]


def drawn_budget(problem: Problem, states: list[int], rng: random.Random) -> int | None:
    peak_bytes = PythonEvaluator(problem).evaluate(states).peak_bytes
    return rng.choice([None, 0, peak_bytes, peak_bytes - 1, int(peak_bytes * rng.random())])


def drawn_problem(case: tuple[list[tuple[str, int, int]], str, int]) -> tuple[Problem, random.Random]:
    program, bus, seed = case
    rng = random.Random(seed)
    with torch.device("meta"):
        model, x = Drawn(program), torch.empty(2, 4, 6, 6)
    step = memfit.capture(model, (x,), loss=torch.Tensor.sum, device="cpu")
    return with_ways(priced(rewrite(step, proofs=AssumedProofs()), BUSES[bus], rng), rng), rng


def assert_twins(native: Evaluator, states: list[int], budget_bytes: int | None) -> None:
    """C and Python agree with and without ways, and picking what was chosen gives the same."""
    assert native.is_native
    twin = PythonEvaluator(native.problem)
    twin.first_ways[:] = native.first_ways
    for choose_ways in (False, True):
        expected = twin.evaluate(states, budget_bytes, choose_ways=choose_ways)
        assert native.evaluate(states, budget_bytes, choose_ways=choose_ways) == expected
        assert native.instructions(states, budget_bytes, choose_ways=choose_ways) == twin.instructions(
            states, budget_bytes, choose_ways=choose_ways
        )
    ways = native.ways(states, budget_bytes)
    assert ways == twin.ways(states, budget_bytes)
    costs = native.problem.costs
    picked = PythonEvaluator(Problem.of(native.problem.step, costs.picking({**costs.picked, **ways})))
    assert picked.evaluate(states, budget_bytes) == expected
    assert picked.instructions(states, budget_bytes) == native.instructions(states, budget_bytes, choose_ways=True)


# --- ways ------------------------------------------------------------------------------------------------------------


@needs_compiler
@settings(max_examples=12, **SETTINGS)
@given(CASES)
def test_c_chooses_as_python_does(case: tuple[list[tuple[str, int, int]], str, int]) -> None:
    problem, rng = drawn_problem(case)
    native = Evaluator.of(problem)
    for _ in range(3):
        states = drawn_again(problem, rng)
        native.first_ways[:] = [rng.randrange(len(ways)) for ways in problem.ways.values()]
        assert_twins(native, states, drawn_budget(problem, states, rng))


@needs_compiler
@pytest.mark.parametrize("name", ["resnet18", "densenet", "gpt2"])
def test_networks_of_the_zoo(name: str) -> None:
    rng = random.Random(name)
    problem = with_ways(priced(step_of(name), BUSES["two tiers"], rng), rng)
    assert any(problem.step.ops[op].again for op in problem.ways) == (name != "gpt2"), "ops with another form again"
    native = Evaluator.of(problem)
    for _ in range(3):
        states = drawn_again(problem, rng)
        native.first_ways[:] = [rng.randrange(len(ways)) for ways in problem.ways.values()]
        assert_twins(native, states, drawn_budget(problem, states, rng))


@settings(max_examples=15, **SETTINGS)
@given(CASES)
def test_the_way_is_the_fastest_that_fits(case: tuple[list[tuple[str, int, int]], str, int]) -> None:
    """Where nothing travels, the ledger says what room there is: an account of its own."""
    problem, rng = drawn_problem((case[0], "no tier", case[2]))
    states = drawn_again(problem, rng)
    budget_bytes = drawn_budget(problem, states, rng)
    limit = 1 << 62 if budget_bytes is None else budget_bytes
    evaluator = Evaluator.of(problem)
    ways = evaluator.ways(states, budget_bytes)
    choices = problem.costs.choices(problem.step)
    assert ways.keys() == choices.keys() - problem.costs.picked.keys()
    program = Program(problem.step, evaluator.instructions(states, budget_bytes, choose_ways=True))
    held: dict[int, int] = {}
    for entry in Ledger.of(program).entries:
        if isinstance(entry.instruction, Run):
            op = entry.instruction.op
            held[op] = max(held.get(op, 0), entry.total_bytes)
    for op, name in ways.items():
        if problem.step.ops[op].again:  # it needs the workspace of its other form too, whichever way it is computed
            continue
        fits = [cost for cost in choices[op].values() if held[op] + cost.workspace_bytes <= limit]
        chosen = choices[op][name]
        if fits:
            assert chosen.time_ps == min(cost.time_ps for cost in fits)
            assert chosen.workspace_bytes == min(c.workspace_bytes for c in fits if c.time_ps == chosen.time_ps)
        else:
            assert chosen.workspace_bytes == min(cost.workspace_bytes for cost in choices[op].values())


@pytest.mark.parametrize("make", EVALUATORS)
def test_without_choices_there_is_nothing_to_choose(make: Callable[[Problem], Evaluator]) -> None:
    problem = chain()
    evaluator, states = make(problem), problem.default_states()
    assert evaluator.ways(states, 10**5) == {}
    assert evaluator.evaluate(states, 10**5, choose_ways=True) == evaluator.evaluate(states, 10**5)


# --- early ends ------------------------------------------------------------------------------------------------------


def ranks_around(outcome: Outcome, rng: random.Random) -> list[Rank]:
    """Incumbents that the outcome beats, equals, or just misses."""
    violation, step_ps = outcome.rank
    near = [(violation + a, step_ps + b) for a in (-1, 0, 1) for b in (-1, 0, 1)]
    huge = 1 << 80
    far = [(huge, 0), (0, huge), (violation, huge), (-1, huge), (-huge, huge), (violation, -huge)]
    return [
        *near,
        *far,
        (0, step_ps),
        (0, 1 << 62),
        (violation, 0),
        (1 << 62, 0),
        (rng.randrange(violation + 1), step_ps),
    ]


@needs_compiler
@settings(max_examples=25, **SETTINGS)
@given(CASES, st.booleans())
def test_a_trial_ends_early_only_if_it_is_not_better(
    case: tuple[list[tuple[str, int, int]], str, int], choose_ways: bool
) -> None:
    problem, rng = drawn_problem(case)
    native = Evaluator.of(problem)
    cases = [drawn_again(problem, rng) for _ in range(4)]
    budget_bytes = drawn_budget(problem, cases[0], rng)
    outcomes = [native.evaluate(states, budget_bytes, choose_ways=choose_ways) for states in cases]
    for states, outcome in zip(cases, outcomes, strict=True):
        others = [other.rank for other in outcomes]
        for incumbent in (*ranks_around(outcome, rng), *others):
            found = native.improves(states, budget_bytes, incumbent, choose_ways=choose_ways)
            assert found == (outcome if outcome.rank < incumbent else None)
    twin = PythonEvaluator(problem)
    for incumbent in (outcomes[0].rank, outcomes[1].rank):
        expected = twin.improves(cases[0], budget_bytes, incumbent, choose_ways=choose_ways)
        assert native.improves(cases[0], budget_bytes, incumbent, choose_ways=choose_ways) == expected


@needs_compiler
def test_flips_of_a_network_end_early_only_if_they_are_not_better() -> None:
    rng = random.Random(5)
    problem = with_ways(priced(step_of("resnet18"), BUSES["one tier"], rng), rng)
    native = Evaluator.of(problem)
    states = native.array(drawn_states(problem, rng))
    budget_bytes = int(0.9 * native.evaluate(states).peak_bytes)
    best = native.evaluate(states, budget_bytes, choose_ways=True)
    num_better = 0
    for storage in sorted(problem.reruns.recomputable) * 2:
        before = states[storage]
        states[storage] = rng.choice([KEEP, DROP])
        outcome = native.evaluate(states, budget_bytes, choose_ways=True)
        better = native.improves(states, budget_bytes, best.rank, choose_ways=True)
        assert better == (outcome if outcome.rank < best.rank else None)
        best = better or best
        num_better += better is not None
        states[storage] = states[storage] if better else before
    assert num_better > 3


# --- arrays that change in place -------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("choose_ways", [False, True])
def test_what_is_changed_in_the_arrays_is_seen(choose_ways: bool) -> None:
    rng = random.Random(7)
    # Without ops that run again in another form: the prices of those are in every way's too.
    problem = with_ways(priced(step_of("vgg16"), BUSES["one tier"], rng), rng)
    native, states = Evaluator.of(problem), drawn_states(problem, rng)
    assert isinstance(native, NativeEvaluator)
    native.evaluate(states, 10**6, choose_ways=choose_ways)
    slower = {key: replace(cost, time_ps=3 * cost.time_ps + 1) for key, cost in problem.costs.by_signature.items()}
    changed = Problem.of(problem.step, replace(problem.costs, by_signature=slower))
    native.array_named("op_ps")[:] = changed.op_ps
    native.array_named("rerun_ps")[:] = changed.rerun_ps
    native.changed()
    expected = PythonEvaluator(changed).evaluate(states, 10**6, choose_ways=choose_ways)
    assert native.evaluate(states, 10**6, choose_ways=choose_ways) == expected
    assert native.improves(states, 10**6, expected.rank, choose_ways=choose_ways) is None


# --- more than once --------------------------------------------------------------------------------------------------


def made_again_and_again(problem: Problem) -> list[int]:
    """Each is gone when it is to be held, and to make it again lets go of all others."""
    states = [KEEP] * len(problem.step.storage_bytes)
    for storage in problem.reruns.recomputable:
        states[storage] = -(problem.step.storage[storage].first_backward or problem.num_ops)
    return states


@needs_compiler
def test_there_is_room_for_what_runs_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that outgrows C is given more room, and then is evaluated in Python; both are the same."""
    rng = random.Random(3)
    problem = priced(step_of("vgg16"), BUSES["no tier"], rng)
    states = made_again_and_again(problem)
    expected = PythonEvaluator(problem).evaluate(states, 10**6)
    native = Evaluator.of(problem)
    assert isinstance(native, NativeEvaluator)
    once = flat_problem._once_again_length(problem)
    assert problem.num_ops + expected.num_reruns > once, "more than fits at first"
    assert native.evaluate(states, 10**6) == expected
    assert native._desks[False].growth > 1
    assert native.evaluate(problem.default_states(), 10**6) == PythonEvaluator(problem).evaluate(
        problem.default_states(), 10**6
    )

    monkeypatch.setattr(flat_problem, "_MOST_POSITIONS", once)
    small = Evaluator.of(problem)
    assert isinstance(small, NativeEvaluator)
    assert small.evaluate(states, 10**6) == expected
    assert small.improves(states, 10**6, expected.rank) is None
    assert small.improves(states, 10**6, (1 << 62, 0)) == expected
    assert small.ways(states, 10**6) == {}
    assert small.instructions(states, 10**6) == native.instructions(states, 10**6)
    assert small._desks[False].growth == 1


def test_rotor_asks_c() -> None:
    """Its plans make storages again more than once; they have the figures that the lowering and the simulator give."""
    pool = Pool.of(chain().step, chain().costs)
    decisions = {s: Recompute(chain().num_forward + 3) for s in chain().reruns.recomputable}
    program = lower(chain().step, decisions, chain().costs)
    timeline = simulate(program, chain().costs)
    entry = pool.add(decisions)
    assert (entry.peak_bytes, entry.step_ps) == (timeline.peak_bytes, timeline.step_ps)
    assert not any(isinstance(name, str) and "lower" in name for name in vars(pool_file)), "no other way around"


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The evaluator as a program of its own, watched by the sanitizers; each of its arrays has a gap behind it."""
    compiler = library._find_compiler(os.environ.get("CC"))
    assert compiler is not None
    made = tmp_path_factory.mktemp("driver") / "driver"
    sources = [str(path) for path in library._sources() if path.suffix == ".c"]
    source = Path(__file__).parent / "evaluator_driver.c"
    flags = ["-O1", "-g", "-std=c11", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command = [*compiler, *flags, f"-I{library.EVALUATOR.folder}", *sources, str(source), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return made


def watched(driver: Path, problem: Problem, trials: list[tuple[int, Rank, list[int]]], growth: int) -> list[list[int]]:
    """What the driver says of each trial: the verdict, and the outcome if there is one."""
    flat = flat_problem.FlatProblem(problem)
    made = flat.struct(first_ways=np.zeros(len(flat.problem.ways), dtype=np.int32), growth=growth)
    content = b"".join(struct.pack("=q", getattr(made, name)) for name in flat_problem._COUNTS)
    for name, _ in made._fields_[len(flat_problem._COUNTS) :]:
        array = flat.arrays.get(name, np.empty(0))
        content += struct.pack("=q", array.nbytes) + array.tobytes()
    content += struct.pack("=q", len(trials))
    for limit, (violation, step_ps), states in trials:
        content += struct.pack("=3q", limit, violation, step_ps) + np.array(states, dtype=np.int32).tobytes()
    file = driver.with_name("problem")
    file.write_bytes(content)
    ran = subprocess.run([str(driver), str(file)], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout[-1000:] + ran.stderr
    return [[int(word) for word in line.split()] for line in ran.stdout.splitlines()]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("growth", [1, 2, 64])
@pytest.mark.parametrize("name", ["vgg16", "resnet18", "densenet", "gpt2", "unet", "darts"])
def test_the_sanitizers_find_nothing(driver: Path, name: str, growth: int) -> None:
    rng = random.Random(f"{name} {growth}")
    problem = with_ways(priced(step_of(name), BUSES[rng.choice(sorted(BUSES))], rng), rng)
    native = Evaluator.of(problem)
    trials = []
    for number in range(60):
        states = drawn_again(problem, rng)
        if number % 3 == 0:  # what nobody would choose
            low = -problem.num_ops if number % 2 else 0
            states = [rng.randrange(low, 2 + len(problem.tiers)) for _ in states]
        peak_bytes = native.evaluate(states).peak_bytes
        limit = rng.choice([0, int(peak_bytes * rng.random()), peak_bytes, 1 << 62])
        rank = native.evaluate(states, limit, choose_ways=True).rank
        trials.append((limit, rng.choice([(1 << 62, 0), (0, 1 << 62), rank, (rank[0], rank[1] + 1)]), states))
    num_outgrown = 0
    for (limit, rank, states), said in zip(trials, watched(driver, problem, trials, growth), strict=True):
        outcome = native.improves(states, limit, rank, choose_ways=True)
        assert said == ([-2] if outcome is None else [-1, *astuple(outcome)]) or (said == [-3] and growth < 64)
        num_outgrown += said == [-3]
    assert num_outgrown < len(trials) // 2


@pytest.mark.slow
@needs_compiler
def test_nothing_is_written_beyond_the_room_there_is(driver: Path) -> None:
    problem = priced(step_of("vgg16"), BUSES["no tier"], random.Random(3))
    states = made_again_and_again(problem)
    trials = [(10**6, (1 << 62, 0), states)] * 2
    for growth in (1, 2, 4):
        assert watched(driver, problem, trials, growth) == [[-3], [-3]]
    outcome = PythonEvaluator(problem).evaluate(states, 10**6)
    assert watched(driver, problem, trials, 64) == [[-1, *astuple(outcome)]] * 2
