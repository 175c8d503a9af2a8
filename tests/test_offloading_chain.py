"""Offloading on chains: every solver against every schedule there is, against a linear program, and by hand."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from offloading_brute import (
    PS_PER_S,
    complaints,
    halves,
    least_fluid_ps,
    least_half_ps,
    least_idle_ps,
    random_chain,
)

from memfit.errors import BadOption
from memfit.plan.offloading import (
    Chain,
    Half,
    Schedule,
    Stage,
    Transfer,
    VdnnChoice,
    evaluate,
    fluid,
    fluid_halves,
    shortest_prefix,
    solve_dp,
    solve_greedy,
    solve_relaxed,
    solve_vdnn,
    solve_whole,
)
from memfit.plan.offloading.vdnn_chain import prefetched_beside

WIDE = 10**9
"""More labels than any small chain has."""


def choices(chain: Chain) -> list[frozenset[int]]:
    stages = range(len(chain.stages))
    return [frozenset(away) for size in range(len(stages) + 1) for away in combinations(stages, size)]


def idle_ps(chain: Chain, away: frozenset[int] | range) -> int:
    schedule = evaluate(chain, away)
    assert schedule is not None
    return schedule.idle_ps


# Evaluation.


@pytest.mark.parametrize("seed", range(4))
def test_evaluation_against_every_schedule_of_a_choice(seed: int) -> None:
    rng = random.Random(seed)
    num_single = 0
    for _ in range(12):
        chain = random_chain(rng, rng.randint(1, 4))
        for away in choices(chain):
            schedule = evaluate(chain, away)
            give_up_ps = 60
            found = [least_half_ps(runs, away, chain.limit_bytes, give_up_ps) for runs in halves(chain)]
            if schedule is None:
                assert None in found
                continue
            least_ps = sum(half_ps or 0 for half_ps in found) - chain.work_ps
            assert None not in found and least_ps <= schedule.idle_ps
            if len(away) <= 1:  # there is no other order
                num_single += 1
                assert least_ps == schedule.idle_ps
    assert num_single > 10


def test_evaluation_by_hand() -> None:
    # 6 bytes go out at one byte per picosecond and come back at two. The third stage fits when they are gone.
    stages = (Stage(2, 1, 6), Stage(4, 3, 2), Stage(5, 2, 3, backward_transient_bytes=1))
    chain = Chain(stages, limit_bytes=10, send_bytes_per_s=PS_PER_S, fetch_bytes_per_s=2 * PS_PER_S)
    assert evaluate(chain, ()) is None
    schedule = evaluate(chain, {0})
    assert schedule == Schedule(
        away=(0,),
        forward_starts_ps=(0, 2, 8),
        backward_starts_ps=(18, 15, 13),
        sends=(Transfer(0, 2, 8),),
        fetches=(Transfer(0, 15, 18),),
        peak_bytes=8,
        idle_ps=2,
    )
    assert complaints(chain, schedule) == []
    # Three bytes per two picoseconds take up the fraction, and the latency comes on top.
    assert replace(chain, send_bytes_per_s=3 * PS_PER_S // 2, latency_ps=7).halves[0].transfer_ps == (
        4 + 7,
        2 + 7,
        2 + 7,
    )


def test_all_sends_end_before_the_first_backward() -> None:
    chain = Chain((Stage(1, 9, 5), Stage(1, 9, 1)), limit_bytes=9, send_bytes_per_s=PS_PER_S)
    assert idle_ps(chain, frozenset()) == 0
    assert idle_ps(chain, frozenset({0})) == 4  # compute is over at 2, the send at 6; the fetch hides


def test_a_step_in_reversed_time_waits_as_long() -> None:
    rng = random.Random(1)
    for _ in range(100):
        chain = random_chain(rng, rng.randint(1, 7))
        mirrored = replace(
            chain,
            stages=tuple(
                Stage(s.backward_ps, s.forward_ps, s.saved_bytes, s.backward_transient_bytes, s.forward_transient_bytes)
                for s in chain.stages
            ),
            send_bytes_per_s=chain.fetch_bytes_per_s or chain.send_bytes_per_s,
            fetch_bytes_per_s=chain.send_bytes_per_s,
        )
        one, other = fluid(chain), fluid(mirrored)
        assert one is not None and other is not None and one.idle_ps == other.idle_ps
        away = frozenset(stage for stage in range(len(chain.stages)) if rng.random() < 0.5)
        there, back = evaluate(chain, away), evaluate(mirrored, away)
        assert (there and there.idle_ps) == (back and back.idle_ps)


# The relaxations.


@pytest.mark.parametrize("seed", range(5))
def test_the_greedys_relaxation_equals_its_linear_program(seed: int) -> None:
    rng = random.Random(seed)
    num_waiting = 0
    for _ in range(30):
        chain = random_chain(rng, rng.randint(1, 5), largest=7)
        relaxed = fluid(chain)
        assert relaxed is not None
        assert relaxed.idle_ps == least_fluid_ps(chain)
        num_waiting += relaxed.idle_ps > 0
    assert num_waiting > 8
    assert least_fluid_ps(replace(chain, limit_bytes=chain.floor_bytes - 1)) is None


def test_the_bound_holds_for_halves_in_different_orders() -> None:
    rng = random.Random(8)
    num_waiting = 0
    for _ in range(60):
        chain = random_chain(rng, rng.randint(2, 4))
        forward, backward = chain.halves
        order = rng.sample(range(len(chain.stages)), len(chain.stages))
        shuffled = Half(
            *(
                tuple(numbers[stage] for stage in order)
                for numbers in (backward.durations_ps, backward.transient_bytes, backward.saved_bytes)
            ),
            backward.limit_bytes,
            backward.bytes_per_s,
            backward.latency_ps,
        )
        first, second = halves(chain)
        second = [second[stage] for stage in order]
        found = []
        for away in choices(chain):
            there_ps = least_half_ps(first, away, chain.limit_bytes, 80)
            back_ps = least_half_ps(second, frozenset(map(order.index, away)), chain.limit_bytes, 80)
            if there_ps is not None and back_ps is not None:
                found.append(there_ps + back_ps - chain.work_ps)
        relaxed = fluid_halves(forward, shuffled)
        assert relaxed is not None and relaxed.bound_ps <= min(found)
        num_waiting += relaxed.bound_ps > 0
    assert num_waiting > 15


def test_the_relaxed_program_equals_the_linear_program_of_the_best_choice() -> None:
    rng = random.Random(2)
    for num_stages in (*(1, 2, 3, 3) * 4, 4):
        chain = random_chain(rng, num_stages)
        prices = {away: least_fluid_ps(chain, away) for away in choices(chain)}
        relaxed = solve_relaxed(chain, width=WIDE)
        assert relaxed.away is not None
        assert relaxed.idle_ps == relaxed.bound_ps == prices[relaxed.away]
        assert relaxed.idle_ps == min(price for price in prices.values() if price is not None)


def test_the_whole_program_is_the_best_choice() -> None:
    rng = random.Random(3)
    for _ in range(150):
        chain = random_chain(rng, rng.randint(1, 7))
        found = [schedule.idle_ps for away in choices(chain) if (schedule := evaluate(chain, away)) is not None]
        whole = solve_whole(chain, width=WIDE)
        assert whole.away is not None
        assert whole.idle_ps == whole.bound_ps == min(found) == idle_ps(chain, whole.away)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_few_labels_lose_no_more_than_they_say(width: int) -> None:
    rng = random.Random(width)
    num_lost = 0
    for _ in range(60):
        chain = random_chain(rng, 9, largest=9)
        for solve in (solve_relaxed, solve_whole):
            exact, rough = solve(chain, width=WIDE), solve(chain, width=width)
            assert rough.bound_ps <= exact.idle_ps <= rough.idle_ps
            num_lost += rough.idle_ps > exact.idle_ps
            # Knowing a schedule, it finds a better one or none.
            known = solve(chain, width=width, known_ps=int(exact.idle_ps) + 1)
            assert known.bound_ps <= exact.idle_ps
            assert known.away is None or known.idle_ps <= exact.idle_ps + 1
            assert solve(chain, width=WIDE, known_ps=int(exact.idle_ps)).away is None or exact.idle_ps % 1
    assert num_lost > 0


# All of them in order.


@pytest.mark.parametrize("seed", range(8))
def test_bound_brute_force_dp_greedy_vdnn(seed: int) -> None:
    rng = random.Random(seed)
    seen = dict.fromkeys(("waits", *VdnnChoice), 0)
    for _ in range(30):
        chain = random_chain(rng, rng.randint(2, 5))
        relaxed, greedy, solution = fluid(chain), solve_greedy(chain), solve_dp(chain)
        assert relaxed is not None and greedy is not None and solution is not None
        least_ps = least_idle_ps(chain, known_ps=solution.schedule.idle_ps)
        order = [relaxed.bound_ps, solution.bound_ps, least_ps, solution.schedule.idle_ps, greedy.idle_ps]
        prefix = shortest_prefix(chain)
        assert prefix is not None
        assert sorted(order) == order and greedy.idle_ps <= idle_ps(chain, prefix)
        seen["waits"] += least_ps > 0
        for choice in VdnnChoice:
            vdnn = solve_vdnn(chain, choice)
            if vdnn is not None:
                seen[choice] += vdnn.idle_ps > 0
                assert greedy.idle_ps <= vdnn.idle_ps
    assert min(seen.values()) >= 3


def test_every_schedule_is_legal() -> None:
    rng = random.Random(4)
    for _ in range(300):
        chain = random_chain(rng, rng.randint(1, 9), shortest_ps=1)
        solution = solve_dp(chain)
        assert solution is not None
        found = [solution.schedule, solve_greedy(chain), *(solve_vdnn(chain, choice) for choice in VdnnChoice)]
        found.append(
            evaluate(chain, frozenset(rng.sample(range(len(chain.stages)), rng.randint(0, len(chain.stages)))))
        )
        for schedule in found:
            assert schedule is None or complaints(chain, schedule) == []
        for stage in solution.schedule.away:  # each is sent for a reason
            fewer = evaluate(chain, frozenset(solution.schedule.away) - {stage})
            assert fewer is None or fewer.idle_ps > solution.schedule.idle_ps


def test_the_checker_finds_planted_mistakes() -> None:
    stages = (Stage(2, 1, 6), Stage(4, 3, 2), Stage(5, 2, 3))
    chain = Chain(stages, limit_bytes=10, send_bytes_per_s=PS_PER_S)
    schedule = evaluate(chain, {0})
    assert schedule is not None and complaints(chain, schedule) == []
    (send,), (fetch,) = schedule.sends, schedule.fetches
    for planted, complaint in [
        (replace(schedule, sends=(send._replace(start_ps=1, end_ps=7),)), "before its bytes are made"),
        (
            replace(schedule, fetches=(fetch._replace(start_ps=fetch.start_ps + 1, end_ps=fetch.end_ps + 1),)),
            "ends after",
        ),
        (replace(schedule, sends=(send._replace(end_ps=7),)), "wrong length"),
        (replace(schedule, sends=()), "sent and fetched once"),
        (replace(schedule, forward_starts_ps=(0, 2, 7)), "11 bytes at once"),
        (replace(schedule, forward_starts_ps=(0, 1, 8)), "two things at once"),
        (replace(schedule, idle_ps=0), "idle time"),
        (replace(schedule, peak_bytes=1), "and it says 1"),
    ]:
        assert any(complaint in found for found in complaints(chain, planted)), complaint


def test_the_floor_is_reached_and_not_passed() -> None:
    rng = random.Random(5)
    for _ in range(60):
        chain = random_chain(rng, rng.randint(1, 8))
        at_floor = replace(chain, limit_bytes=chain.floor_bytes)
        assert solve_greedy(at_floor) is not None and solve_dp(at_floor) is not None
        if chain.floor_bytes:
            below = replace(chain, limit_bytes=chain.floor_bytes - 1)
            assert fluid(below) is shortest_prefix(below) is solve_greedy(below) is solve_dp(below) is None
            assert all(evaluate(below, away) is None for away in (frozenset(), frozenset(range(len(chain.stages)))))
            with pytest.raises(BadOption, match=f"this chain needs {chain.floor_bytes}"):
                solve_whole(below)


def test_more_bytes_and_faster_links_never_wait_longer() -> None:
    rng = random.Random(6)
    for _ in range(15):
        chain = random_chain(rng, 6, largest=9)
        total = sum(stage.saved_bytes for stage in chain.stages)
        by_limit = [replace(chain, limit_bytes=chain.floor_bytes + more) for more in range(total + 1)]
        by_speed = [replace(chain, send_bytes_per_s=PS_PER_S * n // 4, fetch_bytes_per_s=None) for n in range(1, 20)]
        for chains in (by_limit, by_speed):
            relaxed = [bound.idle_ps for each in chains if (bound := fluid(each)) is not None]
            whole = [solve_whole(each, width=WIDE).idle_ps for each in chains]
            for values in (relaxed, whole):
                assert len(values) == len(chains) and all(more <= less for less, more in pairwise(values))
        assert idle_ps(by_limit[-1], frozenset()) == 0


# Why each solver is finished by exact evaluation: the published choice alone breaks the order on these.


def chain_of(*stages: tuple[int, int, int, bool], limit_bytes: int) -> Chain:
    """Stages of (forward, backward, saved bytes, is it a convolution); a byte takes a picosecond."""
    return Chain(tuple(Stage(f, b, w, is_convolution=c) for f, b, w, c in stages), limit_bytes, PS_PER_S)


def test_a_rounded_prefix_can_be_slower_than_vdnn() -> None:
    # One byte must go. The first stage has six, which do not hide; the second has two, which do.
    chain = chain_of((2, 4, 6, False), (2, 1, 2, True), (2, 2, 3, True), (4, 1, 1, True), limit_bytes=11)
    vdnn, greedy = solve_vdnn(chain, VdnnChoice.CONVOLUTIONS), solve_greedy(chain)
    assert vdnn is not None and greedy is not None
    assert shortest_prefix(chain) == range(1)
    assert (idle_ps(chain, range(1)), vdnn.idle_ps, greedy.idle_ps) == (5, 2, 0)


def test_the_relaxed_choice_can_be_slower_than_vdnn_and_the_greedy() -> None:
    # The second stage hides best byte by byte: the third waits for one of its six. Whole, it waits for all, both ways.
    chain = chain_of((1, 5, 2, True), (1, 3, 6, False), (3, 3, 1, True), (2, 2, 3, False), limit_bytes=8)
    vdnn, greedy, solution = solve_vdnn(chain, VdnnChoice.ALL), solve_greedy(chain), solve_dp(chain)
    assert vdnn is not None and greedy is not None and solution is not None
    prices = {away: least_fluid_ps(chain, away) for away in choices(chain) if 3 not in away}
    assert [away for away, price in prices.items() if price == 2] == [frozenset({1})]
    relaxed = solve_relaxed(chain)
    assert (relaxed.away, relaxed.idle_ps, idle_ps(chain, frozenset({1}))) == (frozenset({1}), 2, 12)
    assert vdnn.idle_ps == greedy.idle_ps == solution.schedule.idle_ps == 7


def test_no_prefix_may_be_best() -> None:
    # A byte too many. The second stage has just that, and the first three times as many.
    chain = chain_of((1, 3, 3, True), (1, 2, 1, False), (1, 2, 1, True), limit_bytes=4)
    greedy, solution = solve_greedy(chain), solve_dp(chain)
    assert greedy is not None and solution is not None
    assert (greedy.away, greedy.idle_ps) == ((0,), 3)
    assert (solution.schedule.away, solution.schedule.idle_ps) == ((1,), 2)
    assert least_idle_ps(chain, known_ps=9) == 2


def test_another_order_may_be_best() -> None:
    # In reversed time the link had better wait for one byte that is not ready than begin with four that are.
    chain = chain_of((1, 2, 4, True), (4, 2, 1, False), (1, 6, 1, True), limit_bytes=5)
    solution = solve_dp(chain)
    assert solution is not None
    assert (
        solution.schedule.idle_ps
        == 2
        == min(schedule.idle_ps for away in choices(chain) if (schedule := evaluate(chain, away)) is not None)
    )
    assert solution.bound_ps <= least_idle_ps(chain, known_ps=2) == 1


# vDNN's rules.


def test_vdnn_pads_stages_to_their_transfers() -> None:
    chain = chain_of((2, 2, 5, True), (4, 3, 3, True), (1, 6, 2, True), limit_bytes=100)
    schedule = solve_vdnn(chain, VdnnChoice.ALL)
    assert schedule == Schedule(
        away=(0, 1),
        forward_starts_ps=(0, 2, 7),  # the second stage takes 5 for the first one's bytes
        backward_starts_ps=(21, 16, 10),  # the third fetches the second beside itself; the second, in 5, the first
        sends=(Transfer(0, 2, 7), Transfer(1, 7, 10)),
        fetches=(Transfer(1, 10, 13), Transfer(0, 16, 21)),
        peak_bytes=8,
        idle_ps=1 + 2 + 2,
    )
    assert solve_vdnn(replace(chain, limit_bytes=8), VdnnChoice.ALL) == schedule
    assert solve_vdnn(replace(chain, limit_bytes=7), VdnnChoice.ALL) is None


def test_vdnn_fetches_early_only_within_its_window() -> None:
    # Only the first and the third stage are convolutions, and sent. The last stage's backward fetches the third; that
    # of the third looks past the second, and fetches the first two stages before it is due.
    stages = (1, 1, 2, True), (1, 9, 1, False), (9, 9, 4, True), (1, 1, 0, False)
    schedule = solve_vdnn(chain_of(*stages, limit_bytes=100), VdnnChoice.CONVOLUTIONS)
    assert schedule is not None
    starts_ps = schedule.backward_starts_ps
    assert [(t.stage, t.start_ps) for t in schedule.fetches] == [(2, starts_ps[3]), (0, starts_ps[2])]
    everything = solve_vdnn(chain_of(*stages, limit_bytes=100), VdnnChoice.ALL)
    assert everything is not None and [t.stage for t in everything.fetches] == [2, 1, 0]


@pytest.mark.parametrize(
    ("convolutions", "pending", "current", "expected"),
    [
        ((0, 1, 2), {0, 1}, 2, 1),  # the nearest, which closes the window and is in it
        ((0,), {0, 1}, 2, 1),  # the nearest, one at a time
        ((0,), {0}, 3, 0),  # over stages that are no convolutions
        ((1,), {0}, 3, None),  # not past one that is
        ((0, 1, 2), set(), 3, None),
        ((0,), {0}, 0, None),  # nothing lies below the first stage
    ],
)
def test_vdnns_window(convolutions: tuple[int, ...], pending: set[int], current: int, expected: int | None) -> None:
    chain = chain_of(*((1, 1, 1, index in convolutions) for index in range(4)), limit_bytes=100)
    assert prefetched_beside(chain, current, pending) == expected


def test_vdnn_never_sends_the_last_stage() -> None:
    chain = chain_of((1, 1, 9, True), limit_bytes=9)
    schedule = solve_vdnn(chain, VdnnChoice.ALL)
    assert schedule is not None and schedule.away == () and schedule.idle_ps == 0


# Long chains, and bad numbers.


def long_chain(rng: random.Random, num_stages: int, *, bytes_per_s: int, share: float) -> Chain:
    """Like a network's: seconds and bytes over two orders of magnitude, backward twice forward."""
    stages = []
    for _ in range(num_stages):
        is_convolution = rng.random() < 0.5
        forward_ps = int(rng.lognormvariate(0, 1) * (2e9 if is_convolution else 3e8))
        saved_bytes = int(rng.lognormvariate(0, 1) * 2e7)
        transients = rng.randrange(10**7), rng.randrange(4 * 10**7)
        stages.append(Stage(forward_ps, 2 * forward_ps, saved_bytes, *transients, is_convolution))
    chain = Chain(tuple(stages), 0, bytes_per_s, latency_ps=10**7)
    return replace(chain, limit_bytes=chain.floor_bytes + int(share * sum(s.saved_bytes for s in stages)))


@pytest.mark.parametrize(("bytes_per_s", "share"), [(3 * 10**9, 0.02), (6 * 10**9, 0.2), (12 * 10**9, 0.1)])
def test_work_on_four_hundred_stages_is_bounded(
    monkeypatch: pytest.MonkeyPatch, bytes_per_s: int, share: float
) -> None:
    num_evaluated = 0

    def counting(chain: Chain, away: Collection[int]) -> Schedule | None:
        nonlocal num_evaluated
        num_evaluated += 1
        return evaluate(chain, away)

    for name in ("greedy", "dp"):
        monkeypatch.setattr(f"memfit.plan.offloading.{name}.evaluate", counting)
    chain = long_chain(random.Random(7), 400, bytes_per_s=bytes_per_s, share=share)
    solution = solve_dp(chain)
    assert solution is not None
    # Two programs hold 22 labels of a chain this long, and each label becomes two: a second, not a minute.
    assert 0 < solution.num_labels <= 2 * 400 * 2 * 22
    # Prefixes of all stages and of the convolutions, and then each stage that need perhaps not be sent.
    assert 0 < num_evaluated <= 3 * 400
    greedy, relaxed = solve_greedy(chain), fluid(chain)
    assert greedy is not None and relaxed is not None
    assert 0 < relaxed.bound_ps <= solution.bound_ps <= solution.schedule.idle_ps < greedy.idle_ps
    assert solution.schedule.idle_ps - solution.bound_ps < 0.02 * chain.work_ps
    assert complaints(chain, solution.schedule) == []


def test_bad_numbers_are_refused() -> None:
    stage = Stage(1, 1, 1)
    with pytest.raises(BadOption, match="saved_bytes=-1"):
        Stage(1, 1, -1)
    with pytest.raises(BadOption, match="at least one stage"):
        Chain((), 1, 1)
    with pytest.raises(BadOption, match="fetch_bytes_per_s=0"):
        Chain((stage,), 1, 1, 0)
    with pytest.raises(BadOption, match="limit_bytes=-1"):
        Chain((stage,), -1, 1)
    with pytest.raises(BadOption, match=r"stages \[1\] cannot be sent"):
        evaluate(Chain((stage,), 1, 1), {1})
    with pytest.raises(BadOption, match="width=0"):
        solve_dp(chain_of((1, 3, 3, True), (1, 2, 1, False), (1, 2, 1, True), limit_bytes=4), width=0)
