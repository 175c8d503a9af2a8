"""Kernels that stand in for torch's own give its bits, leave its generators where it would, and know their limits."""

from __future__ import annotations

import copy
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from equivalence import assert_same_as_eager
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memfit
from memfit import operators, stand_ins
from memfit.capture.rewrites import rewrite
from memfit.capture.rewrites import stand_ins as rewrites
from memfit.capture.rewrites.chunks import in_chunks
from memfit.capture.rewrites.proof import Proofs, same_bits
from memfit.cost.signature import signature
from memfit.native import library
from memfit.torch_internals import resolve, thread_team

pytestmark = pytest.mark.skipif(stand_ins.kernels() is None, reason="there is no C compiler")

NAN, INF = float("nan"), float("inf")
MANY = 70_000  # elements: enough for several threads, and for a draw that is not left to torch


@pytest.fixture(params=["avx2", "any machine", "new threads", "one thread"])
def machine(request: pytest.FixtureRequest) -> Iterator[None]:
    """The kernels as they are compiled for this machine and for any, on torch's threads, on new ones, on one."""
    kernels, num_threads = stand_ins.kernels(), torch.get_num_threads()
    assert kernels is not None
    kernels.memfit_allow_avx2(request.param != "any machine")
    kernels.memfit_use_team(None if request.param == "new threads" else thread_team())
    torch.set_num_threads(1 if request.param == "one thread" else max(num_threads, 2))
    yield
    torch.set_num_threads(num_threads)
    kernels.memfit_allow_avx2(True)
    kernels.memfit_use_team(thread_team())


def both(target: str, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """What torch's own makes of the arguments, and what its stand-in does; each has its own copies."""

    def copied(arg: Any) -> Any:
        return arg.clone() if isinstance(arg, torch.Tensor) else arg

    results = []
    for name in (target, stand_ins.STAND_INS[target]):
        given = [copied(arg) for arg in args]
        made = resolve(name)(*given, **kwargs)
        # What was written to counts as made.
        results.append([*(made if isinstance(made, (tuple, list)) else [made]), *given])
    return tuple(results)  # type: ignore[return-value]


def assert_same(target: str, *args: Any, **kwargs: Any) -> None:
    plain, made = both(target, *args, **kwargs)
    for one, other in zip(plain, made, strict=True):
        assert not isinstance(one, torch.Tensor) or same_bits(one, other), (one, other)


@contextmanager
def forbidden() -> Iterator[None]:
    """No kernel in C runs."""
    os.environ["MEMFIT_NATIVE"] = "0"
    try:
        yield
    finally:
        del os.environ["MEMFIT_NATIVE"]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- batch norm ------------------------------------------------------------------------------------------------------

BATCH_NORM = "aten.native_batch_norm.default"


def vectors(num_channels: int, *, given: str = "wbmv") -> list[torch.Tensor | None]:
    """Weight, bias, running mean and running variance, those that are given."""
    return [normal(num_channels, seed=k).abs() if letter in given else None for k, letter in enumerate("wbmv")]


@pytest.mark.parametrize(
    "shape",
    [
        (4, 64, 28, 28),
        (3, 13, 5, 7),
        (2, 8, 100),
        (2, 16, 3, 4, 5),
        (5, 1, 9, 9),
        (1, 7, 31, 1),
        (64, 24, 1, 1),
        (2, 9, 1, 3),
        (8, 40, 7, 7),
    ],
)
def test_batch_norm_is_torchs(machine: None, shape: tuple[int, ...]) -> None:
    assert_same(BATCH_NORM, normal(*shape) * 3 + 1, *vectors(shape[1]), True, 0.1, 1e-5)


@pytest.mark.parametrize("given", ["", "w", "b", "mv", "wb", "wmv"])
@pytest.mark.parametrize(("momentum", "eps"), [(0.1, 1e-5), (1 / 3, 1e-3), (0.0, 0.0), (1.0, 1e-12), (0.77, 0.5)])
def test_batch_norm_with_any_settings(given: str, momentum: float, eps: float) -> None:
    assert_same(BATCH_NORM, normal(4, 19, 6, 6) * 5 - 2, *vectors(19, given=given), True, momentum, eps)


@pytest.mark.parametrize("special", [0.0, -0.0, 1e-42, 3e38, -1e30, 7.0])
def test_batch_norm_of_numbers_that_are_hard_to_add(machine: None, special: float) -> None:
    input = normal(2, 16, 5, 5)
    input[:, ::2] = special  # channels without variance, beside others
    input[:, 3, 1] = special
    assert_same(BATCH_NORM, input, *vectors(16), True, 0.1, 1e-5)


@pytest.mark.parametrize("special", [NAN, INF, -INF])
def test_batch_norm_keeps_what_is_no_number_to_its_channel(machine: None, special: float) -> None:
    input = normal(2, 20, 5, 5)
    input[1, 3, 2, 2] = input[0, 17, 0, 0] = special
    plain, made = both(BATCH_NORM, input, *vectors(20), True, 0.1, 1e-5)
    for one, other in zip(plain, made, strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert plain[0].isnan().flatten(2).any(2)[0].nonzero().flatten().tolist() == [3, 17]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 35),
    st.integers(1, 70),
    st.integers(0, 10**6),
    st.floats(0, 1),
    st.floats(0, 1e-2),
)
def test_batch_norm_of_any_shape(
    num_samples: int, num_channels: int, size: int, seed: int, momentum: float, eps: float
) -> None:
    if num_samples * size == 1:
        size = 2  # of one number there is no variance, and torch is not asked for it
    input = normal(num_samples, num_channels, size, seed=seed) * 10 ** (seed % 7 - 3) + seed % 5
    assert_same(BATCH_NORM, input, *vectors(num_channels), True, momentum, eps)


def test_batch_norm_leaves_the_rest_to_torch() -> None:
    vectors_of = vectors(6)
    assert_same(BATCH_NORM, normal(4, 6, 5, 5), *vectors_of, False, 0.1, 1e-5)  # evaluation
    assert_same(BATCH_NORM, normal(40, 6), *vectors_of, True, 0.1, 1e-5)
    assert_same(BATCH_NORM, normal(40, 6, 1, 1), *vectors_of, True, 0.1, 1e-5)
    with pytest.raises(ValueError, match="must either both be None or neither"):
        resolve(stand_ins.STAND_INS[BATCH_NORM])(normal(4, 6, 5, 5), *vectors(6, given="m"), True, 0.1, 1e-5)
    assert_same(BATCH_NORM, normal(4, 6, 5, 5).double(), None, None, None, None, True, 0.1, 1e-5)
    assert_same(BATCH_NORM, normal(4, 6, 5, 5).bfloat16(), *vectors_of, True, 0.1, 1e-5)
    with forbidden():
        assert_same(BATCH_NORM, normal(4, 6, 5, 5), *vectors_of, True, 0.1, 1e-5)


# --- batch norm, channels last ---------------------------------------------------------------------------------------

NORM_GRADIENTS = "aten.native_batch_norm_backward.default"
ALL_THREE = [True, True, True]


def rows(num_samples: int, num_channels: int, *image: int, seed: int = 0) -> torch.Tensor:
    """Maps whose channels are last in memory."""
    return normal(num_samples, *image, num_channels, seed=seed).movedim(-1, 1)


def backward_of(grad: torch.Tensor, input: torch.Tensor) -> tuple[Any, ...]:
    """The operands of the backward of a batch norm of that input."""
    weight, bias, mean, var = vectors(input.shape[1])
    _, *saved = torch.ops.aten.native_batch_norm.default(input, weight, bias, None, None, True, 0.1, 1e-5)
    return (grad, input, weight, mean, var, *saved, True, 1e-5, ALL_THREE)


@pytest.mark.parametrize(
    "shape",
    [(4, 64, 28, 28), (3, 13, 5, 7), (2, 48, 3, 4, 5), (1, 40, 31, 2), (2, 9, 1, 3), (8, 80, 7, 7), (2, 16, 2, 2)],
)
def test_batch_norm_of_rows_is_torchs(machine: None, shape: tuple[int, ...]) -> None:
    input = rows(*shape) * 3 + 1
    assert stand_ins.has_channels_last(input)
    assert_same(BATCH_NORM, input, *vectors(shape[1]), True, 0.1, 1e-5)
    assert_same(NORM_GRADIENTS, *backward_of(rows(*shape, seed=1), input))
    plain, made = both(NORM_GRADIENTS, *backward_of(rows(*shape, seed=1), input))
    assert plain[0].stride() == made[0].stride()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 70),
    st.integers(2, 9),
    st.integers(2, 9),
    st.integers(0, 10**6),
    st.integers(1, 5),
)
def test_batch_norm_of_any_rows(samples: int, channels: int, height: int, width: int, seed: int, threads: int) -> None:
    """Also where torch has more threads than the machine has: each adds up a part."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        input = rows(samples, channels, height, width, seed=seed) * 10 ** (seed % 7 - 3) + seed % 5
        assert_same(BATCH_NORM, input, *vectors(channels), True, 0.1, 1e-5)
        assert_same(NORM_GRADIENTS, *backward_of(rows(samples, channels, height, width, seed=seed + 1), input))
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("special", [0.0, -0.0, 1e-42, 3e38, -1e30, 7.0])
def test_batch_norm_of_rows_that_are_hard_to_add(machine: None, special: float) -> None:
    input, grad = rows(2, 32, 5, 5), rows(2, 32, 5, 5, seed=1)
    input[:, ::2] = special
    grad[:, 3::4, 1] = special
    assert_same(BATCH_NORM, input, *vectors(32), True, 0.1, 1e-5)
    operands = backward_of(grad, input)
    if torch.isfinite(torch.ops.aten.native_batch_norm_backward.default(*operands)[0]).all():
        assert_same(NORM_GRADIENTS, *operands)


def test_batch_norm_of_rows_leaves_the_rest_to_torch() -> None:
    grad, input, *rest = backward_of(rows(4, 32, 6, 6, seed=1), rows(4, 32, 6, 6))
    weight, mean, var, save_mean, save_invstd, *_ = rest
    for operands in (
        (grad.contiguous(), input, *rest),
        (grad.contiguous(), input.contiguous(), *rest),
        (grad[:, :, :3], input[:, :, :3], *rest),  # not all of the memory they look at
        (grad, input, None, *rest[1:5], True, 1e-5, [True, False, False]),
        (grad, input, *rest[:-1], [True, False, False]),
        (grad, input, *rest[:-1], [False, True, True]),
        (grad, input, weight, mean, var, save_mean, save_invstd, False, 1e-5, ALL_THREE),
        tuple(arg.double() if isinstance(arg, torch.Tensor) else arg for arg in (grad, input, *rest)),
    ):
        assert_same(NORM_GRADIENTS, *operands)
    with forbidden():
        assert_same(NORM_GRADIENTS, grad, input, *rest)
        assert_same(BATCH_NORM, input, *vectors(32), True, 0.1, 1e-5)
    assert_same(BATCH_NORM, input, *vectors(32), False, 0.1, 1e-5)


# --- batch norm with what comes next, and once more ------------------------------------------------------------------


@pytest.mark.parametrize("layout", [normal, rows])
@pytest.mark.parametrize("shape", [(4, 64, 28, 28), (3, 13, 5, 7), (2, 40, 1, 9)])
@pytest.mark.parametrize("special", [-0.0, NAN, INF])
def test_a_batch_norm_with_its_relu_is_both(machine: None, layout: Any, shape: tuple[int, ...], special: float) -> None:
    input = layout(*shape) * 3 + 1
    input[:, 1] = special
    weight, bias, *_ = vectors(shape[1])
    assert weight is not None and bias is not None
    bias[::2] = -0.0
    weight[2] = 0
    out, mean, invstd = torch.ops.aten.native_batch_norm.default(input, weight, bias, None, None, True, 0.1, 1e-5)
    made = stand_ins.native_batch_norm(input, weight, bias, None, None, True, 0.1, 1e-5, True)
    again = [operators.renormalise(input, weight, bias, mean, invstd, is_rectified) for is_rectified in (False, True)]
    for expected, found in ((out.relu(), made[0]), (mean, made[1]), (out, again[0]), (out.relu(), again[1])):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(found.signbit(), expected.signbit()) or special != -0.0
        assert found.stride() == expected.stride()


@pytest.mark.parametrize("shape", [(4, 64, 28, 28), (3, 48, 5, 7), (2, 16, 3, 4, 5)])
@pytest.mark.parametrize("special", [-0.0, NAN, 1e-45])
def test_a_gate_that_adds_up_is_both(machine: None, shape: tuple[int, ...], special: float) -> None:
    """The backward of a ReLU, and with its sums that of the batch norm before it."""
    input, grad, gate = rows(*shape) * 3 + 1, rows(*shape, seed=1), rows(*shape, seed=2)
    gate[:, ::3] = special
    gated = torch.ops.aten.threshold_backward.default(grad, gate, 0)
    _, _, *operands = backward_of(gated, input)
    expected = torch.ops.aten.native_batch_norm_backward.default(gated, input, *operands)
    found, sums = stand_ins.gate_and_add_up(grad, gate, 0, input, operands[3])
    assert found is grad and same_bits(grad, gated)
    assert sums is not None
    assert same_bits(expected, stand_ins.native_batch_norm_backward(grad, input, *operands, sums))
    if torch.isfinite(expected[0]).all():
        sums[0] += 1  # they are what is computed with
        assert not same_bits(expected, stand_ins.native_batch_norm_backward(grad, input, *operands, sums))


@pytest.mark.parametrize("shape", [(4, 15, 5, 7), (4, 32, 5, 7)])
def test_a_gate_that_cannot_add_up_is_a_gate(shape: tuple[int, ...]) -> None:
    grad, gate, input = (make(*shape) for make in (normal, rows, normal))
    expected = torch.ops.aten.threshold_backward.default(grad, gate, 0)
    found, sums = stand_ins.gate_and_add_up(grad, gate, 0, input, normal(shape[1]))
    assert found is grad and sums is None and torch.equal(grad, expected)
    grad, gate, input = (rows(4, 32, 5, 5, seed=seed) for seed in range(3))
    expected = torch.ops.aten.threshold_backward.default(grad, gate, 0.5)
    assert stand_ins.gate_and_add_up(grad, gate, 0.5, input, normal(32))[1] is None
    assert same_bits(grad, expected)


def test_a_relu_behind_what_torch_normalises_is_applied_all_the_same() -> None:
    input = normal(40, 6)
    plain = torch.ops.aten.native_batch_norm.default(input, *vectors(6), True, 0.1, 1e-5)
    made = stand_ins.native_batch_norm(input, *vectors(6), True, 0.1, 1e-5, True)  # type: ignore[arg-type]
    assert same_bits((plain[0].relu(), *plain[1:]), made)
    again = operators.renormalise(input, None, None, *plain[1:], True)
    assert same_bits(operators.renormalise(input, None, None, *plain[1:]).relu(), again)


# --- drawing ---------------------------------------------------------------------------------------------------------

BERNOULLI = "aten.bernoulli_.float"


def draw(target: str, tensor: torch.Tensor, p: float, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """What is drawn, and where that leaves the generator."""
    return resolve(target)(tensor, p, generator=generator), generator.get_state()


@pytest.mark.parametrize("p", [0.0, 1.0, 0.9, 1 / 3])
@pytest.mark.parametrize("num_before", [0, 1, 311, 623, 624])
def test_what_is_drawn_is_torchs(machine: None, p: float, num_before: int) -> None:
    results = []
    for target in (BERNOULLI, stand_ins.STAND_INS[BERNOULLI]):
        generator = torch.Generator().manual_seed(11)
        torch.empty(num_before, dtype=torch.int32).random_(generator=generator)
        results.append([draw(target, torch.empty(count), p, generator) for count in (MANY, 4096, 4097, 5, MANY + 1)])
    assert same_bits(*results)


def untempered(number: int) -> int:
    """The state whose number that is: a Mersenne twister's last step, undone."""
    number ^= number >> 18
    number ^= (number << 15) & 0xEFC60000
    step = number
    for _ in range(4):
        step = number ^ ((step << 7) & 0x9D2C5680)
    number = step
    for _ in range(2):
        step = number ^ (step >> 11)
    return step & 0xFFFFFFFF


@pytest.mark.parametrize("p", [0.9, 0.1, 0.5, 1 / 3, 0.7, 2.0**-53])
def test_numbers_next_to_the_probability_are_on_torchs_side(p: float) -> None:
    """A draw of 53 bits that is just below p, p itself, and just above: no random test would meet these."""
    edge = -int(-(p * 2**53) // 1)  # the first whole number that is not below
    numbers = [max(edge + k, 0) for k in range(-3, 4)]
    state = torch.Generator().manual_seed(0).get_state().numpy().copy()
    fields = state.view(np.uint64)
    state.view(np.int32)[2], fields[2] = 624 + 1 - 1, 1  # left, next: the second of the state comes next
    for k, number in enumerate(numbers):
        fields[3 + 1 + 2 * k], fields[4 + 1 + 2 * k] = untempered(number >> 32), untempered(number & 0xFFFFFFFF)
    results = []
    for target in (BERNOULLI, stand_ins.STAND_INS[BERNOULLI]):
        generator = torch.Generator()
        generator.set_state(torch.from_numpy(state))
        results.append(draw(target, torch.empty(MANY), p, generator))
    assert same_bits(*results)
    assert results[0][0][: len(numbers)].tolist() == [float(number / 2**53 < p) for number in numbers]


def test_the_default_generator_is_drawn_from_if_none_is_given() -> None:
    results = []
    for target in (BERNOULLI, stand_ins.STAND_INS[BERNOULLI]):
        torch.manual_seed(3)
        torch.randn(5)  # leaves a number for later in the generator
        drawn = resolve(target)(torch.empty(MANY), 0.3)
        results.append((drawn, torch.randn(3), torch.get_rng_state()))
    assert same_bits(*results)


def test_a_generator_that_torch_keeps_otherwise_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_ins, "_STATE_BYTES", 16)
    monkeypatch.setattr(stand_ins, "math", None)  # what is drawn from the state needs it
    results = [
        draw(target, torch.empty(MANY), 0.4, torch.Generator().manual_seed(2))
        for target in (BERNOULLI, stand_ins.STAND_INS[BERNOULLI])
    ]
    assert same_bits(*results)


def test_what_is_drawn_into_other_tensors_is_left_to_torch() -> None:
    for tensor in (torch.empty(MANY).double(), torch.empty(300, 300).t()[5:], torch.empty(MANY, dtype=torch.bfloat16)):
        results = []
        for target in (BERNOULLI, stand_ins.STAND_INS[BERNOULLI]):
            results.append(draw(target, tensor.clone(), 0.4, torch.Generator().manual_seed(2)))
        assert same_bits(*results)
    with pytest.raises(RuntimeError, match="to be in"):
        resolve(stand_ins.STAND_INS[BERNOULLI])(torch.empty(MANY), 1.5)


# --- pooling ---------------------------------------------------------------------------------------------------------

MAX_POOL = "aten.max_pool2d_with_indices.default"


def mixed(*shape: int, seed: int = 0) -> torch.Tensor:
    """Many equal numbers, some that are none, a plane of nothing but the least there is."""
    tensor = normal(*shape, seed=seed).relu_()
    generator = torch.Generator().manual_seed(seed)
    for special in (NAN, INF, -INF, -0.0):
        tensor[torch.rand(shape, generator=generator) < 0.02] = special
    tensor[0, 0] = -INF
    return tensor


@pytest.mark.parametrize(
    ("shape", "arguments"),
    [
        ((2, 8, 56, 56), ([3, 3], [2, 2], [1, 1])),
        ((2, 8, 64, 64), ([2, 2], [2, 2])),
        ((2, 8, 64, 64), ([2, 2],)),
        ((3, 5, 17, 40), ([3, 3], [1, 1], [1, 1], [1, 1], True)),
        ((2, 4, 40, 41), ([3, 2], [2, 3], [1, 1], [2, 3], True)),
        ((2, 4, 33, 50), ([5, 5], [1, 1], [2, 2], [3, 3])),
        ((2, 4, 33, 50), ([3], [2], [0], [1], True)),
        ((2, 4, 50, 50), ([1, 1], [3, 3])),
        ((2, 4, 50, 50), ([50, 50],)),
        ((1, 600, 3, 3), ([3, 3], [2, 2], [1, 1])),
    ],
)
def test_max_pooling_is_torchs(machine: None, shape: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
    assert_same(MAX_POOL, mixed(*shape), *arguments)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_max_pooling_of_any_window(data: st.DataObject) -> None:
    def pair(low: int, high: int) -> list[int]:
        return [data.draw(st.integers(low, high)), data.draw(st.integers(low, high))]

    kernel, stride, dilation = pair(1, 5), pair(1, 4), pair(1, 3)
    padding = [data.draw(st.integers(0, size // 2)) for size in kernel]
    shape = (2, 3, *(data.draw(st.integers((k - 1) * d + 1, 45)) for k, d in zip(kernel, dilation, strict=True)))
    sample = mixed(*shape, seed=data.draw(st.integers(0, 99))).repeat(1, 1 + 4096 // (6 * shape[2] * shape[3]), 1, 1)
    assert_same(MAX_POOL, sample, kernel, stride, padding, dilation, data.draw(st.booleans()))


def test_other_pools_are_left_to_torch() -> None:
    assert_same(MAX_POOL, mixed(2, 8, 40, 40).double(), [2, 2])
    assert_same(MAX_POOL, mixed(8, 40, 40, 2).movedim(-1, 1), [2, 2])
    assert_same(MAX_POOL, mixed(8, 40, 40), [2, 2])  # no batch
    with pytest.raises(RuntimeError, match="pad should be at most half"):
        resolve(stand_ins.STAND_INS[MAX_POOL])(mixed(2, 8, 40, 40), [2, 2], [2, 2], [2, 2])


# --- products --------------------------------------------------------------------------------------------------------

CONVOLUTION, GRADIENTS = "aten.convolution.default", "aten.convolution_backward.default"
PLAIN = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="products are not MKL's, and may round otherwise")
def test_a_convolution_of_single_elements_is_a_product() -> None:
    """To the bit where the sum is short; on this machine, as on every one, it is asked for each shape."""
    input, weight = normal(3, 48, 12, 12), normal(32, 48, 1, 1, seed=1)
    assert_same(CONVOLUTION, input, weight, None, *PLAIN)
    gradient = normal(3, 32, 12, 12, seed=2)
    assert_same(GRADIENTS, gradient, input, weight, None, *PLAIN, [True, False, False])
    ghost = torch.empty_like(input)
    ghost.untyped_storage().resize_(0)
    plain = resolve(GRADIENTS)(gradient, input, weight, None, *PLAIN, [True, False, False])
    made = resolve(stand_ins.STAND_INS[GRADIENTS])(gradient, ghost, weight, None, *PLAIN, [True, False, False])
    assert same_bits(plain, made) and made[1] is None and made[2] is None


@pytest.mark.parametrize(
    ("weight_shape", "settings"),
    [
        ((8, 6, 3, 3), ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)),
        ((8, 6, 1, 1), ([2, 2], [0, 0], [1, 1], False, [0, 0], 1)),
        ((8, 6, 1, 1), ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)),
        ((8, 3, 1, 1), ([1, 1], [0, 0], [1, 1], False, [0, 0], 2)),
        ((6, 8, 1, 1), ([1, 1], [0, 0], [1, 1], True, [0, 0], 1)),
    ],
)
def test_other_convolutions_are_left_to_torch(
    weight_shape: tuple[int, ...], settings: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "bmm", None)
    input, weight = normal(2, 6, 9, 9), normal(*weight_shape, seed=1)
    assert_same(CONVOLUTION, input, weight, None, *settings)
    gradient = torch.ones_like(resolve(CONVOLUTION)(input, weight, None, *settings))
    assert_same(GRADIENTS, gradient, input, weight, None, *settings, [True, False, False])


def test_products_that_would_not_be_torchs_are_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "bmm", None)
    input, weight, gradient = normal(2, 6, 9, 9), normal(8, 6, 1, 1, seed=1), normal(2, 8, 9, 9, seed=2)
    assert_same(CONVOLUTION, input, weight, normal(8), *PLAIN)  # a bias is added in between
    assert_same(CONVOLUTION, input.double(), weight.double(), None, *PLAIN)
    assert_same(CONVOLUTION, input.to(memory_format=torch.channels_last), weight, None, *PLAIN)
    for mask in ([True, True, False], [False, True, False], [True, False, True]):
        assert_same(GRADIENTS, gradient, input, weight, [8], *PLAIN, mask)


@contextmanager
def less_precise(kind: str) -> Iterator[None]:
    """One kind of op on a CPU may be computed with fewer bits."""
    told = getattr(torch.backends.mkldnn, kind)
    before, told.fp32_precision = told.fp32_precision, "bf16"
    try:
        yield
    finally:
        told.fp32_precision = before


@pytest.mark.parametrize("kind", ["matmul", "conv"])
def test_in_less_than_full_precision_convolutions_are_left_to_torch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the two the one would be computed in full and the other not, on machines that have both."""
    monkeypatch.setattr(torch, "bmm", None)
    input, weight, gradient = normal(2, 6, 9, 9), normal(8, 6, 1, 1, seed=1), normal(2, 8, 9, 9, seed=2)
    with less_precise(kind):
        assert_same(CONVOLUTION, input, weight, None, *PLAIN)
        assert_same(GRADIENTS, gradient, input, weight, None, *PLAIN, [True, False, False])


@pytest.mark.parametrize("kind", ["matmul", "conv"])
def test_another_precision_is_another_capture(kind: str) -> None:
    model = nn.Sequential(nn.Conv2d(6, 8, 1, bias=False), nn.Flatten(), nn.Linear(8 * 81, 3))
    memfit.fit(model, policy="keep")
    x = normal(2, 6, 9, 9)
    for _ in range(2):
        model(x).sum().backward()
    assert model.memfit.num_captures == 1  # type: ignore[union-attr]
    with less_precise(kind):
        model(x).sum().backward()
    assert model.memfit.num_captures == 2  # type: ignore[union-attr]


def products(step: memfit.Step) -> int:
    return sum("convolution" in op.stand_in for op in step.ops)


def test_products_stand_in_only_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    step = memfit.capture(nn.Conv2d(24, 16, 1, bias=False), (normal(2, 24, 9, 9).requires_grad_(),))
    for is_faster in (True, False):
        monkeypatch.setattr(rewrites, "_is_faster", lambda plain, made, is_faster=is_faster: is_faster)
        assert products(rewrite(step, proofs=Proofs(None))) == (2 if is_faster else 0)


def test_what_is_faster_is_found_by_running_both() -> None:
    order: list[str] = []

    def call(name: str, seconds: float) -> None:
        order.append(name)
        time.sleep(seconds)

    slow, fast = partial(call, "slow", 0.01), partial(call, "fast", 0.0)
    assert rewrites._is_faster(slow, fast) and order[:4] == ["slow", "fast"] * 2
    assert not rewrites._is_faster(fast, slow) and not rewrites._is_faster(slow, slow)


def test_chunks_of_a_convolution_have_no_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrites, "_is_faster", lambda plain, made: True)
    plain = memfit.capture(nn.Conv2d(24, 16, 1, bias=False), (normal(4, 24, 9, 9).requires_grad_(),))
    step = rewrite(plain, proofs=Proofs(None))
    whole = [op for op in step.ops if "convolution" in op.stand_in]
    assert len(whole) == 2
    assert all(in_chunks(op, 2).called.endswith("_in_chunks.default") for op in whole)


# --- in steps --------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Something for each of them to do, of a size that is not left to torch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.mix = nn.Conv2d(16, 16, 1, bias=False)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(self.mix(self.body(x)))
        return self.head(F.dropout(h, 0.1).mean((2, 3)))


class LastNet(Net):
    """The same with channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.contiguous(memory_format=torch.channels_last))


def inputs(batch: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 3, 40, 40),)


def stand_ins_of(step: memfit.Step) -> dict[str, str]:
    return {op.target: op.stand_in for op in step.ops if op.stand_in}


def all_that_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a product is faster is not asked, and nothing is remembered."""
    monkeypatch.setattr(rewrites, "_is_faster", lambda plain, made: True)
    monkeypatch.setattr(Proofs, "holds", lambda self, rewrite, signature, experiment: experiment())


def test_each_stands_in_where_it_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrites, "_is_faster", lambda plain, made: True)
    step = rewrite(memfit.capture(Net(), inputs(4)), proofs=Proofs(None))
    assert stand_ins_of(step) == {
        name: stand_ins.STAND_INS[name] for name in stand_ins.STAND_INS if name != NORM_GRADIENTS
    }
    for op in step.ops:
        assert signature(step, op).startswith(f"{op.called}("), "its price is that of what is called"


def test_with_channels_last_both_halves_of_batch_norm_have_one() -> None:
    found = stand_ins_of(rewrite(memfit.capture(LastNet(), inputs(4)), proofs=Proofs(None)))
    assert found == {name: stand_ins.STAND_INS[name] for name in (BATCH_NORM, NORM_GRADIENTS)}


def test_none_stands_in_for_what_it_does_not_serve() -> None:
    in_double = rewrite(memfit.capture(Net().double(), (torch.randn(4, 3, 40, 40).double(),)))
    assert "aten.native_batch_norm.default" not in stand_ins_of(in_double)
    vectors_only = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))  # too few numbers, no maps
    assert not stand_ins_of(rewrite(memfit.capture(vectors_only, (torch.randn(40, 6),))))
    with forbidden():
        assert not stand_ins_of(rewrite(memfit.capture(Net(), inputs(4)))).keys() - {CONVOLUTION, GRADIENTS}
    assert not stand_ins_of(rewrite(memfit.capture(Net(), inputs(4)), without=frozenset({"stand-ins"})))


def test_none_stands_in_where_its_bits_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each self-test is held against a kernel that is wrong in the least way it could be."""
    kernels = stand_ins.kernels()
    assert kernels is not None

    class Wrong:
        """A library whose kernels write over one result after they have run."""

        def __getattr__(self, name: str) -> Any:
            def run(job: Any, *rest: Any) -> None:
                getattr(kernels, name)(job, *rest)
                made = (getattr(job, field, None) for field in ("running_var", "grad_bias", "sums", "out"))
                where = rest[0] if name == "memfit_bernoulli" else next(filter(None, made))
                ctypes.cast(where, ctypes.POINTER(ctypes.c_float))[1] += 1e-3

            return run

    monkeypatch.setattr(stand_ins, "kernels", lambda: Wrong())
    monkeypatch.setattr(torch, "bmm", lambda one, other: (one @ other).mul_(1 + 1e-6))
    for net in (Net(), LastNet()):
        assert not stand_ins_of(rewrite(memfit.capture(net, inputs(4)), proofs=Proofs(None)))


@pytest.mark.parametrize("net", [Net, LastNet])
@pytest.mark.parametrize("policy", ["keep", "sqrt", "gist-lossless"])
def test_a_model_in_which_they_stand_in_trains_as_in_eager(
    net: type[Net], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_that_are_exact(monkeypatch)
    assert_same_as_eager(net(), inputs, policy=policy)


@pytest.mark.parametrize(
    ("net", "expected"), [(Net, {*stand_ins.STAND_INS} - {NORM_GRADIENTS}), (LastNet, {NORM_GRADIENTS})]
)
def test_a_fitted_model_calls_them(net: type[Net], expected: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    all_that_are_exact(monkeypatch)
    model = net()
    memfit.fit(model, policy="keep")
    model(*inputs(4)).sum().backward()
    text = model.memfit.code  # type: ignore[union-attr]
    assert all(f" stand_ins.{name.split('.')[1]}(" in text for name in expected)


@pytest.mark.parametrize("policy", ["keep", "sqrt"])
def test_a_relu_is_left_to_the_batch_norm_before_it(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it comes next and overwrites the result; run again, too."""
    all_that_are_exact(monkeypatch)
    norms = nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Tanh())
    model = nn.Sequential(nn.Conv2d(3, 16, 3), *norms, *(copy.deepcopy(layer) for layer in norms))
    memfit.fit(model, policy=policy)
    model(*inputs(4)).sum().backward()
    text = model.memfit.code  # type: ignore[union-attr]
    assert "aten.relu" not in text
    assert text.count("native_batch_norm(") == 4
    num_again = text.count("operators.renormalise(")
    assert (num_again > 0) == (policy == "sqrt")
    num_rectified = 2 + text.count("is_rectified=True", text.index("def backward_0"))
    assert text.count("is_rectified=True") == num_rectified and (num_rectified > 2) == (policy == "sqrt")


class Chain(nn.Sequential):
    """Batch norms with a ReLU behind each, channels last."""

    def __init__(self) -> None:
        layers = [(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(4)]
        super().__init__(nn.Conv2d(3, 16, 3), *(layer for three in layers for layer in three), nn.Conv2d(16, 4, 1))
        self.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("policy", ["keep", pytest.param("sqrt", marks=pytest.mark.slow), "vdnn-all"])
def test_the_backward_of_a_relu_adds_up_for_the_batch_norm_behind_it(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_that_are_exact(monkeypatch)
    assert_same_as_eager(Chain(), inputs, policy=policy)
    model = memfit.fit(Chain(), policy=policy)
    model(*inputs(4)).sum().backward()
    text = model.memfit.code  # type: ignore[union-attr]
    assert text.count(", sums = stand_ins.gate_and_add_up(") == text.count(", sums=sums)") > 0
    assert policy != "keep" or text.count(", sums=sums)") == 4


def test_a_relu_that_somebody_reads_the_other_side_of_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x)
            return y.relu() * y.tanh()

    all_that_are_exact(monkeypatch)
    assert_same_as_eager(Both(), inputs, policy="keep")
    model = memfit.fit(Both(), policy="keep")
    model(*inputs(4))
    assert "is_rectified" not in model.memfit.code  # type: ignore[union-attr]


def test_without_a_compiler_torch_does_it_and_says_so(tmp_path: Path) -> None:
    script = """
import logging, torch
logging.basicConfig(level=logging.INFO, format="%(message)s")
from memfit import operators, stand_ins
from memfit.torch_internals import resolve
print(stand_ins.kernels(), resolve("memfit_ops.bernoulli_.default")(torch.empty(9999), 1.0).sum().item())
"""
    environment = {**os.environ, "MEMFIT_CACHE": str(tmp_path / "cache"), "CC": "no-such-compiler"}
    ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert ran.stdout.split() == ["None", "9999.0"], ran.stderr
    assert ran.stderr.count("torch's own kernels are used throughout: there is no C compiler 'no-such-compiler'") == 1


# --- how they are compiled -------------------------------------------------------------------------------------------


def built(made: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    compiler = library._find_compiler(os.environ.get("CC"))
    assert compiler is not None
    files = [str(path) for path in library._sources(library.KERNELS) if path.suffix == ".c"]
    command = [*compiler, *flags, f"-I{library.KERNELS.folder}", *files, "-o", str(made), "-lm"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_the_c_compiles_without_a_warning(tmp_path: Path) -> None:
    done = built(tmp_path / "kernels.so", *library.KERNELS.flags, "-Wall", "-Wextra", "-Werror")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_the_sanitizers_find_nothing(tmp_path: Path, seed: int) -> None:
    driver, source = tmp_path / "driver", Path(__file__).parent / "kernel_driver.c"
    flags = ["-O1", "-g", "-std=c11", "-ffp-contract=off", "-pthread", "-fsanitize=address,undefined"]
    done = built(driver, *flags, "-fno-sanitize-recover=all", str(source))
    assert done.returncode == 0, done.stderr
    ran = subprocess.run([str(driver), "300", str(seed)], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
