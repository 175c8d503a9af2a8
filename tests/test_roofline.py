"""Rooflines against numbers worked out by hand, torch's own flop counter, and the vDNN paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import memfit
from memfit import zoo
from memfit.capture.rewrites import rewrite
from memfit.capture.rewrites.proof import AssumedProofs
from memfit.capture.step import Kind, Op, Step
from memfit.cost.convolutions import convolution_of
from memfit.cost.costs import OpCost, picoseconds
from memfit.cost.devices import device, load_device
from memfit.cost.flops import Work, arithmetic_of
from memfit.cost.roofline import convolution_choices, roofline
from memfit.cost.signature import signature
from memfit.cost.traffic import runs_no_kernel, traffic_bytes
from memfit.errors import BadOption
from memfit.report.step_module import loss_of

# Round figures: a microsecond a launch, a kilobyte a microsecond, a megaflop a microsecond.
ROUND = load_device(
    "memory=1GB,flops=1e12,fp16=4e12,bf16=2e12,fp64=0.5e12,bandwidth=1e9,link=2e9,link_fetch=4e9,latency=1e-6,launch=1e-6,"
    "convolution_efficiency=0.5,plain_convolution_efficiency=0.25,matmul_efficiency=1,attention_efficiency=0.125,"
    "memory_efficiency=1"
)
US = 1_000_000  # picoseconds


class Function(nn.Module):
    """A function of the input as a module, with parameters of the given shapes."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes])

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs, *self.weights)


def step_of(
    function: Callable[..., Tensor], *inputs: Tensor, weights: tuple[tuple[int, ...], ...] = ((1,),), **options: Any
) -> Step:
    dtype = options.pop("dtype", torch.float32)
    return memfit.capture(Function(function, *weights, dtype=dtype), inputs, **options)


def network(name: str, **options: Any) -> Step:
    """A network of the zoo with its loss, captured without a byte of it, all rewrites taken to hold."""
    example = zoo.load(name, device="meta", **options)
    step = memfit.capture(
        example.model.train(),
        example.args,
        example.kwargs,
        loss=lambda output, *targets: loss_of(output, example.loss, targets),
        targets=example.targets,
        device="cpu",
    )
    return rewrite(step, proofs=AssumedProofs())


def only(step: Step, target: str) -> Op:
    (found,) = (op for op in step.ops if op.target == target)
    return found


def price(step: Step, target: str, **options: Any) -> OpCost:
    return roofline(step, ROUND, **options).by_signature[signature(step, only(step, target))]


# ---- Bytes.


def test_an_elementwise_op_reads_its_operands_and_writes_its_result() -> None:
    step = step_of(lambda x, y, w: (x + y) * w, torch.randn(10, 25), torch.randn(10, 25))
    assert traffic_bytes(step, only(step, "aten.add.Tensor")) == 3 * 1000
    assert price(step, "aten.add.Tensor") == OpCost(4 * US, is_estimated=True)


def test_an_operand_given_twice_is_read_once() -> None:
    step = step_of(lambda x, w: torch.add(x, x) * w, torch.randn(10, 25))
    assert traffic_bytes(step, only(step, "aten.add.Tensor")) == 2 * 1000


def test_views_and_empty_memory_cost_nothing_at_all() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return x.view(25, 10).t()[1:].expand(2, 9, 25).mul(w) + torch.empty_like(x)[:9].fill_(1)

    step = step_of(function, torch.randn(10, 25))
    for target in ("aten.view.default", "aten.t.default", "aten.slice.Tensor", "aten.empty_like.default"):
        ops = [op for op in step.ops if op.target == target and op.half.value == "forward"]
        assert ops
        for op in ops:
            assert runs_no_kernel(step, op)
            assert roofline(step, ROUND).by_signature[signature(step, op)] == OpCost(0, is_estimated=True)


def test_an_expanded_operand_is_read_as_often_as_it_exists() -> None:
    step = step_of(lambda x, y, w: (x + y.expand(10, 25)) * w, torch.randn(10, 25), torch.randn(1, 25))
    assert traffic_bytes(step, only(step, "aten.add.Tensor")) == 1000 + 100 + 1000


def test_windows_that_overlap_hold_no_more_than_their_storage() -> None:
    step = step_of(lambda x, w: x.unfold(0, 50, 1).exp() * w, torch.randn(250))
    assert traffic_bytes(step, only(step, "aten.exp.default")) == 1000 + 201 * 50 * 4


def test_an_op_in_place_reads_and_writes_its_operand() -> None:
    step = step_of(lambda x, w: (x * w).relu_(), torch.randn(10, 25))
    assert traffic_bytes(step, only(step, "aten.relu_.default")) == 2 * 1000


def test_filling_reads_nothing() -> None:
    step = step_of(lambda x, w: torch.empty_like(x).fill_(2) * w, torch.randn(10, 25))
    (fill,) = (op for op in step.ops if op.target.startswith("aten.fill_."))
    assert traffic_bytes(step, fill) == 1000


def test_results_written_elsewhere_are_not_read_first() -> None:
    step = rewrite(step_of(lambda x, w: (x * w).relu().exp(), torch.randn(10, 25)), proofs=AssumedProofs())
    gate = only(step, "aten.threshold_backward.grad_input")
    assert "grad_input" in dict(gate.kwargs)
    assert traffic_bytes(step, gate) == 3 * 1000  # the gradient and the result of the ReLU in, the gradient out


def test_an_operand_of_which_only_the_shape_is_read_moves_no_bytes() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.max_pool2d(x * w, 2)

    step = step_of(function, torch.randn(1, 1, 10, 20))
    backward = "aten.max_pool2d_with_indices_backward.default"
    # 50 floats and 50 indices in, 200 floats out; the 200 floats that were pooled are not looked at.
    assert traffic_bytes(step, only(step, backward)) == 50 * 4 + 50 * 8 + 200 * 4
    ghosts = rewrite(step, proofs=AssumedProofs())
    assert traffic_bytes(ghosts, only(ghosts, backward)) == 50 * 4 + 50 * 8 + 200 * 4


def test_running_statistics_are_read_and_written() -> None:
    step = memfit.capture(nn.BatchNorm2d(5), (torch.randn(2, 5, 5, 5),))
    # Input, weight, bias and two statistics in; output, the batch's two and the two running ones out.
    assert traffic_bytes(step, only(step, "aten.native_batch_norm.default")) == 4 * (250 + 4 * 5 + 250 + 2 * 5 + 2 * 5)


def test_an_embedding_reads_the_rows_it_is_asked_for() -> None:
    step = memfit.capture(nn.Embedding(1000, 16), (torch.tensor([3, 1, 2]),))
    assert traffic_bytes(step, only(step, "aten.embedding.default")) == 3 * 8 + 3 * 64 + 3 * 64


def test_a_loss_reads_one_number_per_target() -> None:
    step = step_of(
        lambda x, t, w: F.nll_loss(x * w, t, reduction="sum"), torch.randn(10, 1000), torch.zeros(10, dtype=torch.long)
    )
    assert traffic_bytes(step, only(step, "aten.nll_loss_forward.default")) == 10 * 8 + 10 * 8 + 2 * 4


# ---- Flops.


def counted(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], weights: tuple[tuple[int, ...], ...]) -> int:
    """Flops of forward and backward, by torch's counter."""
    model = Function(function, *weights, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        model(*inputs).sum().backward()
    return counter.get_total_flops()


def summed(step: Step, work: Work) -> int:
    found = [arithmetic_of(step, op) for op in step.ops]
    assert {a.work for a in found if a is not None} == {work}
    return sum(a.flops for a in found if a is not None)


IMAGE = torch.randn(2, 4, 9, 7)


@pytest.mark.parametrize(
    ("function", "inputs", "weights"),
    [
        (lambda x, w: F.conv2d(x, w, padding=1), (IMAGE,), ((6, 4, 3, 3),)),
        (lambda x, w, b: F.conv2d(x, w, b, stride=2, dilation=2), (IMAGE,), ((6, 4, 3, 2), (6,))),
        (lambda x, v, w: F.conv2d(F.conv2d(x, v), w), (IMAGE,), ((5, 4, 3, 3), (6, 5, 1, 1))),
        (lambda x, w: F.conv_transpose2d(x, w, stride=2), (IMAGE,), ((4, 6, 3, 3),)),
        (lambda x, w: F.conv1d(x, w), (torch.randn(2, 4, 9),), ((6, 4, 3),)),
        (
            lambda x, v, w: F.conv3d(F.conv3d(x, v), w),
            (torch.randn(2, 4, 5, 6, 7),),
            ((4, 4, 3, 2, 1), (1, 4, 2, 2, 2)),
        ),
    ],
)
def test_convolutions_count_as_torch_counts_them(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], weights: tuple[tuple[int, ...], ...]
) -> None:
    plain = step_of(function, *inputs, weights=weights)
    expected = counted(function, inputs, weights)
    assert summed(plain, Work.CONVOLUTION) == expected > 0
    # Split into the weight's gradient and the data's, or with a ghost for an operand, it stays the same sum.
    assert summed(rewrite(plain, proofs=AssumedProofs()), Work.CONVOLUTION) == expected


def test_each_group_of_a_convolution_counts_by_itself() -> None:
    step = step_of(lambda x, w: F.conv2d(x, w, groups=2), IMAGE, weights=((6, 2, 3, 3),))
    # Two groups, each from 2 channels to 3, at 7 x 5 places of 2 images. Forward and the weight's gradient are alike;
    # torch's counter takes the latter as if all channels met, twice as much.
    assert summed(step, Work.CONVOLUTION) == 2 * (2 * 2 * (2 * 3 * 9) * 7 * 5 * 2)


@pytest.mark.parametrize(
    ("function", "inputs", "weights"),
    [
        (lambda x, w: x @ w, (torch.randn(3, 5),), ((5, 7),)),
        (lambda x, v, w: F.linear(F.linear(x, v), w), (torch.randn(2, 3, 5),), ((4, 5), (6, 4))),
        (lambda x, w, b: F.linear(x, w, b), (torch.randn(3, 5),), ((7, 5), (7,))),
        (lambda x, w: torch.bmm(x, w), (torch.randn(2, 3, 5),), ((2, 5, 7),)),
        (lambda x, c, w: torch.baddbmm(c, x, w), (torch.randn(2, 3, 5), torch.randn(2, 3, 7)), ((2, 5, 7),)),
    ],
)
def test_products_count_as_torch_counts_them(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], weights: tuple[tuple[int, ...], ...]
) -> None:
    expected = counted(function, inputs, weights)
    assert summed(step_of(function, *inputs, weights=weights), Work.MATMUL) == expected > 0


def test_attention_counts_by_torchs_formula() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        x = x * w
        return F.scaled_dot_product_attention(x[:, :, :5], x, x, is_causal=False)

    step = step_of(function, torch.randn(2, 3, 8, 4))
    query, key = (2, 3, 5, 4), (2, 3, 8, 4)
    forward = arithmetic_of(step, only(step, "aten._scaled_dot_product_flash_attention_for_cpu.default"))
    backward = arithmetic_of(step, only(step, "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"))
    assert forward is not None and backward is not None
    assert forward.work is backward.work is Work.ATTENTION
    assert forward.flops == sdpa_flop_count(query, key, key) == 2 * 2 * 3 * 5 * 8 * 8
    assert backward.flops == sdpa_backward_flop_count(query, query, key, key)


def test_an_lstm_multiplies_its_weights_at_every_position() -> None:
    step = memfit.capture(nn.LSTM(8, 16), (torch.randn(5, 3, 8),))
    forward = arithmetic_of(step, only(step, "aten.mkldnn_rnn_layer.default"))
    backward = arithmetic_of(step, only(step, "aten.mkldnn_rnn_layer_backward.default"))
    assert forward is not None and backward is not None
    assert forward.flops == 2 * 5 * 3 * (64 * 8 + 64 * 16)
    assert backward.flops == 2 * forward.flops
    assert forward.work is Work.MATMUL


def test_what_only_moves_bytes_has_no_arithmetic() -> None:
    step = step_of(lambda x, w: (x * w).softmax(-1), torch.randn(3, 4))
    assert all(arithmetic_of(step, op) is None for op in step.ops)


# ---- Times.


@pytest.mark.parametrize(
    ("dtype", "peak"),
    [(torch.float32, 1e12), (torch.float16, 4e12), (torch.bfloat16, 2e12), (torch.float64, 0.5e12)],
)
def test_a_large_product_takes_its_flops_at_the_rate_of_its_type(dtype: torch.dtype, peak: float) -> None:
    step = step_of(lambda x, w: x @ w, torch.zeros(4096, 4096, dtype=dtype), weights=((4096, 4096),), dtype=dtype)
    forward = next(op for op in step.ops if op.target == "aten.mm.default")
    compute_s = 2 * 4096**3 / peak
    move_s = 3 * 4096**2 * dtype.itemsize / 1e9
    expected = OpCost(picoseconds(1e-6 + max(compute_s, move_s)), is_estimated=True)
    assert roofline(step, ROUND).by_signature[signature(step, forward)] == expected
    fast_memory = load_device(ROUND.to_fields().replace("bandwidth=1000000000.0", "bandwidth=1e15"))
    cost = roofline(step, fast_memory).by_signature[signature(step, forward)]
    assert cost.time_ps == picoseconds(1e-6 + compute_s)


def test_a_small_product_takes_its_bytes() -> None:
    step = step_of(lambda x, w: x @ w, torch.randn(10, 10), weights=((10, 10),))
    forward = next(op for op in step.ops if op.target == "aten.mm.default")
    # 2000 flops are 2 ns; 1200 bytes are 1.2 us.
    assert roofline(step, ROUND).by_signature[signature(step, forward)].time_ps == 1 * US + 1.2 * US


def test_attention_has_an_efficiency_of_its_own() -> None:
    step = step_of(lambda x, w: F.scaled_dot_product_attention(x * w, x * w, x * w), torch.randn(1, 1, 2048, 64))
    cost = price(step, "aten._scaled_dot_product_flash_attention_for_cpu.default")
    assert cost.time_ps == picoseconds(1e-6 + 2 * 2048 * 2048 * (64 + 64) / (1e12 * 0.125))


def one_convolution(weights: tuple[int, ...] = (64, 64, 3, 3), channels: int = 64, **options: Any) -> Step:
    dtype = options.pop("dtype", torch.float32)
    return step_of(
        lambda x, w: F.conv2d(x, w, **options),
        torch.zeros(2, channels, 32, 32, dtype=dtype),
        weights=(weights,),
        dtype=dtype,
    )


def test_a_convolution_is_fast_with_workspace_and_slow_without() -> None:
    step = one_convolution(padding=1)
    flops = 2 * 2 * 32 * 32 * 64 * 64 * 9  # 151 million, 302 us at half the peak; 1.2 MB are 1196 us
    image, kernel = 2 * 64 * 32 * 32 * 4, 64 * 64 * 9 * 4
    assert 1e6 * (2 * image + kernel) / 1e9 > 1e6 * flops / 0.5e12
    fields = ROUND.to_fields().replace("bandwidth=1000000000.0", "bandwidth=1e12")
    card = load_device(fields)
    (choices,) = (c for i, c in convolution_choices(step, card).items() if step.ops[i].half.value == "forward")
    assert choices == {
        "fastest": OpCost(picoseconds(1e-6 + flops / 0.5e12), image * 1088 // 900, is_estimated=True),
        "none": OpCost(picoseconds(1e-6 + flops / 0.25e12), 0, is_estimated=True),
    }
    for workspace in ("fastest", "none"):
        costs = roofline(step, card, workspace=workspace).of(step)
        assert {i: costs[i] for i in convolution_choices(step, card)} == {
            i: c[workspace] for i, c in convolution_choices(step, card).items()
        }


def test_each_gradient_of_a_convolution_costs_as_much_as_its_forward() -> None:
    step = step_of(
        lambda x, v, w: F.conv2d(F.conv2d(x, v, padding=1), w, padding=1),
        torch.zeros(2, 64, 32, 32),
        weights=((64, 64, 3, 3), (64, 64, 3, 3)),
    )
    forward, _, both, weight_only = (convolution_of(step, op) for op in step.ops if "convolution" in op.target)
    assert forward is not None and both is not None and weight_only is not None
    assert (both.num_passes, weight_only.num_passes) == (2, 1)
    assert both.flops == 2 * forward.flops == 2 * weight_only.flops
    assert both.tile_bytes == forward.tile_bytes  # one call after the other


@pytest.mark.parametrize(
    ("weights", "options", "factor"),
    [
        ((64, 64, 3, 3), {"padding": 1}, 1088 / 900),
        ((64, 64, 5, 5), {"padding": 2}, 1088 / 784),
        ((64, 64, 5, 3), {"padding": (2, 1)}, 1088 / 784),  # by the larger side
        ((64, 64, 1, 1), {}, 0),
        ((64, 64, 1, 7), {"padding": (0, 3)}, 0),
        ((64, 64, 2, 2), {}, 0),
        ((64, 64, 3, 3), {"padding": 1, "stride": 2}, 0),
        ((64, 64, 3, 3), {"padding": 2, "dilation": 2}, 0),
        ((64, 1, 3, 3), {"padding": 1, "groups": 64}, 0),
    ],
)
def test_workspace_is_that_of_tiled_fft_where_it_applies(
    weights: tuple[int, ...], options: dict[str, Any], factor: float
) -> None:
    step = one_convolution(weights, **options)
    expected = int(2 * 64 * 32 * 32 * 4 * factor)
    for choices in convolution_choices(step, ROUND).values():
        assert choices["fastest"].workspace_bytes == expected
        assert choices["none"].workspace_bytes == 0


def test_workspace_goes_by_the_larger_of_input_and_output() -> None:
    step = one_convolution((16, 64, 3, 3))
    assert {c["fastest"].workspace_bytes for c in convolution_choices(step, ROUND).values()} == {
        2 * 64 * 32 * 32 * 4 * 1088 // 900
    }


def test_half_precision_is_transformed_in_float32_but_not_where_there_are_tensor_cores() -> None:
    step = one_convolution(padding=1, dtype=torch.bfloat16)
    full = 2 * 64 * 32 * 32 * 4 * 1088 // 900
    assert {c["fastest"].workspace_bytes for c in convolution_choices(step, device("titan-x")).values()} == {full}
    assert {c["fastest"].workspace_bytes for c in convolution_choices(step, device("a100-40gb")).values()} == {0}


# ---- The whole price list.


def test_the_costs_name_the_device_its_link_and_what_was_assumed() -> None:
    step = one_convolution(padding=1)
    card = device("titan-x")
    costs = roofline(step, card)
    assert costs.device == "titan-x" and costs.memory_bytes == 12 * 2**30
    assert "Titan X (Maxwell" in costs.source and "memfit/cost/devices.toml" in costs.source
    link = costs.link("host")
    assert (link.send_channel, link.fetch_channel) == ("d2h", "h2d")
    assert link.send_ps(128_000_000) == picoseconds(10e-6 + 0.01) == link.fetch_ps(128_000_000)
    assert costs.default_codec.encode_bytes_per_s == costs.default_codec.decode_bytes_per_s == card.stream_bytes_per_s
    assert costs.num_estimated == len(costs.by_signature)
    text = "\n".join(costs.notes)
    assert "fastest algorithm, 0.75 of peak, workspace up to 0.00 GB (tiled FFT model); without workspace 0.43" in text
    assert "effective DMA" in text and "TF32" not in text
    assert "convolutions: without workspace, 0.43 of peak" in "\n".join(roofline(step, card, workspace="none").notes)
    assert "TF32" in "\n".join(roofline(step, device("a100-40gb")).notes)


def test_a_step_without_convolutions_says_nothing_of_them() -> None:
    step = step_of(lambda x, w: x @ w, torch.randn(3, 5), weights=((5, 7),))
    assert convolution_choices(step, ROUND) == {}
    assert "convolution" not in "\n".join(roofline(step, device("a100-40gb")).notes)


def test_an_unknown_workspace_is_named() -> None:
    step = step_of(lambda x, w: x * w, torch.randn(3))
    with pytest.raises(BadOption, match=r"workspace='some': unknown\. Convolutions have: fastest, none"):
        roofline(step, ROUND, workspace="some")


def test_vgg16_at_256_has_the_baseline_of_the_vdnn_paper() -> None:
    """Network-wide allocation takes 28 GB there: every map, two shared gradient buffers, one shared workspace."""
    step = network("vgg16", batch=256)
    maps = [
        storage.bytes
        for storage in step.storages
        if storage.maker is not None
        and storage.maker < step.num_forward
        and step.values[storage.values[0]].dtype.is_floating_point
    ]
    costs = roofline(step, device("titan-x"))
    workspace = max(cost.workspace_bytes for cost in costs.of(step))
    inputs = sum(s.bytes for s in step.storages if s.kind is Kind.INPUT)
    baseline = step.parameter_bytes + step.gradient_bytes + inputs + sum(maps) + 2 * max(maps) + workspace
    assert workspace == 256 * 64 * 224 * 224 * 4 * 1088 // 900
    assert baseline == pytest.approx(28e9, rel=0.10)
    assert any("workspace up to 3.98 GB" in note for note in costs.notes)
    # Convolutions: 15.3 billion multiply-adds an image, three times over but for the first layer's data gradient.
    flops = sum(c.flops for op in step.ops if (c := convolution_of(step, op)) is not None)
    assert flops == pytest.approx(256 * 2 * (3 * 15.35e9 - 0.087e9), rel=0.01)
    seconds = sum(cost.time_ps for cost in costs.of(step)) / 1e12
    assert flops / (0.75 * 7e12) < seconds < 1.1 * flops / (0.75 * 7e12)


def test_in_a_step_of_thousands_of_ops_only_distinct_ones_are_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    step = network("resnet152", batch=2)
    assert len(step.ops) > 1000
    num_weighed = 0

    def counting(step: Step, op: Op) -> int:
        nonlocal num_weighed
        num_weighed += 1
        return traffic_bytes(step, op)

    monkeypatch.setattr("memfit.cost.roofline.traffic_bytes", counting)
    prices = roofline(step, device("titan-x"))
    # A convolution is priced once in the list, and once for each of its two algorithms.
    assert 0 < num_weighed <= len(prices.by_signature) + 2 * len(prices.algorithms) < len(step.ops) / 2
    costs = prices.of(step)
    assert len(costs) == len(step.ops) and all(cost.time_ps >= 0 for cost in costs)
