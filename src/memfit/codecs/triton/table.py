"""Which Triton kernel does what a kernel in C of that number does."""

from __future__ import annotations

from collections.abc import Callable

from memfit.codecs.kernels import Kernel
from memfit.codecs.triton import floats, mask, narrow_int, quantised, sparse, window
from memfit.codecs.triton.launch import Job

KERNELS: dict[Kernel, Callable[[Job], int]] = {
    Kernel.MASK_PACK: mask.pack,
    Kernel.MASK_PACK_BOOL: mask.pack_bool,
    Kernel.MASK_UNPACK: mask.unpack,
    Kernel.MASK_GATE: mask.gate,
    Kernel.WINDOW_PACK: window.pack,
    Kernel.WINDOW_UNPACK: window.unpack,
    Kernel.SPARSE_ENCODE: sparse.encode,
    Kernel.SPARSE_DECODE: sparse.decode,
    Kernel.FP16_ENCODE: floats.fp16_encode,
    Kernel.FP16_DECODE: floats.fp16_decode,
    Kernel.BF16_ENCODE: floats.bf16_encode,
    Kernel.BF16_DECODE: floats.bf16_decode,
    Kernel.FP10_ENCODE: floats.fp10_encode,
    Kernel.FP10_DECODE: floats.fp10_decode,
    Kernel.FP8_ENCODE: floats.fp8_encode,
    Kernel.FP8_DECODE: floats.fp8_decode,
    Kernel.INT8_ENCODE: quantised.int8_encode,
    Kernel.INT8_DECODE: quantised.int8_decode,
    Kernel.INT4_ENCODE: quantised.int4_encode,
    Kernel.INT4_DECODE: quantised.int4_decode,
    Kernel.NARROW_ENCODE: narrow_int.encode,
    Kernel.NARROW_DECODE: narrow_int.decode,
}
"""`csr` is for comparison only and has none: on a GPU its twin serves."""
