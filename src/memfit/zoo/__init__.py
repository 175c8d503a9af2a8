"""The networks of the memory-saving literature, at the batches it was published with.

from memfit import zoo

model = zoo.build("vgg16")                            # on the meta device: nothing is allocated
(images,) = zoo.inputs("vgg16", device="meta")        # 64 x 3 x 224 x 224

example = zoo.load("resnet50", batch=4, image=64)     # real weights and data, from a seed
output = example.model(*example.args, **example.kwargs)
example.loss(output, *example.targets).backward()
"""

from memfit.errors import BadOption
from memfit.zoo.catalogue import Network, UnknownNetwork, build, names, spec
from memfit.zoo.data import inputs, loss, targets
from memfit.zoo.example import BadExample, Example, load

__all__ = [
    "BadExample",
    "BadOption",
    "Example",
    "Network",
    "UnknownNetwork",
    "build",
    "inputs",
    "load",
    "loss",
    "names",
    "spec",
    "targets",
]
