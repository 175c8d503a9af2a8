"""A max pooling's backward from the code of its indices, against torch's own: the same bits, whatever the geometry."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from codec_cases import misaligned, num_threads, quick, without_avx2
from hypothesis import assume, given
from hypothesis import strategies as st

from memfit.capture.needs import Need
from memfit.codecs import dense, kernels, pooling
from memfit.codecs.codec import Reading
from memfit.codecs.pool import Pool
from memfit.codecs.pooling import max_pool_backward, max_pool_backward_twin
from memfit.codecs.window import Window

FORMATS = [torch.contiguous_format, torch.channels_last]
TABLES = [contextlib.nullcontext, without_avx2]
WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def hard_inputs(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Few different numbers, so that windows have ties and overlapping ones share their largest; some NaN, infinity."""
    random = torch.Generator().manual_seed(seed)
    made = torch.randint(-1, 2, shape, generator=random).to(dtype)
    made[torch.rand(shape, generator=random) < 0.05] = math.nan
    made[torch.rand(shape, generator=random) < 0.2] = -math.inf
    return made


def hard_gradient(seed: int, like: torch.Tensor) -> torch.Tensor:
    """Numbers of all sizes, so that the order of a sum shows; zeros of both signs, infinity, NaN."""
    random = torch.Generator().manual_seed(seed)
    shape = tuple(like.shape)
    made = torch.randn(shape, generator=random) * torch.exp(3 * torch.randn(shape, generator=random))
    chance = torch.rand(shape, generator=random)
    made[chance < 0.1] = -0.0
    made[(chance > 0.1) & (chance < 0.12)] = math.inf
    made[(chance > 0.12) & (chance < 0.13)] = math.nan
    gradient = torch.empty_like(like)
    return gradient.copy_(made)


def assert_same(one: torch.Tensor, other: torch.Tensor) -> None:
    """Equal bits and layout; NaN equals NaN, whichever of two its bits are from."""
    assert one.stride() == other.stride() and one.dtype is other.dtype
    assert torch.equal(one.isnan(), other.isnan())
    whole = WHOLE[one.element_size()]
    assert torch.equal(one.nan_to_num(nan=7.0).view(whole), other.nan_to_num(nan=7.0).view(whole))


def code_of(indices: torch.Tensor, pool: Pool) -> tuple[torch.Tensor, tuple[float, ...]]:
    settings = Window().settings([Reading(Need.WINDOW, pool=pool)])
    return Window().encode(indices, settings), settings


def check(inputs: torch.Tensor, pool: Pool, ceil_mode: bool, *, seed: int = 0) -> torch.Tensor:
    """Pool, code, and compare; what the kernel made comes back."""
    num_dims = len(pool.input_size)
    op, backward = {
        2: (F.max_pool2d, torch.ops.aten.max_pool2d_with_indices_backward),
        3: (F.max_pool3d, torch.ops.aten.max_pool3d_with_indices_backward),
    }[num_dims]
    geometry = (pool.kernel, pool.stride, pool.padding, pool.dilation)
    _, indices = op(inputs, *geometry, ceil_mode, return_indices=True)
    gradient = hard_gradient(seed, torch.empty_like(indices, dtype=inputs.dtype))
    expected = backward(gradient, inputs, *geometry, ceil_mode, indices)
    dense.forget_fallbacks()
    code, settings = code_of(indices, pool)
    assert not dense.fallbacks()
    found = max_pool_backward(gradient, code, torch.full_like(inputs, 7), settings)
    assert_same(found, expected)
    assert_same(max_pool_backward_twin(gradient, code, torch.full_like(inputs, 7), settings), expected)
    return found


GEOMETRIES = {
    "2x2": ((12, 16), (2, 2), (2, 2), (0, 0), (1, 1), False),
    "2x2, odd size": ((13, 17), (2, 2), (2, 2), (0, 0), (1, 1), False),
    "2x2, rounded up": ((13, 17), (2, 2), (2, 2), (0, 0), (1, 1), True),
    "3x3 overlapping": ((15, 33), (3, 3), (2, 2), (0, 0), (1, 1), False),
    "3x3 padded": ((14, 38), (3, 3), (2, 2), (1, 1), (1, 1), False),
    "3x3 padded, rounded up": ((14, 19), (3, 3), (2, 2), (1, 1), (1, 1), True),
    "3x3 at every element": ((9, 21), (3, 3), (1, 1), (1, 1), (1, 1), False),
    "dilated": ((20, 23), (3, 2), (2, 1), (1, 1), (2, 3), False),
    "apart": ((20, 23), (2, 2), (3, 5), (0, 1), (1, 1), False),
    "a byte to a slot": ((26, 31), (5, 5), (3, 3), (2, 2), (1, 1), False),
    "wider than the input": ((9, 1), (3, 2), (1, 1), (1, 1), (1, 1), False),
    "one window": ((7, 7), (7, 7), (7, 7), (0, 0), (1, 1), False),
    "uneven": ((11, 18), (3, 4), (2, 3), (1, 2), (1, 1), True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_every_geometry_gives_torchs_bits(geometry: tuple, memory_format: torch.memory_format, dtype) -> None:
    size, kernel, stride, padding, dilation, ceil_mode = geometry
    inputs = hard_inputs(3, (2, 19, *size), dtype).contiguous(memory_format=memory_format)
    for table in TABLES:
        with table():
            check(inputs, Pool(size, kernel, stride, padding, dilation), ceil_mode, seed=5)


@quick
@given(data=st.data(), seed=st.integers(0, 10**6), num_dims=st.sampled_from([2, 2, 3]), ceil_mode=st.booleans())
def test_any_geometry_gives_torchs_bits(data: st.DataObject, seed: int, num_dims: int, ceil_mode: bool) -> None:
    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(data.draw(st.integers(low, high)) for _ in range(num_dims))

    kernel, stride, dilation, size = each(1, 4), each(1, 4), each(1, 2), each(1, 20 if num_dims == 2 else 9)
    padding = tuple(data.draw(st.integers(0, k // 2)) for k in kernel)
    geometry = zip(size, kernel, padding, dilation, strict=True)
    assume(all(s + 2 * p >= d * (k - 1) + 1 for s, k, p, d in geometry))
    shape = (data.draw(st.integers(1, 2)), data.draw(st.integers(1, 18)), *size)
    memory_format = data.draw(st.sampled_from(FORMATS if num_dims == 2 else FORMATS[:1]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    inputs = hard_inputs(seed, shape, dtype).contiguous(memory_format=memory_format)
    with data.draw(st.sampled_from(TABLES))():
        check(inputs, Pool(size, kernel, stride, padding, dilation), ceil_mode, seed=seed)


@quick
@given(seed=st.integers(0, 10**6), size=st.tuples(*[st.integers(1, 14)] * 2), out=st.tuples(*[st.integers(1, 9)] * 2))
def test_adaptive_poolings_give_torchs_bits(seed: int, size: tuple[int, int], out: tuple[int, int]) -> None:
    for memory_format in FORMATS:
        inputs = hard_inputs(seed, (2, 9, *size)).contiguous(memory_format=memory_format)
        _, indices = F.adaptive_max_pool2d(inputs, out, return_indices=True)
        gradient = hard_gradient(seed, torch.empty_like(indices, dtype=torch.float32))
        expected = torch.ops.aten.adaptive_max_pool2d_backward(gradient, inputs, indices)
        code, settings = code_of(indices, Pool.adaptive(size, out))
        for call in (max_pool_backward, max_pool_backward_twin):
            assert_same(call(gradient, code, torch.full_like(inputs, 7), settings), expected)


POOL = Pool((13, 17), (3, 3), (2, 2), (1, 1), (1, 1))


def test_one_image_without_a_batch_and_none_at_all() -> None:
    check(hard_inputs(1, (5, 13, 17)), POOL, False)
    check(hard_inputs(1, (0, 5, 13, 17)), POOL, False)


def made_of(shape: tuple[int, ...] = (2, 3, 13, 17)) -> tuple[torch.Tensor, ...]:
    """Inputs, their indices under POOL, a gradient."""
    inputs = hard_inputs(2, shape)
    _, indices = F.max_pool2d(inputs, 3, 2, 1, return_indices=True)
    return inputs, indices, hard_gradient(3, torch.empty_like(indices, dtype=torch.float32))


def test_the_order_of_sums_shows() -> None:
    """So that the tests above can fail: the sums of the same windows from the last to the first are others."""
    inputs, indices, gradient = made_of()
    finite = gradient.nan_to_num(0, 0, 0)
    code, settings = code_of(indices, POOL)
    found = max_pool_backward(finite, code, torch.empty_like(inputs), settings).view(6, -1)
    backwards = torch.zeros_like(found)
    for plane in range(6):
        pairs = zip(indices.view(6, -1)[plane].tolist(), finite.view(6, -1)[plane], strict=True)
        for index, number in reversed(list(pairs)):
            backwards[plane, index] += number
    assert torch.allclose(found, backwards) and not torch.equal(found, backwards)


@pytest.mark.skipif(not kernels.can_run(torch.empty(0)), reason="there is no C compiler")
def test_the_indices_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, indices, gradient = made_of()
    code, settings = code_of(indices, POOL)
    monkeypatch.setattr(pooling, "max_pool_backward_twin", None)
    max_pool_backward(gradient, code, torch.empty_like(inputs), settings)


def test_the_environment_can_forbid_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, indices, gradient = made_of()
    code, settings = code_of(indices, POOL)
    expected = max_pool_backward(gradient, code, torch.empty_like(inputs), settings)
    monkeypatch.setenv("MEMFIT_NATIVE", "0")
    monkeypatch.setattr(kernels, "run", None)
    assert_same(max_pool_backward(gradient, code, torch.empty_like(inputs), settings), expected)


def test_a_dense_copy_serves_as_well() -> None:
    """An index outside its window, which torch adds to where it says."""
    inputs, indices, gradient = made_of()
    indices[0, 0, 0, 0] = 13 * 17 - 1
    code, settings = code_of(indices, POOL)
    assert code.numel() == indices.nbytes
    geometry = (POOL.kernel, POOL.stride, POOL.padding, POOL.dilation)
    expected = torch.ops.aten.max_pool2d_with_indices_backward(gradient, inputs, *geometry, False, indices)
    planned = Window().packed_bytes(indices.numel(), 8, settings)
    for given_code in (code, code[:planned]):
        assert_same(max_pool_backward(gradient, given_code, torch.full_like(inputs, 7), settings), expected)
    dense.forget_fallbacks()


def test_an_input_in_another_layout_than_the_output() -> None:
    inputs, indices, gradient = made_of()
    code, settings = code_of(indices, POOL)
    expected = max_pool_backward(gradient, code, torch.empty_like(inputs), settings)
    like = torch.full_like(inputs, 7).contiguous(memory_format=torch.channels_last)
    found = max_pool_backward(gradient, code, like, settings)
    assert found.stride() == like.stride()
    assert_same(found.contiguous(), expected)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("offset", "code_offset"), [(0, 1), (4, 3), (12, 2), (20, 5)])
def test_misaligned_memory(offset: int, code_offset: int, channels_last: bool) -> None:
    inputs, indices, gradient = made_of((2, 11, 13, 17))
    if channels_last:
        inputs, indices, gradient = (t.contiguous(memory_format=torch.channels_last) for t in made_of((2, 11, 13, 17)))
    code, settings = code_of(indices, POOL)
    expected = max_pool_backward(gradient, code, torch.empty_like(inputs), settings)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        whole = misaligned(tensor.as_strided((tensor.numel(),), (1,)), offset)
        return whole.as_strided(tensor.shape, tensor.stride())

    apart = misaligned(code, code_offset)
    for table in TABLES:
        with table():
            found = max_pool_backward(moved(gradient), apart, moved(torch.full_like(inputs, 7)), settings)
            assert_same(found, expected)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("shape", [(3, 41, 80, 80), (1, 130, 67, 45), (2, 7, 260, 240)])
def test_threads_make_the_same_gradient(shape: tuple[int, ...], memory_format: torch.memory_format) -> None:
    pool = Pool(shape[2:], (3, 3), (2, 2), (1, 1), (1, 1))
    inputs = hard_inputs(4, shape).contiguous(memory_format=memory_format)
    found = []
    for threads in (1, 2, 3, 5):
        with num_threads(threads):
            found.append(check(inputs, pool, False))
    for other in found[1:]:
        assert_same(found[0], other)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_a_damaged_code_writes_nothing_outside(geometry: tuple, memory_format: torch.memory_format) -> None:
    size, kernel, stride, padding, dilation, ceil_mode = geometry
    around = torch.full((3, 19, *size), 7.0).contiguous(memory_format=memory_format)
    _, indices = F.max_pool2d(around[1:2], kernel, stride, padding, dilation, ceil_mode, return_indices=True)
    code, settings = code_of(indices, Pool(size, kernel, stride, padding, dilation))
    for seed, table in enumerate(TABLES * 4):
        code.copy_(torch.randint(0, 256, code.shape, generator=torch.Generator().manual_seed(seed)))
        with table():
            max_pool_backward(torch.ones_like(indices, dtype=torch.float32), code, around[1:2], settings)
        assert bool((around[::2] == 7).all())


def test_tensors_of_another_pooling_are_refused() -> None:
    inputs, indices, gradient = made_of()
    code, settings = code_of(indices, POOL)
    with pytest.raises(ValueError, match=r"a gradient of \(2, 3, 7, 9\) .* of \(2, 3, 13, 16\) .* over \(13, 17\)"):
        max_pool_backward(gradient, code, torch.empty(2, 3, 13, 16), settings)
    with pytest.raises(ValueError, match="is not that of a pooling"):
        max_pool_backward(gradient[:1], code, inputs, settings)
    if kernels.can_run(inputs):
        short = code[:-1].clone()
        with pytest.raises(ValueError, match="the code has 188 bytes, and indices like these have 189"):
            max_pool_backward(gradient, short, torch.empty_like(inputs), settings)
