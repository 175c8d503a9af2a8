"""Floats of few bits on the bits of float32, for Triton kernels: sign, exponent, mantissa, nearest, ties to even."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# Triton has no types, and reads those of kernels as code of theirs.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def shrink(bits, KEEPS_GATE: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, HAS_INFINITY: tl.constexpr):
    """The codes of numbers, all as uint32. Without infinity the format goes on to the last pattern but one."""
    bias: tl.constexpr = (1 << (EXPONENT - 1)) - 1
    infinity: tl.constexpr = ((1 << EXPONENT) - 1) << MANTISSA
    largest: tl.constexpr = infinity - 1 if HAS_INFINITY else (1 << (EXPONENT + MANTISSA)) - 2
    drop: tl.constexpr = 23 - MANTISSA
    least_normal: tl.constexpr = (128 - bias) << 23
    size = bits & 0x7FFFFFFF
    large = tl.maximum(size, least_normal)
    normal = ((large + ((1 << (drop - 1)) - 1) + ((large >> drop) & 1)) >> drop) - ((127 - bias) << MANTISSA)
    # The sum with a power of two whose last place is the format's smallest number rounds as a subnormal must.
    summed = tl.minimum(size, least_normal).to(tl.float32, bitcast=True) + 2.0 ** (24 - bias - MANTISSA)
    tiny = summed.to(tl.uint32, bitcast=True) - ((151 - bias - MANTISSA) << 23)
    code = tl.minimum(tl.where(size < least_normal, tiny, normal), largest)
    if HAS_INFINITY:
        code = tl.where(size == 0x7F800000, infinity, code)
    if KEEPS_GATE:
        code = tl.where((code == 0) & (size != 0), 1, code)
    code |= bits >> 31 << (EXPONENT + MANTISSA)
    if HAS_INFINITY:
        code = tl.where(size > 0x7F800000, infinity | 1 << (MANTISSA - 1), code)
    return code


@triton.jit
def widen(code, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, HAS_INFINITY: tl.constexpr):
    """The numbers of codes, all as uint32; NaN has one pattern."""
    bias: tl.constexpr = (1 << (EXPONENT - 1)) - 1
    infinity: tl.constexpr = ((1 << EXPONENT) - 1) << MANTISSA
    size = code & ((1 << (EXPONENT + MANTISSA)) - 1)
    normal = (size << (23 - MANTISSA)) + ((127 - bias) << 23)
    tiny = (size.to(tl.float32) * 2.0 ** (1 - bias - MANTISSA)).to(tl.uint32, bitcast=True)
    bits = tl.where(size >> MANTISSA == 0, tiny, normal)
    if HAS_INFINITY:
        bits = tl.where(size == infinity, 0x7F800000, bits)
    bits |= code >> (EXPONENT + MANTISSA) << 31
    if HAS_INFINITY:
        bits = tl.where(size > infinity, 0x7FC00000, bits)
    return bits


@triton.jit
def within_float32(number):
    """What rounding has pushed over the edge becomes the largest."""
    most: tl.constexpr = 3.4028234663852886e38
    return tl.where(number > most, most, tl.where(number < -most, -most, number))
