"""Call the codec kernels: on a CPU those in C, on a GPU those in Triton, both behind one call.

C gets pointers through ctypes, which lets go of the interpreter's lock meanwhile. Triton's kernels are in
`codecs/triton`, which nothing imports before a tensor on a GPU asks. Where there are neither, the codecs' twins serve.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memfit.native.library import CODECS, native_library

log = logging.getLogger("memfit")


class Kernel(enum.IntEnum):
    """The kernels, numbered as in native/codecs/codecs.h."""

    MASK_PACK = 0
    MASK_PACK_BOOL = 1
    MASK_UNPACK = 2
    MASK_GATE = 3
    WINDOW_PACK = 4
    WINDOW_UNPACK = 5
    SPARSE_COUNT = 6
    SPARSE_ENCODE = 7
    SPARSE_DECODE = 8
    CSR_ENCODE = 9
    CSR_DECODE = 10
    FP16_ENCODE = 11
    FP16_DECODE = 12
    BF16_ENCODE = 13
    BF16_DECODE = 14
    FP10_ENCODE = 15
    FP10_DECODE = 16
    FP8_ENCODE = 17
    FP8_DECODE = 18
    INT8_ENCODE = 19
    INT8_DECODE = 20
    INT4_ENCODE = 21
    INT4_DECODE = 22
    NARROW_ENCODE = 23
    NARROW_DECODE = 24
    WINDOW_BACKWARD = 25
    SPARSE_FLOAT_COUNT = 26
    SPARSE_FLOAT_ENCODE = 27
    SPARSE_FLOAT_DECODE = 28


class _Job(ctypes.Structure):
    """`struct job` of native/codecs/codecs.h."""

    _fields_ = (
        ("source", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("numbers", ctypes.POINTER(ctypes.c_int64)),
        ("reals", ctypes.POINTER(ctypes.c_float)),
    )


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = native_library(CODECS)
    if library is not None:
        library.memfit_codecs_run.argtypes = [ctypes.c_int, ctypes.POINTER(_Job), ctypes.c_int, ctypes.c_int]
        library.memfit_codecs_run.restype = ctypes.c_int64
    return library


def can_run(tensor: torch.Tensor, which: Kernel | None = None) -> bool:
    """True if there is that kernel for this tensor's device, and MEMFIT_NATIVE=0 does not forbid it.

    C has all kernels, Triton only some; so for a tensor on a GPU it must be said which.
    """
    if os.environ.get("MEMFIT_NATIVE") == "0":
        return False
    if is_for_triton(tensor):
        return which is not None and which in _triton_kernels(tensor.device)
    return tensor.device.type == "cpu" and _library() is not None


def is_for_triton(tensor: torch.Tensor) -> bool:
    """True if only Triton could have kernels for this tensor."""
    return tensor.is_cuda


@functools.cache
def _triton_kernels(device: torch.device) -> dict[Kernel, Callable[[Any], int]]:
    """The kernels that Triton has; none if it does not work on this device, which is found out by trying."""
    try:
        from memfit.codecs.triton.launch import Job
        from memfit.codecs.triton.table import KERNELS

        bools = torch.tensor([True, False, False, True, True] * 2, device=device)
        code = torch.zeros(2, dtype=torch.uint8, device=device)
        KERNELS[Kernel.MASK_PACK_BOOL](Job(bools, code, bools.numel(), ()))
        if code.tolist() != [0b00111001, 0b11]:
            raise RuntimeError(f"a trial packed ten bools as {code.tolist()}")
    except Exception as problem:  # not installed, no compiler for its launcher, too old a GPU: each has its own error
        log.info("codecs run in torch, not in Triton, on %s: %s", device, problem)
        return {}
    return KERNELS


def has_avx2() -> bool:
    """True if the kernels for AVX2 are there and this machine can run them."""
    if os.environ.get("MEMFIT_NATIVE") == "0":
        return False
    library = _library()
    return library is not None and bool(library.memfit_codecs_have_avx2())


@functools.lru_cache(maxsize=4096)
def whole_numbers(numbers: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    """As C has them; kernels never write to them, so calls share them."""
    return (ctypes.c_int64 * len(numbers))(*numbers)


@functools.lru_cache(maxsize=4096)
def real_numbers(numbers: tuple[float, ...]) -> ctypes.Array[ctypes.c_float]:
    return (ctypes.c_float * len(numbers))(*numbers)


def run(
    which: Kernel,
    source: torch.Tensor,
    target: torch.Tensor,
    *,
    count: int,
    numbers: tuple[int, ...],
    reals: Sequence[float] = (),
    table: torch.Tensor | None = None,
    use_avx2: bool = True,
) -> int:
    """Run one kernel from one tensor's memory into another's; its answer. In C on as many threads as torch uses.

    Nothing is checked here: sizes and layouts are the caller's business. A table must be where the tensors are.
    """
    if is_for_triton(target):
        return _run_in_triton(which, source, target, count, numbers, reals, table)
    library = _library()
    assert library is not None, "ask can_run first"
    job = _Job(
        source.data_ptr(),
        None if table is None else table.data_ptr(),
        target.data_ptr(),
        count,
        whole_numbers(numbers),
        real_numbers(tuple(reals)),
    )
    return int(library.memfit_codecs_run(which, ctypes.byref(job), torch.get_num_threads(), use_avx2))


def _run_in_triton(
    which: Kernel,
    source: torch.Tensor,
    target: torch.Tensor,
    count: int,
    numbers: tuple[int, ...],
    reals: Sequence[float],
    table: torch.Tensor | None,
) -> int:
    from memfit.codecs.triton.launch import Job

    return _triton_kernels(target.device)[which](Job(source, target, count, numbers, reals, table))
