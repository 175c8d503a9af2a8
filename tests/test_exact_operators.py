"""Operators, one by one, alone on a leaf, on complex numbers and in low precision: the same bits as eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence import Apply, assert_same_as_eager, seeded, weighted_sum
from operator_bodies import check, run
from torch import nn

OPERATORS = {
    "einsum": lambda h, m: torch.einsum("bi,ij,bj->bj", h, m.w, h),
    "einsum outer": lambda h, m: torch.einsum("bi,bj->bij", h, h).diagonal(dim1=1, dim2=2),
    "bmm": lambda h, m: torch.bmm(h.view(-1, 2, 3), h.view(-1, 3, 2)),
    "baddbmm": lambda h, m: torch.baddbmm(h[:, :4].reshape(-1, 2, 2), h.view(-1, 2, 3), h.view(-1, 3, 2)),
    "batched matmul, broadcast": lambda h, m: h.view(-1, 1, 2, 3) @ m.w[:3, :4],
    "vector matmul": lambda h, m: h @ m.b + m.w @ m.b @ m.b,
    "mv and dot": lambda h, m: torch.mv(h, m.b) * torch.dot(m.b, m.b),
    "kron": lambda h, m: torch.kron(h, m.w[:2, :2]),
    "tensordot": lambda h, m: torch.tensordot(h.view(-1, 2, 3), m.w.view(2, 3, 6), 2),
    "cumsum": lambda h, m: h.cumsum(1),
    "cummax": lambda h, m: h.cummax(1).values,
    "logcumsumexp": lambda h, m: h.logcumsumexp(1),
    "sort": lambda h, m: h.sort(1, descending=True).values * m.b,
    "argsort gather": lambda h, m: h.gather(1, h.argsort(1)),
    "topk": lambda h, m: h.topk(3, 1).values,
    "kthvalue": lambda h, m: h.kthvalue(2, 1).values,
    "median": lambda h, m: h.median(1).values,
    "mode": lambda h, m: h.mode(1).values,
    "max with indices": lambda h, m: (lambda r: r.values * r.indices)(h.max(1)),
    "min": lambda h, m: h.min(1).values + h.amin(),
    "normalised by its maximum": lambda h, m: h / h.amax(),
    "maximum of detached data": lambda h, m: h / h.detach().max(),
    "amax": lambda h, m: h.amax(1) + h.amin(),
    "maximum": lambda h, m: torch.maximum(h, m.b) + torch.minimum(h, m.b),
    "max of ties": lambda h, m: (h * 0).amax(1) + (h * 0).max(1).values,
    "argmax as index": lambda h, m: m.w[h.argmax(1)],
    "gather": lambda h, m: h.gather(1, m.index.expand(h.shape[0], 3)),
    "take along": lambda h, m: h.take_along_dim(m.index.expand(h.shape[0], 3), 1),
    "index select": lambda h, m: h.index_select(1, m.index),
    "take": lambda h, m: h.take(m.index),
    "masked fill": lambda h, m: h.masked_fill(m.mask, 0.0),
    "log softmax": lambda h, m: h.log_softmax(1).exp() * m.b,
    "softmax over view": lambda h, m: h.view(-1, 2, 3).softmax(2),
    "logsumexp": lambda h, m: h.logsumexp(1),
    "mean": lambda h, m: h.mean() + h.mean(1) + h.mean((0, 1)),
    "variance": lambda h, m: h.var(1) + h.std(1, unbiased=False),
    "var mean": lambda h, m: sum(torch.var_mean(h, 1)),
    "norms": lambda h, m: h.norm() + h.norm(1, 1) + h.norm(3, 1) + torch.linalg.vector_norm(h, float("inf"), 1),
    "cdist": lambda h, m: torch.cdist(h, m.w),
    "cosine similarity": lambda h, m: F.cosine_similarity(h, m.b.expand_as(h)),
    "pairwise": lambda h, m: F.pairwise_distance(h, m.b.expand_as(h)),
    "power": lambda h, m: h.abs().pow(1.5) + h.pow(3) + (h.abs() + 1).pow(m.b) + 2**h,
    "roots": lambda h, m: h.abs().sqrt() + (h.abs() + 1).rsqrt() + h.abs().add(1).reciprocal(),
    "logs": lambda h, m: (h.abs() + 1).log() + h.abs().log1p() + (h.abs() + 1).log2() + h.expm1(),
    "trigonometry": lambda h, m: h.sin() + h.cos() + h.tan() + h.atan() + h.sinh() + torch.atan2(h, m.b),
    "special": lambda h, m: h.erf() + torch.lgamma(h.abs() + 1) + torch.special.i0(h) + h.sigmoid().logit(),
    "rounding": lambda h, m: h * h.round() + h.floor() + h.frac() + h.fmod(0.7) + h.remainder(0.7) + h.trunc(),
    "signs": lambda h, m: h.sign() * h + h.abs() + h.copysign(m.b) + torch.heaviside(h.detach(), m.b.detach()),
    "clamp by tensor": lambda h, m: h.clamp(-m.b.abs(), m.b.abs()),
    "division": lambda h, m: h / (m.b.abs() + 1) + torch.div(h, 0.3, rounding_mode="floor"),
    "comparison": lambda h, m: h * h.ge(m.b) + h.isclose(h).float(),
    "nan passes": lambda h, m: torch.where(h > 0, h, torch.nan).nan_to_num(0.5) + h,
    "nan through relu and pool": lambda h, m: F.max_pool1d(
        F.relu(h * torch.tensor([1.0, torch.nan])[m.mask.long()]), 2
    ),
    "infinities": lambda h, m: (h * float("inf")).sigmoid() + h,
    "nansum": lambda h, m: torch.where(m.mask, h, torch.nan).nansum(1),
    "huge and tiny": lambda h, m: (h * 1e38 * 10).tanh() + h * 1e-45 + h * 1e-38 * 1e-5,
    "triangles": lambda h, m: torch.tril(h.t() @ h) + torch.triu(m.w, 1),
    "trace and diag": lambda h, m: (h.t() @ h).trace() + torch.diag(m.b) + torch.diag_embed(h).sum(0),
    "inverse": lambda h, m: torch.linalg.inv(m.w @ m.w.t() + torch.eye(6)) @ h.t(),
    "solve": lambda h, m: torch.linalg.solve(m.w @ m.w.t() + torch.eye(6), h.t()),
    "cholesky": lambda h, m: torch.linalg.cholesky(m.w @ m.w.t() + torch.eye(6)) @ h.t(),
    "determinant": lambda h, m: torch.linalg.slogdet(m.w @ m.w.t() + torch.eye(6))[1] * h,
    "qr": lambda h, m: torch.linalg.qr(m.w)[1] @ h.t(),
    "svd values": lambda h, m: torch.linalg.svdvals(m.w) * h,
    "eigh": lambda h, m: torch.linalg.eigvalsh(m.w + m.w.t()) * h,
    "matrix power": lambda h, m: torch.linalg.matrix_power(m.w, 3) @ h.t(),
    "matrix exp": lambda h, m: torch.matrix_exp(m.w * 0.1) @ h.t(),
    "fft": lambda h, m: torch.fft.fft(h, dim=1).abs(),
    "rfft and back": lambda h, m: torch.fft.irfft(torch.fft.rfft(h) * torch.complex(m.b[:4], m.b[2:]), n=6),
    "fft2": lambda h, m: torch.fft.ifft2(torch.fft.fft2(h)).real,
    "complex arithmetic": lambda h, m: (torch.complex(h, h * 2) * torch.polar(m.b.abs(), m.b)).real,
    "conjugate": lambda h, m: (torch.complex(h, h * 2).conj() * torch.complex(m.b, m.b)).imag,
    "complex output": lambda h, m: torch.complex(h, m.b.expand_as(h)),
    "meshgrid": lambda h, m: sum(torch.meshgrid(h[0], m.b, indexing="ij")),
    "cartesian": lambda h, m: torch.cartesian_prod(h[0], m.b),
    "bucketize": lambda h, m: h * torch.bucketize(h, torch.tensor([-0.5, 0.0, 0.5])),
    "searchsorted": lambda h, m: h * torch.searchsorted(torch.arange(6.0), h.detach().contiguous()),
    "trapezoid": lambda h, m: torch.trapezoid(h, dim=1) + torch.diff(h, dim=1).sum(1),
    "unfold": lambda h, m: F.unfold(h.view(-1, 1, 2, 3), (2, 2)),
    "pad": lambda h, m: F.pad(h, (1, 2)) + F.pad(h.view(-1, 1, 6), (2, 1), mode="circular").squeeze(1),
    "glu": lambda h, m: F.glu(h, 1),
    "lstsq-free pinverse": lambda h, m: torch.linalg.pinv(m.w) @ h.t(),
    "cross": lambda h, m: torch.linalg.cross(h[:, :3], h[:, 3:]),
    "block diagonal": lambda h, m: torch.block_diag(h, m.w),
    "segment softmax": lambda h, m: (lambda e: e / e.sum(1, keepdim=True))((h - h.amax(1, keepdim=True)).exp()),
    "layer norm without affine": lambda h, m: F.layer_norm(h, (6,)) + F.group_norm(h, 2) + F.rms_norm(h, (6,)),
    "empty tensors": lambda h, m: torch.cat([h[:, :0], h], 1) + h[:0].sum(),
    "scalar tensors": lambda h, m: h * torch.tensor(2.0) + torch.tensor(3) + m.b[0],
    "python scalars": lambda h, m: 2 * h + 3 - h / 7 + 1 // 2,
    "full and friends": lambda h, m: (
        h + torch.full((6,), 2.0) + h.new_ones(6) + torch.eye(6)[0] + torch.linspace(0, 1, 6)
    ),
    "mixed dtypes": lambda h, m: h.double() * m.b + h.half().float() + h.bfloat16(),
    "to and type": lambda h, m: h.to(torch.float64).to(torch.float32).type(torch.float64) * h.to("cpu"),
    "shape arithmetic": lambda h, m: h.reshape(h.size(0) * 2, -1) * h.numel() / len(h),
    "iteration over rows": lambda h, m: sum((row * i for i, row in enumerate(h)), start=m.b),
    "multi-head einsum": lambda h, m: torch.einsum("bhd,hde->bhe", h.view(-1, 2, 3), m.w[:, :3].reshape(2, 3, 3)),
    "chain of views": lambda h, m: h.t().unsqueeze(0).transpose(1, 2).squeeze(0).view(-1, 6).t().contiguous().t(),
    "addr and ger": lambda h, m: torch.addr(m.w, m.b, h[0]) + torch.outer(h[0], m.b),
    "bilinear function": lambda h, m: F.bilinear(h, h, m.w.view(1, 6, 6)),
    "embedding of weights": lambda h, m: F.embedding(m.index, m.w) @ h.t(),
    "renorm": lambda h, m: torch.renorm(h, 2, 0, 1.0),
    "quantile": lambda h, m: torch.quantile(h, 0.3, dim=1),
    "huber by hand": lambda h, m: torch.where(h.abs() < 1, 0.5 * h**2, h.abs() - 0.5).mean(),
    "quantised and back": lambda h, m: torch.quantize_per_tensor(h, 0.1, 0, torch.qint8).dequantize() + h,
    "fake quantised": lambda h, m: torch.fake_quantize_per_tensor_affine(h, 0.1, 0, -128, 127),
    "gradient of a function": lambda h, m: torch.func.grad(lambda a: torch.tanh(a @ m.w).sum())(h.detach()) + h,
    "jacobian-vector product": lambda h, m: torch.func.jvp(lambda a: torch.tanh(a @ m.w), (h,), (h.detach(),))[1],
    "saved through hooks": lambda h, m: with_saved_hooks(h, m),
    "inference mode inside": lambda h, m: h * in_inference_mode(m.b),
    "compiled inside": lambda h, m: torch.compile(lambda a: a * 2 + 1, backend="eager")(h) @ m.w,
    "checked by vmap": lambda h, m: torch.func.vmap(lambda r: r @ m.w)(h),
}


def with_saved_hooks(h: torch.Tensor, m: Any) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
        return torch.tanh(h @ m.w) @ m.w


def in_inference_mode(b: torch.Tensor) -> float | torch.Tensor:
    with torch.inference_mode():
        scale = b.sum() * 0 + 2
    return scale.clone()


@check(OPERATORS)
def test_operators_match(body: Any) -> None:
    run(body)


# Formulas of autograd that choose by the data, by the sign of a zero, or by writing into what they made: alone on a
# leaf, so that nothing is added to their gradient that could hide a bit.
ALONE: dict[str, Any] = {
    "maxima of rows": lambda p, m: p.max(1).values,
    "amax": lambda p, m: p.amax(1),
    "aminmax": lambda p, m: sum(torch.aminmax(p)),
    "cummax": lambda p, m: p.cummax(1).values,
    "norm": lambda p, m: p.norm(),
    "norm of zeros": lambda p, m: (p * 0).norm(),
    "infinity norm": lambda p, m: torch.linalg.vector_norm(p, float("inf")),
    "standard deviation": lambda p, m: p.std(),
    "determinant": lambda p, m: torch.linalg.det(p[:, :4]),
    "absolute value": lambda p, m: (p * m.mask).abs(),
    "relu": lambda p, m: F.relu(p),
    "max pool": lambda p, m: F.max_pool1d(p, 2),
    "sorted": lambda p, m: p.sort(1).values,
    "indexed": lambda p, m: p[m.index],
    "indexed by column": lambda p, m: p[:, m.index],
    "row": lambda p, m: p[1],
    "gathered": lambda p, m: p.gather(1, m.index.expand(4, 3)),
    "diagonal": lambda p, m: p.diagonal(),
    "unfolded": lambda p, m: p.unfold(1, 3, 2),
    "as_strided": lambda p, m: p.as_strided((2, 2), (6, 2)),
    "triangle": lambda p, m: p.triu(1),
    "embedding": lambda p, m: F.embedding(m.index, p),
    "rfft": lambda p, m: torch.fft.rfft(p).abs(),
    "irfft": lambda p, m: torch.fft.irfft(torch.complex(p, p * 2)),
    "logarithm of softmax": lambda p, m: p.log_softmax(1)[:, 0],
    "interpolated": lambda p, m: F.interpolate(p[None], scale_factor=2, mode="linear"),
    "padded": lambda p, m: F.pad(p, (1, -1)),
    "expanded": lambda p, m: p[:1].expand(3, 6),
    "itself": lambda p, m: p.view(6, 4),
    "transposed": lambda p, m: p.t(),
}


@check(ALONE)
@pytest.mark.parametrize("sign", [1, -1], ids=["rising", "falling"])
def test_operators_alone_on_a_leaf_match_to_the_sign_of_a_zero(body: Any, sign: int) -> None:
    model = seeded(
        lambda: Apply(
            lambda m: body(m.p, m),
            p=(4, 6),
            mask=torch.tensor([True, False, True, True, False, False]),
            index=torch.tensor([3, 0, 2]),
        )
    )
    assert_same_as_eager(model, lambda n: (), other_batch=None, loss=lambda o, m: sign * weighted_sum(o))


COMPLEX: dict[str, Any] = {
    "product": lambda c, m: c * c,
    "scaled": lambda c, m: c * (0.1 - 0.3j),
    "quotient": lambda c, m: c / (c[0] + 2),
    "matrix product": lambda c, m: c @ c.mH,
    "inverse transform": lambda c, m: torch.fft.irfft(c),
    "transform": lambda c, m: torch.fft.fft(c),
    "magnitude": lambda c, m: c.abs() + c.angle(),
    "conjugate": lambda c, m: c.conj() * 2,
    "exponential": lambda c, m: torch.exp(c).sum(),
    "parts": lambda c, m: c.real * c.imag,
    "as reals": lambda c, m: torch.view_as_real(c) * 2,
}


@check(COMPLEX)
def test_complex_operators_match(body: Any) -> None:
    parameter = nn.Parameter(seeded_complex(4, 6))
    assert_same_as_eager(seeded(lambda: Apply(lambda m: body(m.c, m), c=parameter)), lambda n: (), other_batch=None)


def seeded_complex(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))


SCALED: dict[str, Any] = {
    "group norm and its statistics": lambda h, m: torch.native_group_norm(
        h.view(-1, 2, 3), None, None, len(h), 2, 3, 1, 0.5
    ),
    "scaled by a number": lambda h, m: ((h * 0.04) * 0.08).tanh() * 0.1,
    "mean": lambda h, m: h.mean(1) * 0.3,
    "divided by a number": lambda h, m: (h / 7).exp() / 3,
    "powers": lambda h, m: (h.abs() ** 1.7) * 0.3,
    "mixture of types": lambda h, m: h * 0.3 + (h.float() * 0.3).to(h.dtype),
    "softplus chain": lambda h, m: F.softplus(F.gelu(h) * 0.3) * 0.7,
    "weighted sum": lambda h, m: torch.add(h, h * 2, alpha=0.3).sub(m.b, alpha=0.7),
    "lerp": lambda h, m: torch.lerp(h, h * 2, 0.3),
    "addcmul": lambda h, m: torch.addcmul(h, h, h, value=0.3),
}


@check(SCALED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_numbers_meet_low_precision_as_in_eager(body: Any, dtype: torch.dtype) -> None:
    model = seeded(lambda: Apply(lambda m, x: body(m.l(x), m), l=nn.Linear(6, 6), b=(6,))).to(dtype)
    assert_same_as_eager(model, lambda n: (torch.randn(n, 6, dtype=dtype, requires_grad=True),))
