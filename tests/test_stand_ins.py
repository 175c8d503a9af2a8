"""Kernels that stand in for torch's own give its bits, leave its generators where it would, and know their limits."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from beside_torch import (
    ADDITION,
    AVERAGES,
    AVERAGES_GRADIENT,
    BERNOULLI,
    CONVOLUTION,
    GRADIENTS,
    INF,
    MAX_POOL,
    NAN,
    assert_same,
    needs_kernels,
    normal,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memfit
from memfit import stand_ins
from memfit.capture.rewrites.proof import same_bits
from memfit.native import library
from memfit.stand_ins import compiled, drawing
from memfit.torch_internals import resolve

pytestmark = needs_kernels

MANY = 70_000  # elements: enough for several threads, and for a draw that is not left to torch


# --- adding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 32, 14, 14), (3, 5, 7), (1, 70_001), (7, 2)])
def test_additions_in_place_are_torchs(machine: None, shape: tuple[int, ...]) -> None:
    into, what = normal(*shape), normal(*shape, seed=1)
    into.view(-1)[::3], what.view(-1)[1::5], what.view(-1)[2] = -0.0, INF, -INF
    assert_same(ADDITION, into, what)
    for pair in ((into[:, 1:], what[:, 1:]), (into[:, :1], what[:, 1:2]), (into.mT, what.mT)):
        assert_same(ADDITION, *(each.clone(memory_format=torch.preserve_format) for each in pair))
        copies = [[into.clone(), what.clone()] for _ in range(2)]
        for copy, add in zip(copies, (torch.ops.aten.add_.Tensor, stand_ins.add_), strict=True):
            one, other = (
                each.as_strided(view.shape, view.stride(), view.storage_offset())
                for each, view in zip(copy, pair, strict=True)
            )
            assert add(one, other) is one
        assert same_bits(*copies)  # nothing beside them is touched


def test_many_additions_at_once_are_those_one_by_one(machine: None) -> None:
    into = [normal(4, size, 9, 9, seed=size) for size in (64, 3, 1, 40)]
    whole = normal(4, 108, 9, 9, seed=9)
    what = whole.split([64, 3, 1, 40], 1)
    expected = [one + other for one, other in zip(into, what, strict=True)]
    stand_ins.add_all(into, what)
    assert same_bits(into, expected)
    stand_ins.add_all([into[0], into[1].double()], [what[0], what[1].double()])  # torch's own, for all
    assert same_bits(into[0], expected[0] + what[0])


# --- drawing ---------------------------------------------------------------------------------------------------------


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
    monkeypatch.setattr(drawing, "_STATE_BYTES", 16)
    monkeypatch.setattr(drawing, "math", None)  # what is drawn from the state needs it
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


POOLS = [  # shapes of maps, kernel and all that follows
    ((4, 32, 56, 56), ([2, 2], [2, 2], [0, 0], False, True, None)),
    ((4, 32, 14, 14), ([2, 2], [], [0, 0], False, True, None)),
    ((1, 600, 3, 3), ([2, 2], [2, 2], [1, 1], False, False, None)),
    ((2, 4, 39, 41), ([2, 2], [2, 2], [0, 0], True, True, None)),
    ((2, 4, 39, 41), ([2, 2], [2, 2], [0, 0], False, True, None)),
    ((2, 4, 39, 41), ([3, 2], [4, 2], [1, 1], True, False, None)),
    ((2, 4, 40, 40), ([2, 2], [3, 3], [1, 1], True, True, -7)),
    ((3, 5, 40, 17), ([3, 3], [1, 1], [1, 1], False, True, None)),
    ((3, 5, 40, 17), ([3, 3], [1, 1], [1, 1], False, False, None)),
    ((2, 4, 50, 50), ([3, 5], [2, 2], [1, 2], True, True, None)),
    ((2, 4, 50, 50), ([7], [5], [0], False, True, 3)),
    ((2, 4, 50, 50), ([50, 50], [], [0, 0], False, True, None)),
    ((2, 4, 50, 50), ([1, 1], [3, 3], [0, 0], False, True, None)),
]


def without_bytes(like: torch.Tensor) -> torch.Tensor:
    ghost = torch.empty_like(like)
    ghost.untyped_storage().resize_(0)
    return ghost


def assert_averages_are_torchs(input: torch.Tensor, seed: int, *arguments: Any) -> None:
    """Forward and backward, and backward of an input of which there is but the shape."""
    assert_same(AVERAGES, input, *arguments)
    gradient = mixed(*resolve(AVERAGES)(input, *arguments).shape, seed=seed).to(input.dtype)
    assert_same(AVERAGES_GRADIENT, gradient, input, *arguments)
    made = resolve(stand_ins.STAND_INS[AVERAGES_GRADIENT])(gradient, without_bytes(input), *arguments)
    assert same_bits(resolve(AVERAGES_GRADIENT)(gradient, input, *arguments), made)


@pytest.mark.parametrize(("shape", "arguments"), POOLS)
def test_average_pooling_is_torchs(machine: None, shape: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
    assert_averages_are_torchs(mixed(*shape), 1, *arguments)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_average_pooling_of_any_window(data: st.DataObject) -> None:
    def pair(low: int, high: int) -> list[int]:
        return [data.draw(st.integers(low, high)), data.draw(st.integers(low, high))]

    kernel, stride = pair(1, 5), pair(1, 6)
    padding = [data.draw(st.integers(0, size // 2)) for size in kernel]
    shape = (2, 3, *(data.draw(st.integers(size, 45)) for size in kernel))
    seed = data.draw(st.integers(0, 99))
    sample = mixed(*shape, seed=seed).repeat(1, 1 + 4096 // (6 * shape[2] * shape[3]), 1, 1)
    sample.mul_(data.draw(st.sampled_from([1.0, -1.0, -1e-44, 1e38])))  # quotients of nearly zero, infinite sums
    ceil_mode, count_include_pad = data.draw(st.booleans()), data.draw(st.booleans())
    divisor = data.draw(st.none() | st.integers(1, 40) | st.integers(-40, -1))
    assert_averages_are_torchs(sample, seed + 1, kernel, stride, padding, ceil_mode, count_include_pad, divisor)


def test_a_quotient_that_is_a_negative_zero_becomes_a_positive_one() -> None:
    """As torch adds it to a zero: no random number would be so small."""
    least = torch.full((1, 8, 32, 32), -1e-45)
    made = resolve(stand_ins.STAND_INS[AVERAGES])(least, [2, 2], divisor_override=1 << 20)
    assert not made.signbit().any() and not made.any()
    gradient = torch.full((1, 8, 16, 16), -0.0)
    arguments = ([2, 2], [2, 2], [0, 0], False, True, None)
    assert not resolve(stand_ins.STAND_INS[AVERAGES_GRADIENT])(gradient, least, *arguments).signbit().any()


def test_kernels_of_ours_do_the_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    """And torch does where there is none for it."""
    asked: list[str] = []
    kernels = stand_ins.kernels()

    class Kernels:
        """A library that takes note of what is called."""

        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(kernels, name)

    monkeypatch.setattr(compiled, "kernels", lambda: Kernels())
    for shape, arguments in POOLS:
        asked.clear()
        assert_same(AVERAGES, mixed(*shape), *arguments)
        assert asked == ["memfit_average_pool"]
        gradient = resolve(AVERAGES)(mixed(*shape), *arguments)
        assert_same(AVERAGES_GRADIENT, gradient, mixed(*shape), *arguments)
        assert asked[1:] == ["memfit_average_pool_backward"] * stand_ins.are_apart(*arguments[:2])
    asked.clear()
    settings = ([2, 2], [2, 2], [0, 0], False, True, None)
    for sample in (
        mixed(2, 8, 40, 40).double(),
        mixed(2, 8, 40, 40).to(memory_format=torch.channels_last),
        mixed(8, 40, 40),  # no batch
        mixed(2, 2, 8, 8),  # too few elements
    ):
        assert_averages_are_torchs(sample, 0, *settings)
    gradient = mixed(2, 8, 20, 20).to(memory_format=torch.channels_last)
    assert_same(AVERAGES_GRADIENT, gradient, mixed(2, 8, 40, 40), *settings)
    assert not asked


def test_what_is_wrong_with_averages_is_torchs_to_say() -> None:
    forward, backward = (resolve(stand_ins.STAND_INS[name]) for name in (AVERAGES, AVERAGES_GRADIENT))
    maps = mixed(2, 8, 40, 40)
    with pytest.raises(RuntimeError, match="pad should be at most half"):
        forward(maps, [2, 2], [2, 2], [2, 2])
    with pytest.raises(RuntimeError, match="divisor must be not zero"):
        forward(maps, [2, 2], divisor_override=0)
    with pytest.raises(RuntimeError, match="divisor must be not zero"):
        backward(mixed(2, 8, 20, 20), maps, [2, 2], [2, 2], [0, 0], False, True, 0)
    with pytest.raises(RuntimeError, match="Expected a tensor of dimension 4"):
        backward(mixed(2, 8, 10, 20), maps, [2, 2], [2, 2], [0, 0], False, True, None)


# --- products --------------------------------------------------------------------------------------------------------

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
