"""The bound by fates of large storages: never above the best of all plans, often as high, and right by hand."""

from __future__ import annotations

import random
import sys
from dataclasses import replace

import numpy as np
import pytest
from every_plan import LAYERS, LINKS, EveryPlan, drawn_codes, drawn_costs, drawn_step
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from planning import SECOND, TENSOR, chain, priced, tanh_storages
from random_decisions import random_decisions
from test_bound_networks import costs_of, step_of

from memfit.errors import BadOption
from memfit.plan.bound import Bounds
from memfit.plan.bound.cut import Cuts
from memfit.plan.bound.enumeration import Enumeration
from memfit.plan.bound.fates import Fates, Kind, Parcel
from memfit.plan.bound.halves import IMPOSSIBLE, Clock, Event, Half, Loose, Way
from memfit.plan.decisions import Encode, EncodeThenOffload
from memfit.plan.lower import lower
from memfit.plan.policies.gist import lossless_codes
from memfit.plan.simulate import simulate

SMALL = settings(
    max_examples=8,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)

# --- against every plan there is -------------------------------------------------------------------------------------


@SMALL
@given(LAYERS, st.sampled_from(sorted(LINKS)), st.sampled_from(["plain", "codes", "ways"]), st.integers(0, 2**32))
def test_no_plan_is_better(layers: list[tuple[str, int, int]], links: str, extra: str, seed: int) -> None:
    rng = random.Random(seed)
    step = drawn_step(layers)
    costs = drawn_costs(step, LINKS[links], rng, with_ways=extra == "ways")
    codes = drawn_codes(step, rng, 2) if extra == "codes" else {}
    every = EveryPlan.of(step, costs, codes, chance=rng)
    peaks = every.peaks()
    bounds = Bounds(step, costs, codes)
    for budget in {peaks[0], peaks[len(peaks) // 6], peaks[len(peaks) // 3]}:
        fastest_ps = every.fastest_ps(budget)
        bound = bounds.at(budget)
        for num_sets in (1, 20, 400):
            higher = bounds.enumerated(bound, target_ps=sys.maxsize, num_sets=num_sets)
            assert bound.over_ps is not None and higher.over_ps is not None
            assert bound.over_ps <= higher.over_ps
            assert fastest_ps is None or higher.over_ps <= fastest_ps - bound.keep_ps, higher.describe()


@SMALL
@given(LAYERS, st.sampled_from(sorted(LINKS)), st.integers(0, 2**32))
def test_no_drawn_plan_is_better(layers: list[tuple[str, int, int]], links: str, seed: int) -> None:
    """With all that decisions can be: moments, more than once, codes that are sent."""
    rng = random.Random(seed)
    step = drawn_step(layers)
    costs = drawn_costs(step, LINKS[links], rng, with_ways=False)
    for _ in range(4):
        decisions = dict(random_decisions(step, costs, rng.randrange(2**32)))
        coded = {s: d.codec for s, d in decisions.items() if isinstance(d, (Encode, EncodeThenOffload))}
        try:
            timeline = simulate(lower(step, decisions, costs), costs)
        except BadOption:
            continue  # what a code has made superfluous cannot be recomputed
        bounds = Bounds(step, costs, {s: Encode(name) for s, name in coded.items()})
        higher = bounds.enumerated(bounds.at(timeline.peak_bytes), target_ps=sys.maxsize, num_sets=400)
        assert higher.over_ps is not None and higher.over_ps <= timeline.step_ps - higher.keep_ps, higher.describe()


@pytest.mark.parametrize("seed", [4, 15, 20])
def test_two_results_of_one_op_are_made_again_together(seed: int) -> None:
    """A pool's indices come with what backward wants before them, and need not be made where they are read."""
    rng = random.Random(seed)
    step = drawn_step([("relu pool", 2, 2), ("conv", 0, 2)])
    costs = drawn_costs(step, LINKS["both, compute slows"], rng, with_ways=True)
    every = EveryPlan.of(step, costs, {})
    for budget in every.peaks()[:6]:
        fastest_ps = every.fastest_ps(budget)
        bounds = Bounds(step, costs)
        higher = bounds.enumerated(bounds.at(budget), target_ps=sys.maxsize, num_sets=400)
        assert higher.over_ps is not None and fastest_ps is not None
        assert higher.over_ps <= fastest_ps - higher.keep_ps


def test_of_many_small_steps_it_finds_the_optimum_of_more_than_the_cuts_do() -> None:
    by_cuts = by_fates = 0
    for seed in range(24):
        rng = random.Random(seed)
        names = ("conv", "norm relu_", "relu pool", "tanh")
        step = drawn_step([(rng.choice(names), rng.randrange(3), rng.randrange(3)) for _ in range(4)])
        costs = drawn_costs(step, LINKS["host"], rng, with_ways=True)
        every = EveryPlan.of(step, costs, {})
        peaks = every.peaks()
        budget = peaks[len(peaks) // 6]
        best_ps = every.fastest_ps(budget)
        bounds = Bounds(step, costs)
        cut = bounds.at(budget)
        higher = bounds.enumerated(cut, target_ps=sys.maxsize, num_sets=400)
        assert cut.over_ps is not None and higher.over_ps is not None and best_ps is not None
        by_cuts += cut.over_ps >= best_ps - cut.keep_ps - 2
        by_fates += higher.over_ps >= best_ps - cut.keep_ps - 2
    assert by_fates >= by_cuts + 3


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_what_is_away_at_one_op_is_away_further_from_its_use() -> None:
    """A small parcel leaves room at one op, a large one at the op before it: there both are still to come."""
    elapsed = np.arange(0, 11, dtype=np.float64)
    large = Parcel(7, False, 100, 2, 10, "out", "back", ready=1, last_forward=1, wanted=(9, 9))
    small = Parcel(8, False, 60, 2, 1, "out", "back", ready=1, last_forward=1, wanted=(9, 9))
    at_five, at_four = Event(5, 5, 100, (Way(0, 0.0),)), Event(4, 4, 60, (Way(0, 0.0),))

    def longer_ps(*events: Event) -> float:
        half = Half(Clock(elapsed, 4, is_backward=True), [large, small], [], IMPOSSIBLE)
        return half.longer_ps(events)

    assert longer_ps(at_five) == longer_ps(at_four) == 6, "eleven seconds of fetches, five of ops"
    assert longer_ps(at_five, at_four) == 7, "the large one alone lacks 7 at op 5, and both lack 7 at op 4"


def test_what_is_fetched_for_an_op_that_runs_again_has_no_time_while_that_runs() -> None:
    elapsed = np.arange(0, 11, dtype=np.float64)
    again, full = Event(2, 6, 1_000, (Way(0, 3.0),)), Event(5, 5, 0, (Way(0, 0.0),))
    for wanted, expected in (((6, 2), 6), ((6, 6), 3)):
        parcel = Parcel(7, False, 100, 2, 3, "out", "back", ready=1, last_forward=1, wanted=wanted)
        half = Half(Clock(elapsed, 4, is_backward=True), [parcel], [], IMPOSSIBLE)
        assert half.longer_ps([again, full]) == expected


def test_losses_at_two_ops_add_up() -> None:
    """Each of two ops may have its workspace if a parcel is away there, and it has time for neither."""
    elapsed = np.arange(0, 11, dtype=np.float64)  # ten ops of one second; from the fourth on backward
    parcel = Parcel(7, False, 100, 2, 5, "out", "back", ready=1, last_forward=1, wanted=(9, 9))
    fast_or_slow = (Way(100, 0.0), Way(0, 0.75))
    two = [Event(op, op, 150, fast_or_slow) for op in (6, 7)]

    def longer(events: list[Event], loose: list[Loose] | None = None, limit: float = IMPOSSIBLE) -> float:
        return Half(Clock(elapsed, 4, is_backward=True), [parcel], loose or [], limit).longer_ps(events)

    # Away at op 7 it has one second of the five it takes, away at op 6 two; slower ways are dearer together.
    assert longer(two[:1]) == 0.75 and longer(two[1:]) == 0.75
    assert longer(two) == 1.5
    assert longer(two, [Loose(3.0, 7, 9)]) == 0.75  # away at op 6 now, but not at 7
    assert longer(two, [Loose(3.0, 0, 6)]) == 1.5  # which passes too early
    assert longer([Event(6, 6, 50, fast_or_slow)]) == 3.75  # no room for it even so: it is waited for besides
    assert longer([Event(6, 6, -1, fast_or_slow)]) == IMPOSSIBLE
    assert longer(two, limit=1.0) == IMPOSSIBLE
    # Nothing else: from the boundary it has all the time it takes.
    assert longer([]) == 0.0
    assert Half(Clock(elapsed, 8, is_backward=True), [parcel], [], IMPOSSIBLE).longer_ps([]) == 4.0


def test_a_code_does_not_come_while_it_is_decoded() -> None:
    elapsed = np.arange(0, 11, dtype=np.float64)
    parcel = Parcel(7, True, 100, 2, 5, "out", "back", ready=1, last_forward=1, wanted=(9, 9))
    event = Event(6, 6, 50, (Way(0, 0.0),))

    def longer(code_of: int) -> float:
        half = Half(Clock(elapsed, 4, is_backward=True), [parcel], [Loose(1.0, 9, 9, code_of)], IMPOSSIBLE)
        return half.longer_ps([event])

    assert longer(7) == 3.0 and longer(8) == 2.0


def test_a_chain_by_hand() -> None:
    """Five tanhs, two tensors too many, nothing can be sent: two of them run again, three seconds each."""
    step = chain(5)
    costs = priced(step, {"mul": 1, "tanh": 3, "tanh_backward": 3})
    budget = simulate(lower(step, {}, costs), costs).peak_bytes - 2 * TENSOR
    bounds = Bounds(step, costs)
    found = bounds.enumerated(bounds.at(budget), target_ps=sys.maxsize, num_sets=2_000)
    assert found.over_ps is not None and 6 * SECOND - 2 <= found.over_ps <= 6 * SECOND
    enough = bounds.enumerated(bounds.at(budget), target_ps=SECOND, num_sets=2_000)
    assert enough.over_ps is not None and enough.over_ps >= SECOND


def test_it_says_what_it_went_through() -> None:
    step = chain(5)
    costs = priced(step, {"mul": 1, "tanh": 3, "tanh_backward": 3})
    bounds = Bounds(step, costs)
    bound = replace(bounds.at(simulate(lower(step, {}, costs), costs).peak_bytes - 2 * TENSOR), over_ps=0)
    told = bounds.enumerated(bound, target_ps=sys.maxsize, num_sets=500).describe()
    assert told.endswith("over keeping all: whatever becomes of 6 large storages")
    assert bounds.enumerated(bound, target_ps=0, num_sets=500) is bound


# --- what it is made of ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vgg16", "gpt2"])
def test_what_must_be_there_is_the_sum_over_storages(name: str) -> None:
    step, costs = step_of(name), costs_of(name, "titan-x")
    account = Bounds(step, costs, lossless_codes(step, costs)).account
    whole = account.given_bytes + sum(account.present_bytes_of(storage) for storage in account.backward_uses)
    whole[list(account.codings.gone)] = 0
    assert (whole == account.present_bytes).all()


def test_fates_hold_what_programs_hold() -> None:
    """Of the keep plan: at every op at least what is in every plan and what kept storages have beyond that."""
    step, costs = step_of("vgg16"), costs_of("vgg16", "titan-x")
    account = Bounds(step, costs).account
    fates = Fates(account)
    kept = [next(f for f in fates.of(s) if f.kind is Kind.KEPT) for s in account.backward_uses]
    held = account.present_bytes + sum(fate.more_bytes for fate in kept)
    workspaces = np.array([price.workspace_bytes for price in account.prices])
    assert (held <= account.keep_bytes - workspaces).all()
    assert int(held.max()) > int(account.present_bytes.max())


def test_storages_that_something_is_made_from_are_decided_next() -> None:
    step = chain(6)
    costs = priced(step, {"mul": 1, "tanh": 3, "tanh_backward": 3})
    bounds = Bounds(step, costs)
    budget = simulate(lower(step, {}, costs), costs).peak_bytes - 2 * TENSOR
    search = Enumeration(Cuts(bounds.account, bounds.columns, budget))
    assert set(tanh_storages(step)) <= set(search.storages)
    fourth = tanh_storages(step)[3]
    once = next(fate for fate in search._fates[fourth] if fate.kind is Kind.ONCE)
    assert search._next(search._node((once,), 0.0, 1e18)) == tanh_storages(step)[2]
    kept = next(fate for fate in search._fates[fourth] if fate.kind is Kind.KEPT)
    assert search._next(search._node((kept,), 0.0, 1e18)) == search.storages[0]
