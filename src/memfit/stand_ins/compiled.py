"""The compiled kernels, the structures they are called with, and what they all ask of a tensor."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from memfit.native.library import KERNELS, native_library

LEAST_SHARED = 1 << 15
"""Fewer elements are done by one thread."""

LEAST_ELEMENTS = 1 << 12
"""Of what is drawn, pooled or added; for fewer torch's own is as fast."""


class Piece(ctypes.Structure):
    """`struct channels` of native/kernels/kernels.h."""

    _fields_ = (("input", ctypes.c_void_p), ("stride", ctypes.c_int64), ("num_channels", ctypes.c_int64))


class BatchNorm(ctypes.Structure):
    """`struct batch_norm` of native/kernels/kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input", "weight", "bias", "running_mean", "running_var")),
        *((name, ctypes.c_void_p) for name in ("out", "save_mean", "save_invstd")),
        *((name, ctypes.c_double) for name in ("momentum", "eps")),
        *((name, ctypes.c_int64) for name in ("num_samples", "num_channels", "image_size")),
        *((name, ctypes.c_int64) for name in ("num_parts", "is_rectified")),
        ("pieces", ctypes.POINTER(Piece)),
        ("whole", ctypes.c_void_p),
    )


class BatchNormBackward(ctypes.Structure):
    """`struct batch_norm_backward` of native/kernels/kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("grad_out", "input", "weight", "mean", "invstd", "gate")),
        *((name, ctypes.c_void_p) for name in ("grad_in", "grad_weight", "grad_bias")),
        *((name, ctypes.c_int64) for name in ("num_samples", "num_channels", "image_size", "num_parts")),
    )


class MaxPool(ctypes.Structure):
    """`struct max_pool` of native/kernels/kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input", "out", "indices")),
        *((name, ctypes.c_int64) for name in ("num_planes", "in_height", "in_width", "out_height", "out_width")),
        *((f"{what}_{axis}", ctypes.c_int64) for what in ("kernel", "stride") for axis in ("height", "width")),
        *((f"{what}_{axis}", ctypes.c_int64) for what in ("pad", "dilation") for axis in ("height", "width")),
    )


class AveragePool(ctypes.Structure):
    """`struct average_pool` of native/kernels/kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input", "out")),
        *((name, ctypes.c_int64) for name in ("num_planes", "in_height", "in_width", "out_height", "out_width")),
        *((f"{what}_{axis}", ctypes.c_int64) for what in ("kernel", "stride", "pad") for axis in ("height", "width")),
        *((name, ctypes.c_int64) for name in ("counts_padding", "divisor")),
    )


class Addition(ctypes.Structure):
    """`struct addition` of native/kernels/kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("into", "what")),
        *((name, ctypes.c_int64) for name in ("num_samples", "size", "into_stride", "what_stride")),
    )


class Convolution(ctypes.Structure):
    """`struct convolution` of native/kernels/kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input", "weight", "bias", "out", "scratch")),
        *((name, ctypes.c_int64) for name in ("in_stride", "num_samples", "in_channels", "out_channels")),
        *((name, ctypes.c_int64) for name in ("height", "width", "is_backward", "num_summed")),
    )


class ConvolutionWeights(ctypes.Structure):
    """`struct convolution_weights` of native/kernels/kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input", "grad_out", "out", "grad_bias", "scratch")),
        *((name, ctypes.c_int64) for name in ("in_stride", "grad_stride", "num_samples", "in_channels")),
        *((name, ctypes.c_int64) for name in ("out_channels", "height", "width", "window")),
        *((name, ctypes.c_int64) for name in ("num_parts", "num_summed")),
    )


class Product(ctypes.Structure):
    """`struct product` of native/kernels/kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("one", "other", "bias", "out", "scratch")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_columns", "num_terms", "num_summed", "kind")),
    )


@functools.cache
def _compiled() -> ctypes.CDLL | None:
    library = native_library(KERNELS)
    if library is not None:
        library.memfit_bernoulli.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64]
        library.memfit_bernoulli.restype = None
        library.memfit_add_all.argtypes = [ctypes.POINTER(Addition), ctypes.c_int64, ctypes.c_int]
        library.memfit_add_all.restype = None
        for function, struct in (
            (library.memfit_batch_norm, BatchNorm),
            (library.memfit_batch_norm_rows, BatchNorm),
            (library.memfit_renormalise, BatchNorm),
            (library.memfit_renormalise_rows, BatchNorm),
            (library.memfit_batch_norm_backward, BatchNormBackward),
            (library.memfit_batch_norm_rows_backward, BatchNormBackward),
            (library.memfit_max_pool, MaxPool),
            (library.memfit_average_pool, AveragePool),
            (library.memfit_average_pool_backward, AveragePool),
            (library.memfit_multiply, Product),
        ):
            function.argtypes = [ctypes.POINTER(struct), ctypes.c_int]
            function.restype = None
        library.memfit_multiply_scratch.argtypes = [ctypes.POINTER(Product)]
        library.memfit_multiply_scratch.restype = ctypes.c_int64
        of_convolutions: tuple[tuple[str, type[ctypes.Structure]], ...] = (
            ("memfit_convolve_points", Convolution),
            ("memfit_convolve_windows", Convolution),
            ("memfit_convolution_weights", ConvolutionWeights),
        )
        for name, of in of_convolutions:
            for function, result in (
                (getattr(library, name), None),
                (getattr(library, f"{name}_scratch"), ctypes.c_int64),
            ):
                function.argtypes = [ctypes.POINTER(of), ctypes.c_int]
                function.restype = result
    return library


class _Suspended(threading.local):
    is_so = False


_SUSPENDED = _Suspended()


@contextmanager
def torchs_own() -> Iterator[None]:
    """In this thread stand-ins call what they stand in for: torch has been told what they were not tested with."""
    before, _SUSPENDED.is_so = _SUSPENDED.is_so, True
    try:
        yield
    finally:
        _SUSPENDED.is_so = before


def is_suspended() -> bool:
    """True if torch's own are asked for."""
    return _SUSPENDED.is_so


def kernels() -> ctypes.CDLL | None:
    """The compiled kernels, or None where there are none, or are not wanted; MEMFIT_NATIVE=0 forbids them."""
    return None if _SUSPENDED.is_so or os.environ.get("MEMFIT_NATIVE") == "0" else _compiled()


def is_plain(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous()


def has_samples(tensor: torch.Tensor) -> bool:
    """True if each sample of the map lies in one piece: it may be part of the channels of a larger one."""
    if tensor.dtype is not torch.float32 or not tensor.is_cpu or tensor.dim() < 2:
        return False
    return tensor.is_contiguous() or tensor[0].is_contiguous()


def num_threads_for(tensor: torch.Tensor) -> int:
    return torch.get_num_threads() if tensor.numel() >= LEAST_SHARED else 1
