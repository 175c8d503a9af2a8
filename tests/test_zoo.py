"""The zoo: every network is the published one, runs on meta for free, and trains from a seed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memfit import zoo
from memfit.errors import MemfitError

# As published by torchvision and, for the last ones, by the authors; typed here again, not read from the table.
NUM_PARAMETERS = {
    "alexnet": 61_100_840,
    "googlenet": 6_624_904,
    "inception_v3": 23_834_568,
    "vgg11": 132_863_336,
    "vgg13": 133_047_848,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "vgg11_bn": 132_868_840,
    "vgg13_bn": 133_053_736,
    "vgg16_bn": 138_365_992,
    "vgg19_bn": 143_678_248,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "densenet121": 7_978_856,
    "densenet161": 28_681_000,
    "densenet169": 14_149_480,
    "densenet201": 20_013_928,
    "vit_b16": 86_567_656,
    "overfeat": 145_920_872,
    "darts": 3_349_342,
    "gpt2": 124_439_808,
}

# Small enough to train on one core in about a second, by `build` options, batch and image.
SMALL: dict[str, tuple[dict[str, Any], int, int]] = {
    "alexnet": ({"hidden": 32}, 2, 63),
    "nin": ({}, 2, 39),
    "googlenet": ({}, 4, 32),
    "vgg11": ({"hidden": 32}, 2, 32),
    "vgg16_bn": ({"hidden": 32}, 2, 32),
    "resnet18": ({"width": 8}, 4, 32),
    "resnet50": ({"width": 8, "stages": (1, 1, 1, 1)}, 4, 32),
    "densenet121": ({"blocks": (2, 2, 2, 2)}, 4, 32),
    "darts": ({"channels": 4, "num_cells": 5}, 4, 16),
    "unet": ({"width": 4}, 2, 32),
    "vit_b16": ({"image": 32, "depth": 2, "width": 64, "num_heads": 4, "mlp_width": 128}, 2, 32),
    "gpt2": ({"num_layers": 2, "width": 64, "num_heads": 4, "vocab_size": 101, "context": 32}, 2, 16),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _output_shape(name: str, batch: int, image: int) -> tuple[int, ...]:
    network = zoo.spec(name)
    match network.task:
        case "classify":
            return (batch, network.num_classes)
        case "segment":
            return (batch, network.num_classes, image, image)
        case "next_token":
            return (batch, image, network.num_classes)


# -- The published networks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", zoo.names())
def test_every_network_is_the_published_one(name: str) -> None:
    network = zoo.spec(name)
    model = zoo.build(name)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model.training
    assert _count(model) == network.num_parameters == NUM_PARAMETERS.get(name, network.num_parameters)
    assert network.source and network.batch_source

    (x,) = zoo.inputs(name, device="meta")
    assert x.is_meta and x.shape[0] == network.batch and x.shape[-1] == network.image
    output = model(x)
    assert tuple(output.shape) == _output_shape(name, network.batch, network.image)
    loss = zoo.loss(name)(output, *zoo.targets(name, device="meta"))
    assert loss.shape == ()
    # Meta tensors have versions too: an in-place op in a wrong place raises here.
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", [name for name in zoo.names() if name != "vit_b16"])
def test_every_network_takes_its_smallest_image_and_no_smaller(name: str) -> None:
    network = zoo.spec(name)
    model = zoo.build(name).eval()
    (x,) = zoo.inputs(name, batch=2, image=network.minimum, device="meta")
    assert tuple(model(x).shape) == _output_shape(name, 2, network.minimum)
    if network.minimum > network.multiple:
        with pytest.raises(RuntimeError):
            model(torch.empty(2, network.channels, network.minimum - 1, network.minimum - 1, device="meta"))


@pytest.mark.parametrize(("name", "image"), [("inception_v3", 139), ("overfeat", 221), ("unet", 272), ("gpt2", 7)])
def test_other_images_fit(name: str, image: int) -> None:
    (x,) = zoo.inputs(name, batch=3, image=image, device="meta")
    assert tuple(zoo.build(name)(x).shape) == _output_shape(name, 3, image)


@pytest.mark.parametrize(("name", "num_convolutions"), [("vgg16", 13), ("vgg116", 113), ("vgg416", 413)])
def test_vgg_is_as_deep_as_its_name(name: str, num_convolutions: int) -> None:
    modules = list(zoo.build(name).modules())
    assert sum(isinstance(module, nn.Conv2d) for module in modules) == num_convolutions
    assert sum(isinstance(module, nn.Linear) for module in modules) == 3
    assert all(module.inplace for module in modules if isinstance(module, nn.ReLU))


def test_gpt2_ties_its_head_to_its_tokens() -> None:
    model = zoo.build("gpt2", device="meta")
    head, tokens = model.get_submodule("head"), model.get_submodule("tokens")
    assert head.weight is tokens.weight
    assert sum(m.p == 0.1 for m in model.modules() if isinstance(m, nn.Dropout)) == 1 + 2 * 12


def test_gpt2_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    options, _, image = SMALL["gpt2"]
    model = zoo.build("gpt2", device="cpu", **options).eval()
    (ids,) = zoo.inputs("gpt2", batch=1, image=image, num_classes=101)
    changed = ids.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 101
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


# -- Training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_a_few_steps_train(name: str) -> None:
    options, batch, image = SMALL[name]
    num_classes = options.get("vocab_size")
    torch.manual_seed(0)
    model = zoo.build(name, device="cpu", **options)
    x = zoo.inputs(name, batch=batch, image=image, num_classes=num_classes)
    y = zoo.targets(name, batch=batch, image=image, num_classes=num_classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        loss = zoo.loss(name)(model(*x), *y)
        assert torch.isfinite(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)


def test_very_deep_vgg_still_has_a_gradient_at_its_first_layer() -> None:
    # 45 convolutions without batch norm, most of them narrow: torch's own initialisation would leave about 1e-22.
    torch.manual_seed(0)
    model = zoo.build("vgg116", device="cpu", groups=(20, 20, 3, 1, 1), hidden=16)
    model(*zoo.inputs("vgg116", batch=1, image=32)).square().sum().backward()
    first = next(model.parameters()).grad
    assert first is not None and first.isfinite().all() and first.abs().max() > 1e-12


# -- Data -------------------------------------------------------------------------------------------------------------


def test_data_is_reproducible_and_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    for name in ("resnet18", "unet", "gpt2"):
        a, b, c = (zoo.inputs(name, batch=2, image=16, seed=seed)[0] for seed in (1, 1, 2))
        assert torch.equal(a, b) and not torch.equal(a, c)
        a, b, c = (zoo.targets(name, batch=64, image=16, seed=seed)[0] for seed in (1, 1, 2))
        assert torch.equal(a, b) and not torch.equal(a, c)
        assert a.min() >= 0 and a.max() < zoo.spec(name).num_classes
    assert torch.equal(before, torch.get_rng_state())


def test_gpt2_targets_are_its_inputs_one_token_on() -> None:
    (ids,), (following,) = (make("gpt2", batch=2, image=9, seed=3) for make in (zoo.inputs, zoo.targets))
    assert ids.shape == following.shape == (2, 9)
    assert torch.equal(ids[:, 1:], following[:, :-1])
    assert ids.is_contiguous() and following.is_contiguous()


def test_data_on_meta_at_a_size_no_machine_has() -> None:
    (x,) = zoo.inputs("vgg16", batch=10**9, device="meta")
    assert x.is_meta and x.numel() == 10**9 * 3 * 224 * 224
    (y,) = zoo.targets("unet", batch=10**9, device="meta")
    assert y.is_meta and y.dtype == torch.int64


# -- Loading ----------------------------------------------------------------------------------------------------------


def test_load_makes_a_whole_step_from_its_seed() -> None:
    before = torch.get_rng_state()
    a, b, c = (zoo.load("darts", batch=2, image=8, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(before, torch.get_rng_state())
    for x, y in zip(a.model.parameters(), b.model.parameters(), strict=True):
        assert torch.equal(x, y)
    assert not torch.equal(next(a.model.parameters()), next(c.model.parameters()))
    assert a.loss is not None and a.name == "darts" and a.kwargs == {}
    assert torch.isfinite(a.loss(a.model(*a.args, **a.kwargs), *a.targets))


def test_load_lays_images_out_with_channels_last() -> None:
    plain, last = (zoo.load("vgg11", batch=2, image=32, channels_last=is_last) for is_last in (False, True))
    assert torch.equal(plain.args[0], last.args[0]) and last.args[0].stride()[1] == 1
    weights = [(a, b) for a, b in zip(plain.model.parameters(), last.model.parameters(), strict=True) if a.dim() == 4]
    assert weights and all(torch.equal(a, b) and b.stride()[1] == 1 for a, b in weights)
    with pytest.raises(zoo.BadExample, match=r"gpt2 is given no images .* Leave channels_last out"):
        zoo.load("gpt2", batch=1, image=16, device="meta", channels_last=True)


@pytest.mark.parametrize(("name", "image"), [("vit_b16", 64), ("gpt2", 1040), ("gpt2", 64)])
def test_load_fits_learned_positions_to_the_image(name: str, image: int) -> None:
    example = zoo.load(name, batch=1, image=image, device="meta")
    assert tuple(example.model(*example.args).shape) == _output_shape(name, 1, image)
    if (name, image) == ("gpt2", 64):
        assert _count(example.model) == NUM_PARAMETERS["gpt2"]


OWN = """
import torch
from torch import nn
NUMBER = 3
def plain(): return nn.Linear(4, 2), torch.ones(1, 4)
def listed(): return [nn.Bilinear(4, 4, 2), [torch.ones(1, 4), torch.ones(1, 4)]]
def keyed(): return nn.Linear(4, 2), {"input": torch.ones(1, 4)}
def sized(*, batch=2, image=4, device="cpu"):
    return nn.Linear(image, 2, device=device), torch.ones(batch, image, device=device), lambda out: out.sum()
def anything(**options): return nn.Linear(4, 2), (torch.ones(options.get("batch", 7), 4),)
def demanding(batch): return nn.Linear(4, 2), torch.ones(batch, 4)
def impossible(vocabulary): return None
def only_model(): return nn.Linear(4, 2)
def one_item(): return (nn.Linear(4, 2),)
def no_model(): return "model", torch.ones(1)
def no_inputs(): return nn.Linear(4, 2), 5
def no_loss(): return nn.Linear(4, 2), torch.ones(1, 4), 1.0
def tied():
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    net[1][0].weight = net[0].weight
    return net, torch.ones(1, 4)
class Maker:
    @staticmethod
    def make(): return nn.Linear(4, 2), torch.ones(1, 4)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's, in the current directory and not on the path."""
    (tmp_path / "own_nets.py").write_text(OWN)
    (tmp_path / "own_broken.py").write_text("import a_package_nobody_has\n")
    (tmp_path / "own_raises.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    for module in ("own_nets", "own_broken", "own_raises"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return "own_nets"


@pytest.mark.parametrize("make", ["plain", "listed", "keyed", "sized", "anything", "Maker.make"])
def test_own_networks_load_from_the_current_directory(own: str, make: str) -> None:
    path, state = list(sys.path), torch.get_rng_state()
    example = zoo.load(f"{own}:{make}")
    assert sys.path == path and torch.equal(torch.get_rng_state(), state)
    output = example.model(*example.args, **example.kwargs)
    assert output.shape[-1] == 2
    assert example.targets == () and (example.loss is not None) == (make == "sized")


def test_own_networks_take_the_options_they_name(own: str) -> None:
    example = zoo.load(f"{own}:sized", batch=5, image=6, device="meta")
    assert example.args[0].shape == (5, 6) and example.args[0].is_meta
    assert zoo.load(f"{own}:anything", batch=3).args[0].shape == (3, 4)
    assert zoo.load(f"{own}:demanding", batch=3).args[0].shape == (3, 4)


def test_own_networks_without_a_device_are_moved(own: str) -> None:
    example = zoo.load(f"{own}:listed", device="meta")
    assert all(tensor.is_meta for tensor in (*example.args, *example.model.parameters()))
    assert zoo.load(f"{own}:keyed", device="meta").kwargs["input"].is_meta


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_own_networks_stay_tied_where_they_are_moved(own: str, device: str) -> None:
    model = zoo.load(f"{own}:tied", device=device).model
    assert model.get_parameter("0.weight") is model.get_parameter("1.0.weight")
    assert all(parameter.device.type == device for parameter in model.parameters())


def test_own_networks_are_seeded(own: str) -> None:
    a, b, c = (zoo.load(f"{own}:plain", seed=seed).model.get_parameter("weight") for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)


# -- What is said when it cannot be -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", [zoo.spec, zoo.build, zoo.inputs, zoo.targets, zoo.loss, zoo.load])
def test_unknown_network(ask: Any) -> None:
    with pytest.raises(zoo.UnknownNetwork) as caught:
        ask("VGG-16")
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, MemfitError)
    text = str(caught.value)
    assert "'VGG-16'" in text and "'vgg16'" in text
    assert "`memfit zoo` lists them all" in text and "`package.module:callable`" in text
    with pytest.raises(zoo.UnknownNetwork, match=r"no network 'qqq' in the zoo\. `memfit zoo`"):
        ask("qqq")


def test_unknown_override() -> None:
    with pytest.raises(
        zoo.BadOption, match="gpt2 has no option 'layers'; it takes num_layers, width, num_heads, vocab"
    ):
        zoo.build("gpt2", layers=2)
    with pytest.raises(zoo.BadOption, match="vgg16 has no option 'image'"):
        zoo.build("vgg16", image=64)


@pytest.mark.parametrize(
    ("name", "given", "text"),
    [
        ("vgg16", {"image": 16}, "vgg16 needs an image side of at least 32, not 16."),
        ("unet", {"image": 100}, "unet needs an image side that divides by 16, not 100; try 96 or 112."),
        ("gpt2", {"image": 0}, "gpt2 needs a sequence length of at least 1, not 0."),
        ("darts", {"batch": 0}, "darts needs a batch of at least 1, not 0."),
        ("gpt2", {"num_classes": 0}, "gpt2 needs at least 1 class, not 0."),
    ],
)
def test_bad_sizes(name: str, given: dict[str, int], text: str) -> None:
    for make in (zoo.inputs, zoo.targets):
        with pytest.raises(zoo.BadOption) as caught:
            make(name, device="meta", **given)
        assert str(caught.value) == text


def test_models_say_when_their_positions_do_not_fit() -> None:
    with pytest.raises(ValueError, match="built for images of 224x224, not 64x64; build it with image=64"):
        zoo.build("vit_b16")(*zoo.inputs("vit_b16", image=64, device="meta"))
    with pytest.raises(ValueError, match="at most 1024 tokens, not 1025; build it with context=1025"):
        zoo.build("gpt2")(*zoo.inputs("gpt2", image=1025, device="meta"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no_such_module:make", "there is no module 'no_such_module', neither installed nor in "),
        ("no.such.module:make", "there is no module 'no', neither installed nor in "),
        ("own_broken:make", "own_broken imports 'a_package_nobody_has', which is missing."),
        ("own_raises:make", "importing own_raises raised ZeroDivisionError: division by zero"),
        ("own_nets:nothing", "module 'own_nets' has no attribute 'nothing'. It defines plain, listed, keyed"),
        ("own_nets:Maker.nothing", "'Maker' has no attribute 'nothing'."),
        ("own_nets:NUMBER", "NUMBER is an int, not a callable; it must return (model, inputs)"),
        ("own_nets:", "'own_nets:' is not of the form `package.module:callable`."),
        ("nets/own.py:make", "'nets/own.py:make' names a file; name the module instead, as in `nets.own:make`."),
        ("own_nets:only_model", "returned a Linear; it must return (model, inputs) or (model, inputs, loss)."),
        ("own_nets:one_item", "returned 1 items; it must return (model, inputs)"),
        ("own_nets:no_model", "returned a str where its model belongs"),
        ("own_nets:no_inputs", "returned an int where its inputs belong; they are a tensor, a tuple or list"),
        ("own_nets:no_loss", "returned a float where its loss belongs; it is a callable that takes the output."),
        ("own_nets:demanding", "needs arguments it was not given: batch; give batch."),
        ("own_nets:impossible", "needs arguments it was not given: vocabulary; give them defaults, or wrap it"),
    ],
)
def test_own_networks_that_cannot_be_loaded(own: str, name: str, text: str) -> None:
    path = list(sys.path)
    with pytest.raises(zoo.BadExample) as caught:
        zoo.load(name)
    assert isinstance(caught.value, MemfitError) and isinstance(caught.value, ValueError)
    assert text in str(caught.value)
    assert name.partition(":")[0] in str(caught.value)
    assert sys.path == path


@pytest.mark.parametrize("option", ["batch", "image"])
def test_no_option_is_silently_ignored(own: str, option: str) -> None:
    with pytest.raises(MemfitError, match=f"{option}=4 was given, but own_nets:plain takes no keyword '{option}'"):
        zoo.load(f"{own}:plain", **{option: 4})  # type: ignore[arg-type]
