"""The Triton kernels compiled for a GPU that is not here, just as they are launched; nothing runs.

The interpreter takes much that the compiler refuses, and rounds like numpy whatever a GPU would do: so this looks at
the instructions too. `test_triton_kernels.py` runs this in a process of its own, with the GPU in the environment.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest
import torch
from codec_cases import FLOATS, RELU, VALUE, floats
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from memfit.capture.needs import Need, gate_of
from memfit.codecs import kernels
from memfit.codecs.codec import Reading
from memfit.codecs.kernels import Kernel
from memfit.codecs.mask import Mask
from memfit.codecs.pool import Pool
from memfit.codecs.registry import codec
from memfit.codecs.triton import table
from memfit.codecs.triton.launch import Job

BACKEND, _, ARCHITECTURE = os.environ["MEMFIT_TRITON_TARGET"].partition(":")
HARDTANH = gate_of("aten.hardtanh_backward.default", "self", {"min_val": -1.0, "max_val": 1.0})
# What would not round as torch does, or take a subnormal for zero.
INEXACT = re.compile(r"\bfma\.\S*f(?:16|32|64)\b|\S*\.ftz\S*|\S*\.approx\S*|\bdiv\.full\S*")
BEYOND_32_BITS = (1 << 31) + 5


class AbsentGpu:
    """What Triton asks the driver before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget(BACKEND, int(ARCHITECTURE), 32) if BACKEND == "cuda" else GPUTarget(BACKEND, ARCHITECTURE, 64)


class Compiled:
    """What was compiled: the assembly of every kernel, and which jobs asked for it."""

    def __init__(self) -> None:
        self.assembly: list[tuple[str, str]] = []
        self.jobs: list[tuple[Kernel, Job]] = []


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """CPU tensors take the way of GPU tensors, up to the launch."""
    made, run = Compiled(), JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        found = run(self, *args, grid=grid, warmup=True, **kwargs)
        made.assembly.append((self.__name__, found.asm["ptx" if BACKEND == "cuda" else "amdgcn"]))
        assert found.asm["cubin" if BACKEND == "cuda" else "hsaco"], "no machine code"
        return found

    def noting(which: Kernel):
        def start(job: Job) -> int:
            made.jobs.append((which, job))
            return table.KERNELS[which](job)

        return start

    monkeypatch.setattr(driver, "_active", AbsentGpu())
    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(kernels, "is_for_triton", lambda tensor: True)
    monkeypatch.setattr(kernels, "_triton_kernels", lambda device: {which: noting(which) for which in table.KERNELS})
    return made


def start_one_of_each() -> None:
    for name in ("fp16", "bf16", "fp10", "fp8", "int8", "int4:77"):
        there_and_back(name, floats(1, 3000), codec(name).settings([RELU]))
    there_and_back("sparse:0.5", floats(1, 3001), (0.5,))
    there_and_back("narrow-int:2", torch.arange(99), (1, 2))
    pool_there_and_back(3, torch.contiguous_format)
    mask_there_and_back(torch.float32, RELU)
    mask_there_and_back(torch.bool, None)


def start_more() -> None:
    """All else that changes how they are compiled: dtypes, widths, gates, and sizes that are 1."""
    for name in ("fp16", "bf16", "fp10", "fp8", "int8", "int4:77"):
        there_and_back(name, floats(1, 256), codec(name).settings([VALUE]))
    there_and_back("fp16", torch.ones(1), (0,))
    for dtype in FLOATS:
        there_and_back("sparse:0.5", floats(1, 3001, dtype=dtype), (0.5,))
        there_and_back("sparse:0.5", torch.zeros(9, dtype=dtype), (0.5,))
        for reading in (RELU, Reading(Need.SIGN, HARDTANH)):
            mask_there_and_back(dtype, reading)
    for width, dtype, low in ((1, torch.int64, 0), (2, torch.int32, 1), (4, torch.int64, 2**40)):
        there_and_back(f"narrow-int:{width}", torch.arange(99, dtype=dtype), (low, width))
    for kernel in (2, 3, 5):
        pool_there_and_back(kernel, torch.channels_last)
        pool_there_and_back(kernel, torch.contiguous_format)


def pool_there_and_back(kernel: int, memory_format: torch.memory_format) -> None:
    inputs = torch.randn(2, 3, 12, 13).to(memory_format=memory_format)
    _, indices = torch.nn.functional.max_pool2d(inputs, kernel, 2, 1, return_indices=True)
    pool = Pool((12, 13), (kernel,) * 2, (2, 2), (1, 1), (1, 1))
    there_and_back("window", indices, codec("window").settings([Reading(Need.WINDOW, pool=pool)]))


def mask_there_and_back(dtype: torch.dtype, reading: Reading | None) -> None:
    tensor = floats(1, 1000).to(dtype)
    settings = () if reading is None else Mask().settings([reading])
    code = Mask().encode(tensor, settings)
    Mask().decode(code, tensor, settings)
    for gradient in (None, tensor) if reading is RELU else ():
        numbers = (1, dtype.itemsize)
        kernels.run(Kernel.MASK_GATE, code, tensor.clone(), count=1000, numbers=numbers, table=gradient)


def there_and_back(name: str, tensor: torch.Tensor, settings: tuple[float, ...]) -> None:
    chosen = codec(name)
    size = chosen.packed_bytes(tensor.numel(), tensor.element_size(), settings)
    code = torch.zeros(size, dtype=torch.uint8)
    chosen.pack(tensor, code, settings)
    chosen.unpack(code, tensor, settings)


def assert_exact(compiled: Compiled) -> None:
    if BACKEND == "cuda":
        assert not {(name, word) for name, text in compiled.assembly for word in INEXACT.findall(text)}


def test_one_of_each_compiles(compiled: Compiled) -> None:
    start_one_of_each()
    assert {which for which, _ in compiled.jobs} == set(table.KERNELS)
    assert_exact(compiled)


def test_the_others_compile(compiled: Compiled) -> None:
    start_more()
    assert_exact(compiled)


def test_each_compiles_for_counts_beyond_32_bits(compiled: Compiled) -> None:
    start_one_of_each()
    for which, job in dict(compiled.jobs).items():
        num_before = len(compiled.assembly)
        table.KERNELS[which](replace(job, count=BEYOND_32_BITS))
        assert len(compiled.assembly) > num_before, which


def test_the_look_at_instructions_sees_what_it_looks_for() -> None:
    lines = ["fma.rn.f32 %f1", "cvt.rmi.ftz.f32.f32 %f2", "div.full.f32 %f3", "ex2.approx.f32 %f4"]
    assert all(INEXACT.search(line) for line in lines)
    assert not any(map(INEXACT.search, ["add.rn.f32 %f1", "mul.f32", "div.rn.f32 %f3", "mad.lo.s32 %r1", "add.f32"]))
