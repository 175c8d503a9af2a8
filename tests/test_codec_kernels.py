"""The codec kernels against their twins in torch: the same codes, the same tensors, bit for bit, at any address."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from codec_cases import (
    FLOATS,
    RELU,
    SIZES,
    VALUE,
    floats,
    misaligned,
    num_threads,
    packed,
    quick,
    same_bits,
    unpacked,
    without_avx2,
)
from hypothesis import given
from hypothesis import strategies as st

from memfit.capture.needs import Gate, Need, gate_of
from memfit.codecs import bits, gating, kernels, mask
from memfit.codecs.codec import PackedCodec, Reading
from memfit.codecs.mask import Mask
from memfit.codecs.pool import Pool
from memfit.codecs.registry import codec
from memfit.codecs.sparse import BLOCK, CompactedCodec
from memfit.codecs.sparse_float import SparseFloat
from memfit.native import library

needs_compiler = pytest.mark.skipif(not kernels.can_run(torch.empty(0)), reason="there is no C compiler")
pytestmark = needs_compiler

LOSSY = ["fp16", "bf16", "fp10", "fp8", "int8:5", "int4:4294967295"]
SPARSE_LOSSY = ["sparse-fp16", "sparse-bf16", "sparse-fp10", "sparse-fp8"]
OFFSETS = [0, 1, 2, 4, 12]
TABLES = [contextlib.nullcontext, without_avx2]
HARDTANH = gate_of("aten.hardtanh_backward.default", "self", {"min_val": -1.0, "max_val": 1.0})
THREE_WAY = gate_of("aten.sign.default", "self", {})
LEAKY = gate_of("aten.leaky_relu_backward.default", "self", {})


def assert_twins(
    chosen: PackedCodec, tensor: torch.Tensor, settings: tuple[float, ...], *, offsets: tuple[int, int] = (0, 0)
) -> None:
    """Kernel and twin, from aligned and from misaligned memory."""
    expected, has_code = packed(chosen, tensor, settings, twin=True)
    moved = misaligned(tensor, offsets[0]) if tensor.is_contiguous() else tensor
    code, has_code_too = packed(chosen, moved, settings, twin=False, offset=offsets[1])
    assert has_code == has_code_too
    if not has_code:
        return
    said = _meaning(chosen, tensor, settings)
    assert torch.equal(code[said], expected[said])
    back = unpacked(chosen, code, moved, settings, twin=False)
    assert same_bits(back, unpacked(chosen, expected, moved, settings, twin=True))


def _meaning(chosen: PackedCodec, tensor: torch.Tensor, settings: tuple[float, ...]) -> torch.Tensor:
    """Which bytes of a code say something: all but the room that values did not need."""
    size = chosen.packed_bytes(tensor.numel(), tensor.element_size(), settings)
    said = torch.ones(size, dtype=torch.bool)
    if isinstance(chosen, CompactedCodec):
        item, room = chosen.numbers(tensor, settings)
        used = int((tensor.contiguous().view(torch.uint8).view(-1, item) != 0).any(1).sum())
        said[used * item : room * item] = False
        if chosen.name == "csr":
            said[room * item + 4 * -(-tensor.numel() // BLOCK) + used :] = False
    if isinstance(chosen, SparseFloat):
        num_values = torch.tensor([int((b.view(torch.int32) != 0).sum()) for b in tensor.reshape(-1).split(BLOCK)])
        capacity = chosen.capacity_bytes(tensor.numel(), settings)
        said[int(chosen.block_bytes(num_values).sum()) : capacity] = False
    return said


@quick
@given(
    name=st.sampled_from(LOSSY),
    seed=st.integers(0, 10**6),
    count=st.sampled_from(SIZES),
    offsets=st.tuples(st.sampled_from(OFFSETS), st.sampled_from(OFFSETS)),
    table=st.sampled_from(TABLES),
    readings=st.sampled_from([(RELU,), (VALUE,)]),
    not_negative=st.booleans(),
    zeros=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_lossy_kernels_are_their_twins(name, seed, count, offsets, table, readings, not_negative, zeros) -> None:
    chosen = codec(name)
    settings = chosen.settings(readings)
    only_finite = chosen.name in ("fp8", "int8", "int4") and seed % 5 != 0
    tensor = floats(seed, count, zeros=zeros, only_finite=only_finite, not_negative=not_negative)
    with table():
        assert_twins(chosen, tensor, settings, offsets=offsets)


@quick
@given(
    name=st.sampled_from(["sparse", "csr"]),
    capacity=st.sampled_from([1.0, 0.5, 0.31]),
    seed=st.integers(0, 10**6),
    count=st.sampled_from(SIZES),
    offsets=st.tuples(st.sampled_from(OFFSETS), st.sampled_from(OFFSETS)),
    table=st.sampled_from(TABLES),
    zeros=st.sampled_from([0.4, 0.65, 0.7, 0.99, 1.0]),
    dtype=st.sampled_from(FLOATS),
)
def test_sparse_kernels_are_their_twins(name, capacity, seed, count, offsets, table, zeros, dtype) -> None:
    chosen = codec(f"{name}:{capacity}")
    with table():
        assert_twins(chosen, floats(seed, count, dtype=dtype, zeros=zeros), chosen.settings([VALUE]), offsets=offsets)


@quick
@given(
    name=st.sampled_from(SPARSE_LOSSY),
    capacity=st.sampled_from([1.0, 0.5, 0.31]),
    seed=st.integers(0, 10**6),
    count=st.sampled_from([*SIZES, 20_000]),
    offsets=st.tuples(st.sampled_from(OFFSETS), st.sampled_from(OFFSETS)),
    table=st.sampled_from(TABLES),
    zeros=st.sampled_from([0.0, 0.45, 0.65, 0.7, 0.99, 1.0]),
    readings=st.sampled_from([(RELU,), (VALUE,)]),
)
def test_sparse_lossy_kernels_are_their_twins(name, capacity, seed, count, offsets, table, zeros, readings) -> None:
    chosen = codec(f"{name}:{capacity}")
    tensor = floats(seed, count, zeros=zeros, only_finite=name == "sparse-fp8" and seed % 5 != 0)
    with table():
        assert_twins(chosen, tensor, chosen.settings(readings), offsets=offsets)


@pytest.mark.parametrize("name", SPARSE_LOSSY)
def test_twins_of_several_chunks_are_their_kernels(name: str) -> None:
    tensor = floats(9, 2 * bits.CHUNK + 777, zeros=0.6, only_finite=True)
    assert_twins(codec(f"{name}:0.5"), tensor, codec(f"{name}:0.5").settings([RELU]))


@quick
@given(
    seed=st.integers(0, 10**6),
    count=st.sampled_from(SIZES),
    offsets=st.tuples(st.sampled_from(OFFSETS), st.sampled_from(OFFSETS)),
    table=st.sampled_from(TABLES),
    dtype=st.sampled_from([torch.int64, torch.int32]),
    width=st.sampled_from([1, 2, 4]),
    bounds=st.sampled_from([(0, 255), (-3, 252), (0, 256), (-1, 200), (-(2**31), 2**31 - 1)]),
)
def test_narrow_kernels_are_their_twins(seed, count, offsets, table, dtype, width, bounds) -> None:
    random = torch.Generator().manual_seed(seed)
    tensor = torch.randint(bounds[0], bounds[1] + 1, (count,), generator=random).to(dtype)
    if width == tensor.element_size() or not count:
        return
    chosen = codec(f"narrow-int:{width}")
    settings = chosen.settings([Reading(Need.VALUE, bounds=bounds)])
    with table():
        assert_twins(chosen, tensor, settings, offsets=offsets)


@quick
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 3),
    channels=st.integers(1, 9),
    size=st.tuples(st.integers(4, 30), st.integers(4, 30)),
    kernel=st.sampled_from([2, 3, 4]),
    stride=st.integers(1, 3),
    padding=st.integers(0, 1),
    channels_last=st.booleans(),
    offsets=st.tuples(st.sampled_from([0, 8]), st.sampled_from(OFFSETS)),
    table=st.sampled_from(TABLES),
    is_strange=st.booleans(),
)
def test_window_kernels_are_their_twins(
    seed, batch, channels, size, kernel, stride, padding, channels_last, offsets, table, is_strange
) -> None:
    inputs = torch.randn(batch, channels, *size, generator=torch.Generator().manual_seed(seed))
    inputs = inputs.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    _, indices = torch.nn.functional.max_pool2d(inputs, kernel, stride, padding, return_indices=True)
    if is_strange:
        indices[-1, -1, -1, -1] += size[0] * size[1]
    pool = Pool(size, (kernel,) * 2, (stride,) * 2, (padding,) * 2, (1, 1))
    chosen = codec("window")
    with table():
        assert_twins(chosen, indices, chosen.settings([Reading(Need.WINDOW, pool=pool)]), offsets=offsets)


@quick
@given(
    seed=st.integers(0, 10**6),
    count=st.sampled_from(SIZES),
    offsets=st.tuples(st.sampled_from(OFFSETS), st.sampled_from(OFFSETS)),
    table=st.sampled_from(TABLES),
    dtype=st.sampled_from([*FLOATS, torch.bool]),
    gate=st.sampled_from([RELU.gate, LEAKY, HARDTANH, THREE_WAY]),
)
def test_mask_kernels_are_their_twins(
    seed: int, count: int, offsets: tuple[int, int], table, dtype: torch.dtype, gate: Gate
) -> None:
    tensor = floats(seed, count, zeros=0.3)
    tensor = tensor > 0 if dtype is torch.bool else tensor.to(dtype)
    settings = () if dtype is torch.bool else Mask().settings([Reading(Need.SIGN, gate)])
    tensor = misaligned(tensor, offsets[0])
    with table():
        code = Mask().encode(tensor, settings)
        expected = mask.encode_twin(tensor, torch.empty_like(code), settings)
        assert torch.equal(code, expected)
        code = misaligned(code, offsets[1])
        back = Mask().decode(code, misaligned(torch.zeros_like(tensor), offsets[1]), settings)
        assert same_bits(back, mask.decode_twin(code, torch.zeros_like(tensor), settings))
        if gate is RELU.gate and settings:
            gradient = misaligned(floats(seed + 1, count).to(dtype), offsets[0])
            plain = gating.threshold_backward_twin(gradient, code, torch.empty_like(gradient))
            assert same_bits(gating.threshold_backward_twin(gradient.clone(), code, gradient.clone()), plain)
            assert same_bits(gating.threshold_backward(gradient, code, settings), plain)
            assert same_bits(gating.threshold_backward_(gradient, code, settings), plain)


MANY = 300_001  # enough for several threads to get a share each


@pytest.mark.parametrize("count", [MANY, 3 * 768 * 100 + 1])  # the second: a few beyond equal shares of whole grains
@pytest.mark.parametrize(
    "name",
    [
        *("mask", "fp16", "bf16", "fp10", "fp8", "int8", "int4", "sparse:0.5", "csr:0.5"),
        *(f"{name}:0.5" for name in SPARSE_LOSSY),
    ],
)
def test_threads_make_the_same_code(name: str, count: int) -> None:
    chosen, tensor = codec(name), floats(8, count, zeros=0.6, only_finite=True)
    tensor[-1] = -3.0
    settings = chosen.settings([RELU])
    found = []
    for threads in (1, 3):
        with num_threads(threads):
            code = chosen.encode(tensor, settings)
            found.append((code, chosen.decode(code, torch.full_like(tensor, threads), settings)))
    said = _meaning(chosen, tensor, settings) if isinstance(chosen, PackedCodec) else slice(None)
    assert torch.equal(found[0][0][said], found[1][0][said])
    assert same_bits(found[0][1], found[1][1])
    if not chosen.is_lossy and name != "mask":
        assert same_bits(found[0][1], tensor)


def test_threads_make_the_same_window_code() -> None:
    inputs = torch.randn(4, 20, 121, 121)
    _, indices = torch.nn.functional.max_pool2d(inputs, 3, 2, 1, return_indices=True)
    settings = codec("window").settings(
        [Reading(Need.WINDOW, pool=Pool((121,) * 2, (3,) * 2, (2,) * 2, (1,) * 2, (1,) * 2))]
    )
    assert indices.numel() > MANY // 2
    with num_threads(3):
        code = codec("window").encode(indices, settings)
        assert torch.equal(codec("window").decode(code, torch.empty_like(indices), settings), indices)
    with num_threads(1):
        assert torch.equal(codec("window").encode(indices, settings), code)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", ["sparse", "csr"])
def test_threads_agree_on_the_capacity(name: str, threads: int) -> None:
    chosen, tensor = codec(f"{name}:0.5"), torch.zeros(MANY)
    settings = chosen.settings([VALUE])
    room = chosen.room(MANY, 4, settings)
    with num_threads(threads):
        for num_values, fits in ((room, True), (room + 1, False)):
            tensor[-num_values:] = 1.5
            assert packed(chosen, tensor, settings, twin=False)[1] is fits


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", SPARSE_LOSSY)
def test_threads_agree_on_the_capacity_of_lossy_values(name: str, threads: int) -> None:
    chosen, tensor = codec(f"{name}:0.5"), torch.zeros(MANY)
    settings = chosen.settings([VALUE])
    with num_threads(threads):
        for num_values, fits in ((MANY // 2, True), (MANY // 2 + 3 * MANY // 256, False)):
            tensor[-num_values:] = 1.5
            assert packed(chosen, tensor, settings, twin=False)[1] is fits
            assert packed(chosen, tensor, settings, twin=True)[1] is fits


# --- how they are compiled --------------------------------------------------------------------------------------------


def test_every_kernel_has_the_number_that_c_gives_it() -> None:
    header = (library.CODECS.folder / "codecs.h").read_text()
    listed = header.partition("enum which {")[2].partition("NUM_KERNELS")[0].split(",")
    assert [name.strip() for name in listed if name.strip()] == [kernel.name for kernel in kernels.Kernel]


def test_the_environment_can_forbid_them(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, settings = floats(1, 1000), Mask().settings([RELU])
    expected = Mask().encode(tensor, settings)
    monkeypatch.setenv("MEMFIT_NATIVE", "0")
    monkeypatch.setattr(kernels, "run", None)
    assert torch.equal(Mask().encode(tensor, settings), expected)
    for name in ("sparse", "csr", "fp8", "int4"):
        chosen, finite = codec(name), floats(2, 1000, zeros=0.6, only_finite=True)
        code = chosen.encode(finite, chosen.settings([VALUE]))
        chosen.decode(code, torch.empty_like(finite), chosen.settings([VALUE]))


def test_without_a_compiler_torch_does_it_and_says_so(tmp_path: Path) -> None:
    script = """
import logging, torch
logging.basicConfig(level=logging.INFO, format="%(message)s")
from memfit.codecs import kernels
from memfit.codecs.registry import codec
x = torch.randn(1000)
for _ in range(2):
    code = codec("fp10").encode(x, (0,))
print(kernels.can_run(x), code.numel())
"""
    environment = {**os.environ, "MEMFIT_CACHE": str(tmp_path / "cache"), "CC": "no-such-compiler"}
    ran = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert ran.stdout.split() == ["False", "1336"], ran.stderr
    assert ran.stderr.count("codecs run in torch, not in C: there is no C compiler 'no-such-compiler'") == 1


def test_the_two_libraries_are_compiled_apart(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="memfit"):
        assert library.native_library() is not library.native_library(library.CODECS)
    assert not set(library._sources()) & set(library._sources(library.CODECS))
    assert {path.name for path in library._sources(library.CODECS)} >= {"codecs.c", "plain.c", "avx2.c", "mask_body.h"}


def compiler() -> list[str]:
    found = library._find_compiler(os.environ.get("CC"))
    assert found is not None
    return found


def sources(*more: Path) -> list[str]:
    files = [path for path in library._sources(library.CODECS) if path.suffix == ".c"]
    return [f"-I{library.CODECS.folder}", *map(str, [*files, *more])]


def test_the_c_compiles_without_a_warning(tmp_path: Path) -> None:
    flags = [*library.CODECS.flags, "-Wall", "-Wextra", "-Werror", "-O1"]
    command = [*compiler(), *flags, *sources(), "-o", str(tmp_path / "codecs.so")]
    made = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_the_sanitizers_find_nothing(tmp_path: Path, seed: int) -> None:
    driver = tmp_path / "driver"
    flags = ["-O1", "-g", "-std=c11", "-ffp-contract=off", "-pthread", "-fsanitize=address,undefined"]
    source = Path(__file__).parent / "codec_driver.c"
    command = [*compiler(), *flags, "-fno-sanitize-recover=all", *sources(source), "-o", str(driver)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr
    ran = subprocess.run([str(driver), "400", str(seed)], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
