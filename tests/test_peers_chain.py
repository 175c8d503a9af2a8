"""Networks as chains of blocks for torch.utils.checkpoint: the same network, and less is held between the halves."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from equivalence import seeded
from torch import nn

from memfit import zoo
from memfit.errors import BadOption
from memfit.report.peers_chain import checkpoint_blocks, checkpoint_segments, stages_of

SMALL = {
    "vgg16_bn": ({"widths": (4, 4, 4, 4, 4), "hidden": 8, "num_classes": 3}, 32),
    "resnet50": ({"width": 4, "num_classes": 3}, 32),
    "densenet121": ({"blocks": (2, 2), "growth": 4, "stem_channels": 8, "num_classes": 3}, 32),
    "unet": ({"width": 4}, 16),
    "gpt2": ({"num_layers": 3, "width": 8, "num_heads": 2, "vocab_size": 11, "context": 8}, 8),
}


def small(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    options, image = SMALL[name]
    model = seeded(lambda: zoo.build(name, device="cpu", **options))
    if name == "gpt2":
        return model, (torch.arange(2 * image).reshape(2, image) % 11,)
    return model, (seeded(lambda: torch.randn(2, 1 if name == "unet" else 3, image, image)),)


def gradients(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    torch.manual_seed(3)
    output = model(*inputs)
    output.square().mean().backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(found) == len(list(model.parameters()))
    return [output.detach(), *found]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("wrap", [lambda m: checkpoint_segments(m, 3), lambda m: checkpoint_blocks(m, 4)])
def test_checkpointed_chains_are_the_network(name: str, wrap: Callable[[nn.Module], None]) -> None:
    model, inputs = small(name)
    chained = copy.deepcopy(model)
    wrap(chained)
    expected, found = gradients(model, inputs), gradients(chained, inputs)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert torch.equal(expected[0], found[0])
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in chained.named_parameters()]


def test_checkpoint_holds_less_between_the_halves() -> None:
    model, inputs = small("resnet50")

    def saved_bytes(model: nn.Module) -> int:
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model(*inputs)
        assert output.requires_grad
        return sum(kept.values())

    by_block, by_segment = copy.deepcopy(model), copy.deepcopy(model)
    checkpoint_blocks(by_block, 17)
    checkpoint_segments(by_segment, 3)
    assert saved_bytes(by_block) < 0.5 * saved_bytes(model)
    assert saved_bytes(by_segment) < 0.8 * saved_bytes(model)


def test_chains_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(BadOption, match="no chain of blocks is known for Linear"):
        stages_of(nn.Linear(2, 2))
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with pytest.raises(BadOption, match="3 segments: Sequential has 2 stages to divide"):
        checkpoint_segments(model, 3)
    with pytest.raises(BadOption, match="3 blocks: Sequential has 2 stages"):
        checkpoint_blocks(model, 3)
