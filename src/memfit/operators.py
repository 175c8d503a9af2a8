"""Operators of our own, registered with torch: they have names and schemas, are priced and re-run like torch's own."""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("memfit_ops", "DEF")  # its operators live as long as it does
_LIBRARY.define("renormalise(Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd) -> Tensor")


def renormalise(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
) -> torch.Tensor:
    """What training-mode batch norm made of the input, from the statistics it saved: one pass instead of three.

    The training kernel computes fma(x, alpha, beta) with alpha = invstd * weight and beta = fma(-mean, alpha, bias).
    No elementwise op of torch is such an fma, but the kernel for evaluation is, given statistics that change nothing:
    once for beta, as the norm of -mean, and once for the result.
    """
    normalise = torch.ops.aten.native_batch_norm.default
    zero, one = torch.zeros_like(invstd), torch.ones_like(invstd)
    alpha = invstd if weight is None else invstd * weight
    column = mean.neg().view(1, -1, *(1,) * (input.dim() - 2))
    beta = normalise(column, alpha, zero if bias is None else bias, zero, one, False, 0.0, 0.0)[0].view(-1)
    result: torch.Tensor = normalise(input, alpha, beta, zero, one, False, 0.0, 0.0)[0]
    return result


_LIBRARY.impl("renormalise", renormalise, "CompositeExplicitAutograd")
