"""Batch norm's kernels give torch's bits in both layouts, with the ReLU next to them, and know their limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from beside_torch import BATCH_NORM, INF, NAN, NORM_GRADIENTS, assert_same, both, forbidden, needs_kernels, normal
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit import operators, stand_ins
from memfit.capture.rewrites.proof import same_bits
from memfit.stand_ins import batch_norm
from memfit.torch_internals import resolve

pytestmark = needs_kernels

# --- batch norm ------------------------------------------------------------------------------------------------------


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
        (3, 32, 53, 53),  # too large to be fetched ahead
        (2, 47, 92, 45),
    ],
)
def test_batch_norm_is_torchs(machine: None, shape: tuple[int, ...]) -> None:
    assert_same(BATCH_NORM, normal(*shape) * 3 + 1, *vectors(shape[1]), True, 0.1, 1e-5)


@pytest.mark.parametrize("num_channels", [*range(1, 9), 12, 15, 21, 38])
@pytest.mark.parametrize("size", [*range(2, 10), 15, 16, 17, 63])
def test_batch_norm_with_channels_and_elements_left_over(num_channels: int, size: int) -> None:
    """Eight channels side by side, four, those that are left; vectors of eight elements, what is left of each map."""
    assert_same(BATCH_NORM, normal(3, num_channels, size) * 3 + 1, *vectors(num_channels), True, 0.1, 1e-5)


@pytest.mark.parametrize("given", ["", "w", "b", "mv", "wb", "wmv"])
@pytest.mark.parametrize(("momentum", "eps"), [(0.1, 1e-5), (1 / 3, 1e-3), (0.0, 0.0), (1.0, 1e-12), (0.77, 0.5)])
def test_batch_norm_with_any_settings(given: str, momentum: float, eps: float) -> None:
    assert_same(BATCH_NORM, normal(4, 19, 6, 6) * 5 - 2, *vectors(19, given=given), True, momentum, eps)


@pytest.mark.parametrize("special", [0.0, -0.0, 1e-42, 3e38, -1e30, 7.0])
def test_batch_norm_of_numbers_that_are_hard_to_add(machine: None, special: float) -> None:
    input = normal(2, 23, 5, 5)
    input[:, ::2] = special  # channels without variance, beside others
    input[:, 3::4, 1] = special
    assert_same(BATCH_NORM, input, *vectors(23), True, 0.1, 1e-5)


@pytest.mark.parametrize("special", [NAN, INF, -INF])
def test_batch_norm_keeps_what_is_no_number_to_its_channel(machine: None, special: float) -> None:
    input = normal(2, 23, 5, 5)
    input[1, 3, 2, 2] = input[0, 17, 0, 0] = input[0, 14, 4, 4] = input[1, 18, 4, 4] = input[0, 22, 4, 4] = special
    plain, made = both(BATCH_NORM, input, *vectors(23), True, 0.1, 1e-5)
    for one, other in zip(plain, made, strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert plain[0].isnan().flatten(2).any(2)[0].nonzero().flatten().tolist() == [3, 14, 17, 18, 22]


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
    plain, made = both(NORM_GRADIENTS, *operands)
    for one, other in zip(plain[:3], made[:3], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert torch.isfinite(plain[0]).all() or abs(special) > 1e20


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


# --- its backward, channels first ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(4, 64, 28, 28), (3, 13, 5, 7), (2, 8, 100), (2, 16, 3, 4, 5), (9, 5, 4, 4), (1, 7, 31, 2), (6, 40, 7, 7)]
)
def test_the_backward_of_batch_norm_is_torchs(machine: None, shape: tuple[int, ...]) -> None:
    assert_same(NORM_GRADIENTS, *backward_of(normal(*shape, seed=1), normal(*shape) * 3 + 1))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 35), st.integers(8, 90), st.integers(0, 10**6))
def test_the_backward_of_batch_norm_of_any_maps(samples: int, channels: int, size: int, seed: int) -> None:
    input = normal(samples, channels, size, seed=seed) * 10 ** (seed % 7 - 3) + seed % 5
    assert_same(NORM_GRADIENTS, *backward_of(normal(samples, channels, size, seed=seed + 1), input))


@pytest.mark.parametrize("special", [0.0, -0.0, 1e-42, 3e38, -1e30, NAN, INF])
def test_the_backward_of_maps_that_are_hard_to_add(machine: None, special: float) -> None:
    input, grad = normal(5, 16, 5, 5), normal(5, 16, 5, 5, seed=1)
    input[:, ::2] = special
    grad[:, 3::4, 1] = special
    plain, made = both(NORM_GRADIENTS, *backward_of(grad, input))
    for one, other in zip(plain[:3], made[:3], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert torch.isfinite(plain[0]).any()


def test_the_backward_of_other_maps_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_norm, "BatchNormBackward", None)
    grad, input, *rest = backward_of(normal(4, 6, 5, 5, seed=1), normal(4, 6, 5, 5))
    for operands in (
        (grad.transpose(2, 3), input, *rest),
        (grad[:, :, :1].contiguous(), input[:, :, :1].contiguous(), *rest),  # too small
        (grad, input, *rest[:-1], [True, False, True]),
        (grad, input, *rest[:5], False, *rest[6:]),
        (grad, input, None, *rest[1:]),
    ):
        assert_same(NORM_GRADIENTS, *operands)


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


@pytest.mark.parametrize("sizes", [(64, 32, 32), (5, 3, 16, 1), (8,), (1, 1, 1)])
@pytest.mark.parametrize("shape", [(4, 14, 14), (3, 5, 7), (2, 3, 3, 4)])
def test_a_concatenation_that_is_normalised_is_both(
    machine: None, sizes: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    num_samples, *image = shape
    larger = normal(num_samples, 70, *image, seed=8)
    pieces = [normal(num_samples, size, *image, seed=size + k) for k, size in enumerate(sizes)]
    pieces[-1] = larger[:, 2 : 2 + sizes[-1]]  # part of another map
    pieces[0][0, 0] = -0.0
    whole = torch.cat(pieces, 1)
    for is_rectified, is_kept in ((False, True), (True, False)):
        given = [vectors(len(whole[0])) for _ in range(2)]
        out, *statistics = torch.ops.aten.native_batch_norm.default(whole, *given[0], True, 0.1, 1e-5)
        kept, made = stand_ins.cat_and_normalise(pieces, given[1], 0.1, 1e-5, is_rectified, is_kept)
        assert made is not None and (same_bits(kept, whole) if is_kept else kept is None)
        assert same_bits([out.relu() if is_rectified else out, *statistics, *given[0]], [*made, *given[1]])
        assert stand_ins.native_batch_norm(whole, *given[1], True, 0.1, 1e-5, is_rectified, made) is made


def test_a_concatenation_that_no_kernel_normalises_is_a_concatenation() -> None:
    for pieces in (
        [normal(4, 8, 5, 5), rows(4, 8, 5, 5)],
        [normal(4, 8, 5, 5).double(), normal(4, 8, 5, 5).double()],
        [normal(4, 8, 1, 1), normal(4, 8, 1, 1)],
        [normal(4, 0, 5, 5), normal(4, 16, 5, 5)],
        [normal(0, 8, 5, 5), normal(0, 8, 5, 5)],
        [normal(4, 8), normal(4, 8)],
    ):
        kept, made = stand_ins.cat_and_normalise(pieces, vectors(16), 0.1, 1e-5, True, False)
        assert made is None and same_bits(kept, torch.cat(pieces, 1))


@pytest.mark.parametrize("layout", [normal, rows])
@pytest.mark.parametrize("shape", [(4, 64, 28, 28), (3, 48, 5, 7), (2, 16, 3, 4, 5), (9, 32, 3, 3)])
@pytest.mark.parametrize("special", [-0.0, NAN, 1e-45])
def test_a_gate_that_goes_on_is_both(machine: None, layout: Any, shape: tuple[int, ...], special: float) -> None:
    """The backward of a ReLU and that of the batch norm before it, where the gradient was."""
    input, grad, gate = layout(*shape) * 3 + 1, layout(*shape, seed=1), layout(*shape, seed=2)
    gate[:, ::3] = special
    gated = torch.ops.aten.threshold_backward.default(grad, gate, 0)
    _, _, *operands = backward_of(gated, input)
    expected = torch.ops.aten.native_batch_norm_backward.default(gated, input, *operands)
    weight, _, _, mean, invstd, *_ = operands
    found, made = stand_ins.gate_and_go_on(grad, gate, 0, input, weight, mean, invstd)
    assert found is grad and made is not None and made[0] is grad
    assert same_bits(expected, made)
    assert stand_ins.native_batch_norm_backward(grad, input, *operands, made) is made


@pytest.mark.parametrize(("layout", "shape"), [(normal, (3, 48, 5, 7)), (rows, (9, 32, 3, 3)), (normal, (4, 3, 1, 2))])
def test_the_gradient_may_be_where_the_gradient_was(machine: None, layout: Any, shape: tuple[int, ...]) -> None:
    input, grad = layout(*shape) * 3 + 1, layout(*shape, seed=1)
    _, _, *operands = backward_of(grad, input)
    expected = torch.ops.aten.native_batch_norm_backward.default(grad, input, *operands)
    kept = grad.clone()
    apart = stand_ins.native_batch_norm_backward(grad, input, *operands)
    assert same_bits(expected, apart) and torch.equal(grad, kept), "unless it is asked for, nothing is overwritten"
    made = stand_ins.native_batch_norm_backward(grad, input, *operands, in_place=True)
    # Maps that small have no kernel: torch's own has a place of its own.
    assert same_bits(expected, made) and (made[0] is grad) == (shape[2:] != (1, 2))


@pytest.mark.parametrize("is_rectified", [False, True])
@pytest.mark.parametrize(("layout", "shape"), [(normal, (3, 48, 5, 7)), (rows, (9, 32, 3, 3)), (normal, (40, 6))])
def test_the_result_may_be_where_the_input_was(
    machine: None, layout: Any, shape: tuple[int, ...], is_rectified: bool
) -> None:
    input = layout(*shape) * 3 + 1
    operands = vectors(shape[1])[:2]
    settings = (None, None, True, 0.1, 1e-5)
    expected = torch.ops.aten.native_batch_norm.default(input, *operands, *settings)
    result = expected[0].relu() if is_rectified else expected[0]
    kept = input.clone()
    for statistics in (None, expected[1:]):
        for in_place in (False, True):
            given = input.clone()
            if statistics is None:
                out, *found = stand_ins.native_batch_norm(given, *operands, *settings, is_rectified, in_place=in_place)
                assert same_bits(expected[1:], found)
            else:
                out = operators.renormalise(given, *operands, *statistics, is_rectified, in_place)
            # What torch normalises, it has a place of its own for.
            assert same_bits(result, out) and (out is given) == (in_place and len(shape) > 2)
            assert out is given or torch.equal(given, kept), "unless it is asked for, nothing is overwritten"


@pytest.mark.parametrize("shape", [(4, 15, 5, 7), (4, 32, 5, 7)])
def test_a_gate_that_cannot_go_on_is_a_gate(shape: tuple[int, ...]) -> None:
    vectors = [normal(shape[1]).abs() for _ in range(3)]
    for layouts, threshold in (((normal, rows, normal), 0), ((rows, rows, normal), 0), ((normal, normal, normal), 0.5)):
        grad, gate, input = (layout(*shape, seed=seed) for seed, layout in enumerate(layouts))
        expected = torch.ops.aten.threshold_backward.default(grad, gate, threshold)
        found, made = stand_ins.gate_and_go_on(grad, gate, threshold, input, *vectors)
        assert found is grad and made is None and torch.equal(grad, expected)


def test_a_relu_behind_what_torch_normalises_is_applied_all_the_same() -> None:
    input = normal(40, 6)
    plain = torch.ops.aten.native_batch_norm.default(input, *vectors(6), True, 0.1, 1e-5)
    made = stand_ins.native_batch_norm(input, *vectors(6), True, 0.1, 1e-5, True)  # type: ignore[arg-type]
    assert same_bits((plain[0].relu(), *plain[1:]), made)
    again = operators.renormalise(input, None, None, *plain[1:], True)
    assert same_bits(operators.renormalise(input, None, None, *plain[1:]).relu(), again)
