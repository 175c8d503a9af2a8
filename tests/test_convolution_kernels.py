"""Convolutions by kernels of ours give oneDNN's bits in an order that is found, and only where they are faster."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from beside_torch import CONVOLUTION, GRADIENTS, forbidden, needs_kernels, normal
from codec_cases import num_threads as on_threads
from equivalence import assert_same_as_eager
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memfit
from memfit import stand_ins
from memfit.capture.rewrites import convolution_orders, rewrite, trials
from memfit.capture.rewrites.chunks import in_chunks
from memfit.capture.rewrites.proof import Proofs, same_bits
from memfit.stand_ins import convolutions
from memfit.stand_ins.convolutions import orders
from memfit.stand_ins.orders import Order
from memfit.torch_internals import resolve

pytestmark = needs_kernels
needs_avx512 = pytest.mark.skipif(
    not convolutions.are_there() or not torch.backends.mkldnn.is_available(), reason="there is no AVX-512 or no oneDNN"
)

OF_INPUT, OF_WEIGHT, OF_BOTH = [True, False, False], [False, True, False], [False, True, True]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """In which order oneDNN adds up depends on them; with one, torch does not ask it for windows of one element."""
    with on_threads(2):
        yield


def plain(window: int) -> tuple[Any, ...]:
    """The settings of a convolution whose result is as large as its input."""
    return ([1, 1], [window // 2] * 2, [1, 1], False, [0, 0], 1)


def drawn(
    num_samples: int, num_in: int, num_out: int, height: int, width: int, window: int
) -> tuple[torch.Tensor, ...]:
    """The gradient of the output, the input, the weight, and the bias."""
    maps = normal(num_samples, num_out, height, width), normal(num_samples, num_in, height, width, seed=1)
    return *maps, normal(num_out, num_in, window, window, seed=2) / num_in, normal(num_out, seed=3)


def found(target: str, mask: list[bool], *args: Any) -> Order:
    """The order in which a kernel of ours makes what torch makes, of those that are tried."""
    weight = args[2] if mask else args[1]
    expected = resolve(target)(*args)
    family = stand_ins.convolution_backward if mask else stand_ins.convolution
    for order in orders(weight.shape, len(args[0]), args[0].shape[2:], mask):
        if same_bits(expected, getattr(family, order.name)(*args)):
            return order
    raise AssertionError("in none of the orders")


@needs_avx512
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    "shape",
    [
        (4, 128, 32, 28, 28, 3),
        (4, 64, 64, 56, 56, 3),
        (3, 48, 40, 7, 7, 3),
        (2, 40, 70, 9, 15, 3),
        (3, 160, 24, 17, 2, 3),
    ],
)
def test_windows_of_three_are_onednns(shape: tuple[int, ...], num_threads: int) -> None:
    grad, input, weight, bias = drawn(*shape)
    with on_threads(num_threads):
        for each in (None, bias):
            assert found(CONVOLUTION, [], input, weight, each, *plain(3)) == Order(16)
        assert found(GRADIENTS, OF_INPUT, grad, input, weight, None, *plain(3), OF_INPUT) == Order(16)
        for mask in (OF_WEIGHT, OF_BOTH):
            found(GRADIENTS, mask, grad, input, weight, [shape[2]], *plain(3), mask)


@needs_avx512
@pytest.mark.parametrize("num_threads", [2, 4])
@pytest.mark.parametrize(
    "shape",
    [
        (4, 64, 128, 56, 56, 1),
        (4, 544, 128, 14, 14, 1),
        (4, 1000, 128, 14, 14, 1),
        (4, 1024, 128, 7, 7, 1),
        (3, 17, 21, 5, 9, 1),
        (4, 128, 64, 32, 32, 1),
    ],
)
def test_windows_of_one_are_onednns_in_some_order(shape: tuple[int, ...], num_threads: int) -> None:
    grad, input, weight, bias = drawn(*shape)
    with on_threads(num_threads):
        for each in (None, bias):
            found(CONVOLUTION, [], input, weight, each, *plain(1))
        for mask in (OF_INPUT, OF_WEIGHT):
            found(GRADIENTS, mask, grad, input, weight, None, *plain(1), mask)


@needs_avx512
@settings(max_examples=25, deadline=None)
@given(
    st.integers(2, 4), st.integers(2, 6), st.integers(1, 80), st.integers(3, 20), st.integers(3, 40), st.integers(0, 99)
)
def test_windows_of_any_maps(samples: int, blocks: int, num_out: int, height: int, width: int, seed: int) -> None:
    """Where oneDNN takes its usual kernel: whole blocks of channels."""
    input, weight = normal(samples, 16 * blocks, height, width, seed=seed), normal(num_out, 16 * blocks, 3, 3, seed=1)
    found(CONVOLUTION, [], input, weight, None, *plain(3))


@needs_avx512
def test_samples_may_be_anywhere() -> None:
    """Channels of larger maps, as slices of what was put together."""
    grad, input = normal(4, 80, 14, 14)[:, 16:48], normal(4, 100, 14, 14, seed=1)[:, 4:68]
    for window in (1, 3):
        weight = normal(32, 64, window, window, seed=2)
        found(CONVOLUTION, [], input, weight, None, *plain(window))
        for mask in (OF_INPUT, OF_WEIGHT):
            found(GRADIENTS, mask, grad, input, weight, None, *plain(window), mask)


@needs_avx512
def test_what_is_not_read_may_be_a_ghost() -> None:
    grad, input, weight, _ = drawn(4, 48, 32, 12, 12, 3)
    ghosts = [torch.empty_like(each) for each in (input, weight)]
    for ghost in ghosts:
        ghost.untyped_storage().resize_(0)
    for mask, operands in ((OF_INPUT, (grad, ghosts[0], weight)), (OF_WEIGHT, (grad, input, ghosts[1]))):
        order = found(GRADIENTS, mask, grad, input, weight, None, *plain(3), mask)
        made = getattr(stand_ins.convolution_backward, order.name)(*operands, None, *plain(3), mask)
        assert same_bits(resolve(GRADIENTS)(grad, input, weight, None, *plain(3), mask), made)


@needs_avx512
@pytest.mark.parametrize("special", [float("inf"), float("nan")])
def test_what_is_beyond_an_edge_is_left_out(special: float) -> None:
    """Not multiplied by zero: of what is no number that would make a number of no kind."""
    grad, input, weight, _ = drawn(4, 32, 32, 10, 10, 3)
    weight[3, 5, 0, 1] = grad[0, 7, 0, 0] = grad[1, 2, 9, 9] = input[0, 1, 0, 4] = special
    settings = plain(3)
    for target, made, args in (
        (CONVOLUTION, stand_ins.convolution.sums_of_16, (input, weight, None, *settings)),
        (GRADIENTS, stand_ins.convolution_backward.sums_of_16, (grad, input, weight, None, *settings, OF_INPUT)),
        (GRADIENTS, stand_ins.convolution_backward.sums_of_0_in_1, (grad, input, weight, None, *settings, OF_WEIGHT)),
    ):
        results = [call(*args) for call in (resolve(target), made)]
        for one, other in zip(*(result if isinstance(result, tuple) else (result,) for result in results), strict=True):
            if one is not None:
                assert 0 < torch.isfinite(one).sum() < one.numel()
                assert torch.equal(torch.isfinite(one), torch.isfinite(other))


@pytest.mark.parametrize(
    ("weight_shape", "settings"),
    [
        ((8, 6, 3, 3), ([2, 2], [1, 1], [1, 1], False, [0, 0], 1)),
        ((8, 6, 3, 3), ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)),
        ((8, 6, 3, 3), ([1, 1], [2, 2], [2, 2], False, [0, 0], 1)),
        ((8, 6, 5, 5), ([1, 1], [2, 2], [1, 1], False, [0, 0], 1)),
        ((8, 6, 1, 3), ([1, 1], [0, 1], [1, 1], False, [0, 0], 1)),
        ((6, 3, 3, 3), ([1, 1], [1, 1], [1, 1], False, [0, 0], 2)),
        ((6, 8, 3, 3), ([1, 1], [1, 1], [1, 1], True, [0, 0], 1)),
    ],
)
def test_other_convolutions_are_left_to_torch(
    weight_shape: tuple[int, ...], settings: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolutions, "_run", None)
    input, weight = normal(2, 6, 9, 9), normal(*weight_shape, seed=1)
    expected = resolve(CONVOLUTION)(input, weight, None, *settings)
    assert same_bits(expected, stand_ins.convolution.sums_of_16(input, weight, None, *settings))
    for name, mask in (("sums_of_16", OF_INPUT), ("sums_of_0_in_1", OF_WEIGHT)):
        args = (torch.ones_like(expected), input, weight, None, *settings, mask)
        assert same_bits(resolve(GRADIENTS)(*args), getattr(stand_ins.convolution_backward, name)(*args))


def test_operands_of_other_kinds_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "_run", None)
    grad, input, weight, _ = drawn(2, 16, 16, 9, 9, 3)
    by_rows = [each.to(memory_format=torch.channels_last) for each in (grad, input)]
    for one, other, third in ((grad.double(), input.double(), weight.double()), (*by_rows, weight)):
        args = (other, third, None, *plain(3))
        assert same_bits(resolve(CONVOLUTION)(*args), stand_ins.convolution.sums_of_16(*args))
        for name, mask in (
            ("sums_of_16", OF_INPUT),
            ("sums_of_0_in_1", OF_WEIGHT),
            ("sums_of_16", [True, True, False]),
        ):
            args = (one, other, third, None, *plain(3), mask)
            assert same_bits(resolve(GRADIENTS)(*args), getattr(stand_ins.convolution_backward, name)(*args))
    with forbidden():
        args = (input, weight, None, *plain(3))
        assert same_bits(resolve(CONVOLUTION)(*args), stand_ins.convolution.sums_of_16(*args))


@pytest.mark.parametrize("window", [1, 3])
def test_orders_that_make_no_sense_are_left_to_torch(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "_run", None)
    grad, input, weight, _ = drawn(2, 16, 16, 9, 9, window)
    args = (input, weight, None, *plain(window))
    assert same_bits(resolve(CONVOLUTION)(*args), stand_ins.convolution.sums_of_0(*args))
    # No sum of no element, and no part without a sample; the gradient of one is not that of another.
    for name, mask in (("sums_of_0", OF_INPUT), ("sums_of_9_in_3", OF_WEIGHT), ("sums_of_9_in_1", OF_INPUT)):
        args = (grad, input, weight, None, *plain(window), mask)
        assert same_bits(resolve(GRADIENTS)(*args), getattr(stand_ins.convolution_backward, name)(*args))


def test_scratch_is_of_one_kind() -> None:
    """Whatever torch makes of numbers by default."""
    _, input, weight, _ = drawn(2, 32, 32, 9, 9, 3)
    expected = resolve(CONVOLUTION)(input, weight, None, *plain(3))
    torch.set_default_dtype(torch.float16)
    try:
        assert same_bits(expected, stand_ins.convolution.sums_of_16(input, weight, None, *plain(3)))
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_order_has_a_name() -> None:
    for order in (Order(16), Order(784, 2), Order(0, 1)):
        assert Order.named(order.name) == order
    assert Order.named("default") is None and Order.named("sums_of_16_in_") is None
    with pytest.raises(AttributeError, match="sums is no order of sums; those are named like sums_of_16"):
        stand_ins.convolution.sums
    assert resolve("memfit_ops.convolution.sums_of_48") is resolve("memfit_ops.convolution.sums_of_48")


# --- in steps --------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Convolutions with and without bias, one that has slices for its gradient, one that is left to torch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, stride=2, padding=1)
        self.wide = nn.Conv2d(32, 48, 3, padding=1)
        self.mix = nn.Conv2d(48, 32, 1, bias=False)
        self.last = nn.Conv2d(32, 16, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.mix(F.relu(self.wide(self.first(x))))
        return torch.cat([h, self.last(F.relu(h))], 1).square().mean()


def inputs(batch: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 3, 24, 24),)


def kept(step: memfit.Step) -> list[str]:
    return [op.stand_in for op in step.ops if "convolution" in op.stand_in]


def regardless_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "is_faster", lambda plain, made: True)


@needs_avx512
@pytest.mark.parametrize("policy", ["keep", pytest.param("sqrt", marks=pytest.mark.slow), "vdnn-conv"])
def test_a_model_with_convolutions_of_ours_trains_as_in_eager(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    regardless_of_time(monkeypatch)
    monkeypatch.setattr(Proofs, "_outcome", lambda self, rewrite, signature, experiment: experiment())
    assert_same_as_eager(Net(), inputs, policy=policy)
    model = memfit.fit(Net(), policy=policy)
    model(*inputs(4)).backward()
    text = model.memfit.code  # type: ignore[union-attr]
    assert text.count("stand_ins.convolution.sums_of_") >= 3
    assert text.count("stand_ins.convolution_backward.sums_of_") == 6, "of three inputs and three weights"


@needs_avx512
def test_kernels_stand_in_only_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    step = memfit.capture(Net(), inputs(4))
    for is_faster in (True, False):
        monkeypatch.setattr(trials, "is_faster", lambda plain, made, is_faster=is_faster: is_faster)
        assert len(kept(rewrite(step, proofs=Proofs(None)))) == (9 if is_faster else 0)


def test_where_there_is_no_avx512_products_of_matrices_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    regardless_of_time(monkeypatch)
    for module in (convolutions, convolution_orders):
        monkeypatch.setattr(module, "are_there", lambda: False)
    step = memfit.capture(nn.Conv2d(24, 16, 1, bias=False), (normal(2, 24, 9, 9).requires_grad_(),))
    found = kept(rewrite(step, proofs=Proofs(None)))
    assert found == ["memfit_ops.convolution.default", "memfit_ops.convolution_backward.default"]


def test_none_stands_in_where_its_bits_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the least that a number can be another."""
    regardless_of_time(monkeypatch)
    run = convolutions._run
    makers: list[str] = []

    def wrongly(kernel: Any, num_floats: Any, job: Any) -> None:
        run(kernel, num_floats, job)
        makers.append(kernel.__name__)
        ctypes.cast(job.out, ctypes.POINTER(ctypes.c_int32))[0] ^= 1

    monkeypatch.setattr(convolutions, "_run", wrongly)
    monkeypatch.setattr(torch, "bmm", lambda one, other: (one @ other).mul_(1 + 1e-6))
    assert kept(rewrite(memfit.capture(Net(), inputs(4)), proofs=Proofs(None))) == []
    assert bool(makers) == convolutions.are_there()


def test_what_is_faster_is_found_by_running_both() -> None:
    order: list[str] = []

    def call(name: str, seconds: float) -> None:
        order.append(name)
        time.sleep(seconds)

    slow, fast = partial(call, "slow", 0.01), partial(call, "fast", 0.0)
    assert trials.is_faster(slow, fast) and order[:4] == ["slow", "fast"] * 2
    assert not trials.is_faster(fast, slow)


def test_chunks_of_a_convolution_have_no_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    regardless_of_time(monkeypatch)
    step = memfit.capture(nn.Conv2d(24, 16, 1, bias=False), (normal(4, 24, 9, 9).requires_grad_(),))
    whole = [op for op in rewrite(step, proofs=Proofs(None)).ops if "convolution" in op.stand_in]
    assert len(whole) >= 2
    assert all(in_chunks(op, 2).called.endswith("_in_chunks.default") for op in whole)
