"""Tensors that are not dense, and writes that cannot be followed, are refused by name, with the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equivalence import Apply, seeded
from refusals import line_of, refusal, refusal_of, rows
from torch import nn

import memfit
from memfit.errors import MemfitError

# --- tensors that are not dense --------------------------------------------------------------------------------------


def test_a_sparse_input_is_refused() -> None:
    model = seeded(lambda: Apply(lambda m, x: torch.sparse.mm(x, m.w), w=(6, 6)))
    text = refusal_of(model, lambda m: m(torch.eye(6).to_sparse()))
    assert "input 0 is a sparse coo tensor of shape (6, 6)" in text and "to_dense()" in text


def test_a_quantised_input_is_refused() -> None:
    model = seeded(lambda: Apply(lambda m, x: x.dequantize() @ m.w, w=(6, 6)))
    text = refusal_of(model, lambda m: m(torch.quantize_per_tensor(torch.eye(6), 0.1, 0, torch.qint8)))
    assert "input 0 is a quantised tensor of shape (6, 6)" in text and "dequantize()" in text


def test_a_sparse_buffer_is_refused_by_its_name() -> None:
    model = seeded(lambda: Apply(lambda m, x: torch.sparse.mm(m.graph, m.l(x)), l=nn.Linear(6, 6)))
    model.register_buffer("graph", torch.eye(3).to_sparse())
    text = refusal_of(model, lambda m: m(rows()))
    assert "buffer 'graph' is a sparse coo tensor" in text


def test_a_nested_input_is_refused() -> None:
    model = seeded(lambda: Apply(lambda m, x: m.l(x), l=nn.Linear(6, 6)))
    given = torch.nested.nested_tensor([torch.randn(2, 6), torch.randn(3, 6)], layout=torch.jagged)
    memfit.fit(model)
    with pytest.raises(MemfitError, match="input 0 is a"):
        model(given)


def test_a_tensor_subclass_as_input_is_refused_by_its_type() -> None:
    class Marked(torch.Tensor):
        pass

    model = seeded(lambda: Apply(lambda m, x: m.l(x), l=nn.Linear(6, 6)))
    text = refusal_of(model, lambda m: m(rows().as_subclass(Marked)), trains=False)
    assert "input 0 is a Marked tensor" in text


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_embedding_gradients_are_refused_by_module(kind: Any) -> None:
    model = seeded(lambda: nn.Sequential(kind(10, 6, sparse=True), nn.Linear(6, 2)))
    text = refusal_of(model, lambda m: m(torch.arange(6).view(2, 3)))
    assert "module '0'" in text and "sparse" in text and "sparse=False" in text


# --- writing where it cannot be followed -----------------------------------------------------------------------------


def test_writing_into_an_input_that_requires_grad_is_refused() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.l(x.mul_(2))  # here

    model = seeded(lambda: Apply(body, l=nn.Linear(6, 6)))
    given = lambda: rows(requires_grad=True) * 1  # noqa: E731
    text = refusal_of(model, lambda m: m(given()))
    assert f"module '(root)' at {line_of(body)} writes in place" in text
    assert "input 0" in text and "clone()" in text


def test_writing_into_a_leaf_input_that_requires_grad_fails_as_in_eager() -> None:
    for fit in (False, True):
        model = seeded(lambda: Apply(lambda m, x: m.l(x.mul_(2)), l=nn.Linear(6, 6)))
        if fit:
            memfit.fit(model)
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            model(rows(requires_grad=True))


def test_giving_a_tensor_another_storage_is_refused() -> None:
    def body(m: Any, y: torch.Tensor) -> torch.Tensor:
        y.data = y.detach() * 2
        return y

    text = refusal(body)
    assert "another storage" in text and "write into it instead" in text
