"""`memfit zoo`: the networks that commands know by name."""

from __future__ import annotations

import argparse

from memfit import zoo
from memfit.cli.screen import Screen


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "A network of your own is named package.module:callable; it returns (model, inputs[, loss])."


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """List the networks with their published batch, image side or sequence length, and parameters."""
    networks = [zoo.spec(name) for name in zoo.names()]
    if screen.json:
        rows = [
            {
                "name": n.name,
                "batch": n.batch,
                "image": n.image,
                "parameters": n.num_parameters,
                "task": n.task,
                "source": n.source,
                "batch_source": n.batch_source,
            }
            for n in networks
        ]
        screen.object({"networks": rows})
        return 0
    screen.table(
        ("name", "batch", "image", "parameters", "source"),
        [
            (n.name, str(n.batch), str(n.image), "" if n.num_parameters is None else f"{n.num_parameters:,}", n.source)
            for n in networks
        ],
        right=("batch", "image", "parameters"),
    )
    return 0
