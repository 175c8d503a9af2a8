"""Recurrent layers, attention and embeddings train fitted as they train eagerly, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence import Apply, assert_same_as_eager, seeded
from layer_inputs import check, sequences, tokens
from torch import nn

# --- recurrent layers ------------------------------------------------------------------------------------------------

RECURRENT = {
    "lstm": (lambda: nn.LSTM(8, 5, batch_first=True), sequences),
    "lstm, two layers, dropout": (lambda: nn.LSTM(8, 5, 2, dropout=0.3, batch_first=True), sequences),
    "lstm, bidirectional": (lambda: nn.LSTM(8, 5, 2, bidirectional=True, batch_first=True), sequences),
    "lstm, projected": (lambda: nn.LSTM(8, 5, proj_size=3, batch_first=True), sequences),
    "lstm, time first, no bias": (lambda: nn.LSTM(8, 5, bias=False), sequences),
    "lstm with a given state": (
        lambda: nn.LSTM(8, 5),
        lambda n: (torch.randn(5, n, 8), (torch.randn(1, n, 5), torch.randn(1, n, 5, requires_grad=True))),
    ),
    "gru": (lambda: nn.GRU(8, 5, batch_first=True), sequences),
    "gru, bidirectional, dropout": (
        lambda: nn.GRU(8, 5, 2, bidirectional=True, dropout=0.3, batch_first=True),
        sequences,
    ),
    "rnn": (lambda: nn.RNN(8, 5, 2, batch_first=True), sequences),
    "rnn, relu": (lambda: nn.RNN(8, 5, nonlinearity="relu", batch_first=True), sequences),
    "lstm between layers": (
        lambda: Apply(
            lambda m, x: m.o(F.dropout(m.r(m.e(x))[0], 0.2)[:, -1]),
            e=nn.Embedding(10, 8),
            r=nn.LSTM(8, 5, 2, dropout=0.2, batch_first=True),
            o=nn.Linear(5, 2),
        ),
        tokens,
    ),
    "gru cell in a loop": (lambda: CellLoop(nn.GRUCell(8, 5)), sequences),
    "rnn cell in a loop": (lambda: CellLoop(nn.RNNCell(8, 5)), sequences),
    "lstm cell in a loop": (lambda: LSTMLoop(), sequences),
}


class CellLoop(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(x.shape[0], 5)
        states = []
        for step in x.unbind(1):
            state = self.cell(step, state)
            states.append(state)
        return torch.stack(states, 1)


class LSTMLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0] * state[1]


@check(RECURRENT)
def test_recurrent_layers_match(build: Any, inputs: Any) -> None:
    assert_same_as_eager(seeded(build), inputs)


# --- attention -------------------------------------------------------------------------------------------------------


class Attend(nn.Module):
    """Self-attention by hand, on F.scaled_dot_product_attention."""

    def __init__(self, heads: int = 2, dropout: float = 0.0, causal: bool = False, masked: bool = False) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.heads, self.dropout, self.causal, self.masked = heads, dropout, causal, masked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, w = x.shape
        q, k, v = (p.view(n, t, self.heads, w // self.heads).transpose(1, 2) for p in self.project(x).split(w, 2))
        mask = torch.ones(t, t, dtype=torch.bool).tril() if self.masked else None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.dropout, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(n, t, w))


class AttendByHand(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.ones(5, 5, dtype=torch.bool).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.q(x) @ self.k(x).transpose(-1, -2) / 8**0.5
        weights = F.softmax(scores.masked_fill(self.mask, float("-inf")), dim=-1)
        return self.dropout(weights) @ self.v(x)


def mha(**options: Any) -> nn.Module:
    return Apply(lambda m, x: m.a(x, x, x), a=nn.MultiheadAttention(8, 2, batch_first=True, **options))


ATTENTION = {
    "multihead": (lambda: mha(), sequences),
    "multihead, dropout": (lambda: mha(dropout=0.3), sequences),
    "multihead, no bias": (lambda: mha(bias=False, add_bias_kv=True, add_zero_attn=True), sequences),
    "multihead without weights": (
        lambda: Apply(
            lambda m, x: m.a(x, x, x, need_weights=False)[0],
            a=nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True),
        ),
        sequences,
    ),
    "multihead, other key and value widths": (
        lambda: Apply(lambda m, x, y: m.a(x, y, y)[0], a=nn.MultiheadAttention(8, 2, kdim=6, vdim=6, batch_first=True)),
        lambda n: (torch.randn(n, 5, 8), torch.randn(n, 4, 6)),
    ),
    "multihead with a padding mask": (
        lambda: Apply(
            lambda m, x, mask: m.a(x, x, x, key_padding_mask=mask)[0], a=nn.MultiheadAttention(8, 2, batch_first=True)
        ),
        lambda n: (torch.randn(n, 5, 8), torch.tensor([[False] * 3 + [True] * 2] * n)),
    ),
    "sdpa": (lambda: Attend(), sequences),
    "sdpa, dropout": (lambda: Attend(dropout=0.3), sequences),
    "sdpa, causal": (lambda: Attend(causal=True), sequences),
    "sdpa, causal, dropout": (lambda: Attend(causal=True, dropout=0.3), sequences),
    "sdpa, masked": (lambda: Attend(masked=True), sequences),
    "sdpa, masked, dropout": (lambda: Attend(masked=True, dropout=0.3), sequences),
    "by hand": (lambda: AttendByHand(), sequences),
    "by hand, dropout": (lambda: AttendByHand(0.3), sequences),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), sequences),
    "encoder layer, dropout": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True), sequences),
    "encoder layer, norm first, gelu": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.2, "gelu", batch_first=True, norm_first=True),
        sequences,
    ),
    "encoder of two layers": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True), 2),
        sequences,
    ),
    "decoder layer": (
        lambda: nn.TransformerDecoderLayer(8, 2, 16, 0.1, batch_first=True),
        lambda n: (torch.randn(n, 5, 8), torch.randn(n, 4, 8)),
    ),
    "decoder of two layers, causal": (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, 0.1, batch_first=True), 2, nn.LayerNorm(8)),
        lambda n: (
            (torch.randn(n, 5, 8), torch.randn(n, 4, 8)),
            {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(5), "tgt_is_causal": True},
        ),
    ),
    "whole transformer": (
        lambda: nn.Transformer(8, 2, 1, 1, 16, 0.1, batch_first=True),
        lambda n: (torch.randn(n, 5, 8), torch.randn(n, 4, 8)),
    ),
}


@check(ATTENTION)
def test_attention_matches(build: Any, inputs: Any) -> None:
    assert_same_as_eager(seeded(build), inputs)


# --- embeddings ------------------------------------------------------------------------------------------------------

EMBEDDINGS = {
    "plain": (lambda: nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 2)), tokens),
    "alone": (lambda: nn.Embedding(10, 6), tokens),
    "padded": (lambda: nn.Embedding(10, 6, padding_idx=0), tokens),
    "scaled by frequency": (lambda: nn.Embedding(10, 6, scale_grad_by_freq=True), tokens),
    "int32": (lambda: nn.Embedding(10, 6), lambda n: (torch.randint(0, 10, (n, 5), dtype=torch.int32),)),
    "bag, mean": (lambda: nn.EmbeddingBag(10, 6), tokens),
    "bag, sum": (lambda: nn.EmbeddingBag(10, 6, mode="sum"), tokens),
    "bag, max": (lambda: nn.EmbeddingBag(10, 6, mode="max"), tokens),
    "bag, weighted": (
        lambda: nn.EmbeddingBag(10, 6, mode="sum"),
        lambda n: (torch.randint(0, 10, (n, 5)), None, torch.randn(n, 5, requires_grad=True)),
    ),
    "bag with offsets": (
        lambda: nn.EmbeddingBag(10, 6),
        lambda n: (torch.randint(0, 10, (3 * n,)), torch.arange(0, 3 * n, 3)),
    ),
    "tied to the output": (
        lambda: Apply(lambda m, x: F.linear(torch.tanh(m.e(x)), m.e.weight), e=nn.Embedding(10, 6)),
        tokens,
    ),
    "token and position": (
        lambda: Apply(lambda m, x: m.t(x) + m.p(torch.arange(x.shape[1])), t=nn.Embedding(10, 6), p=nn.Embedding(5, 6)),
        tokens,
    ),
    "one-hot": (lambda: Apply(lambda m, x: F.one_hot(x, 10).float() @ m.w, w=(10, 4)), tokens),
}


@check(EMBEDDINGS)
def test_embeddings_match(build: Any, inputs: Any) -> None:
    assert_same_as_eager(seeded(build), inputs)


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_an_embedding_that_renormalises_its_weight_in_forward_matches(max_norm: float) -> None:
    model = seeded(lambda: nn.Sequential(nn.Embedding(10, 6, max_norm=max_norm), nn.Linear(6, 2)))
    assert_same_as_eager(model, tokens)
