"""Dropout, noise and normalisation layers train fitted as they train eagerly, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from equivalence import Apply, assert_same_as_eager, seeded
from layer_inputs import behind_conv, between, check, images, lines, rows, tokens, volumes
from torch import nn

# --- dropout and noise -----------------------------------------------------------------------------------------------

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


# --- normalisation ---------------------------------------------------------------------------------------------------

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
