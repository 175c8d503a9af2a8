"""The Triton kernels in Triton's interpreter, against their twins in torch: the same codes, the same tensors, all bits.

`test_triton_kernels.py` runs this in a process of its own: the interpreter must be chosen before Triton is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from codec_cases import FLOATS, RELU, SIZES, VALUE, WHOLE, floats, misaligned, packed, same_bits, unpacked
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpretedFunction

from memfit.capture.needs import Gate, Need, gate_of
from memfit.codecs import dense, gating, kernels, mask
from memfit.codecs.codec import PackedCodec, Reading
from memfit.codecs.kernels import Kernel
from memfit.codecs.mask import Mask
from memfit.codecs.pool import Pool
from memfit.codecs.registry import codec
from memfit.codecs.small_float import Format, widen
from memfit.codecs.triton import table
from memfit.codecs.triton.launch import Job

assert os.environ.get("TRITON_INTERPRET") == "1", "run test_triton_kernels.py"

# numpy warns where a product is infinite, which kernels mean to cut down.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

interpreted = settings(max_examples=25, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
OFFSETS = [0, 1, 2, 4, 12]
LOSSY = ["fp16", "bf16", "fp10", "fp8", "int8:5", "int8:2147483648", "int4", "int4:4294967295"]
LEAKY = gate_of("aten.leaky_relu_backward.default", "self", {})
HARDTANH = gate_of("aten.hardtanh_backward.default", "self", {"min_val": -1.0, "max_val": 1.0})
THREE_WAY = gate_of("aten.sign.default", "self", {})
HARDSIGMOID = gate_of("aten.hardsigmoid_backward.default", "self", {})

_ran: set[Kernel] = set()
_ran_ever: set[Kernel] = set()


@pytest.fixture(autouse=True, scope="module")
def triton_for_all() -> Iterator[None]:
    """CPU tensors take the way of GPU tensors: the same dispatch, the same launches. What runs is noted."""
    patch = pytest.MonkeyPatch()
    patch.setattr(kernels, "is_for_triton", lambda tensor: True)
    kernels._triton_kernels.cache_clear()
    assert kernels._triton_kernels(torch.device("cpu")) is table.KERNELS, "the trial failed"
    for which, start in table.KERNELS.items():
        patch.setitem(table.KERNELS, which, _noting(which, start))
    run = InterpretedFunction.run

    def checked(self, *args, **kwargs):
        """A GPU traps where the interpreter does not mind."""
        for arg in args:
            if isinstance(arg, torch.Tensor):
                assert arg.data_ptr() % arg.element_size() == 0, f"{self.__name__} gets a misaligned pointer"
        return run(self, *args, **kwargs)

    patch.setattr(InterpretedFunction, "run", checked)
    yield
    patch.undo()
    kernels._triton_kernels.cache_clear()


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    _ran.clear()


def _noting(which: Kernel, start):
    def noting(job: Job) -> int:
        _ran.add(which)
        _ran_ever.add(which)
        return start(job)

    return noting


def assert_twins(
    chosen: PackedCodec, tensor: torch.Tensor, settings_: tuple[float, ...], *, offsets: tuple[int, int] = (0, 0)
) -> bool:
    """Kernel and twin, to a code and back. The tensor may lie wherever its dtype may, a code to decode anywhere."""
    expected, has_code = packed(chosen, tensor, settings_, twin=True)
    moved = misaligned(tensor, offsets[0] * tensor.element_size()) if tensor.is_contiguous() else tensor
    code, has_code_too = packed(chosen, moved, settings_, twin=False)
    assert has_code == has_code_too
    if has_code:
        assert torch.equal(code, expected)
        code = misaligned(code, offsets[1])
        back = torch.full_like(tensor, 7)
        chosen.unpack(code, back, settings_)
        assert same_bits(back, unpacked(chosen, expected, tensor, settings_, twin=True))
    return has_code


two_offsets = st.tuples(st.sampled_from([0, 1, 3]), st.sampled_from(OFFSETS))


@pytest.mark.parametrize("name", LOSSY)
@interpreted
@given(
    seed=st.integers(0, 10**6),
    count=st.sampled_from(SIZES),
    offsets=two_offsets,
    readings=st.sampled_from([(RELU,), (VALUE,)]),
    not_negative=st.booleans(),
    zeros=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_lossy_kernels_are_their_twins(name, seed, count, offsets, readings, not_negative, zeros) -> None:
    chosen = codec(name)
    only_finite = chosen.name in ("fp8", "int8", "int4") and seed % 5 != 0
    tensor = floats(seed, count, zeros=zeros, only_finite=only_finite, not_negative=not_negative)
    assert assert_twins(chosen, tensor, chosen.settings(readings), offsets=offsets) or not only_finite


@pytest.mark.parametrize("readings", [(RELU,), (VALUE,)])
@pytest.mark.parametrize("name", ["fp16", "bf16", "fp10", "fp8", "int8", "int4"])
def test_any_pattern_of_float32_is_encoded_alike(name: str, readings: tuple[Reading, ...]) -> None:
    """Every exponent and NaN's payloads, and numbers half-way between two that keep 3, 4, 7 or 10 bits."""
    random = torch.Generator().manual_seed(7)
    drawn = torch.randint(-(2**31), 2**31, (4, 2000), generator=random)
    dropped = torch.tensor([[20], [19], [16], [13]])
    half_way = (drawn >> dropped << dropped) + (1 << (dropped - 1))
    tensor = torch.cat([drawn, half_way, half_way + 1, half_way - 1]).view(-1).to(torch.int32).view(torch.float32)
    if name in ("fp8", "int8", "int4"):
        tensor = tensor[tensor.isfinite()]
    assert assert_twins(codec(name), tensor, codec(name).settings(readings))


@pytest.mark.parametrize("readings", [(RELU,), (VALUE,)])
@pytest.mark.parametrize(("name", "num_codes"), [("fp16", 0x7C00), ("fp10", 0x1F0)])
def test_half_way_between_two_codes_is_rounded_alike(name: str, num_codes: int, readings: tuple[Reading, ...]) -> None:
    """Subnormals among them, which have fewer bits; and the float32 numbers next to each."""
    form = Format(exponent_bits=5, mantissa_bits=10 if name == "fp16" else 4)
    numbers = widen(torch.arange(num_codes, dtype=torch.int32), form)
    if name == "fp16":
        numbers = torch.cat([numbers[:2100], numbers[2100::97], numbers[-2:]])
    half_way = ((numbers[1:] + numbers[:-1]) / 2).view(torch.int32)
    tensor = torch.cat([half_way, half_way + 1, half_way - 1]).view(torch.float32)
    assert_twins(codec(name), torch.cat([tensor, -tensor]), codec(name).settings(readings))


@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_blocks_of_tiny_numbers_are_encoded_alike(name: str) -> None:
    """Down to blocks with nothing but subnormals, whose steps have no inverse."""
    random = torch.Generator().manual_seed(3)
    size = torch.arange(-149, -109).repeat_interleave(256)
    tensor = torch.ldexp(torch.randn(size.shape, dtype=torch.float64, generator=random), size).to(torch.float32)
    for readings in ([RELU], [VALUE]):
        assert assert_twins(codec(name), tensor, codec(name).settings(readings))


@pytest.mark.parametrize(("name", "num_codes"), [("fp16", 1 << 16), ("bf16", 1 << 16), ("fp10", 1 << 10)])
def test_every_code_is_decoded_alike(name: str, num_codes: int) -> None:
    codes = torch.arange(num_codes, dtype=torch.int32)
    if name == "fp10":
        codes = torch.cat([codes, codes.flip(0), codes, codes[:8]])
        codes = codes[: codes.numel() // 3 * 3].view(-1, 3)
        code = (codes[:, 0] | codes[:, 1] << 10 | codes[:, 2] << 20).view(torch.uint8)
        count = 3 * codes.shape[0]
    else:
        code, count = codes.to(torch.int16).view(torch.uint8), num_codes
    found = unpacked(codec(name), code, torch.empty(count), (0,), twin=False)
    assert same_bits(found, unpacked(codec(name), code, torch.empty(count), (0,), twin=True))


@pytest.mark.parametrize("step", [2.0**-126, 2.0**-3, 1.0, 2.0**120])
def test_every_code_of_a_block_is_decoded_alike(step: float) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes.masked_fill(codes & 0x7F == 0x7F, 0)  # NaN, which fp8 never writes
    for name, tail in (("fp8", finite), ("int8", codes), ("int4", codes[:128])):
        for sign in (1.0,) if name == "fp8" else (1.0, -1.0):
            code = torch.cat([torch.tensor([sign * step]).view(torch.uint8), tail])
            found = unpacked(codec(name), code, torch.empty(256), (0,), twin=False)
            assert same_bits(found, unpacked(codec(name), code, torch.empty(256), (0,), twin=True)), name


@interpreted
@given(
    capacity=st.sampled_from([1.0, 0.5, 0.31]),
    seed=st.integers(0, 10**6),
    count=st.sampled_from(SIZES),
    offsets=two_offsets,
    zeros=st.sampled_from([0.4, 0.65, 0.7, 0.99, 1.0]),
    dtype=st.sampled_from(FLOATS),
)
def test_sparse_kernels_are_their_twins(capacity, seed, count, offsets, zeros, dtype) -> None:
    chosen = codec(f"sparse:{capacity}")
    assert_twins(chosen, floats(seed, count, dtype=dtype, zeros=zeros), chosen.settings([VALUE]), offsets=offsets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_capacity_of_sparse_is_exact(dtype: torch.dtype) -> None:
    chosen, tensor = codec("sparse:0.5"), torch.zeros(2500, dtype=dtype)
    settings_ = chosen.settings([VALUE])
    room = chosen.room(2500, dtype.itemsize, settings_)
    for num_values, fits in ((room, True), (room + 1, False), (2500, False)):
        tensor[-num_values:] = -0.0
        around = torch.full((chosen.packed_bytes(2500, dtype.itemsize, settings_) + 64,), 7, dtype=torch.uint8)
        assert chosen.pack(tensor, around[:-64], settings_) is fits
        assert bool((around[-64:] == 7).all()), "it wrote behind the code"


@interpreted
@given(
    seed=st.integers(0, 10**6),
    count=st.sampled_from(SIZES[1:]),
    offsets=two_offsets,
    dtype=st.sampled_from([torch.int64, torch.int32]),
    width=st.sampled_from([1, 2, 4]),
    bounds=st.sampled_from([(0, 255), (1, 252), (0, 256), (-1, 200), (-(2**31), 2**31 - 1), (2**40, 2**40 + 9)]),
)
def test_narrow_kernels_are_their_twins(seed, count, offsets, dtype, width, bounds) -> None:
    random = torch.Generator().manual_seed(seed)
    tensor = torch.randint(bounds[0], bounds[1] + 1, (count,), generator=random).to(dtype)
    if width < tensor.element_size():
        chosen = codec(f"narrow-int:{width}")
        assert_twins(chosen, tensor, chosen.settings([Reading(Need.VALUE, bounds=bounds)]), offsets=offsets)


@pytest.mark.parametrize("bad", [-1, 256, 2**32, -(2**63), 2**63 - 1])
def test_one_integer_out_of_range_is_seen(bad: int) -> None:
    tensor = torch.arange(3000) % 256
    assert packed(codec("narrow-int:1"), tensor, (0, 1), twin=False)[1]
    tensor[2999] = bad
    assert not packed(codec("narrow-int:1"), tensor, (0, 1), twin=False)[1]


@interpreted
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 3),
    channels=st.integers(1, 9),
    size=st.tuples(st.integers(4, 20), st.integers(4, 20)),
    kernel=st.sampled_from([2, 3, 4, 5]),
    stride=st.integers(1, 3),
    padding=st.integers(0, 1),
    dilation=st.integers(1, 2),
    channels_last=st.booleans(),
    offset=st.sampled_from(OFFSETS),
    is_strange=st.booleans(),
)
def test_window_kernels_are_their_twins(
    seed, batch, channels, size, kernel, stride, padding, dilation, channels_last, offset, is_strange
) -> None:
    if dilation * (kernel - 1) + 1 > min(size):
        dilation = 1
    inputs = torch.randn(batch, channels, size[0] + 1, size[1] + 1, generator=torch.Generator().manual_seed(seed))
    inputs = inputs.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    _, indices = torch.nn.functional.max_pool2d(inputs, kernel, stride, padding, dilation, return_indices=True)
    if is_strange:
        indices[-1, -1, -1, -1] += inputs.shape[2] * inputs.shape[3]
    pool = Pool(tuple(inputs.shape[2:]), (kernel,) * 2, (stride,) * 2, (padding,) * 2, (dilation,) * 2)
    settings_ = codec("window").settings([Reading(Need.WINDOW, pool=pool)])
    assert assert_twins(codec("window"), indices, settings_, offsets=(0, offset)) is not is_strange


@pytest.mark.parametrize("is_adaptive", [False, True])
def test_window_kernels_in_three_dimensions(is_adaptive: bool) -> None:
    inputs, functional = torch.randn(2, 3, 6, 7, 8), torch.nn.functional
    if is_adaptive:
        _, indices = functional.adaptive_max_pool3d(inputs, (4, 3, 5), return_indices=True)
        pool = Pool.adaptive((6, 7, 8), (4, 3, 5))
    else:
        _, indices = functional.max_pool3d(inputs, 3, 2, 1, return_indices=True)
        pool = Pool((6, 7, 8), (3,) * 3, (2,) * 3, (1,) * 3, (1,) * 3)
    assert assert_twins(codec("window"), indices, codec("window").settings([Reading(Need.WINDOW, pool=pool)]))


@interpreted
@given(
    seed=st.integers(0, 10**6),
    count=st.sampled_from(SIZES),
    offsets=two_offsets,
    dtype=st.sampled_from([*FLOATS, torch.bool]),
    gate=st.sampled_from([RELU.gate, LEAKY, HARDTANH, THREE_WAY, HARDSIGMOID, Gate(((-0.3, 0.1, 0.0),), 1.0)]),
)
def test_mask_kernels_are_their_twins(
    seed: int, count: int, offsets: tuple[int, int], dtype: torch.dtype, gate: Gate
) -> None:
    tensor = floats(seed, count, zeros=0.3)
    tensor = torch.where(torch.arange(count) % 5 == 0, tensor.clamp(-1, 1), tensor)
    tensor[1::7], tensor[2::7] = 0.1, -0.3
    tensor = tensor > 0 if dtype is torch.bool else tensor.to(dtype)
    settings_ = () if dtype is torch.bool else Mask().settings([Reading(Need.SIGN, gate)])
    tensor = misaligned(tensor, offsets[0] * tensor.element_size())
    code = Mask().encode(tensor, settings_)
    assert torch.equal(code, mask.encode_twin(tensor, torch.empty_like(code), settings_))
    code = misaligned(code, offsets[1])
    back = Mask().decode(code, torch.full_like(tensor, 7), settings_)
    assert same_bits(back, mask.decode_twin(code, torch.zeros_like(tensor), settings_))
    assert _ran >= {Kernel.MASK_UNPACK, Kernel.MASK_PACK if settings_ else Kernel.MASK_PACK_BOOL}


@interpreted
@given(
    seed=st.integers(0, 10**6),
    count=st.sampled_from(SIZES),
    offsets=two_offsets,
    dtype=st.sampled_from(FLOATS),
    is_in_place=st.booleans(),
)
def test_the_gate_kernels_are_their_twin(seed, count, offsets, dtype, is_in_place) -> None:
    code = misaligned(torch.randint(0, 256, (-(-count // 8),), dtype=torch.uint8), offsets[1])
    whole = WHOLE[dtype.itemsize]
    room = torch.iinfo(whole)
    patterns = torch.randint(room.min, room.max, (count,), dtype=whole, generator=torch.Generator().manual_seed(seed))
    gradient = misaligned(patterns, offsets[0] * dtype.itemsize).view(dtype)
    expected = gating.threshold_backward_twin(gradient, code, torch.empty_like(gradient))
    target = gradient if is_in_place else torch.full_like(gradient, 7)
    source = None if is_in_place else gradient
    kernels.run(Kernel.MASK_GATE, code, target, count=count, numbers=(1, dtype.itemsize), table=source)
    assert same_bits(target, expected)


# --- the way there ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp10", "fp8", "int8", "int4", "sparse:0.5", "csr:0.5", "narrow-int"])
def test_a_codec_runs_the_kernels_it_names_and_else_its_twin(name: str) -> None:
    chosen, tensor = codec(name), floats(3, 3000, zeros=0.6, only_finite=True)
    tensor = tensor.abs().clamp(max=99).to(torch.int64) if name == "narrow-int" else tensor
    settings_ = chosen.settings([VALUE])
    assert (chosen.encode_kernel is None) == (chosen.decode_kernel is None) == (chosen.name == "csr")
    code = chosen.encode(tensor, settings_)
    assert code.numel() < tensor.nbytes, "a dense copy tests nothing"
    back = chosen.decode(code, torch.empty_like(tensor), settings_)
    assert _ran == {chosen.encode_kernel, chosen.decode_kernel} - {None}
    expected, _ = packed(chosen, tensor, settings_, twin=True)
    assert same_bits(back, unpacked(chosen, expected, tensor, settings_, twin=True))


@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_what_is_not_finite_becomes_a_dense_copy(name: str) -> None:
    for bad in (float("nan"), float("inf"), -float("inf")):
        tensor = torch.ones(2900)
        tensor[2899] = bad
        dense.forget_fallbacks()
        settings_ = codec(name).settings([VALUE])
        code = codec(name).encode(tensor, settings_)
        assert code.numel() == tensor.nbytes and dense.fallbacks()[name].num_tensors == 1
        assert same_bits(codec(name).decode(code, torch.empty_like(tensor), settings_), tensor)
    dense.forget_fallbacks()


def test_layouts_come_back() -> None:
    tensor = floats(5, 2 * 3 * 9 * 11, zeros=0.7).view(2, 3, 9, 11).contiguous(memory_format=torch.channels_last)
    for name in ("fp16", "fp10"):
        code = codec(name).encode(tensor, (0,))
        back = codec(name).decode(code, torch.empty_like(tensor), (0,))
        assert same_bits(back, unpacked(codec(name), code, tensor, (0,), twin=True))


def test_the_environment_can_forbid_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_NATIVE", "0")
    Mask().encode(floats(1, 1000), Mask().settings([RELU]))
    codec("fp16").encode(floats(1, 1000), (0,))
    assert not _ran


def test_every_kernel_was_run() -> None:
    """The last test: what this file did not run it did not test."""
    assert _ran_ever == set(table.KERNELS)
