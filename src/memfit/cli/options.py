"""Options that several commands share, and the checks on their values."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

import torch

from memfit.plan.options import Options, parse_bytes


def add_network(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("network", metavar="NET", help="a network of the zoo, or package.module:callable")
    parser.add_argument("--batch", type=positive, metavar="N", help="batch size (default: the published one)")
    parser.add_argument(
        "--image", type=positive, metavar="S", help="image side, or sequence length (default: the published one)"
    )


def add_fitting(parser: argparse.ArgumentParser, *, steps: int) -> None:
    parser.add_argument("--policy", default="keep", help="what to do with saved tensors (default: %(default)s)")
    parser.add_argument("--budget", metavar="SIZE", help="the most bytes the step may need, such as 6GiB")
    parser.add_argument(
        "--without", action="extend", nargs="+", default=[], metavar="NAME", help="rewrites to leave out, for diagnosis"
    )
    parser.add_argument("--steps", type=positive, default=steps, metavar="K", help="how many (default: %(default)s)")
    parser.add_argument("--threads", type=positive, metavar="N", help="threads of torch (default: torch's own choice)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, data and dropout (default: %(default)s)")


def fit_options(arguments: argparse.Namespace) -> Options:
    """The options of fit(), checked before anything is built."""
    return Options(parse_bytes(arguments.budget), arguments.policy, frozenset(arguments.without))


@contextlib.contextmanager
def num_threads(threads: int | None) -> Iterator[None]:
    """Let torch use that many threads; None leaves the choice to torch."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if threads is not None:
            torch.set_num_threads(before)


def positive(text: str) -> int:
    """A whole number from 1 up."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return number
