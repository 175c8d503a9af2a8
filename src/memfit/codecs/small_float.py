"""Floats of few bits in torch: sign, exponent, mantissa, subnormals, infinity and one NaN; nearest, ties to even."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """How many bits the exponent and the mantissa have; the exponent's bias is in the middle, as in float32."""

    exponent_bits: int
    mantissa_bits: int

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def infinity(self) -> int:
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    @property
    def nan(self) -> int:
        return self.infinity | 1 << (self.mantissa_bits - 1)

    @property
    def sign_bit(self) -> int:
        return self.exponent_bits + self.mantissa_bits


def shrink(numbers: torch.Tensor, form: Format, *, keeps_gate: bool) -> torch.Tensor:
    """The codes of float32 numbers, as int32. Too large becomes the largest; see lossy.py for gates.

    Done in float64, where every step but the one rounding is exact.
    """
    size = numbers.abs().to(torch.float64)
    exponent = torch.frexp(size.clamp(min=2.0 ** (1 - form.bias)))[1] - 1  # of a subnormal it is the least
    unit = torch.ldexp(torch.ones_like(size), exponent - form.mantissa_bits)
    steps = torch.round(size / unit)
    lead = (exponent + form.bias - 1).to(torch.float64) * (1 << form.mantissa_bits)  # a carry moves the exponent up
    code = torch.where(size.isfinite(), lead + steps, 0).clamp(max=form.infinity - 1).to(torch.int32)
    if keeps_gate:
        code = code.where((code != 0) | (size == 0), 1)
    code = code.masked_fill(size.isinf(), form.infinity)
    code |= numbers.signbit().to(torch.int32) << form.sign_bit
    return code.masked_fill(numbers.isnan(), form.nan)


def widen(codes: torch.Tensor, form: Format) -> torch.Tensor:
    """The float32 numbers of int32 codes."""
    size = codes & ((1 << form.sign_bit) - 1)
    exponent = size >> form.mantissa_bits
    mantissa = (size & ((1 << form.mantissa_bits) - 1)).to(torch.float32)
    lead = (exponent > 0).to(torch.float32) * (1 << form.mantissa_bits)
    number = torch.ldexp(lead + mantissa, exponent.clamp(min=1) - form.bias - form.mantissa_bits)
    number = number.masked_fill(size == form.infinity, float("inf")).masked_fill(size > form.infinity, float("nan"))
    return torch.where(codes >> form.sign_bit != 0, -number, number).masked_fill(size > form.infinity, float("nan"))
