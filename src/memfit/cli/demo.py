"""`memfit demo`: one network of the zoo trained both ways, in about a minute."""

from __future__ import annotations

import argparse

from memfit.cli.options import num_threads, positive
from memfit.cli.run import print_comparison
from memfit.cli.screen import Screen
from memfit.report.comparison import compare_network

_NETWORK, _BATCH, _IMAGE, _STEPS = "googlenet", 8, 96, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--network", default=_NETWORK, help="a network of the zoo, or package.module:callable (default: %(default)s)"
    )
    parser.add_argument("--batch", type=positive, default=_BATCH, help="batch size (default: %(default)s)")
    parser.add_argument("--image", type=positive, default=_IMAGE, help="image side (default: %(default)s)")
    parser.add_argument("--threads", type=positive, metavar="N", help="threads of torch (default: torch's own choice)")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Exit code 0 if the gradients are identical, 1 if not."""
    screen.line("Training one network twice from the same weights: in plain PyTorch, and through memfit.fit(model).")
    screen.line()
    with num_threads(arguments.threads):
        found = compare_network(
            arguments.network, batch=arguments.batch, image=arguments.image, steps=_STEPS, progress=screen.progress
        )
    screen.done()
    if screen.json:
        screen.object(found.to_dict())
        return 0 if found.exact else 1
    print_comparison(found, screen)
    screen.line()
    if found.exact:
        verdict = found.verdict
        screen.line(
            f"gradients identical: {verdict.num_compared:,} tensors (losses, gradients, buffers, weights, random "
            f"state) compared bit for bit over {verdict.steps} steps"
        )
    else:
        screen.line(f"gradients DIFFER: {found.verdict}")
    return 0 if found.exact else 1
