"""Convolutions in batch chunks: picked by a policy, run, priced, proven, and bit for bit what eager computes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence import assert_same_as_eager
from torch import nn

import memfit
from memfit.capture.rewrites import chunks, rewrite
from memfit.capture.rewrites.chunks import (
    WHOLE,
    chunk_counts,
    in_chunks,
    is_in_chunks,
    num_chunks_of,
    proven_counts,
    way_name,
    way_of,
    whole_target,
)
from memfit.capture.rewrites.proof import PROOFS, AssumedProofs, Proofs
from memfit.capture.step import Ghost, Step
from memfit.cost import profile
from memfit.cost.costs import Costs, OpCost, free_of_charge
from memfit.cost.price_cache import PriceCache
from memfit.cost.profile import measure
from memfit.cost.signature import signature
from memfit.cost.stopwatch import Stopwatch
from memfit.errors import BadOption, MemfitError
from memfit.plan.check import check
from memfit.plan.decisions import Decision, Encode, Recompute
from memfit.plan.encode import encode_step, why_not_encode
from memfit.plan.lower import lower
from memfit.plan.plan import Plan, WrongPlan
from memfit.plan.planner import plan_step
from memfit.plan.policies.policy import Decided, Policy
from memfit.plan.policies.registry import POLICIES
from memfit.plan.rerun import Reruns
from memfit.plan.simulate import simulate
from memfit.run import fitted as fitted_module
from memfit.torch_internals import resolve

HOLDS = 4 << 20
"""What every convolution holds whole, in the made-up prices of these tests; in chunks it holds its share."""


def with_ways(step: Step, costs: Costs) -> Costs:
    """These prices, and made-up ones of all ways that give the same bits here."""
    algorithms: dict[str, dict[str, OpCost]] = {}
    prices = dict(costs.by_signature)
    for op in step.ops:
        counts = proven_counts(step, op, chunk_counts(step, op), PROOFS)
        if not counts:
            continue
        key = signature(step, op)
        time_ps = prices[key].time_ps
        prices[key] = OpCost(time_ps, HOLDS)
        algorithms[key] = {WHOLE: prices[key]}
        for count in counts:
            cost = OpCost(time_ps + count, HOLDS // count)
            prices[signature(step, in_chunks(op, count))] = algorithms[key][way_name(count)] = cost
    return replace(costs, by_signature=prices, algorithms=algorithms)


def most_chunks(step: Step, costs: Costs) -> dict[int, str]:
    """For every op that has a choice the way with the smallest workspace."""
    choices = costs.choices(step)
    return {op: min(ways, key=lambda way: ways[way].workspace_bytes) for op, ways in choices.items()}


def nothing(step: Step) -> dict[int, Decision]:
    return {}


def recompute_all(step: Step) -> dict[int, Decision]:
    reruns = Reruns(step)
    return {s: Recompute() for s in reruns.recomputable if step.storage[s].first_backward is not None}


def encode_all(step: Step) -> dict[int, Decision]:
    return {s: Encode("sparse:0.9") for s in Reruns(step).owned if not why_not_encode(step, s, "sparse:0.9")}


@pytest.fixture
def picking() -> Iterator[Callable[..., str]]:
    """A policy that computes every convolution in as many chunks as there are, besides what else it decides."""
    made: list[str] = []

    def policy(decisions: Callable[[Step], dict[int, Decision]] = nothing, at_least: int = 1) -> str:
        def decide(step: Step, costs: Costs, budget_bytes: int | None) -> Decided:
            priced = with_ways(step, costs)
            picked = most_chunks(step, priced)
            assert len(picked) >= at_least, "too little to pick: the test tests nothing"
            return Decided(decisions(step), priced.picking(picked))

        name = f"picking-{len(made)}"
        made.append(name)
        POLICIES[name] = Policy(name, "for tests", decide)
        return name

    yield policy
    for name in made:
        del POLICIES[name]


def images(*shape: int) -> Callable[[int], tuple[torch.Tensor, ...]]:
    return lambda batch: (torch.randn(batch, *shape),)


MODELS: dict[str, tuple[nn.Module, Callable[[int], Any], int]] = {
    # model, inputs, how many ops are in chunks at least
    "plain": (
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.Flatten()),
        images(3, 9, 11),
        3,
    ),
    "strided, dilated, groups": (
        nn.Sequential(
            nn.Conv2d(4, 8, 3, stride=2, groups=2), nn.ReLU(), nn.Dropout(0.3), nn.Conv2d(8, 8, 3, dilation=2, groups=8)
        ),
        images(4, 17, 15),
        3,
    ),
    "transposed": (
        nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.ConvTranspose2d(6, 4, 3, stride=2, output_padding=1)),
        images(3, 8, 8),
        3,
    ),
    "many channels": (
        nn.Sequential(nn.Conv2d(33, 40, 3), nn.ReLU(), nn.Conv2d(40, 32, 3, stride=2, padding=1, bias=False)),
        images(33, 9, 8),
        5,
    ),
    "1d": (nn.Sequential(nn.Conv1d(3, 6, 5), nn.ReLU(), nn.Conv1d(6, 4, 3, bias=False)), images(3, 33), 2),
    "3d": (nn.Sequential(nn.Conv3d(2, 4, 3), nn.ReLU(), nn.Conv3d(4, 3, 2)), images(2, 6, 7, 8), 2),
    "channels last": (
        nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)).to(
            memory_format=torch.channels_last
        ),
        lambda batch: (torch.randn(batch, 4, 12, 10).contiguous(memory_format=torch.channels_last),),
        2,
    ),
    "double": (nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).double(), None, 2),  # type: ignore
}
MODELS["double"] = (MODELS["double"][0], lambda batch: (torch.randn(batch, 2, 9, 9, dtype=torch.float64),), 2)


@pytest.mark.parametrize("name", MODELS)
def test_in_chunks_it_computes_what_eager_does(name: str, picking: Callable[..., str]) -> None:
    """Batches of 5: the last chunk of 2 or 4 is smaller than the others. The last step has a batch of 1: no chunks."""
    model, inputs, at_least = MODELS[name]
    policy = picking(at_least=0)
    fitted = assert_same_as_eager(model, inputs, batch=5, other_batch=1, policy=policy, debug=True)
    chunked = [op.target for op in fitted.memfit.step.ops if is_in_chunks(op)]
    assert all("weight_gradient" in target for target in chunked), "a batch of 1 has no chunks but of channels"
    again = memfit.fit(model.train(), policy=picking(at_least=at_least), debug=True)
    again(*inputs(5)).sum().backward()
    assert sum(map(is_in_chunks, again.memfit.step.ops)) >= at_least
    memfit.unfit(model)


@pytest.mark.parametrize("decide", [recompute_all, encode_all])
def test_with_re_runs_and_with_codes(
    decide: Callable[[Step], dict[int, Decision]], picking: Callable[..., str]
) -> None:
    model, inputs, _ = MODELS["plain"]
    fitted = assert_same_as_eager(
        model, inputs, batch=6, other_batch=None, policy=picking(decide, at_least=3), debug=True
    )
    code = fitted.memfit.code
    assert "ops.memfit_ops.convolution_in_chunks.default(" in code
    assert "ops.memfit_ops.convolution_gradient_in_chunks.default(" in code
    if decide is recompute_all:
        assert "(again)" in code and code.count("convolution_in_chunks") > 2, "re-runs are in chunks too"
    else:
        assert "memfit.encode(" in code and "memfit.threshold_backward" in code


def test_other_tangents_find_what_the_forward_half_left(
    picking: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Re-runs of another backward half are in chunks too, where these are priced."""
    model, inputs, _ = MODELS["plain"]
    plain = fitted_module.free_of_charge
    monkeypatch.setattr(fitted_module, "free_of_charge", lambda step, **more: with_ways(step, plain(step, **more)))

    def loss(output: torch.Tensor, model: nn.Module) -> torch.Tensor:
        return output.sum()  # an expanded tangent: not the strides that were captured

    fitted = assert_same_as_eager(
        model, inputs, batch=4, policy=picking(recompute_all), loss=loss, other_batch=None, debug=True
    )
    variants = [v for v in fitted.memfit.newest._variants.values() if v is not None]
    assert variants
    for variant in variants:
        step = variant.compiled.program.step
        assert sum(map(is_in_chunks, step.ops[: step.num_forward])) == 2


def captured(batch: int = 8, proofs: Proofs | None = None) -> Step:
    model = MODELS["plain"][0]
    return rewrite(memfit.capture(model.train(), images(3, 9, 11)(batch)), proofs=proofs or AssumedProofs())


def test_the_program_has_the_calls_and_their_prices() -> None:
    step = captured()
    costs = with_ways(step, free_of_charge(step))
    picked = most_chunks(step, costs)
    kept, chosen = lower(step, {}, costs), lower(step, {}, costs.picking(picked))
    assert chosen.instructions == kept.instructions, "what is where does not change"
    assert {i for i, op in enumerate(chosen.step.ops) if is_in_chunks(op)} == set(picked)
    for plain, other in zip(step.ops, chosen.step.ops, strict=True):
        assert whole_target(other.target) == plain.target and set(plain.reads()) == set(other.reads())
        assert other.made == plain.made
    # By its number in the step, or by itself in the program: the price is the same.
    prices = costs.picking(picked).of(step)
    assert prices == costs.of(chosen.step) == costs.picking(picked).of(chosen.step)
    before, after = simulate(kept, costs), simulate(chosen, costs)
    assert set(picked.values()) == {"chunks:4"}, "tiny as they are, chunks of two samples still have the same kernel"
    assert before.ledger.peak.workspace_bytes == HOLDS and after.ledger.peak.workspace_bytes == HOLDS // 4
    assert after.peak_bytes == before.peak_bytes - HOLDS + HOLDS // 4
    assert after.step_ps > before.step_ps
    proof = check(chosen, workspace_bytes=[p.workspace_bytes for p in prices], peak_bytes=after.peak_bytes)
    assert proof.peak_bytes == after.peak_bytes


def test_picks_follow_their_ops_where_codes_move_them() -> None:
    step = captured()
    costs = with_ways(step, free_of_charge(step))
    # On a device of the catalogue a pick is only a price.
    named = {key: {"fastest": ways[WHOLE], "none": OpCost(77)} for key, ways in costs.algorithms.items()}
    costs = replace(costs, algorithms=named).picking(dict.fromkeys(costs.choices(step), "none"))
    program = lower(step, encode_all(step), costs)
    moved = costs.following(step, program.step)
    assert len(moved.picked) == len(costs.picked) and moved.picked.keys() != costs.picked.keys()
    assert sum(price.time_ps == 77 for price in moved.of(program.step)) == len(costs.picked)
    assert not any(map(is_in_chunks, program.step.ops))
    assert costs.following(step, step).picked == costs.picked


def test_a_plan_with_ways_comes_back_as_it_was(picking: Callable[..., str]) -> None:
    step = captured(proofs=PROOFS)
    planned = plan_step(step, free_of_charge(step), policy=picking(encode_all))
    plan = planned.plan
    assert plan is not None and len(plan.picked) >= 3
    data = json.loads(plan.to_json())
    assert data["step"] == step.digest and set(data["picked"].values()) == {"chunks:4"}
    back = Plan.from_json(plan.to_json(), step, device="none")
    assert back.picked == plan.picked and back.program.step.digest == plan.program.step.digest
    assert back.to_json() == plan.to_json()


@pytest.mark.parametrize(
    ("picked", "says"),
    [
        ({"0": "thrice"}, r"computes op 0 by 'thrice': no such way. Known: whole, fastest, none, and chunks:2"),
        (
            {"0": "chunks:9"},
            r"computes op 0 by 'chunks:9': aten.convolution.default in module '0': at most 8 are possible",
        ),
        ({"0": "chunks:1"}, r"at most 8 are possible"),
        ({"0": "chunks:02"}, r"no such way"),
        ({"1": "chunks:2"}, r"in module '1': only convolutions and their gradients can be computed in chunks"),
        ({"999": "chunks:2"}, r"computes op 999 by 'chunks:2': the step has ops 0 to"),
        ({"a": "chunks:2"}, r"is damaged"),
        (["chunks:2"], r"is damaged"),
    ],
)
def test_a_plan_with_other_ways_is_refused(picked: Any, says: str) -> None:
    step = captured()
    data = json.loads(Plan(step, {}, lower(step, {}, free_of_charge(step)), "keep", "none", None, 0).to_json())
    assert step.ops[1].path == "1"
    with pytest.raises(WrongPlan, match=says):
        Plan.from_dict(data | {"picked": picked}, step, device="none")


class Refused(Proofs):
    """Takes nothing to give the same bits."""

    def __init__(self) -> None:
        super().__init__(None)

    def holds(self, rewrite: str, signature: Any, experiment: Callable[[], bool]) -> bool:
        return False


def test_a_plan_whose_ways_are_not_the_same_here_is_refused() -> None:
    step = captured()
    program = lower(step, {}, free_of_charge(step))
    data = Plan(step, {}, program, "keep", "none", None, 0, {0: "chunks:2"}).to_dict()
    with pytest.raises(WrongPlan, match=r"it does not give the same bits here\. Plan again"):
        Plan.from_dict(data, step, device="none", proofs=Refused())


def test_what_cannot_be_picked_is_refused_by_name() -> None:
    step = captured()
    gradient = next(i for i, op in enumerate(step.ops) if op.target == "aten.convolution_backward.default")
    assert not chunk_counts(step, step.ops[gradient]), "the first is that of weights, of too few channels"
    with pytest.raises(BadOption, match=rf"op {gradient}, aten.convolution_backward.default in module '3', cannot be"):
        encode_step(step, {}, {gradient: "chunks:2"})
    with pytest.raises(BadOption, match=r"'fastest' is picked for op 1000: the step has ops 0 to"):
        encode_step(step, {}, {1000: "fastest"})
    costs = free_of_charge(step)
    with pytest.raises(MemfitError, match=r"do not cover op 0 of the step, memfit_ops\.convolution_in_chunks"):
        simulate(lower(step, {}, costs.picking({0: "chunks:2"})), costs)


def test_names_of_ways() -> None:
    assert [num_chunks_of(way) for way in ("chunks:2", "chunks:16", "chunks:x", "chunks:", "whole", "4")] == [
        *(2, 16),
        *(None, None, None, None),
    ]
    step = captured()
    assert way_of(step.ops[0]) == "whole" and way_of(in_chunks(step.ops[0], 3)) == "chunks:3"
    assert chunk_counts(captured(1), captured(1).ops[0]) == ()
    assert chunk_counts(captured(3), captured(3).ops[0]) == (2, 3)
    assert chunk_counts(captured(64), captured(64).ops[0]) == (2, 4, 8, 16, 32)


def test_what_differs_in_a_single_bit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    step = captured(6)
    op = step.ops[0]
    target = in_chunks(op, 2).target
    kernel, results = resolve(target), []

    def off_by_a_bit(*args: Any) -> torch.Tensor:
        made: torch.Tensor = kernel(*args)
        made.view(torch.int32).view(-1)[-1] ^= 1
        results.append(made)
        return made

    with monkeypatch.context() as patch:
        patch.setattr(chunks, "resolve", lambda name: off_by_a_bit if name == target else resolve(name))
        assert proven_counts(step, op, (2, 3), Proofs(None)) == () and len(results) == 2
    assert proven_counts(step, op, (2, 3), Proofs(None)) == (2, 3)


def test_the_input_of_a_gradient_may_be_a_ghost() -> None:
    step = captured(6, PROOFS)
    op = next(op for op in step.ops if any(isinstance(arg, Ghost) for arg in op.args) and chunk_counts(step, op))
    assert proven_counts(step, op, (2, 3), Proofs(None)) == (2, 3)


class Wide(nn.Module):
    """One convolution whose workspace is worth chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).sum()


@pytest.mark.slow
def test_measured_ways_hold_less_and_are_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stopwatch, "codec_bytes_per_s", lambda self, name: (1e9, 1e9))  # not what this is about
    monkeypatch.setattr(profile, "_links", lambda cache: ({}, ()))
    step = rewrite(memfit.capture(Wide(), (torch.empty(4, 8, 96, 96),)))
    cache = PriceCache(tmp_path / "costs.json")
    costs = measure(step, ways=True, cache=cache)
    if any("workspaces are taken to be 0" in note for note in costs.notes):
        pytest.skip(str(costs.notes))
    assert not measure(step, cache=PriceCache(tmp_path / "costs.json")).algorithms, "only for those who ask"
    choices = costs.choices(step)
    assert choices, "convolutions of this size hold megabytes"
    for index, ways in choices.items():
        names = list(ways)
        assert names[0] == WHOLE and len(names) > 1 and ways[WHOLE] == costs.of(step)[index]
        for less, more in zip(names[1:], names, strict=False):
            assert ways[less].workspace_bytes < ways[more].workspace_bytes
            assert ways[less].time_ps >= ways[more].time_ps
        assert all(costs.picking({index: way}).of(step)[index] == ways[way] for way in ways)
    # Known to the disk: no time is needed, and nothing is run again.
    again = measure(step, cap_s=0.0, ways=True, cache=PriceCache(tmp_path / "costs.json"))
    assert again.algorithms == costs.algorithms
    # Unknown and no time: no ways, and a note.
    other = rewrite(memfit.capture(Wide(), (torch.empty(4, 8, 104, 96),)))
    measure(other, cache=cache)
    late = measure(other, cap_s=0.0, ways=True, cache=cache)
    assert not late.algorithms
    assert any("kinds of convolutions were not tried in chunks: no time" in note for note in late.notes)
    # What a run corrected counts.
    index, ways = next(iter(choices.items()))
    name = list(ways)[-1]
    count = num_chunks_of(name)
    assert count is not None
    cache.correct(signature(step, in_chunks(step.ops[index], count)), ways[WHOLE].workspace_bytes)
    corrected = measure(step, ways=True, cache=cache)
    assert name not in corrected.choices(step).get(index, {}), "it holds as much as the whole"
