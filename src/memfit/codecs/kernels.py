"""Call the codec kernels in C: pointers through ctypes, which lets go of the interpreter's lock meanwhile."""

from __future__ import annotations

import ctypes
import enum
import functools
import os
from collections.abc import Sequence

import torch

from memfit.native.library import CODECS, native_library


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


def can_run(tensor: torch.Tensor) -> bool:
    """True if there are kernels for this tensor's device, and MEMFIT_NATIVE=0 does not forbid them."""
    return tensor.device.type == "cpu" and os.environ.get("MEMFIT_NATIVE") != "0" and _library() is not None


def has_avx2() -> bool:
    """True if the kernels for AVX2 are there and this machine can run them."""
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
    """Run one kernel from one tensor's memory into another's, on as many threads as torch uses; its answer.

    Nothing is checked here: sizes and layouts are the caller's business.
    """
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
