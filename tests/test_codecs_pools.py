"""The `window` codec on indices that torch's own poolings make: padded, dilated, ceil-mode, overlapping, with ties."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from codec_cases import quick, same_bits, value_like
from hypothesis import assume, given
from hypothesis import strategies as st

from memfit.capture.needs import Need
from memfit.codecs import dense
from memfit.codecs.codec import Reading
from memfit.codecs.pool import Pool, pool_of
from memfit.codecs.window import Window

FORMATS = {
    2: [torch.contiguous_format, torch.channels_last],
    3: [torch.contiguous_format],  # the other one's indices may lie outside their windows, see needs.py
}


def hard_inputs(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Few different numbers, so that windows have ties, and some NaN and infinity."""
    random = torch.Generator().manual_seed(seed)
    made = torch.randint(-1, 2, shape, generator=random).float()
    made[torch.rand(shape, generator=random) < 0.05] = math.nan
    made[torch.rand(shape, generator=random) < 0.2] = -math.inf
    return made


def check_indices(indices: torch.Tensor, pool: Pool, bits: int | None = None) -> None:
    codec, readings = Window(), [Reading(Need.WINDOW, pool=pool)]
    settings = codec.settings(readings)
    value = value_like(indices)
    assert codec.why_not(value, readings) == ""
    dense.forget_fallbacks()
    code = codec.encode(indices, settings)
    assert not dense.fallbacks(), "an index outside its window"
    assert code.numel() == codec.code_bytes(value, settings)
    if bits is not None:
        assert code.numel() == -(-indices.numel() * bits // 8)
    back = codec.decode(code, torch.full_like(indices, -5), settings)
    assert same_bits(back, indices)


@quick
@given(data=st.data(), seed=st.integers(0, 10**6), num_dims=st.sampled_from([2, 3]), ceil_mode=st.booleans())
def test_indices_of_any_pooling_come_back(data: st.DataObject, seed: int, num_dims: int, ceil_mode: bool) -> None:
    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(data.draw(st.integers(low, high)) for _ in range(num_dims))

    kernel, stride, dilation, size = each(1, 3), each(1, 4), each(1, 2), each(1, 9)
    padding = tuple(data.draw(st.integers(0, k // 2)) for k in kernel)
    geometry = zip(size, kernel, padding, dilation, strict=True)
    assume(all(s + 2 * p >= d * (k - 1) + 1 for s, k, p, d in geometry))
    batch, channels = data.draw(st.tuples(st.integers(0 if num_dims == 2 else 1, 2), st.integers(1, 5)))
    memory_format = data.draw(st.sampled_from(FORMATS[num_dims]))
    inputs = hard_inputs(seed, (batch, channels, *size)).contiguous(memory_format=memory_format)
    op = F.max_pool2d if num_dims == 2 else F.max_pool3d
    _, indices = op(inputs, kernel, stride, padding, dilation, ceil_mode, return_indices=True)
    check_indices(indices, Pool(size, kernel, stride, padding, dilation))


@quick
@given(seed=st.integers(0, 10**6), size=st.tuples(*[st.integers(1, 12)] * 2), out=st.tuples(*[st.integers(1, 9)] * 2))
def test_indices_of_adaptive_poolings_come_back(seed: int, size: tuple[int, int], out: tuple[int, int]) -> None:
    _, indices = F.adaptive_max_pool2d(hard_inputs(seed, (2, 3, *size)), out, return_indices=True)
    check_indices(indices, Pool.adaptive(size, out))


@pytest.mark.parametrize(("kernel", "bits"), [(2, 2), (3, 4), (4, 4), (5, 8), (16, 8)])
def test_a_slot_takes_two_four_or_eight_bits(kernel: int, bits: int) -> None:
    _, indices = F.max_pool2d(torch.randn(2, 3, 37, 41), kernel, return_indices=True)
    check_indices(indices, Pool((37, 41), (kernel,) * 2, (kernel,) * 2, (0, 0), (1, 1)), bits)


def test_one_image_without_a_batch() -> None:
    _, indices = F.max_pool2d(torch.randn(3, 9, 11), 3, 2, 1, return_indices=True)
    check_indices(indices, Pool((9, 11), (3, 3), (2, 2), (1, 1), (1, 1)), 4)


@pytest.mark.parametrize("index", [-1, 8, 63, 2**40, -(2**40)])
def test_an_index_outside_its_window_makes_a_dense_copy(index: int) -> None:
    _, indices = F.max_pool2d(torch.randn(1, 1, 8, 8), 2, return_indices=True)
    indices[0, 0, 1, 1] = index
    settings = Window().settings([Reading(Need.WINDOW, pool=Pool((8, 8), (2, 2), (2, 2), (0, 0), (1, 1)))])
    dense.forget_fallbacks()
    code = Window().encode(indices, settings)
    assert code.numel() == indices.nbytes and dense.fallbacks()["window"].num_tensors == 1
    assert torch.equal(Window().decode(code, torch.empty_like(indices), settings), indices)
    dense.forget_fallbacks()


def test_refusals_say_why() -> None:
    def why_not(tensor: torch.Tensor, *pools: Pool) -> str:
        return Window().why_not(value_like(tensor), [Reading(Need.WINDOW, pool=pool) for pool in pools])

    small, indices = Pool((8, 8), (2, 2), (2, 2), (0, 0), (1, 1)), torch.zeros(2, 3, 4, 4, dtype=torch.int64)
    assert "different poolings" in why_not(indices, small, Pool((8, 8), (3, 3), (2, 2), (0, 0), (1, 1)))
    assert "it is int32" in why_not(indices.int(), small)
    assert "neither contiguous nor channels_last" in why_not(indices.transpose(2, 3), small)
    large = Pool((40, 40), (17, 17), (17, 17), (0, 0), (1, 1))
    assert "windows have 289 slots, and a byte tells 256 apart" in why_not(indices, large)
    far = Pool((4, 4000, 4000), (2, 1, 1), (2, 1, 1), (0, 0, 0), (1, 1, 1))
    assert "reach too far" in why_not(indices, far)


def test_the_geometry_comes_from_the_op_that_reads() -> None:
    arguments = {
        "self": torch.empty(2, 3, 9, 11),
        "grad_output": torch.empty(2, 3, 4, 5),
        "kernel_size": [3],
        "stride": [],
        "padding": [1, 0],
        "dilation": [1],
    }
    pool = pool_of("aten.max_pool2d_with_indices_backward.default", arguments)
    assert pool == Pool((9, 11), (3, 3), (3, 3), (1, 0), (1, 1))
    assert Pool.of_numbers(pool.numbers()) == pool
    adaptive = pool_of("aten.adaptive_max_pool2d_backward.default", arguments)
    assert adaptive == Pool((9, 11), (3, 3)) and Pool.of_numbers(adaptive.numbers()) == adaptive
    assert pool_of("aten.avg_pool2d_backward.default", arguments) is None
