"""Networks of the zoo at other depths than published, for what depends on the size of the graph alone."""

from __future__ import annotations

import time
from dataclasses import dataclass

from memfit import zoo
from memfit.capture.step import Step
from memfit.capture.trace import capture
from memfit.errors import BadOption

_LAYERS = "num_layers"


@dataclass(frozen=True)
class DeepNetwork:
    """A network of the zoo, with another number of layers than published where it has that option.

    Attributes:
        num_layers: None for networks that have no such option.
    """

    name: str
    num_layers: int | None = None

    @classmethod
    def parse(cls, text: str) -> DeepNetwork:
        """From 'resnet50', 'gpt2' or 'gpt2:48'."""
        name, colon, number = text.partition(":")
        if not colon:
            return cls(name, zoo.spec(name).options.get(_LAYERS))
        known = [each for each in zoo.names() if _LAYERS in zoo.spec(each).options]
        if name not in known:
            raise BadOption(
                f"network {text!r}: before the colon goes a network of the zoo whose number of layers can be chosen "
                f"({', '.join(known)}), after it that number"
            )
        if not number.isdecimal() or int(number) < 1:
            raise BadOption(
                f"network {text!r}: after the colon goes the number of layers, a whole number from 1 up, as in {name}:2"
            )
        return cls(name, int(number))

    def __str__(self) -> str:
        is_published = self.num_layers == zoo.spec(self.name).options.get(_LAYERS)
        return self.name if is_published else f"{self.name}:{self.num_layers}"

    def captured(self) -> tuple[Step, float]:
        """Its step at the published sizes, captured now on the meta device; and the seconds that took."""
        layers = {} if self.num_layers is None else {_LAYERS: self.num_layers}
        model = zoo.build(self.name, device="meta", **layers)
        inputs, targets = zoo.inputs(self.name, device="meta"), zoo.targets(self.name, device="meta")
        start_s = time.perf_counter()
        step = capture(model, inputs, loss=zoo.loss(self.name), targets=targets, device="cpu", name=str(self))
        return step, time.perf_counter() - start_s
