"""The table of networks: what each is, where it was published, at which batch, and how to build it."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from memfit.errors import BadOption, MemfitError
from memfit.zoo import vgg
from memfit.zoo.classic import alexnet, nin, overfeat
from memfit.zoo.darts import DARTS
from memfit.zoo.densenet import DenseNet
from memfit.zoo.gpt2 import GPT2
from memfit.zoo.inception import googlenet, inception_v3
from memfit.zoo.resnet import ResNet
from memfit.zoo.unet import UNet
from memfit.zoo.vgg import VGG
from memfit.zoo.vit import ViT

Task = Literal["classify", "segment", "next_token"]


class UnknownNetwork(MemfitError, ValueError):
    """A name that is in no table; the text suggests those nearest."""

    def __init__(self, name: str) -> None:
        self.name = name
        near = difflib.get_close_matches(name.lower(), _TABLE, n=3, cutoff=0.5)
        guess = f" Did you mean {_either(near)}?" if near else ""
        super().__init__(
            f"there is no network {name!r} in the zoo.{guess} `memfit zoo` lists them all; "
            "a network of your own is named as `package.module:callable`."
        )


@dataclass(frozen=True, kw_only=True)
class Network:
    """One row of the zoo.

    `image` is the side of the square input, or the sequence length of a language model; `num_classes` is then its
    vocabulary. A side must be at least `minimum` and divide by `multiple`.
    """

    name: str
    source: str
    """Who published the network."""
    batch: int
    batch_source: str
    """Who published this batch."""
    image: int = 224
    num_classes: int = 1000
    num_parameters: int | None = None
    channels: int = 3
    task: Task = "classify"
    minimum: int = 1
    multiple: int = 1
    make: Callable[..., nn.Module] = field(repr=False)
    preset: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}), repr=False, hash=False)
    """Options of `make` that turn the family into this network."""

    @property
    def options(self) -> Mapping[str, Any]:
        """What `build` takes for this network, and the values it has otherwise."""
        parameters = inspect.signature(self.make).parameters.values()
        return MappingProxyType({p.name: self.preset.get(p.name, p.default) for p in parameters})

    def check_image(self, image: int) -> None:
        """Raise BadOption if this network cannot run at `image`."""
        what = "a sequence length" if self.task == "next_token" else "an image side"
        if image < self.minimum:
            raise BadOption(f"{self.name} needs {what} of at least {self.minimum}, not {image}.")
        if image % self.multiple:
            below = max(image // self.multiple, 1) * self.multiple
            raise BadOption(
                f"{self.name} needs {what} that divides by {self.multiple}, not {image}; "
                f"try {below} or {below + self.multiple}."
            )

    def fitting(self, image: int | None) -> dict[str, int]:
        """The options `build` needs so that the network takes `image`: none, except where positions are learned."""
        if image is not None and "image" in self.options:
            return {"image": image}
        # A shorter sequence just reads the start of the table, so the published network stays as it is.
        if image is not None and image > self.options.get("context", image):
            return {"context": image}
        return {}


def names() -> tuple[str, ...]:
    """The name of every network in the zoo."""
    return tuple(_TABLE)


def spec(name: str) -> Network:
    """The row of the network `name`; raises UnknownNetwork."""
    try:
        return _TABLE[name]
    except KeyError:
        raise UnknownNetwork(name) from None


def build(name: str, *, device: str | torch.device = "meta", **overrides: Any) -> nn.Module:
    """Make the network `name` on `device`, in training mode; on meta nothing is allocated.

    `overrides` change its published options, such as `num_classes`, or make it small: `spec(name).options` has them.
    Weights are drawn from torch's global random state, as by any module; `load` does it from a seed.

    ViT takes `image=` for another image side, and GPT-2 `context=` for longer sequences: both have a learned table of
    positions. All others take any image that `spec(name)` allows as they are.
    """
    network = spec(name)
    unknown = [option for option in overrides if option not in network.options]
    if unknown:
        raise BadOption(f"{name} has no option {_either(unknown)}; it takes {', '.join(network.options)}.")
    with torch.device(device):
        return network.make(**{**network.preset, **overrides})


def _either(items: list[str]) -> str:
    """'a', 'a' or 'b', ..."""
    return " or ".join(repr(item) for item in items)


# -- The table --------------------------------------------------------------------------------------------------------

_VDNN = "Rhu et al., vDNN, MICRO 2016"
_FENG = "Feng and Huang, Optimal Gradient Checkpoint Search for Arbitrary Computation Graphs, CVPR 2021"
_GIST = "Jain et al., Gist, ISCA 2018"
_OURS = "ours"

_SIMONYAN = "Simonyan and Zisserman, Very Deep Convolutional Networks for Large-Scale Image Recognition, ICLR 2015"
_HE = "He et al., Deep Residual Learning for Image Recognition, CVPR 2016; stride as in torchvision"
_HUANG = "Huang et al., Densely Connected Convolutional Networks, CVPR 2017"


def _vgg(
    name: str, groups: tuple[int, ...], num_parameters: int, *, batch: int = 64, batch_source: str = _FENG,
    source: str = _SIMONYAN,
) -> Network:  # fmt: skip
    batch_norm = name.endswith("_bn")
    return Network(
        name=name,
        source=source,
        batch=batch,
        batch_source=batch_source,
        num_parameters=num_parameters,
        minimum=32,
        make=VGG,
        preset=MappingProxyType({"groups": groups, "batch_norm": batch_norm}),
    )


def _very_deep_vgg(name: str, *, by: int, num_parameters: int) -> Network:
    source = f"{_VDNN}: VGG-16 with {by} more convolutions in each of its five groups"
    groups = vgg.deeper(vgg.VGG16, by=by)
    return _vgg(name, groups, num_parameters, batch=32, batch_source=_VDNN, source=source)


def _resnet(name: str, stages: tuple[int, ...], num_parameters: int, *, batch: int, bottleneck: bool) -> Network:
    return Network(
        name=name,
        source=_HE,
        batch=batch,
        batch_source=_FENG,
        num_parameters=num_parameters,
        make=ResNet,
        preset=MappingProxyType({"stages": stages, "bottleneck": bottleneck}),
    )


def _densenet(
    name: str, blocks: tuple[int, ...], num_parameters: int, *, batch: int, growth: int = 32, stem_channels: int = 64
) -> Network:
    return Network(
        name=name,
        source=_HUANG,
        batch=batch,
        batch_source=_FENG,
        num_parameters=num_parameters,
        minimum=29,
        make=DenseNet,
        preset=MappingProxyType({"blocks": blocks, "growth": growth, "stem_channels": stem_channels}),
    )


_ROWS = (
    Network(
        name="alexnet",
        source="Krizhevsky et al., ImageNet Classification with Deep CNNs, NeurIPS 2012; one tower as in torchvision",
        batch=128,
        batch_source=f"{_VDNN}; 128 in the AlexNet paper too",
        num_parameters=61_100_840,
        minimum=63,
        make=alexnet,
    ),
    Network(
        name="overfeat",
        source="Sermanet et al., OverFeat, ICLR 2014; the fast model",
        batch=128,
        batch_source=_VDNN,
        image=231,
        num_parameters=145_920_872,
        minimum=71,
        make=overfeat,
    ),
    Network(
        name="nin",
        source="Lin et al., Network in Network, ICLR 2014; the ImageNet model of the Caffe zoo",
        batch=128,
        batch_source="Lin et al., Network in Network, ICLR 2014; 64 in Gist",
        num_parameters=7_595_176,
        minimum=39,
        make=nin,
    ),
    Network(
        name="googlenet",
        source="Szegedy et al., Going Deeper with Convolutions, CVPR 2015; with batch norm as in torchvision",
        batch=128,
        batch_source=_VDNN,
        num_parameters=6_624_904,
        minimum=15,
        make=googlenet,
    ),
    Network(
        name="inception_v3",
        source="Szegedy et al., Rethinking the Inception Architecture for Computer Vision, CVPR 2016",
        batch=64,
        batch_source=f"{_GIST} (every network at 64); 32 in Feng and Huang",
        image=299,
        num_parameters=23_834_568,
        minimum=75,
        make=inception_v3,
    ),
    _vgg("vgg11", vgg.VGG11, 132_863_336),
    _vgg("vgg13", vgg.VGG13, 133_047_848),
    _vgg("vgg16", vgg.VGG16, 138_357_544, batch_source=f"{_VDNN}, which also runs 128 and 256; {_GIST}; {_FENG}"),
    _vgg("vgg19", vgg.VGG19, 143_667_240),
    _vgg("vgg11_bn", vgg.VGG11, 132_868_840, batch_source="as without batch norm"),
    _vgg("vgg13_bn", vgg.VGG13, 133_053_736, batch_source="as without batch norm"),
    _vgg("vgg16_bn", vgg.VGG16, 138_365_992, batch_source="as without batch norm"),
    _vgg("vgg19_bn", vgg.VGG19, 143_678_248, batch_source="as without batch norm"),
    _very_deep_vgg("vgg116", by=20, num_parameters=248_241_704),
    _very_deep_vgg("vgg216", by=40, num_parameters=358_125_864),
    _very_deep_vgg("vgg316", by=60, num_parameters=468_010_024),
    _very_deep_vgg("vgg416", by=80, num_parameters=577_894_184),
    _resnet("resnet18", (2, 2, 2, 2), 11_689_512, batch=256, bottleneck=False),
    _resnet("resnet34", (3, 4, 6, 3), 21_797_672, batch=128, bottleneck=False),
    _resnet("resnet50", (3, 4, 6, 3), 25_557_032, batch=64, bottleneck=True),
    _resnet("resnet101", (3, 4, 23, 3), 44_549_160, batch=32, bottleneck=True),
    _resnet("resnet152", (3, 8, 36, 3), 60_192_808, batch=16, bottleneck=True),
    _densenet("densenet121", (6, 12, 24, 16), 7_978_856, batch=32),
    _densenet("densenet161", (6, 12, 36, 24), 28_681_000, batch=16, growth=48, stem_channels=96),
    _densenet("densenet169", (6, 12, 32, 32), 14_149_480, batch=32),
    _densenet("densenet201", (6, 12, 48, 32), 20_013_928, batch=16),
    Network(
        name="darts",
        source="Liu et al., DARTS: Differentiable Architecture Search, ICLR 2019; second order, 20 cells, CIFAR-10",
        batch=96,
        batch_source="Liu et al., DARTS, ICLR 2019; 64 in Feng and Huang",
        image=32,
        num_classes=10,
        num_parameters=3_349_342,
        minimum=4,
        multiple=4,
        make=DARTS,
    ),
    Network(
        name="unet",
        source="Ronneberger et al., U-Net, MICCAI 2015; padded and with batch norm",
        batch=8,
        batch_source=f"{_OURS}: the paper trains on one unpadded tile of 572 at a time",
        image=512,
        num_classes=2,
        num_parameters=31_036_546,
        channels=1,
        task="segment",
        minimum=16,
        multiple=16,
        make=UNet,
    ),
    Network(
        name="vit_b16",
        source="Dosovitskiy et al., An Image is Worth 16x16 Words, ICLR 2021; without dropout as in torchvision",
        batch=64,
        batch_source=f"{_OURS}: the paper trains at 4096 over many devices",
        num_parameters=86_567_656,
        minimum=16,
        multiple=16,
        make=ViT,
    ),
    Network(
        name="gpt2",
        source="Radford et al., Language Models are Unsupervised Multitask Learners, 2019; the small model",
        batch=8,
        batch_source=f"{_OURS}: the paper trains at 512 over many devices",
        image=1024,
        num_classes=50_257,
        num_parameters=124_439_808,
        task="next_token",
        make=GPT2,
    ),
)

_TABLE: Mapping[str, Network] = MappingProxyType({row.name: row for row in _ROWS})
