"""The lossless codecs: what they give back, what it costs to the byte, what they refuse, when they give up."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from codec_cases import FLOATS, ODD, RELU, SIZES, VALUE, floats, quick, same_bits, value_like
from hypothesis import given
from hypothesis import strategies as st

from memfit.capture.needs import Gate, Need, gate_of
from memfit.codecs import dense, mask
from memfit.codecs.bounds import bounds_of
from memfit.codecs.codec import Codec, Reading
from memfit.codecs.gating import threshold_backward, threshold_backward_
from memfit.codecs.mask import Mask
from memfit.codecs.registry import ALL_NAMES, LOSSLESS_NAMES, LOSSY_NAMES, codec
from memfit.codecs.samples import sample
from memfit.errors import BadOption

HARDTANH = gate_of("aten.hardtanh_backward.default", "self", {"min_val": -1.0, "max_val": 1.0})
THREE_WAY = gate_of("aten.sign.default", "self", {})
HARDSIGMOID = gate_of("aten.hardsigmoid_backward.default", "self", {})
LEAKY = gate_of("aten.leaky_relu_backward.default", "self", {})
SPARSE_LOSSY = [name for name in LOSSY_NAMES if name.startswith("sparse-")]


def there_and_back(chosen: Codec, tensor: torch.Tensor, readings: list[Reading]) -> torch.Tensor:
    """Encode and decode, and check the size on the way; a dense copy would be of another."""
    settings = chosen.settings(readings)
    code = chosen.encode(tensor, settings)
    assert code.dtype is torch.uint8 and code.dim() == 1
    assert code.numel() == code.untyped_storage().nbytes() == chosen.code_bytes(value_like(tensor), settings)
    return chosen.decode(code, torch.full_like(tensor, 3), settings)


# --- mask -------------------------------------------------------------------------------------------------------------


@quick
@given(
    seed=st.integers(0, 10**6),
    count=st.sampled_from(SIZES),
    dtype=st.sampled_from(FLOATS),
    gate=st.sampled_from([RELU.gate, LEAKY, HARDTANH, HARDSIGMOID, THREE_WAY]),
)
def test_a_mask_gives_every_elements_stand_in(seed: int, count: int, dtype: torch.dtype, gate: Gate) -> None:
    tensor = floats(seed, count, dtype=dtype, zeros=0.3)
    tensor = torch.where(torch.arange(count) % 5 == 0, tensor.clamp(-1, 1), tensor)
    readings = [Reading(Need.SIGN, gate)]
    assert Mask().why_not(value_like(tensor), readings) == ""
    back = there_and_back(Mask(), tensor, readings)
    expected = torch.full_like(tensor, gate.otherwise)
    for low, high, stand_in in reversed(gate.cells):
        expected = torch.where((tensor >= low) & (tensor <= high), torch.tensor(stand_in, dtype=dtype), expected)
    assert torch.equal(back.isnan(), expected.isnan())
    assert torch.equal(back.nan_to_num(nan=99), expected.nan_to_num(nan=99))


@pytest.mark.parametrize(
    ("gate", "bits"), [(RELU.gate, 1), (LEAKY, 1), (HARDSIGMOID, 1), (HARDTANH, 2), (THREE_WAY, 2)]
)
def test_two_classes_take_one_bit_and_four_take_two(gate: Gate, bits: int) -> None:
    settings = Mask().settings([Reading(Need.SIGN, gate)])
    assert Mask().code_bytes(value_like(torch.empty(1000)), settings) == 1000 * bits // 8


@pytest.mark.parametrize("size", [67, 4099])
def test_hardtanh_backward_through_two_bits_is_bit_equal(size: int) -> None:
    tensor = floats(1, size)
    tensor[::3] = tensor[::3].clamp(-1, 1)
    back = there_and_back(Mask(), tensor, [Reading(Need.SIGN, HARDTANH)])
    gradient = torch.randn(size)
    both = [torch.ops.aten.hardtanh_backward(gradient, t, -1.0, 1.0) for t in (tensor, back)]
    assert same_bits(*both)


def test_a_new_nan_in_the_settings_of_every_call_does_not_fill_memory() -> None:
    *cells, _ = Mask().settings([Reading(Need.SIGN, HARDTANH)])
    tensor = torch.ones(8)
    sizes = set()
    for _ in range(5):
        settings = (*cells, float("nan"))
        Mask().decode(Mask().encode(tensor, settings), tensor, settings)
        sizes.add((mask._Classes._of.cache_info().currsize, mask._patterns.cache_info().currsize))
    assert len(sizes) == 1


@quick
@given(
    seed=st.integers(0, 10**6),
    count=st.sampled_from(SIZES),
    dtype=st.sampled_from(FLOATS),
    threshold=st.sampled_from([0, 1, -2.5]),
)
def test_the_gate_applied_to_the_gradient_is_threshold_backward(
    seed: int, count: int, dtype: torch.dtype, threshold: float
) -> None:
    tensor, gradient = floats(seed, count, dtype=dtype, zeros=0.3), floats(seed + 1, count, dtype=dtype)
    gate = gate_of("aten.threshold_backward.default", "self", {"threshold": threshold})
    settings = Mask().settings([Reading(Need.SIGN, gate)])
    code = Mask().encode(tensor, settings)
    expected = torch.ops.aten.threshold_backward(gradient, tensor, threshold)
    assert same_bits(threshold_backward_(gradient.clone(), code, settings), expected)
    before = gradient.clone()
    assert same_bits(threshold_backward(gradient, code, settings), expected)
    assert same_bits(gradient, before), "only read"


def test_a_gated_gradient_has_the_gradients_layout() -> None:
    tensor, gradient = (torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last) for _ in range(2))
    settings = Mask().settings([RELU])
    gated = threshold_backward(gradient, Mask().encode(tensor, settings), settings)
    assert same_bits(gated, torch.ops.aten.threshold_backward(gradient, tensor, 0))


def test_another_gate_is_not_taken_for_a_threshold() -> None:
    settings = Mask().settings([Reading(Need.SIGN, HARDTANH)])
    for call in (threshold_backward, threshold_backward_):
        with pytest.raises(ValueError, match="not the settings of a threshold"):
            call(torch.ones(8), torch.zeros(2, dtype=torch.uint8), settings)


# --- sparse, csr ------------------------------------------------------------------------------------------------------


@quick
@given(
    name=st.sampled_from(["sparse", "csr"]),
    seed=st.integers(0, 10**6),
    count=st.sampled_from(SIZES),
    zeros=st.sampled_from([0.3, 0.6, 0.95, 1.0]),
    dtype=st.sampled_from(FLOATS),
)
def test_sparse_codes_give_every_bit_back(name: str, seed: int, count: int, zeros: float, dtype: torch.dtype) -> None:
    tensor = floats(seed, count, dtype=dtype, zeros=zeros)
    settings = codec(name).settings([VALUE])
    code = codec(name).encode(tensor, settings)
    assert code.numel() <= max(tensor.nbytes, 0)
    assert same_bits(codec(name).decode(code, torch.full_like(tensor, 3), settings), tensor)


@pytest.mark.parametrize("name", ["sparse:0.5", "csr:0.5", *LOSSY_NAMES, *(f"{name}:0.5" for name in SPARSE_LOSSY)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_layouts_come_back(name: str, memory_format: torch.memory_format) -> None:
    tensor = floats(5, 2 * 3 * 9 * 11, zeros=0.7, only_finite=True).clamp(-100, 100).view(2, 3, 9, 11)
    tensor = tensor.contiguous(memory_format=memory_format)
    back = there_and_back(codec(name), tensor, [VALUE])
    assert back.stride() == tensor.stride()
    if codec(name).is_lossy:
        assert (back - tensor).abs().max() <= 100 / 7
    else:
        assert same_bits(back, tensor)


@pytest.mark.parametrize("num_extra", [0, 1])
@pytest.mark.parametrize("name", ["sparse", "csr", "sparse-fp16", "sparse-bf16"])
def test_the_capacity_is_exact_and_beyond_it_a_dense_copy_is_counted(
    name: str, num_extra: int, caplog: pytest.LogCaptureFixture
) -> None:
    dense.forget_fallbacks()
    chosen, tensor = codec(f"{name}:0.25"), torch.zeros(4000)
    tensor[torch.randperm(4000, generator=torch.Generator().manual_seed(3))[: 1000 + num_extra]] = -0.0
    settings = chosen.settings([VALUE])
    planned = chosen.code_bytes(value_like(tensor), settings)
    with caplog.at_level(logging.WARNING, logger="memfit"):
        codes = [chosen.encode(tensor, settings) for _ in range(2)]
    assert codes[0].numel() == (tensor.nbytes if num_extra else planned)
    for code in (codes[0], codes[0][:planned]):  # a tier gives back a view of the planned size
        assert same_bits(chosen.decode(code, torch.empty_like(tensor), settings), tensor)
    expected = {name: dense.Fallbacks(2, 2 * (tensor.nbytes - planned))} if num_extra else {}
    assert dense.fallbacks() == expected
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == num_extra, "said once"
    assert all(
        f"16,000 bytes does not fit the {planned:,} bytes planned for its '{name}' code" in text for text in said
    )
    dense.forget_fallbacks()
    assert dense.fallbacks() == {}


# --- narrow-int -------------------------------------------------------------------------------------------------------


@quick
@given(
    seed=st.integers(0, 10**6),
    count=st.sampled_from(SIZES),
    dtype=st.sampled_from([torch.int64, torch.int32]),
    bounds=st.sampled_from([(0, 1), (0, 255), (0, 256), (-100, 99), (-1, 65534), (0, 65536), (-(2**31), 2**31 - 1)]),
)
def test_integers_within_their_bounds_come_back(
    seed: int, count: int, dtype: torch.dtype, bounds: tuple[int, int]
) -> None:
    random, (low, high) = torch.Generator().manual_seed(seed), bounds
    tensor = torch.randint(low, high + 1, (count,), generator=random, dtype=torch.int64).to(dtype)
    tensor[: min(count, 2)] = torch.tensor([low, high], dtype=dtype)[: min(count, 2)]
    dense.forget_fallbacks()
    assert torch.equal(there_and_back(codec("narrow-int"), tensor, [Reading(Need.VALUE, bounds=bounds)]), tensor)
    assert not dense.fallbacks()


def test_the_narrowest_bounds_of_all_uses_count() -> None:
    readings = [VALUE, Reading(Need.VALUE, bounds=(-5, 250)), Reading(Need.VALUE, bounds=(-100, 99_999))]
    assert codec("narrow-int").settings(readings) == (-5, 1)
    assert codec("narrow-int:2").settings(readings) == (-5, 2)
    assert codec("narrow-int").settings([VALUE]) == (0, 0), "half of the bytes, whatever these are"


@pytest.mark.parametrize(("name", "bad"), [("narrow-int:1", -1), ("narrow-int:1", 256), ("narrow-int", 2**40)])
def test_an_integer_out_of_range_makes_a_dense_copy(name: str, bad: int) -> None:
    dense.forget_fallbacks()
    tensor, settings = torch.arange(200), codec(name).settings([VALUE])
    tensor[77] = bad
    code = codec(name).encode(tensor, settings)
    assert code.numel() == tensor.nbytes and dense.fallbacks()["narrow-int"].num_tensors == 1
    assert torch.equal(codec(name).decode(code, torch.empty_like(tensor), settings), tensor)
    dense.forget_fallbacks()


def test_bounds_come_from_the_ops_that_read() -> None:
    shaped = torch.empty(4, 1000)
    assert bounds_of("aten.embedding_dense_backward.default", "indices", {"num_weights": 300}) == (0, 299)
    nll = {"self": shaped, "ignore_index": -100}
    assert bounds_of("aten.nll_loss_backward.default", "target", nll) == (-100, 999)
    assert bounds_of("aten.nll_loss2d_backward.default", "target", {**nll, "ignore_index": 1234}) == (0, 1234)
    assert bounds_of("aten.scatter_add_.default", "index", {"self": shaped, "dim": -1}) == (0, 999)
    selected = {"sizes": [4, 7], "dim": 1}
    assert bounds_of("aten.value_selecting_reduction_backward.default", "indices", selected) == (0, 6)
    assert bounds_of("aten.mul.Tensor", "self", {"self": shaped}) is None


# --- what they cost, what they refuse ---------------------------------------------------------------------------------

N = 3 * 256 * 100
BITS_PER_ELEMENT = {
    "mask": 1,
    "sparse:0.4": 1 + 0.4 * 32 + 0.125,
    "csr:0.4": 0.4 * (32 + 8) + 0.125,
    "fp16": 16,
    "bf16": 16,
    "fp10": 32 / 3,
    "fp8": 8 + 0.125,
    "sparse-fp16:0.4": 1 + 0.4 * 16 + 0.125,
    "sparse-bf16:0.4": 1 + 0.4 * 16 + 0.125,
    "sparse-fp10:0.4": 1 + (0.4 + 2 / 256) * 32 / 3 + 0.125,
    "sparse-fp8:0.4": 1 + 0.4 * 8 + 0.125 + 0.125,
    "int8": 8 + 0.125,
    "int4": 4 + 0.125,
}


@pytest.mark.parametrize("name", BITS_PER_ELEMENT)
def test_bits_per_element(name: str) -> None:
    value = value_like(torch.empty(N))
    assert codec(name).code_bytes(value, codec(name).settings([RELU])) * 8 == pytest.approx(N * BITS_PER_ELEMENT[name])


@pytest.mark.parametrize("name", ["sparse", "csr", "fp8", "int8", "int4", "narrow-int", "fp10", *SPARSE_LOSSY])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 255, 257])
def test_a_code_is_never_larger_than_the_tensor(name: str, count: int) -> None:
    tensor = torch.full((count,), 5, dtype=torch.int64 if name == "narrow-int" else torch.float32)
    settings = codec(name).settings([VALUE])
    assert codec(name).encode(tensor, settings).numel() <= tensor.nbytes
    back = codec(name).decode(codec(name).encode(tensor, settings), torch.zeros_like(tensor), settings)
    assert torch.allclose(back, tensor, rtol=0.07)


def test_one_number_is_not_worth_a_step() -> None:
    assert codec("int8").why_not(value_like(torch.empty(1)), [VALUE]) == "its code of 5 bytes would be no smaller"


@pytest.mark.parametrize(
    ("name", "tensor", "readings", "why"),
    [
        ("mask", torch.empty(4, 4)[:, :2], [RELU], "gapless"),
        ("mask", torch.empty(8), [RELU, VALUE], "more of it than on which side"),
        ("mask", torch.empty(8), [RELU, Reading(Need.SIGN, LEAKY)], "different gates"),
        ("sparse", torch.empty(512)[::2], [VALUE], "gapless"),
        ("sparse", torch.empty(512, dtype=torch.int64), [VALUE], "int64, not a float"),
        ("csr", torch.empty(512, dtype=torch.bool), [VALUE], "bool, not a float"),
        ("narrow-int", torch.empty(512), [VALUE], "float32, and int64 and int32 can be narrowed"),
        ("narrow-int", torch.empty(9, dtype=torch.int32), [Reading(Need.VALUE, bounds=(0, 99999))], "no smaller"),
        ("fp16", torch.empty(512, dtype=torch.bfloat16), [VALUE], "bfloat16, and 'fp16' takes float32"),
        ("fp8", torch.empty(512), [Reading(Need.SIGN, HARDTANH)], "other than zero, which rounding could cross"),
        ("sparse-fp8", torch.empty(512, dtype=torch.float64), [VALUE], "float64, and 'sparse-fp8' takes float32"),
        ("sparse-fp16", torch.empty(512), [Reading(Need.SIGN, HARDTANH)], "which rounding could cross"),
        ("sparse-fp16", torch.empty(1 << 31, device="meta"), [VALUE], "more bytes than offsets of 32 bits reach"),
        ("window", torch.empty(2, 2, dtype=torch.int64), [VALUE], "which slot of its window"),
    ],
)
def test_refusals_say_why(name: str, tensor: torch.Tensor, readings: list[Reading], why: str) -> None:
    assert why in codec(name).why_not(value_like(tensor), readings)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("zip", r"codec 'zip': unknown\. Codecs: mask, window, sparse"),
        ("mask:3", r"codec 'mask:3': 'mask' has no option\. Options have: sparse, csr"),
        ("sparse:lots", r"codec 'sparse:lots': the option of 'sparse' is a number, not 'lots'"),
        ("csr:1.5", r"codec 'csr:1.5': the capacity is a fraction of the elements, in \(0, 1\]"),
        ("sparse:0", r"the capacity is a fraction"),
        ("sparse-fp8:2", r"codec 'sparse-fp8:2.0': the capacity is a fraction of the elements, in \(0, 1\]"),
        ("sparse-fp10:few", r"the option of 'sparse-fp10' is a number, not 'few'"),
        ("narrow-int:3", r"the bytes of a number can be 1, 2 or 4"),
        ("int4:-1", r"codec 'int4:-1': the seed is a number of 32 bits, not negative"),
        ("int8:4294967296", r"the seed is a number of 32 bits"),
    ],
)
def test_names_that_mean_nothing_are_refused(name: str, text: str) -> None:
    with pytest.raises(BadOption, match=text):
        codec(name)


def test_the_lossy_ones_are_marked() -> None:
    assert SPARSE_LOSSY == ["sparse-fp16", "sparse-bf16", "sparse-fp10", "sparse-fp8"]
    assert LOSSY_NAMES[:6] == ("fp16", "bf16", "fp10", "fp8", "int8", "int4")
    assert list(LOSSY_NAMES[6:]) == SPARSE_LOSSY
    assert LOSSLESS_NAMES == ("mask", "window", "sparse", "csr", "narrow-int")


@pytest.mark.parametrize("name", ALL_NAMES)
def test_every_codec_has_a_sample_that_it_takes(name: str) -> None:
    dense.forget_fallbacks()
    drawn = sample(name, 1 << 16)
    assert 0.7 < drawn.tensor.nbytes / (1 << 16) < 1.3
    code = codec(name).encode(drawn.tensor, drawn.settings)
    back = codec(name).decode(code, torch.empty_like(drawn.tensor), drawn.settings)
    assert code.numel() < drawn.tensor.nbytes and not dense.fallbacks()
    if name not in (*LOSSY_NAMES, "mask"):
        assert same_bits(back, drawn.tensor)
    assert math.isclose((drawn.tensor == 0).float().mean(), 0.6, abs_tol=0.02) or name in ("window", "narrow-int")


def test_odd_numbers_are_odd() -> None:
    """The other tests draw on these: NaN, both infinities, -0.0 and a subnormal must be among them."""
    assert any(map(math.isnan, ODD)) and {math.inf, -math.inf, 1e-45} <= set(ODD)
    assert any(number == 0 and math.copysign(1, number) < 0 for number in ODD)
