"""gist-lossless and gist-lossy: exact where they promise it, what they choose, and what they refuse."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence import Apply, assert_same_as_eager, seeded
from test_exact_zoo import ALL, DEEPER, SMALL, small
from torch import nn

import memfit
from memfit.capture.rewrites import rewrite
from memfit.capture.step import Step
from memfit.codecs import dense
from memfit.cost.costs import Costs, free_of_charge
from memfit.cost.densities import assumed_densities
from memfit.cost.devices import device
from memfit.cost.roofline import roofline
from memfit.errors import BadOption
from memfit.plan.decisions import Encode
from memfit.plan.planner import plan_step
from memfit.plan.policies import gist
from memfit.plan.policies.registry import POLICIES, with_format
from memfit.plan.program import Free, Run


@pytest.fixture
def encode_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small networks have small tensors, which the policies leave alone otherwise."""
    monkeypatch.setattr(gist, "_LEAST_BYTES", 0)


def codecs_of(model: nn.Module) -> Counter[str]:
    """How many tensors the fitted model's newest plan stores by each codec."""
    decisions = model.memfit.planned.plan.decisions
    return Counter(d.codec.partition(":")[0] for d in decisions.values() if isinstance(d, Encode))


# --- exact ------------------------------------------------------------------------------------------------------------


SLOW = ("googlenet", "inception_v3")
QUICK = [name for name in SMALL if name not in SLOW]


@pytest.mark.usefixtures("encode_all_sizes")
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in (*SLOW, *DEEPER))])
def test_networks_of_the_zoo_match_with_every_map_encoded(name: str) -> None:
    model, inputs, loss = small(name)
    steps = 1 if name in ("inception_v3", "overfeat", "vgg316", "vgg416") else 3
    batch = ALL[name][1]
    assert_same_as_eager(
        model, inputs, batch=batch, other_batch=None, loss=loss, steps=steps, policy="gist-lossless", debug=steps == 1
    )


@pytest.mark.usefixtures("encode_all_sizes")
@pytest.mark.parametrize("name", ["alexnet", "vgg16_bn", "unet"])
def test_networks_of_the_zoo_match_encoded_in_channels_last(name: str) -> None:
    model, inputs, loss = small(name)

    def last(n: int) -> tuple[torch.Tensor, ...]:
        return tuple(t.to(memory_format=torch.channels_last) for t in inputs(n))

    model = model.to(memory_format=torch.channels_last)
    assert_same_as_eager(model, last, batch=2, other_batch=None, steps=2, loss=loss, policy="gist-lossless")


@pytest.mark.usefixtures("encode_all_sizes")
@pytest.mark.parametrize("name", ["alexnet", "resnet18", "gpt2"])
def test_networks_of_the_zoo_match_encoded_without_our_rewrites(name: str) -> None:
    model, inputs, loss = small(name)
    assert_same_as_eager(
        model, inputs, batch=2, other_batch=None, steps=2, loss=loss, policy="gist-lossless", without=memfit.REWRITES
    )


POOLS: dict[str, nn.Module] = {
    "overlapping": nn.MaxPool2d(3, 2),
    "padded": nn.MaxPool2d(3, 2, padding=1),
    "dilated": nn.MaxPool2d(3, 1, dilation=2),
    "ceil mode": nn.MaxPool2d(3, 2, ceil_mode=True),
    "odd windows": nn.MaxPool2d((2, 5), (1, 3), padding=(1, 2)),
    "large windows": nn.MaxPool2d(7, 3),
    "adaptive": nn.AdaptiveMaxPool2d((3, 2)),
}


def pooled(pool: nn.Module, *, channels_last: bool) -> nn.Module:
    body = nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.ReLU(), pool, nn.Conv2d(5, 3, 1), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)
    )
    body(torch.zeros(1, 2, 15, 17))
    return body.to(memory_format=torch.channels_last) if channels_last else body


@pytest.mark.usefixtures("encode_all_sizes")
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("pool", POOLS)
def test_pools_match_with_ties_and_without_a_number(pool: str, channels_last: bool) -> None:
    def inputs(n: int) -> tuple[torch.Tensor]:
        x = torch.randint(-2, 3, (n, 2, 15, 17)).float()  # few numbers: windows full of ties
        x[0, 0, 0, :4] = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
        return (x.to(memory_format=torch.channels_last) if channels_last else x,)

    model = seeded(lambda: pooled(POOLS[pool], channels_last=channels_last))
    assert_same_as_eager(model, inputs, policy="gist-lossless", batch=3, other_batch=1)


@pytest.mark.usefixtures("encode_all_sizes")
def test_an_empty_batch_matches() -> None:
    model = seeded(lambda: pooled(nn.MaxPool2d(2), channels_last=False))
    assert_same_as_eager(model, lambda n: (torch.randn(n, 2, 15, 17),), policy="gist-lossless", batch=0, other_batch=2)


BODIES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "relu6": (lambda m, x: F.relu6(x @ m.w) @ m.v, {"w": (6, 8), "v": (8, 3)}),
    "leaky": (lambda m, x: F.leaky_relu(x @ m.w, 0.25).sum(1), {"w": (6, 8)}),
    "dropout": (lambda m, x: F.dropout(x @ m.w, 0.3) @ m.v, {"w": (6, 8), "v": (8, 3)}),
    "dropout of relu": (
        lambda m, x: F.dropout(F.relu(x @ m.w), 0.5) @ m.v,
        {"w": (6, 8), "v": (8, 3)},
    ),
    "read through a transposed view": (lambda m, x: F.relu(x @ m.w).t() @ (x @ m.v), {"w": (6, 8), "v": (6, 3)}),
    "read through parts": (
        lambda m, x: (F.relu(x @ m.w)[:, :4] @ m.v) * F.relu(x @ m.w)[:, 4:],
        {"w": (6, 8), "v": (4, 4)},
    ),
    "labels": (lambda m, x: F.cross_entropy(x @ m.w, torch.arange(x.shape[0]) % 8), {"w": (6, 8)}),
    "used twice, far apart": (
        lambda m, x: torch.tanh(torch.tanh(torch.tanh(F.relu(x @ m.w) @ m.v) @ m.v) @ m.v) @ m.v * F.relu(x @ m.w),
        {"w": (6, 8), "v": (8, 8)},
    ),
}


@pytest.mark.usefixtures("encode_all_sizes")
@pytest.mark.parametrize("body", BODIES)
def test_other_readers_match(body: str) -> None:
    function, held = BODIES[body]
    model = seeded(lambda: Apply(function, **held))
    assert_same_as_eager(model, lambda n: (torch.randn(n, 6),), policy="gist-lossless", batch=8, other_batch=3)


def test_looking_at_the_data_leaves_no_trace() -> None:
    """The forward half is run once more to count zeros: statistics, random state and written inputs are put back."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.line = nn.BatchNorm1d(8), nn.Linear(8, 8)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            x.mul_(0.5)
            return F.dropout(F.relu(self.norm(self.line(x))), 0.5)

    assert_same_as_eager(seeded(Writes), lambda n: (torch.randn(n, 8),), policy="gist-lossless", batch=512)


# --- what is chosen ---------------------------------------------------------------------------------------------------


def planned_codecs(
    model: nn.Module, x: torch.Tensor, policy: str = "gist-lossless", **densities: float
) -> Counter[str]:
    step = rewrite(memfit.capture(model, (x,)))
    costs = free_of_charge(step)
    costs = Costs(costs.device, costs.by_signature, densities=assumed_densities(step, **densities))
    planned = plan_step(step, costs, policy=policy, allow_lossy=policy != "gist-lossless")
    assert planned.plan is not None
    return Counter(d.codec.partition(":")[0] for d in planned.plan.decisions.values() if isinstance(d, Encode))


@pytest.mark.usefixtures("encode_all_sizes")
@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        # The gate of ReLU is all that is asked: average pooling needs nothing of its input, nor does a sum.
        ([nn.ReLU(), nn.AvgPool2d(2)], {"mask": 1}),
        # Max pooling in front of a convolution: slots for it, and the pooled map serves the gate and the convolution.
        ([nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3)], {"window": 1, "sparse": 1}),
        # A convolution reads the values; zeros and the gate come with them.
        ([nn.ReLU(), nn.Conv2d(4, 4, 3)], {"sparse": 1}),
        # Batch norm reads its input, which has no zeros: nothing to gain but at the ReLU behind it.
        ([nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)], {"sparse": 1}),
    ],
)
def test_the_smallest_code_that_serves_all_uses_is_chosen(layers: list[nn.Module], expected: dict[str, int]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), *layers, nn.AdaptiveAvgPool2d(1))
    assert planned_codecs(model, torch.randn(2, 3, 12, 12)) == expected


def test_dense_maps_are_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1))
    x = torch.randn(2, 3, 40, 40)
    assert planned_codecs(model, x, relu=0.5) == {"sparse": 1}
    assert planned_codecs(model, x, relu=0.9) == {}
    assert planned_codecs(model, x, "gist-lossy:fp8", relu=0.99) == {"fp8": 1}
    assert planned_codecs(model, x, "gist-lossy:fp8", relu=0.5) == {"sparse-fp8": 1}


def test_no_lossy_code_for_statistics_and_logarithms() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 1024, 1), nn.BatchNorm2d(1024), nn.Flatten(), nn.Linear(1024 * 4, 1024), nn.LogSoftmax(1)
    )
    step = rewrite(memfit.capture(model, (torch.randn(4, 3, 2, 2),)))
    planned = plan_step(step, free_of_charge(step), policy="gist-lossy:fp8", allow_lossy=True)
    assert planned.plan is not None and planned.plan.decisions
    for storage in planned.plan.decisions:
        value = step.values[step.storage[storage].values[0]]
        maker = step.ops[step.storage[storage].maker or 0].target
        assert len(value.shape) > 1 and "log_softmax" not in maker


def skipped(far: bool) -> nn.Module:
    """A ReLU whose result is read by a product right behind it, or behind a dozen ops, and by its own backward."""

    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        r = F.relu(x @ m.w)
        h = r
        for _ in range(4 if far else 0):
            h = torch.tanh(h @ m.v)
        return (h @ m.v) * (r @ m.v)

    return Apply(body, w=(6, 32), v=(32, 32))


@pytest.mark.usefixtures("encode_all_sizes")
@pytest.mark.parametrize(("far", "least"), [(False, 1), (True, 2)])
def test_what_is_used_far_apart_is_decoded_for_each_use(far: bool, least: int) -> None:
    model = seeded(lambda: skipped(far))
    memfit.fit(model, policy="gist-lossless")
    x = torch.randn(64, 6)
    model(x).sum().backward()
    step = model.memfit.step
    decodes = [op for op in step.ops if op.target == "memfit.decode" and "relu" in step.values[op.made[0]].name]
    assert (len(decodes) >= 2) == (least == 2) and decodes
    assert_same_as_eager(
        lambda: seeded(lambda: skipped(far)), lambda n: (torch.randn(n, 6),), policy="gist-lossless", batch=64
    )


def test_a_gate_beside_values_is_a_code_of_its_own() -> None:
    """Neither the copy for the weights' gradient nor its code is held while the input's gradient is made."""
    model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1)))
    memfit.fit(model, policy="gist-lossless", debug=True)
    model(torch.randn(2, 3, 40, 40)).sum().backward()
    planned = model.memfit.planned
    step, program = planned.program.step, planned.program
    codes = {step.values[op.made[0]].name: op.made[0] for op in step.ops if op.target == "memfit.encode"}
    assert set(codes) == {"relu_code", "relu_gate"}
    sizes = {name: step.values[value].bytes for name, value in codes.items()}
    assert sizes["relu_gate"] == 2 * 8 * 38 * 38 // 8 < sizes["relu_code"]

    def is_alive(value: int, number: int) -> bool:
        storage = step.values[value].storage
        return Free(storage) not in program.instructions[:number]

    targets = [(n, step.ops[i.op]) for n, i in enumerate(program.instructions) if isinstance(i, Run)]
    of_inputs = next(n for n, op in targets if op.target.startswith("aten.convolution_backward") and op.args[-1][0])
    (decoded,) = [op.made[0] for _, op in targets if op.target == "memfit.decode"]
    assert is_alive(codes["relu_gate"], of_inputs)
    assert not is_alive(codes["relu_code"], of_inputs) and not is_alive(decoded, of_inputs)


def test_gates_and_pools_work_on_the_code_itself() -> None:
    model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(3, 2), nn.AvgPool2d(2)))
    memfit.fit(model, policy="gist-lossless", debug=True)
    model(torch.randn(4, 3, 40, 40)).sum().backward()
    targets = Counter(op.target for op in model.memfit.step.ops if op.target.startswith("memfit."))
    assert targets == {"memfit.encode": 2, "memfit.threshold_backward_": 1, "memfit.max_pool_backward": 1}


def test_room_is_reserved_by_what_the_data_show() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    with torch.no_grad():
        model[0].bias.fill_(-1e3)
        model[0].bias[:64].fill_(1e3)  # a quarter of the elements are not zero, whatever the inputs
    memfit.fit(model, policy="gist-lossless")
    model(torch.randn(128, 64)).sum().backward()
    (decision,) = [d for d in model.memfit.planned.plan.decisions.values() if d.codec.startswith("sparse")]
    assert 0.25 < float(decision.codec.partition(":")[2]) < 0.33


def test_more_non_zeros_than_planned_are_kept_dense_and_counted() -> None:
    def close(m: nn.Module, step: int) -> None:
        with torch.no_grad():
            m[0].bias.fill_(1e3 if step else -1e3)  # all zeros when it is planned, none from then on

    dense.forget_fallbacks()
    assert_same_as_eager(
        nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)),
        lambda n: (torch.randn(n, 64),),
        policy="gist-lossless",
        batch=128,
        other_batch=None,
        between=close,
        debug=True,
    )
    assert dense.fallbacks()["sparse"].num_tensors == 2


# --- sparsity that nobody has looked at -------------------------------------------------------------------------------


def densities_by_name(step: Step) -> dict[str, float]:
    found = assumed_densities(step, relu=0.4, pooled=0.6)
    return {step.values[step.storage[s].values[0]].name: density for s, density in found.items()}


def test_zeros_are_assumed_behind_relu_pooling_dropout_and_concatenation() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        r = F.relu(m.conv(x))
        p = F.max_pool2d(r, 2)
        both = torch.cat([p, m.conv2(p)], 1)
        return F.dropout(both, 0.25).sum() + torch.sigmoid(r).sum()

    step = memfit.capture(Apply(body, conv=nn.Conv2d(2, 4, 3), conv2=nn.Conv2d(4, 4, 1)), (torch.randn(1, 2, 10, 10),))
    found = densities_by_name(step)
    assert found["relu"] == 0.4 and found["max_pool2d_with_indices"] == 0.6
    assert found["cat"] == pytest.approx(0.8) and found["mul"] == pytest.approx(0.8 * 0.75)
    assert "sigmoid" not in found and "convolution" not in found


def test_devices_of_the_catalogue_assume_them() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1))
    step = rewrite(memfit.capture(model, (torch.randn(2, 3, 40, 40),)))
    costs = roofline(step, device("titan-x"))
    assert sorted(costs.densities.values()) == [0.4]


# --- loss -------------------------------------------------------------------------------------------------------------


def convnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Dropout(0.2), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)),
    )


def ready() -> nn.Module:
    model = convnet()
    model(torch.zeros(2, 3, 20, 20))
    return model


@pytest.mark.parametrize(
    ("format_", "cosine"),
    [("fp16", 1 - 1e-6), ("bf16", 1 - 1e-4), ("fp10", 0.999), ("fp8", 0.999), ("int8", 0.999), ("int4", 0.9)],
)
def test_a_lossy_plan_changes_gradients_only_and_a_little(format_: str, cosine: float) -> None:
    model = seeded(ready)
    x = torch.randn(8, 3, 20, 20, generator=torch.Generator().manual_seed(3))
    verdict = memfit.verify(model, (x,), policy="gist-lossy", format=format_, allow_lossy=True)
    assert not verdict.exact and verdict.holds, str(verdict)
    error = verdict.gradient_error
    assert error is not None and cosine <= error.cosine < 1 and 0 < error.relative_norm < 0.5
    assert error.worst_relative_norm >= error.relative_norm
    assert "all but gradients" in str(verdict) and error.worst in str(verdict)
    assert verdict.to_dict()["gradient_error"]["cosine"] == error.cosine


def test_more_bits_lose_less() -> None:
    model = seeded(ready)
    x = torch.randn(8, 3, 20, 20, generator=torch.Generator().manual_seed(3))

    def loss(format_: str) -> float:
        found = memfit.verify(model, (x,), policy="gist-lossy", format=format_, allow_lossy=True, steps=1)
        assert found.gradient_error is not None
        return found.gradient_error.relative_norm

    assert loss("fp16") < loss("bf16") < loss("fp8") < loss("int4")


def test_lossy_policies_want_to_be_allowed() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(BadOption, match=r"policy 'gist-lossy' stores .* gradients will differ .* allow_lossy=True"):
        memfit.fit(model, policy="gist-lossy")
    with pytest.raises(BadOption, match=r"policy 'gist-lossy:fp8' stores"):
        memfit.fit(model, policy="gist-lossy", format="fp8")
    step = memfit.capture(model, (torch.randn(3, 2),))
    with pytest.raises(BadOption, match="allow_lossy=True"):
        plan_step(step, free_of_charge(step), policy="gist-lossy:int4")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "keep", "format": "fp8"}, r"format='fp8': policy 'keep' stores nothing in a format.*gist-lossy"),
        (
            {"policy": "gist-lossless", "format": "fp8"},
            r"format='fp8': unknown. Codes of 'gist-lossless': mask, window",
        ),
        ({"policy": "gist-lossy", "format": "fp9", "allow_lossy": True}, r"format='fp9': unknown.*fp16, bf16, fp10"),
        ({"policy": "gist-lossy:fp8", "format": "fp8", "allow_lossy": True}, r"names one already"),
        ({"policy": "gist-lossless", "allow_lossy": True}, r"allow_lossy=True: policy='gist-lossless' loses nothing"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadOption, match=message):
        memfit.fit(nn.Linear(2, 2), **options)


def test_formats_are_part_of_the_policys_name() -> None:
    assert with_format("gist-lossy", None) == "gist-lossy" and with_format("gist-lossy", "fp10") == "gist-lossy:fp10"
    assert POLICIES["gist-lossy"].is_lossy and not POLICIES["gist-lossless"].is_lossy
