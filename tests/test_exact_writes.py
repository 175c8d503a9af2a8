"""In-place writes, also through views, in every mix: the same bits as eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence import Apply, assert_same_as_eager, seeded
from operator_bodies import bodies_in, check, run, wanting
from torch import nn


def slice_assign(h, m):
    y = h.clone()
    y[:, 1:3] = h[:, :2] * 2
    return y


def slice_assign_parameter(h, m):
    y = torch.zeros_like(h)
    y[:, :] = m.b
    y[:, 2] = h[:, 1]
    return y * h


def masked_assign(h, m):
    y = h * 2
    y[y > 0] = 0.5
    return y


def index_assign(h, m):
    y = h * 1
    y[:, m.index] = h[:, :3].exp()
    return y


def write_into_view(h, m):
    y = h * 1
    y.view(-1)[::2].mul_(3)
    return y


def write_into_view_of_view(h, m):
    y = (h * 1).view(-1, 2, 3)
    y.transpose(1, 2)[:, 0].add_(1).mul_(m.b[:2])
    return y


def write_base_after_view(h, m):
    y = h * 1
    v = y[:, :3]
    y.mul_(2)
    return v + y[:, 3:]


def write_view_read_base_and_view(h, m):
    y = h * 1
    v = y.t()
    v[0] = 1.0
    return y.sum(0) * v.sum(1)


def write_twice_between_reads(h, m):
    y = h * 1
    a = y.sum()
    y.add_(1)
    b = y.sum()
    y.add_(m.b)
    return y * a + b


def plus_equals_chain(h, m):
    y = h
    y = y + m.b
    for _ in range(4):
        y += h
        y *= 1.5
    return y


def relu_after_add(h, m):
    return F.relu_(h + m.b) @ m.w


def relu_in_place_of_linear(h, m):
    return F.relu_(h) @ m.w


def sigmoid_in_place(h, m):
    return h.sigmoid_() @ m.w


def exp_in_place_saved(h, m):
    return h.exp_().mul(m.b)


def residual_in_place(h, m):
    y = h @ m.w
    y += h
    return F.relu(y, inplace=True)


def fill_views(h, m):
    y = torch.empty_like(h)
    y[:, :2].copy_(h[:, 2:4])
    y[:, 2:].zero_()
    y[:, 5].fill_(7.0)
    return y


def copy_with_cast(h, m):
    y = torch.zeros(h.shape, dtype=torch.float64)
    y.copy_(h)
    return y


def unbind_write(h, m):
    # views of a multi-view op may not be written in place; copies may
    a, *rest = h.unbind(1)
    a = a.clone()
    a.mul_(2)
    return torch.stack([a, *rest])


def as_strided_written(h, m):
    y = h * 1
    y.as_strided((h.shape[0], 2), (6, 5)).mul_(2)
    return y


def diagonal_written(h, m):
    y = h.t() @ h
    y.diagonal().mul_(2)
    return y


def diagonal_filled(h, m):
    return (h.t() @ h).fill_diagonal_(1.0)


def index_put_accumulate(h, m):
    y = torch.zeros(6)
    y.index_put_((m.index,), h[0, :3], accumulate=True)
    return y * m.b


def index_add(h, m):
    return torch.zeros(h.shape).index_add_(1, m.index, h[:, :3])


def scatter_in_place(h, m):
    places = m.index.expand(h.shape[0], 3)
    return (h * 1).scatter_(1, places, 2.0)


def masked_fill_in_place(h, m):
    return (h * 1).masked_fill_(m.mask, -1.0) @ m.w


def clamp_in_place(h, m):
    return (h * 1).clamp_(-0.5, 0.5)


def detached_written(h, m):
    y = h * 2
    z = y.sum()
    y.detach().add_(1)
    return z + (y * 1).sum()


def no_grad_part(h, m):
    with torch.no_grad():
        scale = h.abs().mean()
        scale.add_(1)
    return h / scale


def no_grad_write_into_own_buffer(h, m):
    with torch.no_grad():
        m.mask.logical_not_()
    return h * m.mask


def in_place_on_leaf_under_no_grad(h, m):
    with torch.no_grad():
        m.b.clamp_(-1, 1)
    return h * m.b


def squeeze_in_place(h, m):
    y = (h * 1).unsqueeze_(1)
    y.squeeze_(1).t_()
    return y * 2


def in_place_same_operand(h, m):
    y = h + 1
    y.add_(y)
    y.sub_(y.detach(), alpha=0.5)
    return y


def list_built_step_by_step(h, m):
    parts = []
    for i in range(6):
        parts.append(h[:, i] * m.b[i])
        parts[-1] += 1
    return torch.stack(parts, 1)


def write_through_zip_of_rows(h, m):
    y = torch.zeros(h.shape)
    for i in range(h.shape[0]):
        y[i] = h[i] * i
        y[i, 2:4] += m.b[2:4]
    return y


def rope(h, m):
    a, b = h[..., ::2], h[..., 1::2]
    y = torch.empty_like(h)
    y[..., ::2] = a * m.b[:3].cos() - b * m.b[:3].sin()
    y[..., 1::2] = a * m.b[:3].sin() + b * m.b[:3].cos()
    return y


def cache_written(h, m):
    cache = torch.zeros(8, 6)
    cache[: h.shape[0]] = h
    return cache @ m.w


def set_item_none_and_ellipsis(h, m):
    y = torch.zeros(h.shape[0], 2, 6)
    y[..., 0, :] = h
    y[:, 1] = h[None][0]
    return y


def int_arithmetic(h, m):
    steps = torch.arange(6)
    steps += 1
    steps[2:] *= 2
    return h * (steps // 2)


def out_argument(h, m):
    y = torch.empty(h.shape)
    with torch.no_grad():
        torch.add(h, 1, out=y)
    return y * h


def swap_halves_in_place(h, m):
    y = h * 1
    left = y[:, :3].clone()
    y[:, :3] = y[:, 3:]
    y[:, 3:] = left
    return y


def foreach_like_norm(h, m):
    torch._foreach_mul_([a := h * 1, b := h * 2], 3.0)
    return a + b


def hardtanh_relu6_in_place(h, m):
    return F.relu6(F.hardtanh(h * 3, inplace=True) * 7, inplace=True) @ m.w


def leaky_then_dropout_in_place(h, m):
    return F.dropout(F.leaky_relu(h, 0.2, inplace=True) * 2, 0.3, True, inplace=True) @ m.w


def add_then_layer_norm_then_relu_in_place(h, m):
    return F.relu_(F.layer_norm(h.add_(m.b), (6,), m.b))


def fork_with_in_place_branch(h, m):
    y = h @ m.w
    a = F.relu(y)
    b = y.clone().neg_().exp_()
    return a + b + y


def dense_fork(h, m):
    found = [h]
    for _ in range(4):
        found.append(F.relu_(torch.cat(found, 1).sum(1, keepdim=True) * m.b))
    return torch.cat(found, 1)


def addmm_in_place(h, m):
    return (h * 1).addmm_(h, m.w, beta=0.5).addcmul_(h, h, value=0.1)


def unsafe_chunk_in_place(h, m):
    a, b = torch.unsafe_chunk(h, 2, 1)
    a.mul_(2)
    return a * b


def inplace_on_expanded_copy(h, m):
    y = m.b.expand(h.shape[0], 6).clone()
    y += h
    y[0] -= 1
    return y


def parameter_view_written_under_no_grad(h, m):
    with torch.no_grad():
        m.w[0].mul_(0.9)
        m.w.t()[1].add_(0.1)
    return h @ m.w


IN_PLACE = bodies_in(globals())


@check(IN_PLACE)
def test_views_and_writes_match(body: Any) -> None:
    run(body)


@check(IN_PLACE)
def test_views_and_writes_of_an_input_that_requires_grad_match(body: Any) -> None:
    run(body, wanting)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "name",
    ["write into view", "relu after add", "dense fork", "residual in place", "add then layer norm then relu in place"],
)
def test_other_float_types_match(name: str, dtype: torch.dtype) -> None:
    body = IN_PLACE[name]
    model = seeded(lambda: Apply(lambda m, x: body(m.l(x), m), l=nn.Linear(6, 6), w=(6, 6), b=(6,)))
    assert_same_as_eager(model.to(dtype), lambda n: (torch.randn(n, 6, dtype=dtype),))
