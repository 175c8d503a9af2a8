"""Encode decisions: which storages they fit, where the two ops go, and that the bits come back."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from equivalence import Apply, assert_same_as_eager
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memfit
from memfit.capture.needs import Gate, Need
from memfit.capture.rewrites import rewrite
from memfit.capture.step import Step, Value
from memfit.codecs.codec import Reading
from memfit.codecs.mask import Mask
from memfit.cost.costs import CodecRate, Costs, free_of_charge
from memfit.errors import BadOption
from memfit.plan.check import check
from memfit.plan.decisions import Encode, EncodeThenOffload
from memfit.plan.encode import encode_step, why_not_encode
from memfit.plan.ledger import Ledger
from memfit.plan.lower import lower, lower_keep
from memfit.plan.policies.policy import Policy
from memfit.plan.policies.registry import POLICIES
from memfit.plan.rerun import Reruns
from memfit.plan.simulate import simulate

RELU = Gate(((-math.inf, 0.0, 0.0),), 1.0)
ODD = [math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-45, -1e-45, 3.0, -3.0]


def value_like(tensor: torch.Tensor) -> Value:
    return Value(0, "v", 0, tuple(tensor.shape), tuple(tensor.stride()), 0, tensor.dtype, "cpu")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    numbers=st.lists(st.sampled_from(ODD), min_size=0, max_size=70),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
def test_relus_gate_survives_whatever_the_numbers(numbers: list[float], dtype: torch.dtype) -> None:
    tensor, codec = torch.tensor(numbers, dtype=dtype), Mask()
    settings_ = codec.settings([Reading(Need.SIGN, RELU)])
    code = codec.encode(tensor, settings_)
    assert code.dtype is torch.uint8 and code.numel() == codec.code_bytes(value_like(tensor)) == -(-len(numbers) // 8)
    back = codec.decode(code, torch.empty_like(tensor), settings_)
    gradient = torch.arange(1, len(numbers) + 1, dtype=dtype)
    expected = torch.ops.aten.threshold_backward(gradient, tensor, 0)
    assert torch.equal(torch.ops.aten.threshold_backward(gradient, back, 0), expected)


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (8,), (9,), (3, 5, 7), (2, 3, 5, 5), (1 << 20 | 13,)])
def test_bools_come_back_in_any_size(shape: tuple[int, ...]) -> None:
    tensor = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5
    codec = Mask()
    assert codec.why_not(value_like(tensor), [Reading(Need.VALUE)]) == ""
    code = codec.encode(tensor, ())
    assert torch.equal(codec.decode(code, torch.empty_like(tensor), ()), tensor)


def test_the_order_is_that_of_memory_so_layouts_come_back() -> None:
    tensor = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    codec, gate = Mask(), Mask().settings([Reading(Need.SIGN, RELU)])
    back = codec.decode(codec.encode(tensor, gate), torch.empty_like(tensor), gate)
    assert back.stride() == tensor.stride() and torch.equal(back > 0, tensor > 0)


def a_step() -> Step:
    """conv, relu, average pool: backward reads of the relu's result only on which side of zero it is."""
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 3))
    return rewrite(memfit.capture(model, (torch.randn(2, 2, 8, 8),)), without=frozenset({"reinplace"}))


def relu_storage(step: Step) -> int:
    return next(step.values[op.made[0]].storage for op in step.ops if op.target.startswith("aten.relu"))


def test_the_code_replaces_the_storage_between_the_halves() -> None:
    step = a_step()
    storage = relu_storage(step)
    assert why_not_encode(step, storage, "mask") == ""
    encoded = encode_step(step, {storage: Encode("mask")})
    code = encoded.code_of[storage]
    targets = [op.target for op in encoded.step.ops]
    assert targets.count("memfit.encode") == targets.count("memfit.threshold_backward") == 1
    assert "memfit.decode" not in targets and "aten.threshold_backward.default" not in targets
    assert targets.index("memfit.encode") < encoded.step.num_forward <= targets.index("memfit.threshold_backward")
    assert encoded.step.storage[storage].first_backward is None
    assert encoded.step.storage_bytes[code] == -(-step.storage_bytes[storage] // 32)
    program = lower(step, {storage: Encode("mask")}, free_of_charge(step))
    check(program)
    at_boundary = [Ledger.of(p).entries[p.boundary].total_bytes for p in (lower_keep(step), program)]
    assert at_boundary[0] - at_boundary[1] == step.storage_bytes[storage] - encoded.step.storage_bytes[code]


def test_the_code_can_be_sent_away_in_its_turn() -> None:
    step = a_step()
    storage = relu_storage(step)
    costs = free_of_charge(step, tiers=("host",))
    program = lower(step, {storage: EncodeThenOffload("mask", "host")}, costs)
    check(program)
    code = encode_step(step, {storage: Encode("mask")}).code_of[storage]
    assert any(getattr(i, "storage", None) == code and type(i).__name__ == "SendStart" for i in program.instructions)


def test_codecs_cost_their_throughput() -> None:
    step = a_step()
    storage = relu_storage(step)
    prices = free_of_charge(step).by_signature
    size = step.storage_bytes[storage]
    costs = Costs("test", prices, codecs={"mask": CodecRate(size / 2, size / 3)})
    keep = simulate(lower(step, {}, costs), costs)
    encoded = simulate(lower(step, {storage: Encode("mask")}, costs), costs)
    gate_ps = 1_000_000  # of the op that reads the tensor itself; the one that reads the code takes its place
    assert encoded.step_ps - keep.step_ps == 5 * 10**12 - gate_ps  # two seconds in, three out


def test_what_cannot_be_encoded_says_why() -> None:
    step = a_step()
    reruns = Reruns(step)
    reasons = {why_not_encode(step, s, "mask") for s in reruns.owned}
    assert "backward needs more of it than on which side of a gate each element lies" in reasons
    parameter = step.values[step.sources[0].value].storage
    with pytest.raises(BadOption, match=r"cannot be encoded as 'mask': it is not made by the forward half"):
        encode_step(step, {parameter: Encode("mask")})


# --- trained through codes --------------------------------------------------------------------------------------------


@pytest.fixture
def encode_all() -> str:
    def decide(step: Step, costs: Costs, budget_bytes: int | None) -> dict[int, Encode]:
        found = {s: Encode("mask") for s in Reruns(step).owned if not why_not_encode(step, s, "mask")}
        assert found, "nothing to encode: the test tests nothing"
        return found

    POLICIES["encode-all"] = Policy("encode-all", "for tests", decide)
    yield "encode-all"
    del POLICIES["encode-all"]


def conv(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), *layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))


@pytest.mark.parametrize(
    "layers",
    {
        "relu": (nn.ReLU(),),
        "relu in place": (nn.ReLU(inplace=True),),
        "leaky": (nn.LeakyReLU(0.25),),
        "max pool of relu": (nn.ReLU(), nn.MaxPool2d(3, 2, padding=1, ceil_mode=True)),
    }.values(),
)
def test_training_through_masks_matches_eager(encode_all: str, layers: tuple[nn.Module, ...]) -> None:
    assert_same_as_eager(conv(*layers), lambda n: (torch.randn(n, 2, 9, 11),), policy=encode_all, without=["pool-swap"])


def test_training_through_masks_with_nan_and_infinity_matches_eager(encode_all: str) -> None:
    def inputs(n: int) -> tuple[torch.Tensor]:
        x = torch.randn(n, 8)
        x.view(-1)[: len(ODD)] = torch.tensor(ODD)
        return (x,)

    model = Apply(lambda m, x: F.relu(x * m.w).sum(0) * m.w, w=(8,))
    assert_same_as_eager(model, inputs, policy=encode_all)


def test_bool_masks_of_where_are_packed(encode_all: str) -> None:
    model = Apply(lambda m, x: torch.where(x > 0, x @ m.w, x * 2), w=(5, 5))
    assert_same_as_eager(model, lambda n: (torch.randn(n, 5),), policy=encode_all)
