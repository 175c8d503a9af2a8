"""Views, indexing and shared tensors that are only read: the same bits as eager."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from operator_bodies import bodies_in, check, run, wanting


def chunk_then_cat(h, m):
    a, b = h.chunk(2, 1)
    return torch.cat([b * 2, a.tanh(), b], 1)


def split_unequal(h, m):
    a, b, c = h.split([1, 2, 3], 1)
    return a * b.sum() + c


def tensor_split(h, m):
    return sum(part.sum() * i for i, part in enumerate(h.tensor_split(4, 1)))


def expand_and_reduce(h, m):
    return (h.unsqueeze(1).expand(-1, 4, -1) * m.b).sum(1)


def expand_returned(h, m):
    return h[:, :1].expand(-1, 4)


def as_strided(h, m):
    return h.contiguous().as_strided((h.shape[0], 3, 2), (6, 2, 1)) * 2


def as_strided_overlapping(h, m):
    return h.contiguous().as_strided((h.shape[0], 4, 3), (6, 1, 1)) * 2


def transpose_matmul(h, m):
    return h.t() @ h @ m.w.t()


def permute_contiguous(h, m):
    return h.view(-1, 2, 3).permute(2, 0, 1).contiguous().view(3, -1)


def movedim_flatten(h, m):
    return h.view(-1, 2, 3).movedim(0, 2).flatten(1) * 2


def index_copy_and_fill(h, m):
    return h.index_copy(1, m.index, h[:, :3] * 2).index_fill(1, m.index[:1], 0.5)


def scatter(h, m):
    places = m.index.expand(h.shape[0], 3)
    return torch.zeros_like(h).scatter(1, places, h[:, :3])


def scatter_add_and_reduce(h, m):
    places = m.index.expand(h.shape[0], 3)
    y = torch.zeros_like(h).scatter_add(1, places, h[:, :3])
    return y.scatter_reduce(1, places, h[:, 3:], "amax", include_self=True)


def masked_scatter(h, m):
    return h.masked_scatter(h > 0, m.w.flatten())


def where_both(h, m):
    return torch.where(h > 0, h * 2, m.b)


def detach_and_share(h, m):
    y = h * 2
    return y + y.detach() * 3


def enable_grad_inside_no_grad(h, m):
    with torch.no_grad():
        y = h * 2
        with torch.enable_grad():
            z = h * 3
    return y + z


def data_access(h, m):
    return h * m.w.data.sum() + (m.b * h).data


def straight_through(h, m):
    return h + (h.round() - h).detach()


def same_tensor_both_operands(h, m):
    return h * h + h @ h.t() @ h


def narrow_select_unfold(h, m):
    return h.narrow(1, 1, 4).unfold(1, 2, 1).select(2, 0) * 2


def roll_flip_rot(h, m):
    return torch.rot90(h.flip(1).roll(2, 1), 1, (0, 1))


def repeat_tile_interleave(h, m):
    return h.repeat(2, 1).tile(1, 2).repeat_interleave(2, 0)


def stack_and_vstack(h, m):
    return torch.vstack([torch.stack([h, h * 2]).flatten(0, 1), h])


def advanced_index_read_twice(h, m):
    return h[:, [0, 0, 2]] + h[:, m.index] * h[[0], :3]


def bool_arithmetic(h, m):
    return h * (h > 0) + (h < 0).float() * m.b


def view_as_real_and_back(h, m):
    return torch.view_as_real(torch.view_as_complex(h.view(-1, 3, 2)) * (1 + 2j)).abs()


def resize_like_views(h, m):
    return h.view_as(h).reshape(h.shape[0], 2, 3).swapaxes(1, 2).flatten(1).unflatten(1, (2, 3)).ravel()


def dtype_view(h, m):
    return h * (h.detach().view(torch.int32) & 1).float()


def residual_chain(h, m):
    for _ in range(3):
        h = h + F.relu(h @ m.w)
    return h


def lerp_and_addcdiv(h, m):
    return torch.lerp(h, h.detach() + m.b, 0.3).addcdiv(h, m.b.abs() + 1)


VIEWS = bodies_in(globals())


@check(VIEWS)
def test_views_and_writes_match(body: Any) -> None:
    run(body)


@check(VIEWS)
def test_views_and_writes_of_an_input_that_requires_grad_match(body: Any) -> None:
    run(body, wanting)
