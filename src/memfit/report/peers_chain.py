"""Networks as chains of stages, so that torch.utils.checkpoint can be put around stretches of them.

A stage takes a tuple of tensors and returns one: what flows from block to block is one tensor in most networks, the
tensor and its skips in a U-Net, and all features so far inside a dense block. Stages begin with an op that does not
write over its operand, since checkpoint holds that operand to start again from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import singledispatch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from memfit.errors import BadOption
from memfit.zoo.densenet import DenseBlock, DenseLayer, DenseNet
from memfit.zoo.gpt2 import GPT2
from memfit.zoo.resnet import ResNet
from memfit.zoo.unet import UNet
from memfit.zoo.vgg import VGG

State = tuple[Tensor, ...]
Stage = Callable[..., State]


@singledispatch
def stages_of(model: nn.Module) -> list[Stage]:
    """The stages that the model's forward is a chain of."""
    raise BadOption(
        f"no chain of blocks is known for {type(model).__name__}, so torch.utils.checkpoint has nothing to be put "
        "around. Known are VGG, ResNet, DenseNet, U-Net, GPT-2 and nn.Sequential"
    )


def checkpoint_segments(model: nn.Module, num_segments: int) -> None:
    """Checkpoint that many stretches of about as many stages each, but the last: as checkpoint_sequential does."""
    stages = stages_of(model)
    if not 1 <= num_segments <= len(stages):
        raise BadOption(f"{num_segments} segments: {type(model).__name__} has {len(stages)} stages to divide")
    size = len(stages) // num_segments
    cuts = [number * size for number in range(num_segments)]
    _checkpoint(model, stages, [range(start, start + size) for start in cuts[:-1]])


def checkpoint_blocks(model: nn.Module, num_blocks: int) -> None:
    """Checkpoint each of the first stages by itself, and leave the others as they are."""
    stages = stages_of(model)
    if not 0 <= num_blocks <= len(stages):
        raise BadOption(f"{num_blocks} blocks: {type(model).__name__} has {len(stages)} stages")
    _checkpoint(model, stages, [range(number, number + 1) for number in range(num_blocks)])


def _checkpoint(model: nn.Module, stages: Sequence[Stage], segments: Sequence[range]) -> None:
    """Let the model's forward run its stages, those of each segment under one checkpoint. In place."""
    num_inside = sum(len(segment) for segment in segments)

    def forward(*inputs: Tensor) -> Tensor:
        state: State = inputs
        for segment in segments:
            state = checkpoint(_run, stages[segment.start : segment.stop], *state, use_reentrant=False)
        (output,) = _run(stages[num_inside:], *state)
        return output

    model.__dict__["forward"] = forward


def _run(stages: Sequence[Stage], *state: Tensor) -> State:
    for stage in stages:
        state = stage(*state)
    return state


def _one(module: Callable[[Tensor], Tensor]) -> Stage:
    """A stage of a module that takes one tensor and returns one."""
    return lambda x: (module(x),)


def _groups(modules: Sequence[nn.Module], starts: type[nn.Module]) -> list[Stage]:
    """Stages of modules in a row, each from one of that type up to the next."""
    groups: list[list[nn.Module]] = []
    for module in modules:
        if isinstance(module, starts) or not groups:
            groups.append([])
        groups[-1].append(module)
    return [_one(nn.Sequential(*group)) for group in groups]


@stages_of.register
def _(model: nn.Sequential) -> list[Stage]:
    return [_one(module) for module in model]


@stages_of.register
def _(model: VGG) -> list[Stage]:
    return [
        *_groups(list(model.features), nn.Conv2d),
        _one(lambda x: model.classifier(model.pool(x).flatten(1))),
    ]


@stages_of.register
def _(model: ResNet) -> list[Stage]:
    return [
        _one(model.stem),
        *(_one(block) for stage in model.stages for block in stage),  # type: ignore[attr-defined]
        _one(lambda x: model.head(model.pool(x).flatten(1))),
    ]


@stages_of.register
def _(model: DenseNet) -> list[Stage]:
    *features, norm = model.features
    stem, blocks = features[:4], features[4:]
    stages = [_one(nn.Sequential(*stem))]
    for block in blocks:
        if isinstance(block, DenseBlock):
            stages += [_dense(layer) for layer in block]  # type: ignore[arg-type]
            stages.append(lambda *state: (torch.cat(state, dim=1),))
        else:
            stages.append(_one(block))
    # Behind the last norm stands a ReLU in place: together, or a segment would end in what is written over.
    stages.append(_one(lambda x: model.head(F.adaptive_avg_pool2d(F.relu(norm(x), inplace=True), 1).flatten(1))))
    return stages


def _dense(layer: DenseLayer) -> Stage:
    return lambda *state: (*state, layer(list(state)))


@stages_of.register
def _(model: UNet) -> list[Stage]:
    last = len(model.down) - 1

    def down(index: int) -> Stage:
        def stage(x: Tensor, *skips: Tensor) -> State:
            x = model.down[index](x)
            if index == last:
                x = model.drop(x)
            return (model.pool(x), *skips, x)

        return stage

    def bottom(x: Tensor, *skips: Tensor) -> State:
        return (model.drop(model.bottom(x)), *skips)

    def up(index: int) -> Stage:
        def stage(x: Tensor, *skips: Tensor) -> State:
            *rest, skip = skips
            return (model.up[index](torch.cat([skip, model.widen[index](x)], dim=1)), *rest)

        return stage

    levels = range(len(model.down))
    return [*map(down, levels), bottom, *map(up, levels), _one(model.head)]


@stages_of.register
def _(model: GPT2) -> list[Stage]:
    def embed(ids_BT: Tensor) -> State:
        places_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        return (model.drop(model.tokens(ids_BT) + model.positions(places_T)),)

    return [embed, *(_one(block) for block in model.blocks), _one(lambda x: model.head(model.norm(x)))]
