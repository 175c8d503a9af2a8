"""Training through codes: gradients bit for bit eager's for the lossless ones, close for the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from equivalence import Apply, assert_same_as_eager
from torch import nn

import memfit
from memfit.capture.needs import Need
from memfit.capture.rewrites import rewrite
from memfit.capture.rewrites.proof import AssumedProofs
from memfit.capture.step import Step
from memfit.codecs import dense
from memfit.codecs.codec import Reading
from memfit.codecs.registry import LOSSLESS_NAMES, LOSSY_NAMES, codec
from memfit.cost.costs import Costs, free_of_charge
from memfit.errors import BadOption
from memfit.plan.decisions import Decision, Encode, EncodeThenOffload, from_text, to_text
from memfit.plan.encode import encode_step, why_not_encode
from memfit.plan.plan import Plan
from memfit.plan.planner import plan_step
from memfit.plan.policies.policy import Policy
from memfit.plan.policies.registry import POLICIES
from memfit.plan.rerun import Reruns
from memfit.run.aliases import alias
from memfit.tiers.disk import DiskSettings, DiskTier
from memfit.tiers.null import NullTier
from memfit.tiers.registry import TIERS


@pytest.fixture
def encoding() -> Iterator[Callable[..., str]]:
    """A policy that encodes all it can by the first of these codecs that takes it; counts what it encodes."""
    made: list[str] = []

    def policy(*codecs: str, tier: str = "") -> str:
        def decide(step: Step, costs: Costs, budget_bytes: int | None) -> dict[int, Decision]:
            found: dict[int, Decision] = {}
            for storage in Reruns(step).owned:
                name = next((name for name in codecs if not why_not_encode(step, storage, name)), None)
                if name is not None:
                    found[storage] = EncodeThenOffload(name, tier) if tier else Encode(name)
            assert found, "nothing to encode: the test tests nothing"
            return found

        name = f"encoding-{len(made)}"
        made.append(name)
        POLICIES[name] = Policy(name, "for tests", decide, is_lossy=any(codec(c).is_lossy for c in codecs))
        return name

    dense.forget_fallbacks()
    TIERS["away"] = NullTier()
    yield policy
    del TIERS["away"]
    for name in made:
        del POLICIES[name]
    dense.forget_fallbacks()


def net(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 6, 3), *layers, nn.Conv2d(6, 4, 2), nn.AdaptiveAvgPool2d(2), nn.Flatten())


LAYERS = {
    "relu": (nn.ReLU(),),
    "relu6": (nn.ReLU6(),),
    "hardtanh": (nn.Hardtanh(-1.0, 1.0),),
    "leaky": (nn.LeakyReLU(0.25),),
    "pool": (nn.ReLU(), nn.MaxPool2d(2)),
    "pool that overlaps": (nn.ReLU(), nn.MaxPool2d(3, 2, padding=1, ceil_mode=True)),
    "pool that is dilated": (nn.MaxPool2d(2, 1, dilation=2), nn.ReLU()),
    "adaptive pool": (nn.ReLU(), nn.AdaptiveMaxPool2d((5, 4))),
    "dropout": (nn.ReLU(), nn.Dropout(0.5)),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_lossless_codes_train_like_eager(
    encoding: Callable[..., str], layers: tuple[nn.Module, ...], channels_last: bool
) -> None:
    policy = encoding("mask", "window", "sparse:0.9", "narrow-int")
    model = net(*layers)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)

    def inputs(n: int) -> tuple[torch.Tensor]:
        x = torch.randn(n, 2, 13, 11)
        return (x.to(memory_format=torch.channels_last) if channels_last else x,)

    assert_same_as_eager(model, inputs, policy=policy, without=["pool-swap"])


@pytest.mark.parametrize("name", ["sparse", "csr", "sparse:0.3"])
def test_dense_maps_in_sparse_codes_train_like_eager(encoding: Callable[..., str], name: str) -> None:
    """Conv outputs have no zeros: every one of them falls back."""
    model = net(nn.BatchNorm2d(6), nn.ReLU())
    assert_same_as_eager(model, lambda n: (torch.randn(n, 2, 9, 9),), policy=encoding(name))
    assert dense.fallbacks()[name.partition(":")[0]].num_tensors > 0


def test_dense_copies_travel_whole(encoding: Callable[..., str]) -> None:
    """A tier gives back a view of the planned size on a storage that is larger."""
    policy = encoding("sparse:0.3", tier="away")
    assert_same_as_eager(net(nn.Tanh()), lambda n: (torch.randn(n, 2, 9, 9),), policy=policy)
    assert dense.fallbacks()["sparse"].num_tensors > 0


@pytest.mark.parametrize("is_dense", [False, True])
@pytest.mark.parametrize("place", ["null", "disk"])
def test_codes_come_back_from_tiers_as_what_they_were(tmp_path: Path, place: str, is_dense: bool) -> None:
    """The code, and the dense copy in its place: both are told apart by the storage that comes back."""
    chosen, tensor = codec("sparse:0.5"), torch.rand(5003) + 1
    if not is_dense:
        tensor[::2] = tensor[1::4] = 0
    settings = chosen.settings([Reading(Need.VALUE)])
    planned_bytes = chosen.packed_bytes(tensor.numel(), 4, settings)
    code = chosen.encode(tensor, settings)
    assert (code.numel() > planned_bytes) is is_dense
    tier = NullTier() if place == "null" else DiskTier(DiskSettings(directory=str(tmp_path)))
    tier.reserve(tensor.nbytes)
    parcel = tier.send(code, "a code")
    parcel.sent()
    parcel.fetch()
    back = alias(parcel.fetched(), torch.uint8, (planned_bytes,), (1,), 0)
    assert torch.equal(chosen.decode(back, torch.empty_like(tensor), settings), tensor)
    dense.forget_fallbacks()


@pytest.mark.parametrize("decision", [Encode("sparse:0.5"), EncodeThenOffload("int4:77", "disk")])
def test_options_are_in_the_text_of_a_decision(decision: Decision) -> None:
    assert from_text(to_text(decision)) == decision


def test_indices_made_in_forward_are_narrowed(encoding: Callable[..., str]) -> None:
    model = Apply(lambda m, x: F.embedding(x.argmax(1), m.w) * x.topk(2, 1).values.sum(), w=(7, 3))
    policy = encoding("narrow-int:1")
    assert_same_as_eager(model, lambda n: (torch.randn(n, 7),), policy=policy)
    assert not dense.fallbacks()


def captured() -> Step:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(4, 4, 2), nn.ReLU6())
    return rewrite(memfit.capture(model, (torch.randn(2, 2, 17, 17),)), without=frozenset({"pool-swap", "reinplace"}))


def sizes_by_codec(step: Step) -> dict[str, set[tuple[str, float]]]:
    """For each codec what it takes, by the op that makes it, and the bits per element there."""
    found: dict[str, set[tuple[str, float]]] = {}
    for name in (*LOSSLESS_NAMES, *LOSSY_NAMES):
        for storage in Reruns(step).owned:
            if why_not_encode(step, storage, name):
                continue
            encoded = encode_step(step, {storage: Encode(name)})
            known = step.storage[storage]
            bits = 8 * encoded.step.storage_bytes[encoded.code_of[storage]] / step.values[known.values[0]].num_elements
            maker = step.ops[known.maker or 0].target.split(".")[1]
            found.setdefault(name, set()).add((maker, round(bits, 1)))
    return found


def test_each_codec_takes_what_it_is_made_for() -> None:
    found = sizes_by_codec(captured())
    assert found["window"] == {("max_pool2d_with_indices", 4.0)}
    assert ("max_pool2d_with_indices", 8.0) in found["narrow-int"], "an input of 225 elements has indices of a byte"
    assert ("relu", 1.0) in found["mask"]
    assert all(("relu", bits) in found[name] for name, bits in (("fp16", 16.0), ("fp10", 10.7), ("fp8", 8.1)))


@pytest.mark.parametrize("name", LOSSY_NAMES)
def test_lossy_gradients_are_near_eagers(encoding: Callable[..., str], name: str) -> None:
    torch.manual_seed(4)
    model = net(nn.ReLU(), nn.MaxPool2d(2))
    x = torch.randn(4, 2, 13, 11)
    model(x).square().sum().backward()
    exact = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    memfit.fit(model, policy=encoding(name), allow_lossy=True)
    loss = model(x).square().sum()
    loss.backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    off = float((found - exact).norm() / exact.norm())
    assert 0 < off < {"fp16": 1e-3, "bf16": 1e-2, "int4": 0.2}.get(name, 0.05)


def test_lossy_codecs_are_refused_of_a_policy_that_does_not_say_so() -> None:
    step = rewrite(memfit.capture(net(nn.ReLU()), (torch.randn(2, 2, 9, 9),)), proofs=AssumedProofs())
    storage = next(s for s in Reruns(step).owned if not why_not_encode(step, s, "fp8"))
    decisions = {storage: Encode("fp8")}
    with pytest.raises(BadOption, match=r"policy 'keep' encodes storage \d+ .* as 'fp8', which is lossy"):
        plan_step(step, free_of_charge(step), decisions=decisions)
    kept = plan_step(step, free_of_charge(step)).plan
    assert kept is not None
    data = kept.to_dict() | {"decisions": {str(storage): "encode:fp8"}}
    with pytest.raises(BadOption, match="the plan encodes storage"):
        Plan.from_dict(data, step, device=kept.device)


def test_a_lossy_plan_comes_back_to_those_who_allow_it() -> None:
    step = rewrite(memfit.capture(net(nn.ReLU()), (torch.randn(2, 2, 9, 9),)), proofs=AssumedProofs())
    storage = next(s for s in Reruns(step).owned if not why_not_encode(step, s, "fp8"))
    plan = plan_step(
        step, free_of_charge(step), policy="gist-lossy:fp8", decisions={storage: Encode("fp8")}, allow_lossy=True
    ).plan
    assert plan is not None
    back = Plan.from_json(plan.to_json(), step, device=plan.device, allow_lossy=True)
    assert back.decisions == plan.decisions and back.program.instructions == plan.program.instructions
    with pytest.raises(BadOption, match="the plan encodes storage"):
        Plan.from_json(plan.to_json(), step, device=plan.device)
