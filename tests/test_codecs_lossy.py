"""The lossy codecs: how far off they may be, and what they must never do to a gate, to infinity and to NaN."""

from __future__ import annotations

import math

import pytest
import torch
from codec_cases import RELU, SIZES, VALUE, floats, quick, same_bits, value_like
from hypothesis import given
from hypothesis import strategies as st

from memfit.codecs import dense
from memfit.codecs.registry import LOSSY_NAMES, codec
from memfit.codecs.small_float import Format, shrink, widen

FLOAT_LIKE = ["fp16", "bf16", "fp10", "sparse-fp16", "sparse-bf16", "sparse-fp10"]
BLOCKWISE = ["fp8", "int8", "int4", "sparse-fp8"]


def there_and_back(name: str, tensor: torch.Tensor, *readings) -> torch.Tensor:
    _, *others = codec(name).settings([VALUE])
    settings = (
        int(RELU in readings),
        *others,
    )  # plans always keep gates; without is what the formats are by themselves
    return codec(name).decode(codec(name).encode(tensor, settings), torch.full_like(tensor, 9), settings)


@quick
@given(name=st.sampled_from(LOSSY_NAMES), seed=st.integers(0, 10**6), count=st.sampled_from(SIZES))
def test_no_gate_opens_or_closes(name: str, seed: int, count: int) -> None:
    """Negative, zero, positive, NaN: each stays what it is, whatever else is in its block."""
    for not_negative in (False, True):
        tensor = floats(seed, count, zeros=0.2, only_finite=name in BLOCKWISE, not_negative=not_negative)
        back = there_and_back(name, tensor, RELU, VALUE)
        assert torch.equal(back.sign().nan_to_num(7), tensor.sign().nan_to_num(7))
        gradient = torch.ones(count)
        assert torch.equal(*(torch.ops.aten.threshold_backward(gradient, t, 0) for t in (tensor, back)))


@pytest.mark.parametrize("name", LOSSY_NAMES)
def test_without_the_rule_gates_would_close(name: str) -> None:
    """So that the test above can fail: where gates need not be kept, small numbers do become zero."""
    tensor = torch.full((512,), 1e-42)
    tensor[::100] = 1.0
    assert (there_and_back(name, tensor, VALUE) == 0).any()
    assert (there_and_back(name, tensor, RELU) > 0).all()


@pytest.mark.parametrize("name", FLOAT_LIKE)
def test_infinity_and_nan_survive_and_too_large_becomes_the_largest(name: str) -> None:
    tensor = torch.tensor([math.nan, math.inf, -math.inf, 3.402e38, -3.402e38, -0.0, 0.0, 1.0])
    back = there_and_back(name, tensor)
    assert back[0].isnan() and back[1:3].tolist() == [math.inf, -math.inf]
    largest = {"fp16": 65504.0, "bf16": torch.finfo(torch.bfloat16).max, "fp10": 63488.0}[name.removeprefix("sparse-")]
    assert back[3:5].tolist() == [largest, -largest]
    assert back[5:].tolist() == [0, 0, 1] and back[5].signbit() and not back[6].signbit()


@pytest.mark.parametrize("name", BLOCKWISE)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_formats_without_infinity_make_a_dense_copy(name: str, bad: float) -> None:
    dense.forget_fallbacks()
    tensor = torch.randn(1000)
    tensor[999] = bad
    assert same_bits(there_and_back(name, tensor), tensor)
    assert dense.fallbacks()[name].num_tensors == 1
    dense.forget_fallbacks()


@pytest.mark.parametrize("name", BLOCKWISE)
def test_nothing_finite_becomes_infinite(name: str) -> None:
    most = torch.finfo(torch.float32).max
    for scale in (1, -1):
        tensor = torch.linspace(0.5, 1, 700).mul(most).mul(scale)
        tensor[-1] = most * scale
        assert there_and_back(name, tensor).isfinite().all()


def test_half_and_brain_floats_are_torchs_own_casts() -> None:
    numbers = floats(3, 50_000, only_finite=True)
    assert torch.equal(there_and_back("fp16", numbers), numbers.clamp(-65504, 65504).half().float())
    most = torch.finfo(torch.bfloat16).max
    assert torch.equal(there_and_back("bf16", numbers), numbers.clamp(-most, most).bfloat16().float())


def test_fp8_is_torchs_own_cast_of_the_scaled_block() -> None:
    """A block whose largest number is in the last binade is not scaled at all."""
    numbers = floats(4, 256 * 64, only_finite=True).clamp(-448, 448)
    numbers[::256] = 448.0
    assert torch.equal(there_and_back("fp8", numbers), numbers.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize(
    ("name", "low", "high", "error"),
    [("fp16", 2**-14, 65504, 2**-11), ("bf16", 1e-30, 1e30, 2**-8), ("fp10", 2**-14, 63488, 2**-5)],
)
def test_the_relative_error_in_the_normal_range(name: str, low: float, high: float, error: float) -> None:
    random = torch.Generator().manual_seed(1)
    span = torch.rand(20_000, generator=random, dtype=torch.float64)
    numbers = (low * (high / low) ** span).float()
    off = (there_and_back(name, numbers) - numbers).abs() / numbers
    assert off.max() <= error and off.max() > error * 0.9, "as coarse as it may be, no coarser"


@pytest.mark.parametrize("power", [-140, -100, -20, 0, 100, 120])
def test_fp8_follows_the_size_of_each_block(power: int) -> None:
    numbers = torch.ldexp(torch.rand(2560, generator=torch.Generator().manual_seed(2)) + 0.5, torch.tensor(power))
    back = there_and_back("fp8", numbers, RELU)
    assert bool((back > 0).all()), "below its smallest step the side of zero is kept"
    if power >= -126:
        assert ((back - numbers).abs() / numbers).max() <= 2**-4


def test_small_floats_of_fp16_are_half_precision() -> None:
    """The twin of fp10 with other widths is torch's half: every code, and numbers between."""
    form = Format(exponent_bits=5, mantissa_bits=10)
    every = torch.arange(1 << 16, dtype=torch.int32)
    half = every.to(torch.int16).view(torch.float16)
    wide = widen(every, form)
    assert torch.equal(wide.nan_to_num(7), half.float().nan_to_num(7)) and torch.equal(wide.isnan(), half.isnan())
    numbers = floats(6, 20_000)
    expected = numbers.clamp(-65504, 65504).where(~numbers.isinf(), numbers).half().view(torch.int16)
    found = shrink(numbers, form, keeps_gate=False).to(torch.int16)
    assert torch.equal(found[~numbers.isnan()], expected[~numbers.isnan()])


# --- values of a sparse form ------------------------------------------------------------------------------------------

SPARSE_LOSSY = [name for name in LOSSY_NAMES if name.startswith("sparse-")]


@quick
@given(
    name=st.sampled_from(SPARSE_LOSSY),
    seed=st.integers(0, 10**6),
    count=st.sampled_from([n for n in SIZES if n > 8]),
    zeros=st.sampled_from([0.0, 0.3, 0.6, 0.95, 1.0]),
    readings=st.sampled_from([(RELU, VALUE), (VALUE,)]),
)
def test_values_of_a_sparse_form_are_those_of_the_dense_codec(name, seed, count, zeros, readings) -> None:
    """Block by block: what the dense codec gives back for the non-zeros alone, and zero elsewhere."""
    plain = name.removeprefix("sparse-")
    tensor = floats(seed, count, zeros=zeros, only_finite=plain == "fp8")
    expected = torch.zeros(count)
    for start in range(0, count, 256):
        block = tensor[start : start + 256]
        is_there = block.view(torch.int32) != 0
        values = block[is_there]
        dense_code = torch.empty(codec(plain).packed_bytes(values.numel(), 4, ()), dtype=torch.uint8)
        codec(plain).pack_twin(values, dense_code, (int(RELU in readings),))
        rounded = torch.empty_like(values)
        codec(plain).unpack_twin(dense_code, rounded, ())
        expected[start : start + 256][is_there] = rounded
    dense.forget_fallbacks()
    assert same_bits(there_and_back(name, tensor, *readings), expected)
    assert not dense.fallbacks()


@quick
@given(
    name=st.sampled_from(SPARSE_LOSSY),
    count=st.sampled_from([300, 1000, 2560, 5003]),
    capacity=st.sampled_from([0.001, 0.01, 0.1, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 10**6),
    layout=st.sampled_from(["front", "spread", "random"]),
)
def test_as_many_values_as_the_capacity_says_fit_wherever_they_are(name, count, capacity, seed, layout) -> None:
    chosen, tensor = codec(f"{name}:{capacity}"), torch.zeros(count)
    settings = chosen.settings([RELU])
    num_values = math.ceil(capacity * count)
    places = {
        "front": torch.arange(num_values),
        "spread": torch.linspace(0, count - 1, num_values).round().long(),
        "random": torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:num_values],
    }[layout]
    tensor[places] = 1.5
    code = chosen.encode(tensor, settings)
    assert code.numel() == chosen.code_bytes(value_like(tensor), settings) < tensor.nbytes
    assert torch.equal(chosen.decode(code, torch.empty_like(tensor), settings), tensor)


@pytest.mark.parametrize("name", SPARSE_LOSSY)
def test_many_more_values_make_a_dense_copy(name: str) -> None:
    dense.forget_fallbacks()
    chosen, tensor = codec(f"{name}:0.25"), torch.ones(4096)
    tensor[::2] = 0
    settings = chosen.settings([RELU])
    code = chosen.encode(tensor, settings)
    assert code.numel() == tensor.nbytes and dense.fallbacks()[name].num_tensors == 1
    assert same_bits(chosen.decode(code, torch.empty_like(tensor), settings), tensor)
    dense.forget_fallbacks()


# --- random rounding --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "tops"), [("int8", (127, 255)), ("int4", (7, 15))])
@pytest.mark.parametrize("not_negative", [False, True])
def test_every_number_goes_to_a_neighbouring_multiple(name: str, tops: tuple[int, int], not_negative: bool) -> None:
    numbers = torch.randn(256, generator=torch.Generator().manual_seed(5)) * 3
    numbers = numbers.abs() if not_negative else numbers
    step = numbers.abs().max() / tops[not_negative]
    back = there_and_back(name, numbers)
    assert (back - numbers).abs().max() <= step * 1.0001
    multiples = back / step
    assert torch.allclose(multiples, multiples.round(), atol=1e-3)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_rounding_is_fair(name: str) -> None:
    """The mean over many elements of one number is that number, within five deviations."""
    for number in (0.1234, 0.777, -0.333):
        numbers = torch.full((256 * 400,), number)
        numbers[::256] = 1.0 if number > 0 else -1.0
        step = 1 / {("int8", True): 255, ("int8", False): 127, ("int4", True): 15, ("int4", False): 7}[name, number > 0]
        back = there_and_back(name, numbers)[numbers == number].double()
        assert abs(back.mean() - number) < 5 * step / 2 / math.sqrt(back.numel())
        assert len(back.unique()) == 2


def test_seeds_change_codes_and_torchs_random_numbers_are_left_alone() -> None:
    numbers = torch.randn(5000)
    before = torch.get_rng_state()
    codes = {}
    for name in ("int8", "int8:0", "int8:1", "int4:1"):
        settings = codec(name).settings([VALUE])
        codes[name] = [codec(name).encode(numbers, settings) for _ in range(2)]
        assert torch.equal(*codes[name]), "the same tensor, the same code"
    assert torch.equal(codes["int8"][0], codes["int8:0"][0])
    differing = (codes["int8"][0] != codes["int8:1"][0]).float().mean()
    assert 0.1 < differing < 0.6
    assert torch.equal(torch.get_rng_state(), before)


def test_rounding_changes_from_step_to_step() -> None:
    """The same numbers beside another largest one are rounded by other random numbers."""
    numbers = torch.full((256,), 0.5001)
    errors = []
    for largest in (1.0, 1.0001):
        numbers[0] = largest
        errors.append(there_and_back("int4", numbers)[1:] > 0.51)
    assert 0.2 < (errors[0] != errors[1]).float().mean() < 0.8


@pytest.mark.parametrize("name", LOSSY_NAMES)
def test_codes_are_smaller_by_plan(name: str) -> None:
    value = value_like(torch.empty(4, 64, 7, 7))
    assert codec(name).why_not(value, [RELU, VALUE]) == ""
    assert codec(name).code_bytes(value) < value.bytes
