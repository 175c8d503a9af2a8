"""Every kind of layer trains fitted as it trains eagerly, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence import Apply, assert_same_as_eager, seeded
from torch import nn


def rows(n: int, width: int = 6, **options: Any) -> tuple[torch.Tensor]:
    return (torch.randn(n, width, **options),)


def lines(n: int) -> tuple[torch.Tensor]:
    return (torch.randn(n, 4, 9),)


def images(n: int) -> tuple[torch.Tensor]:
    return (torch.randn(n, 4, 8, 8),)


def volumes(n: int) -> tuple[torch.Tensor]:
    return (torch.randn(n, 4, 6, 6, 6),)


def tokens(n: int) -> tuple[torch.Tensor]:
    return (torch.randint(0, 10, (n, 5)),)


def sequences(n: int) -> tuple[torch.Tensor]:
    return (torch.randn(n, 5, 8),)


def between(layer: nn.Module, width: int = 6) -> nn.Module:
    """The layer with something trainable before and after it."""
    return nn.Sequential(nn.Linear(width, width), layer, nn.Linear(width, 3))


def behind_conv(layer: nn.Module, channels: int = 4) -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, channels, 3, padding=1), layer)


def check(cases: dict[str, tuple[Any, Any]]) -> Any:
    return pytest.mark.parametrize(("build", "inputs"), list(cases.values()), ids=list(cases))


DROPOUT = {
    "between layers": (lambda: between(nn.Dropout(0.5)), rows),
    "first": (lambda: nn.Sequential(nn.Dropout(0.3), nn.Linear(6, 3)), rows),
    "last": (lambda: nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.3)), rows),
    "p zero": (lambda: between(nn.Dropout(0.0)), rows),
    "p one": (lambda: between(nn.Dropout(1.0)), rows),
    "in place": (lambda: between(nn.Dropout(0.5, inplace=True)), rows),
    "on an embedding": (lambda: nn.Sequential(nn.Embedding(10, 6), nn.Dropout(0.5), nn.Linear(6, 2)), tokens),
    "functional": (lambda: Apply(lambda m, x: F.dropout(m.l(x), 0.4, m.training), l=nn.Linear(6, 6)), rows),
    "functional, always": (lambda: Apply(lambda m, x: F.dropout(m.l(x), 0.4), l=nn.Linear(6, 6)), rows),
    "off": (lambda: Apply(lambda m, x: F.dropout(m.l(x), 0.4, False), l=nn.Linear(6, 6)), rows),
    "twice the same input": (
        lambda: Apply(lambda m, x: F.dropout(m.l(x), 0.4) + F.dropout(m.l(x), 0.4), l=nn.Linear(6, 6)),
        rows,
    ),
    "alpha": (lambda: between(nn.AlphaDropout(0.4)), rows),
    "feature alpha": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.FeatureAlphaDropout(0.4)), images),
    "dropout1d": (lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.Dropout1d(0.4)), lines),
    "dropout2d": (lambda: behind_conv(nn.Dropout2d(0.4)), images),
    "dropout3d": (lambda: nn.Sequential(nn.Conv3d(4, 4, 3), nn.Dropout3d(0.4)), volumes),
    "rrelu": (lambda: between(nn.RReLU()), rows),
    "gumbel": (lambda: Apply(lambda m, x: F.gumbel_softmax(m.l(x), hard=True), l=nn.Linear(6, 6)), rows),
    "noise": (lambda: Apply(lambda m, x: m.l(x) + 0.1 * torch.randn_like(x), l=nn.Linear(6, 6)), rows),
    "bernoulli": (
        lambda: Apply(lambda m, x: m.l(x) * torch.bernoulli(torch.full_like(x, 0.5)), l=nn.Linear(6, 6)),
        rows,
    ),
    "in-place noise": (lambda: Apply(lambda m, x: m.l(x) * torch.empty_like(x).uniform_(), l=nn.Linear(6, 6)), rows),
    "randperm": (lambda: Apply(lambda m, x: m.l(x)[:, torch.randperm(6)], l=nn.Linear(6, 6)), rows),
    "multinomial": (
        lambda: Apply(lambda m, x: m.l(x)[:, torch.multinomial(torch.ones(6), 3)], l=nn.Linear(6, 6)),
        rows,
    ),
    "stochastic depth by tensor": (
        lambda: Apply(lambda m, x: x + m.l(x) * (torch.rand(x.shape[0], 1) < 0.5).to(x.dtype), l=nn.Linear(6, 6)),
        rows,
    ),
}


@check(DROPOUT)
def test_random_layers_draw_what_eager_draws(build: Any, inputs: Any) -> None:
    assert_same_as_eager(seeded(build), inputs)


NORMS = {
    "batch1d": (lambda: between(nn.BatchNorm1d(6)), rows),
    "batch1d on lines": (lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4)), lines),
    "batch2d": (lambda: behind_conv(nn.BatchNorm2d(4)), images),
    "batch3d": (lambda: nn.Sequential(nn.Conv3d(4, 4, 3), nn.BatchNorm3d(4)), volumes),
    "batch without affine": (lambda: behind_conv(nn.BatchNorm2d(4, affine=False)), images),
    "batch without running stats": (lambda: behind_conv(nn.BatchNorm2d(4, track_running_stats=False)), images),
    "batch with momentum one": (lambda: behind_conv(nn.BatchNorm2d(4, momentum=1.0)), images),
    "batch, in-place relu behind": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3)),
        images,
    ),
    "batch first": (lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)), images),
    "group": (lambda: behind_conv(nn.GroupNorm(2, 4)), images),
    "group without affine": (lambda: behind_conv(nn.GroupNorm(4, 4, affine=False)), images),
    "layer": (lambda: between(nn.LayerNorm(6)), rows),
    "layer without affine": (lambda: between(nn.LayerNorm(6, elementwise_affine=False)), rows),
    "layer without bias": (lambda: between(nn.LayerNorm(6, bias=False)), rows),
    "layer over images": (lambda: behind_conv(nn.LayerNorm([4, 8, 8])), images),
    "rms": (lambda: between(nn.RMSNorm(6)), rows),
    "instance1d": (lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.InstanceNorm1d(4)), lines),
    "instance2d": (lambda: behind_conv(nn.InstanceNorm2d(4)), images),
    "instance2d affine, tracked": (
        lambda: behind_conv(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
        images,
    ),
    "instance3d": (lambda: nn.Sequential(nn.Conv3d(4, 4, 3), nn.InstanceNorm3d(4, affine=True)), volumes),
    "local response": (lambda: behind_conv(nn.LocalResponseNorm(2)), images),
    "normalize": (lambda: Apply(lambda m, x: F.normalize(m.l(x), dim=1), l=nn.Linear(6, 6)), rows),
    "batch in eval inside a training model": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
        images,
    ),
    "functional batch norm": (
        lambda: Apply(
            lambda m, x: F.batch_norm(x * m.s, m.mean, m.var, training=True),
            s=(1,),
            mean=torch.zeros(6),
            var=torch.ones(6),
        ),
        rows,
    ),
}


@check(NORMS)
def test_normalisation_layers_and_their_buffers_match(build: Any, inputs: Any) -> None:
    assert_same_as_eager(seeded(build), inputs)


def test_batch_norm_kept_in_eval_while_the_model_trains_matches() -> None:
    model = seeded(lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))
    model.train()
    model[1].eval()
    assert_same_as_eager(model, images, train=False)


CONVOLUTIONS = {
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(4, 5, 3), nn.ReLU(), nn.Conv1d(5, 3, 3)), lines),
    "conv2d": (lambda: nn.Sequential(nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Conv2d(5, 3, 3)), images),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(4, 3, 3), nn.ReLU(), nn.Conv3d(3, 2, 2)), volumes),
    "no bias": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3, bias=False), nn.Conv2d(4, 3, 3)), images),
    "1x1": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 3, 1)), images),
    "grouped": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Conv2d(8, 8, 3, groups=4)), images),
    "depthwise": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3, groups=4), nn.Conv2d(8, 3, 1)), images),
    "dilated, strided": (lambda: behind_conv(nn.Conv2d(4, 3, 2, stride=2, dilation=2, padding=1)), images),
    "same padding": (lambda: behind_conv(nn.Conv2d(4, 3, 3, padding="same")), images),
    "even kernel, same padding": (lambda: behind_conv(nn.Conv2d(4, 3, 2, padding="same")), images),
    "circular padding": (lambda: behind_conv(nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular")), images),
    "reflect padding": (lambda: behind_conv(nn.Conv2d(4, 3, 3, padding=1, padding_mode="reflect")), images),
    "replicate padding": (lambda: behind_conv(nn.Conv2d(4, 3, 3, padding=1, padding_mode="replicate")), images),
    "transposed 1d": (lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.ConvTranspose1d(4, 3, 3)), lines),
    "transposed 2d": (lambda: behind_conv(nn.ConvTranspose2d(4, 3, 3, stride=2, output_padding=1)), images),
    "transposed 3d": (lambda: nn.Sequential(nn.Conv3d(4, 4, 3), nn.ConvTranspose3d(4, 3, 2)), volumes),
    "unfold and fold": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Unfold(2, stride=2), nn.Fold((8, 8), 2, stride=2)),
        images,
    ),
    "frozen weight": (lambda: freeze(nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)), "1.weight"), images),
    "frozen bias": (lambda: freeze(nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)), "1.bias"), images),
    "all frozen but bias": (lambda: freeze(nn.Sequential(nn.Conv2d(4, 4, 3)), "0.weight"), images),
    "unbatched": (lambda: nn.Conv2d(4, 3, 3), lambda n: (torch.randn(4, 8, 8),)),
    "conv + relu + pool": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2), nn.Conv2d(4, 2, 3)),
        images,
    ),
    "conv + relu + pool, no last layer": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2)),
        images,
    ),
    "relu read beside the pool": (
        lambda: Apply(
            lambda m, x: (lambda y: (F.max_pool2d(y, 2), y.mean()))(F.relu(m.c(x))),
            c=nn.Conv2d(4, 4, 3, padding=1),
        ),
        images,
    ),
    "overlapping pool behind relu": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(4, 2, 2)),
        images,
    ),
    "padded pool behind relu": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1), nn.Conv2d(4, 2, 2)),
        images,
    ),
    "bilinear": (lambda: nn.Bilinear(6, 6, 4), lambda n: (torch.randn(n, 6), torch.randn(n, 6))),
}


def freeze(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


@check(CONVOLUTIONS)
def test_convolutions_match(build: Any, inputs: Any) -> None:
    assert_same_as_eager(seeded(build), inputs)


@pytest.mark.parametrize("name", ["conv2d", "no bias", "depthwise", "unfold and fold", "frozen weight"])
def test_convolutions_of_an_input_that_requires_grad_match(name: str) -> None:
    assert_same_as_eager(seeded(CONVOLUTIONS[name][0]), lambda n: (torch.randn(n, 4, 8, 8, requires_grad=True),))


POOLS = {
    "max1d": (lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.MaxPool1d(2)), lines),
    "max2d": (lambda: behind_conv(nn.MaxPool2d(2)), images),
    "max2d ceil, dilated": (lambda: behind_conv(nn.MaxPool2d(3, 2, padding=1, dilation=2, ceil_mode=True)), images),
    "max3d": (lambda: nn.Sequential(nn.Conv3d(4, 4, 3), nn.MaxPool3d(2)), volumes),
    "max2d with indices": (
        lambda: Apply(lambda m, x: F.max_pool2d(m.c(x), 2, return_indices=True), c=nn.Conv2d(4, 4, 3, padding=1)),
        images,
    ),
    "max unpool": (
        lambda: Apply(
            lambda m, x: F.max_unpool2d(*F.max_pool2d(m.c(x), 2, return_indices=True), 2),
            c=nn.Conv2d(4, 4, 3, padding=1),
        ),
        images,
    ),
    "average1d": (lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.AvgPool1d(2)), lines),
    "average2d": (lambda: behind_conv(nn.AvgPool2d(3, 2, padding=1, count_include_pad=False)), images),
    "average3d": (lambda: nn.Sequential(nn.Conv3d(4, 4, 3), nn.AvgPool3d(2)), volumes),
    "adaptive average1d": (lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.AdaptiveAvgPool1d(3)), lines),
    "adaptive average2d": (lambda: behind_conv(nn.AdaptiveAvgPool2d((3, 2))), images),
    "adaptive average to one": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)),
        images,
    ),
    "adaptive max1d": (lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.AdaptiveMaxPool1d(3)), lines),
    "adaptive max2d": (lambda: behind_conv(nn.AdaptiveMaxPool2d((3, 2))), images),
    "lp": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.LPPool2d(2, 2)), images),
    "fractional": (lambda: behind_conv(nn.FractionalMaxPool2d(2, output_size=3)), images),
}


@check(POOLS)
def test_pooling_matches(build: Any, inputs: Any) -> None:
    assert_same_as_eager(seeded(build), inputs)


RESIZING = {
    "nearest": (lambda: behind_conv(nn.Upsample(scale_factor=2)), images),
    "nearest-exact": (lambda: behind_conv(nn.Upsample(scale_factor=2, mode="nearest-exact")), images),
    "bilinear": (lambda: behind_conv(nn.Upsample(scale_factor=2, mode="bilinear")), images),
    "bilinear aligned": (lambda: behind_conv(nn.Upsample((5, 7), mode="bilinear", align_corners=True)), images),
    "bicubic": (lambda: behind_conv(nn.Upsample(scale_factor=1.5, mode="bicubic")), images),
    "area": (
        lambda: Apply(lambda m, x: F.interpolate(m.c(x), size=(4, 4), mode="area"), c=nn.Conv2d(4, 4, 3)),
        images,
    ),
    "antialias": (
        lambda: Apply(
            lambda m, x: F.interpolate(m.c(x), size=(4, 4), mode="bilinear", antialias=True), c=nn.Conv2d(4, 4, 3)
        ),
        images,
    ),
    "linear": (lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.Upsample(scale_factor=2, mode="linear")), lines),
    "trilinear": (lambda: nn.Sequential(nn.Conv3d(4, 4, 3), nn.Upsample(scale_factor=2, mode="trilinear")), volumes),
    "pixel shuffle": (lambda: behind_conv(nn.PixelShuffle(2)), images),
    "pixel unshuffle": (lambda: behind_conv(nn.PixelUnshuffle(2)), images),
    "channel shuffle": (lambda: behind_conv(nn.ChannelShuffle(2)), images),
    "zero pad": (lambda: behind_conv(nn.ZeroPad2d((1, 2, -1, 0))), images),
    "reflection pad": (lambda: behind_conv(nn.ReflectionPad2d(2)), images),
    "replication pad": (lambda: behind_conv(nn.ReplicationPad2d(2)), images),
    "constant pad": (lambda: behind_conv(nn.ConstantPad2d(1, 3.5)), images),
    "grid sample": (
        lambda: Apply(
            lambda m, x: F.grid_sample(
                m.c(x), F.affine_grid(m.t.expand(x.shape[0], 2, 3), [x.shape[0], 4, 5, 5], align_corners=False)
            ),
            c=nn.Conv2d(4, 4, 3),
            t=(1, 2, 3),
        ),
        images,
    ),
}


@check(RESIZING)
def test_resizing_and_padding_match(build: Any, inputs: Any) -> None:
    assert_same_as_eager(seeded(build), inputs)


ACTIVATIONS = [
    nn.ReLU(),
    nn.ReLU(inplace=True),
    nn.ReLU6(),
    nn.ReLU6(inplace=True),
    nn.LeakyReLU(0.1),
    nn.LeakyReLU(0.1, inplace=True),
    nn.GELU(),
    nn.GELU("tanh"),
    nn.SiLU(),
    nn.SiLU(inplace=True),
    nn.ELU(),
    nn.ELU(inplace=True),
    nn.CELU(),
    nn.SELU(),
    nn.Hardswish(),
    nn.Hardswish(inplace=True),
    nn.Hardsigmoid(),
    nn.Hardtanh(),
    nn.Mish(),
    nn.PReLU(),
    nn.PReLU(6),
    nn.Softplus(),
    nn.Softsign(),
    nn.Softshrink(),
    nn.Hardshrink(),
    nn.Tanhshrink(),
    nn.Tanh(),
    nn.Sigmoid(),
    nn.LogSigmoid(),
    nn.Softmax(1),
    nn.Softmin(1),
    nn.LogSoftmax(1),
    nn.GLU(),
    nn.Threshold(0.1, -1.0),
]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations_match(activation: nn.Module) -> None:
    after = 3 if isinstance(activation, nn.GLU) else 6
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 6), copy.deepcopy(activation), nn.Linear(after, 3)))
    assert_same_as_eager(model, rows)


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


class LoRA(nn.Module):
    """A frozen linear layer with a low-rank update beside it."""

    def __init__(self, layer: nn.Linear, rank: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + 2.0 * F.linear(F.linear(self.dropout(x), self.down), self.up)


def linear(n_in: int = 6, n_out: int = 6) -> nn.Linear:
    return nn.Linear(n_in, n_out)


REPARAMETRISED = {
    "lora": (lambda: nn.Sequential(LoRA(linear()), nn.ReLU(), LoRA(linear())), rows),
    "lora on frozen embeddings": (
        lambda: nn.Sequential(nn.Embedding(10, 6).requires_grad_(False), LoRA(linear()), nn.GELU(), LoRA(linear())),
        tokens,
    ),
    "weight norm by parametrization": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(linear()), nn.ReLU(), linear()),
        rows,
    ),
    "weight norm by hook": (lambda: nn.Sequential(nn.utils.weight_norm(linear()), nn.ReLU(), linear()), rows),
    "spectral norm by parametrization": (
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(linear()), nn.ReLU(), linear()),
        rows,
    ),
    "spectral norm by hook": (lambda: nn.Sequential(nn.utils.spectral_norm(linear()), nn.ReLU(), linear()), rows),
    "orthogonal": (lambda: nn.Sequential(nn.utils.parametrizations.orthogonal(linear()), linear()), rows),
    "own parametrization": (lambda: nn.Sequential(symmetric(linear()), nn.Tanh(), linear()), rows),
    "pruned by hook": (lambda: nn.Sequential(pruned(linear()), nn.ReLU(), linear()), rows),
    "standardised weight": (lambda: StandardisedConv(), images),
}


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def symmetric(layer: nn.Linear) -> nn.Linear:
    nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def pruned(layer: nn.Linear) -> nn.Module:
    from torch.nn.utils import prune

    return prune.l1_unstructured(layer, "weight", amount=0.4)


class StandardisedConv(nn.Conv2d):
    def __init__(self) -> None:
        super().__init__(4, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight / (weight.std((1, 2, 3), keepdim=True) + 1e-5), self.bias)


@check(REPARAMETRISED)
def test_adapters_and_reparametrised_weights_match(build: Any, inputs: Any) -> None:
    assert_same_as_eager(build, inputs)  # built anew: some of these cannot be deep-copied


class InModel(nn.Module):
    """A model that computes its own loss from labels."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.loss = loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.layer(x), y)


def classes(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 6), torch.randint(0, 5, (n,))


def reals(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 6), torch.rand(n, 5)


LOSSES = {
    "cross entropy": (nn.CrossEntropyLoss(), classes),
    "cross entropy, summed": (nn.CrossEntropyLoss(reduction="sum"), classes),
    "cross entropy, each": (nn.CrossEntropyLoss(reduction="none"), classes),
    "cross entropy, weighted": (nn.CrossEntropyLoss(weight=torch.arange(1.0, 6.0)), classes),
    "cross entropy, smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), classes),
    "cross entropy, some ignored": (
        nn.CrossEntropyLoss(),
        lambda n: (torch.randn(n, 6), torch.tensor([-100, 3, 1, 2, 0][:n])),
    ),
    "cross entropy, soft targets": (nn.CrossEntropyLoss(), reals),
    "nll": (lambda p, y: F.nll_loss(F.log_softmax(p, 1), y), classes),
    "bce": (lambda p, y: F.binary_cross_entropy(p.sigmoid(), y), reals),
    "bce with logits": (nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0)), reals),
    "mse": (nn.MSELoss(), reals),
    "l1": (nn.L1Loss(), reals),
    "smooth l1": (nn.SmoothL1Loss(), reals),
    "huber": (nn.HuberLoss(), reals),
    "kl": (lambda p, y: F.kl_div(F.log_softmax(p, 1), F.softmax(y, 1), reduction="batchmean"), reals),
    "poisson": (nn.PoissonNLLLoss(), reals),
    "multi margin": (nn.MultiMarginLoss(), classes),
    "soft margin": (nn.SoftMarginLoss(), lambda n: (torch.randn(n, 6), torch.randn(n, 5).sign())),
    "triplet": (lambda p, y: F.triplet_margin_loss(p, y, y.flip(0)), reals),
}


@pytest.mark.parametrize(("loss", "inputs"), list(LOSSES.values()), ids=list(LOSSES))
def test_losses_inside_the_model_match(loss: Any, inputs: Any) -> None:
    assert_same_as_eager(seeded(lambda: InModel(loss)), inputs)
