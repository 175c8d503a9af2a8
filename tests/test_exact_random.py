"""Random small programs of views, writes, matrix products and reductions: fitted and eager agree on every bit.

A program is drawn as data, so that hypothesis can shrink a failure to the few operations that matter.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence import assert_same_as_eager, seeded, weighted_sum
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import memfit

Tensor = torch.Tensor

# Every state is a (4, 6) or (n, 6) table; each operation takes two of the tables made so far and gives a new one.
FRESH: dict[str, Callable[[Tensor, Tensor, nn.Module], Tensor]] = {
    "add": lambda a, b, m: a + b,
    "mul": lambda a, b, m: a * b,
    "sub detached": lambda a, b, m: a - b.detach(),
    "div": lambda a, b, m: a / (b.abs() + 1),
    "matmul": lambda a, b, m: a @ m.w,
    "matmul transposed": lambda a, b, m: a @ m.w.t(),
    "gram": lambda a, b, m: a @ (b.t() @ a) * 0.1,
    "linear": lambda a, b, m: m.layer(a),
    "layer norm": lambda a, b, m: m.norm(a),
    "batch norm": lambda a, b, m: m.batch(a),
    "dropout": lambda a, b, m: F.dropout(a, 0.3),
    "relu": lambda a, b, m: F.relu(a),
    "tanh": lambda a, b, m: torch.tanh(a),
    "sigmoid": lambda a, b, m: torch.sigmoid(a),
    "gelu": lambda a, b, m: F.gelu(a),
    "exp": lambda a, b, m: torch.exp(a.clamp(max=2)),
    "softmax": lambda a, b, m: a.softmax(1),
    "log softmax": lambda a, b, m: a.log_softmax(1),
    "sum rows": lambda a, b, m: a.sum(0, keepdim=True) + b,
    "mean columns": lambda a, b, m: a.mean(1, keepdim=True) * b,
    "max": lambda a, b, m: a.amax(1, keepdim=True) + b,
    "cumsum": lambda a, b, m: a.cumsum(1),
    "sort": lambda a, b, m: a.sort(1).values,
    "where": lambda a, b, m: torch.where(a > b, a, b * 2),
    "masked": lambda a, b, m: a.masked_fill(m.mask, 0.5),
    "gather": lambda a, b, m: a[:, m.order],
    "cat": lambda a, b, m: torch.cat([a[:, :3], b[:, 3:]], 1),
    "stack": lambda a, b, m: torch.stack([a, b]).sum(0),
    "flip": lambda a, b, m: a.flip(1),
    "roll": lambda a, b, m: a.roll(1, 0) + b,
    "clone": lambda a, b, m: a.clone(),
    "contiguous of transposed": lambda a, b, m: a.t().contiguous().t(),
    "bias": lambda a, b, m: a + m.b,
    "in no_grad": lambda a, b, m: a * _without_gradient(b),
    "outer": lambda a, b, m: torch.einsum("ij,ik->ij", a, b),
    "straight through": lambda a, b, m: a + (a.round() - a).detach(),
    "pool": lambda a, b, m: F.max_pool1d(F.relu(a).repeat(1, 2), 2),
    "conv": lambda a, b, m: m.conv(a[:, None]).sum(1),
    "noise": lambda a, b, m: a + torch.randn_like(b) * 0.1,
}

# Views: the result looks at its operand's storage.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "same": lambda a: a.view(a.shape),
    "reshaped twice": lambda a: a.view(-1, 2, 3).view(-1, 6) if a.is_contiguous() else a,
    "transposed twice": lambda a: a.t().t(),
    "all of it": lambda a: a[:],
    "permuted": lambda a: a.unsqueeze(0).permute(1, 2, 0).squeeze(2),
    "narrowed": lambda a: a.narrow(0, 0, a.shape[0]),
    "unfolded": lambda a: a.unflatten(1, (2, 3)).flatten(1) if a.is_contiguous() else a,
    "expanded": lambda a: a.unsqueeze(0).expand(1, -1, -1)[0],
}

# Writes: change a copy, or the newest table itself, in place.
WRITES: dict[str, Callable[[Tensor, Tensor, nn.Module], Any]] = {
    "add_": lambda a, b, m: a.add_(b, alpha=0.5),
    "mul_ number": lambda a, b, m: a.mul_(1.5),
    "add_ number": lambda a, b, m: a.add_(1),
    "slice": lambda a, b, m: a[:, 1:4].__setitem__(slice(None), b[:, :3]),
    "column": lambda a, b, m: a[:, 2].copy_(b[:, 0]),
    "row": lambda a, b, m: a[0].zero_(),
    "strided": lambda a, b, m: a[:, ::2].mul_(2),
    "transposed": lambda a, b, m: a.t()[1].add_(m.b[0]),
    "relu_": lambda a, b, m: F.relu_(a),
    "clamp_": lambda a, b, m: a.clamp_(-1, 1),
    "masked_fill_": lambda a, b, m: a.masked_fill_(m.mask, 0.25),
    "index_add_": lambda a, b, m: a.index_add_(1, m.order[:3], b[:, :3]),
    "index_put": lambda a, b, m: a.__setitem__((slice(None), m.order[:2]), b[:, :2]),
    "neg_": lambda a, b, m: a.neg_(),
    "fill diagonal": lambda a, b, m: a.diagonal().add_(1),
    "sub_ bias": lambda a, b, m: a.sub_(m.b),
    "copy_": lambda a, b, m: a.copy_(b),
    "dropout_": lambda a, b, m: F.dropout(a, 0.2, True, inplace=True),
    "buffer": lambda a, b, m: m.seen.add_(a.detach().mean(0)),
}


def _without_gradient(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return (tensor * 2).add_(1)


@dataclasses.dataclass(frozen=True)
class Line:
    kind: str
    name: str
    first: int
    second: int


class Program(nn.Module):
    """Runs the lines; tables that a write would spoil for backward are copied first, so that eager is content."""

    def __init__(self, lines: list[Line], returned: list[int]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 6) * 0.4)
        self.b = nn.Parameter(torch.randn(6))
        self.layer = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.batch = nn.BatchNorm1d(6)
        self.conv = nn.Conv1d(1, 2, 3, padding=1)
        self.register_buffer("mask", torch.tensor([True, False, False, True, False, False]))
        self.register_buffer("order", torch.tensor([5, 3, 1, 0, 2, 4]))
        self.register_buffer("seen", torch.zeros(6))
        self.lines = tuple(lines)
        self.returned = tuple(returned)

    def forward(self, x: Tensor) -> list[Tensor]:
        tables = [self.layer(x), x * self.b]
        for line in self.lines:
            a, b = tables[line.first % len(tables)], tables[line.second % len(tables)]
            if line.kind == "fresh":
                tables.append(FRESH[line.name](a, b, self))
            elif line.kind == "view":
                tables.append(VIEWS[line.name](a))
            elif line.kind == "write here":
                WRITES[line.name](a, b, self)
            else:
                fresh = a * 1.0 if line.kind == "write copy" else a + 0.0
                view = VIEWS[list(VIEWS)[line.second % len(VIEWS)]](fresh)
                WRITES[line.name](view if line.second % 2 else fresh, b, self)
                tables += [fresh, view]
        return [tables[-1], *(tables[index % len(tables)] for index in self.returned)]


def a_line(*, here: bool = False) -> st.SearchStrategy[Line]:
    places = st.integers(0, 30)
    written = st.builds(Line, st.just("write here"), st.sampled_from(list(WRITES)), places, places)
    return st.one_of(
        *([written] if here else []),
        st.builds(Line, st.just("fresh"), st.sampled_from(list(FRESH)), places, places),
        st.builds(Line, st.just("view"), st.sampled_from(list(VIEWS)), places, places),
        st.builds(Line, st.just("write copy"), st.sampled_from(list(WRITES)), places, places),
        st.builds(Line, st.just("write sum"), st.sampled_from(list(WRITES)), places, places),
    )


quick = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@quick
@given(lines=st.lists(a_line(), min_size=1, max_size=12), returned=st.lists(st.integers(0, 30), max_size=2))
def test_random_programs_match(lines: list[Line], returned: list[int]) -> None:
    model = seeded(lambda: Program(lines, returned))
    assert_same_as_eager(model, lambda n: (torch.randn(n, 6),), batch=4, other_batch=None, steps=2)


@quick
@given(lines=st.lists(a_line(), min_size=1, max_size=8), frozen=st.integers(0, 255))
def test_random_programs_with_frozen_parameters_and_a_wanting_input_match(lines: list[Line], frozen: int) -> None:
    model = seeded(lambda: Program(lines, []))
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(not frozen >> index & 1)
    assert_same_as_eager(model, lambda n: (torch.randn(n, 6, requires_grad=True),), batch=4, other_batch=None, steps=2)


@quick
@given(lines=st.lists(a_line(), min_size=1, max_size=8))
def test_random_programs_whose_loss_sums_one_output_match(lines: list[Line]) -> None:
    model = seeded(lambda: Program(lines, [0, 1]))
    assert_same_as_eager(
        model,
        lambda n: (torch.randn(n, 6),),
        batch=4,
        other_batch=None,
        steps=2,
        loss=lambda output, m: output[0].sum(),
    )


@quick
@given(lines=st.lists(a_line(here=True), min_size=2, max_size=10))
def test_random_programs_that_write_over_what_they_made_match_or_are_refused_as_eager_refuses_them(
    lines: list[Line],
) -> None:
    model = seeded(lambda: Program(lines, [1]))
    try:
        weighted_sum(copy.deepcopy(model)(torch.randn(4, 6))).backward()
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=re.escape(str(error).split(":")[0])):
            weighted_sum(memfit.fit(model)(torch.randn(4, 6))).backward()
    else:
        assert_same_as_eager(model, lambda n: (torch.randn(n, 6),), batch=4, other_batch=None, steps=2)
