"""Rotor's dynamic program against a search through all states of memory, and its schedules against their replay."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, pairwise

import pytest

from memfit.errors import BadOption
from memfit.plan.checkpointing.rotor import (
    Chain,
    IllegalSchedule,
    Kept,
    Kind,
    Operation,
    Schedule,
    Stage,
    coarsened,
    floor_bytes,
    kept,
    simulate,
    solve,
    solve_each,
)

EMPTY, CHECKPOINT, ALL, BACKWARD = Kind
EXACT = 10**6
"""More slots than any small chain has bytes."""


def random_stage(rng: random.Random, largest: int) -> Stage:
    output = rng.randint(0, largest)
    carried = rng.choice([0, 0, rng.randint(0, output)])
    return Stage(
        forward_ps=rng.randint(0, 9),
        backward_ps=rng.randint(0, 9),
        output_bytes=output,
        saved_bytes=output - carried + rng.choice([0, rng.randint(0, 2 * largest)]),
        forward_transient_bytes=rng.choice([0, rng.randint(0, largest)]),
        backward_transient_bytes=rng.randint(0, 2 * largest),
        gradient_bytes=rng.choice([None, rng.randint(0, largest)]),
        carried_bytes=carried,
    )


def random_chain(rng: random.Random, num_stages: int, largest: int = 5) -> Chain:
    return Chain(tuple(random_stage(rng, largest) for _ in range(num_stages)), rng.randint(0, largest))


def keep_all(chain: Chain) -> tuple[int, int]:
    indices = range(len(chain.stages))
    return simulate(chain, [Operation(ALL, i) for i in indices] + [Operation(BACKWARD, i) for i in reversed(indices)])


def solved(chain: Chain, budget_bytes: int, **options: int) -> Schedule:
    schedule = solve(chain, budget_bytes, **options)
    assert schedule is not None
    assert (schedule.peak_bytes, schedule.time_ps) == simulate(chain, schedule.operations)
    assert schedule.peak_bytes <= budget_bytes
    assert chain.work_ps <= schedule.bound_ps <= schedule.time_ps
    return schedule


# A second opinion: Dijkstra through every state of memory. A state is the next backward, and one letter per activation
# (what stage i reads): "." not here, "f" fresh (read by nobody yet), "p" pinned (stays until its backward), "s" saved,
# that is with all else that the stage before it needs for backward. The last letter is the chain's output.

State = tuple[str, int]


def put(letters: str, at: int, letter: str) -> str:
    return letters[:at] + letter + letters[at + 1 :]


def moves(chain: Chain, state: State, persistent: bool) -> Iterator[tuple[int, int, State]]:
    """Time, bytes while it runs, and the state after, of every operation that is possible."""
    letters, last = state
    held = sum(
        0
        if letter == "."
        else chain.input_bytes
        if at == 0
        else chain.stages[at - 1].saved_bytes
        if letter == "s"
        else chain.stages[at - 1].output_bytes
        for at, letter in enumerate(letters)
    )
    gradient = 0
    if last < len(chain.stages) - 1:
        given = chain.stages[last].gradient_bytes
        gradient = chain.stages[last].output_bytes if given is None else given
    for i, stage in enumerate(chain.stages[: last + 1]):
        here, after = letters[i], letters[i + 1]
        if here == ".":
            continue
        if after == ".":
            stays = put(letters, i, "s" if here == "s" else "p")
            need = held + gradient + stage.forward_transient_bytes
            yield stage.forward_ps, need + stage.output_bytes, (put(stays, i + 1, "f"), last)
            yield stage.forward_ps, need + stage.saved_bytes, (put(stays, i + 1, "s"), last)
            if here == "f" or (here == "p" and not persistent):
                goes = put(letters, i, ".")
                yield stage.forward_ps, need + stage.output_bytes, (put(goes, i + 1, "f"), last)
        if i == last and after == "s":
            need = held + stage.backward_transient_bytes
            yield stage.backward_ps, need, (put(put(letters, i + 1, "."), i, "s" if here == "s" else "."), last - 1)
    if not persistent:  # anything may go at any time
        for at in range(1, len(letters)):
            if letters[at] != ".":
                yield 0, held, (put(letters, at, "."), last)


def searched(chain: Chain, budget_bytes: int, persistent: bool = True) -> int | None:
    """The least time within the budget."""
    start: State = ("p" + "." * len(chain.stages), len(chain.stages) - 1)
    if chain.input_bytes > budget_bytes:
        return None
    order = count()
    queue: list[tuple[int, int, State]] = [(0, next(order), start)]
    done: set[State] = set()
    while queue:
        time_ps, _, state = heapq.heappop(queue)
        if state in done:
            continue
        done.add(state)
        if state[1] < 0:
            return time_ps
        for added_ps, need_bytes, after in moves(chain, state, persistent):
            if need_bytes <= budget_bytes and after not in done:
                heapq.heappush(queue, (time_ps + added_ps, next(order), after))
    return None


@pytest.mark.parametrize("seed", range(8))
def test_equals_exhaustive_search(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        chain = random_chain(rng, rng.randint(1, 5))
        floor, top = floor_bytes(chain), keep_all(chain)[0]
        for budget in {floor - 1, floor, rng.randint(floor, max(floor, top)), max(floor, top - 1)}:
            schedule = solve(chain, budget, num_slots=EXACT)
            found_ps = searched(chain, budget)
            assert (None if schedule is None else schedule.time_ps) == found_ps, (chain, budget)
            assert (schedule is None) == (budget < floor)
            if schedule is not None:
                assert solved(chain, budget, num_slots=EXACT).bound_ps == schedule.time_ps
                assert schedule.discretisation_bytes == 0


def test_search_without_persistence_is_never_slower() -> None:
    rng = random.Random(1)
    for _ in range(60):
        chain = random_chain(rng, rng.randint(2, 4))
        floor = floor_bytes(chain)
        budget = rng.randint(floor, max(floor, keep_all(chain)[0]))
        free_ps = searched(chain, budget, persistent=False)
        assert free_ps is not None
        assert free_ps <= solved(chain, budget, num_slots=EXACT).time_ps


def test_more_bytes_never_take_longer() -> None:
    rng = random.Random(2)
    for _ in range(10):
        chain = random_chain(rng, 12)
        budgets = range(floor_bytes(chain), keep_all(chain)[0] + 2)
        times = [solved(chain, budget, num_slots=EXACT).time_ps for budget in budgets]
        assert all(more <= less for less, more in pairwise(times))
        assert times[-1] == chain.work_ps


@pytest.mark.parametrize("num_slots", [1, 7, 40, 500])
def test_few_slots_hold_the_budget_and_the_floor(num_slots: int) -> None:
    rng = random.Random(num_slots)
    for _ in range(12):
        chain = random_chain(rng, rng.randint(2, 25), largest=10**9)
        floor, top = floor_bytes(chain), keep_all(chain)[0]
        assert solve(chain, floor - 1, num_slots=num_slots) is None
        for budget in (floor, rng.randint(floor, max(floor, top)), max(floor, top - 1)):
            schedule = solved(chain, budget, num_slots=num_slots)
            # The promise of discretisation_bytes, against exact optima.
            smaller = budget - schedule.discretisation_bytes
            if len(chain.stages) <= 4 and smaller >= floor:
                assert schedule.time_ps <= (searched(chain, smaller) or 0)


@pytest.mark.parametrize("seed", range(4))
def test_bound_and_error_of_few_slots(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        chain = random_chain(rng, rng.randint(2, 8), largest=40)
        floor = floor_bytes(chain)
        budget = rng.randint(floor, max(floor, keep_all(chain)[0]))
        exact = solved(chain, budget, num_slots=EXACT)
        assert exact.discretisation_bytes == 0
        rough = solved(chain, budget, num_slots=30)
        assert rough.bound_ps <= exact.time_ps <= rough.time_ps
        smaller = solve(chain, budget - rough.discretisation_bytes, num_slots=EXACT)
        assert smaller is None or rough.time_ps <= smaller.time_ps


def test_budgets_that_share_a_table_keep_their_promises() -> None:
    rng = random.Random(7)
    for _ in range(12):
        chain = random_chain(rng, rng.randint(2, 8), largest=300)
        floor, top = floor_bytes(chain), keep_all(chain)[0]
        budgets = [floor - 1, *(rng.randint(floor, max(floor, top)) for _ in range(8)), top, floor]
        found = solve_each(chain, budgets, num_slots=60)
        assert found[0] is None
        for budget, schedule in zip(budgets[1:], found[1:], strict=True):
            assert schedule is not None and schedule.peak_bytes <= budget
            assert (schedule.peak_bytes, schedule.time_ps) == simulate(chain, schedule.operations)
            exact_ps = solved(chain, budget, num_slots=EXACT).bound_ps
            assert chain.work_ps <= schedule.bound_ps <= schedule.time_ps and exact_ps <= schedule.time_ps
            # Half of the slots at least, and one more that rounding up to whole bytes may take.
            free = budget - chain.input_bytes
            assert schedule.discretisation_bytes <= (len(chain.stages) + 1) * (2 * free // 60 + 1)


def test_what_is_carried_through_a_stage_that_kept_all_counts_once() -> None:
    # Cells that pass the output of the cell before on: what each makes has one byte, what the next reads two.
    cell = Stage(1, 2, output_bytes=2, saved_bytes=5, carried_bytes=1)
    last = Stage(1, 2, output_bytes=0, saved_bytes=5)
    assert keep_all(Chain((cell, cell, cell, last)))[0] == 4 * 5
    with pytest.raises(BadOption, match="counts the output"):
        replace(cell, saved_bytes=0)


def test_a_large_budget_runs_everything_once() -> None:
    chain = random_chain(random.Random(3), 20)
    schedule = solved(chain, 10**12)
    assert schedule.time_ps == schedule.bound_ps == sum(s.forward_ps + s.backward_ps for s in chain.stages)
    assert len(schedule.operations) == 40 and schedule.discretisation_bytes == 0
    assert kept(schedule) == Kept(tuple(range(20)), (), ())


def test_a_small_chain_is_checkpointed_as_by_hand() -> None:
    # Outputs of one byte, five saved. Thirteen hold two stages and a checkpoint: the cheap ones run twice.
    chain = Chain(tuple(Stage(forward_ps, 2, output_bytes=1, saved_bytes=5) for forward_ps in (1, 1, 4, 4)))
    schedule = solved(chain, 13, num_slots=EXACT)
    assert schedule.time_ps == searched(chain, 13) == 10 + 8 + 2
    assert kept(schedule) == Kept(stored=(2, 3), checkpoints=(0,), dropped=(1,))
    assert floor_bytes(chain) == 1 + 5 + 1  # a checkpoint, all of one stage, the gradient that waits


def test_kept_covers_every_stage_once() -> None:
    rng = random.Random(4)
    for _ in range(30):
        chain = random_chain(rng, 15)
        found = kept(solved(chain, floor_bytes(chain) + rng.randint(0, 20)))
        assert sorted(found.stored + found.checkpoints + found.dropped) == list(range(15))
        assert 0 not in found.dropped and 14 in found.stored


def test_merged_stages_need_no_less_and_take_as_long() -> None:
    rng = random.Random(5)
    for _ in range(40):
        chain = random_chain(rng, rng.randint(2, 30), largest=1000)
        coarse = coarsened(chain, rng.randint(1, 12))
        assert [i for group in coarse.groups for i in group] == list(range(len(chain.stages)))
        assert coarse.chain.work_ps == chain.work_ps
        assert sum(s.saved_bytes for s in coarse.chain.stages) == sum(s.saved_bytes for s in chain.stages)
        floor = floor_bytes(coarse.chain)
        schedule = solved(coarse.chain, rng.randint(floor, max(floor, keep_all(coarse.chain)[0])))
        peak_bytes, time_ps = simulate(chain, coarse.expanded(schedule.operations))
        assert peak_bytes <= schedule.peak_bytes and time_ps == schedule.time_ps


def test_long_chains_are_merged_and_still_reach_their_floor() -> None:
    chain = random_chain(random.Random(6), 60, largest=1000)
    floor, top = floor_bytes(chain), keep_all(chain)[0]
    assert solve(chain, floor - 1, max_stages=20) is None
    times = [solved(chain, floor + (top - floor) * tenths // 10, max_stages=20).time_ps for tenths in range(11)]
    assert times[-1] == chain.work_ps < times[5]
    assert coarsened(chain, 60).chain == chain


STAGES = Chain((Stage(1, 1, 1, 2), Stage(1, 1, 1, 2)))


@pytest.mark.parametrize(
    ("operations", "complaint"),
    [
        ([(ALL, 1)], "input is not here"),
        ([(ALL, 0), (EMPTY, 1)], "saved by the stage before"),
        ([(ALL, 0), (ALL, 0)], "output is still here"),
        ([(ALL, 0), (BACKWARD, 0)], "next is that of stage 1"),
        ([(CHECKPOINT, 0), (CHECKPOINT, 1), (BACKWARD, 1)], "what it saved is not here"),
        ([(EMPTY, 0), (ALL, 1), (BACKWARD, 1), (ALL, 0)], "input is not here"),
        ([(ALL, 0), (ALL, 1), (BACKWARD, 1), (BACKWARD, 1)], "still to do are 0 to 0"),
        ([(ALL, 0), (ALL, 1), (BACKWARD, 1)], "end before the backward of stage 0"),
        ([(ALL, 2)], "still to do are 0 to 1"),
    ],
)
def test_replay_refuses(operations: list[tuple[Kind, int]], complaint: str) -> None:
    with pytest.raises(IllegalSchedule, match=complaint):
        simulate(STAGES, [Operation(*operation) for operation in operations])


def test_replay_counts_each_term() -> None:
    first = Stage(1, 10, output_bytes=3, saved_bytes=7, forward_transient_bytes=2, backward_transient_bytes=20)
    last = Stage(100, 1000, output_bytes=1, saved_bytes=4, forward_transient_bytes=5, backward_transient_bytes=6)
    chain = Chain((first, last), input_bytes=50)
    order = [(CHECKPOINT, 0), (ALL, 1), (BACKWARD, 1), (ALL, 0), (BACKWARD, 0)]
    operations = [Operation(kind, stage) for kind, stage in order]
    assert simulate(chain, operations) == (50 + 7 + 20, 1112)
    cheap = replace(first, backward_transient_bytes=0)
    assert simulate(Chain((cheap, last), 50), operations)[0] == 50 + 3 + 4 + 6  # the last backward
    costly = replace(cheap, gradient_bytes=30)
    assert simulate(Chain((costly, last), 50), operations)[0] == 50 + 30 + 7 + 2  # the gradient waits


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(BadOption, match="counts the output"):
        Stage(1, 1, output_bytes=3, saved_bytes=2)
    with pytest.raises(BadOption, match="forward_ps=-1"):
        Stage(-1, 1, 1, 1)
    with pytest.raises(BadOption, match="at least one stage"):
        Chain(())
    with pytest.raises(BadOption, match="input_bytes=-1"):
        Chain((Stage(1, 1, 1, 1),), -1)
    with pytest.raises(BadOption, match="bytes in all"):
        Chain((Stage(1, 1, 1, 1 << 59),) * 2)
    with pytest.raises(BadOption, match="ps in all"):
        Chain((Stage(1 << 58, 1, 1, 1),) * 2)
    with pytest.raises(BadOption, match="num_slots=0"):
        solve(STAGES, 3, num_slots=0)
    with pytest.raises(BadOption, match="max_stages=0"):
        coarsened(STAGES, 0)
