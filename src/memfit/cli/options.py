"""Options that several commands share, and the checks on their values."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterator

import torch

from memfit.cost.roofline import WORKSPACES
from memfit.plan.budget import OPTIMIZERS, Budget
from memfit.plan.options import Options, policy_or_default
from memfit.plan.policies.gist import FORMATS, SINGLE_CODES
from memfit.plan.policies.registry import POLICIES, with_format


def add_network(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("network", metavar="NET", help="a network of the zoo, or package.module:callable")
    parser.add_argument("--batch", type=positive, metavar="N", help="batch size (default: the published one)")
    parser.add_argument(
        "--image", type=positive, metavar="S", help="image side, or sequence length (default: the published one)"
    )


def add_budget(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--budget",
        metavar="SIZE",
        help="the most bytes the step may need, such as 6GiB; or such as 60%%: that share of what the keep plan's "
        "activations need, on top of what no plan can change",
    )


def add_fitting(parser: argparse.ArgumentParser, *, steps: int) -> None:
    add_policy(parser)
    add_losses(parser)
    parser.add_argument(
        "--budget",
        metavar="SIZE",
        help="the most bytes the step may need, such as 6GiB, or 60%% of the keep plan's activations",
    )
    parser.add_argument(
        "--without", action="extend", nargs="+", default=[], metavar="NAME", help="rewrites to leave out, for diagnosis"
    )
    parser.add_argument("--steps", type=positive, default=steps, metavar="K", help="how many (default: %(default)s)")
    parser.add_argument("--threads", type=positive, metavar="N", help="threads of torch (default: torch's own choice)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, data and dropout (default: %(default)s)")


def add_policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        metavar="P",
        help=f"what to do with saved tensors: {', '.join(POLICIES)} (default: auto with a budget, else keep)",
    )


def add_losses(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--format",
        metavar="F",
        help=f"in what gist-lossy stores values ({', '.join(FORMATS)}), or what gist-lossless uses alone "
        f"({', '.join(SINGLE_CODES)})",
    )
    parser.add_argument(
        "--allow-lossy", action="store_true", help="gradients may differ from eager's, as gist-lossy makes them"
    )


def add_planning(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        default="here",
        metavar="NAME",
        help="whose costs to plan with: a name of `memfit devices`, a TOML file, fields such as "
        "memory=24GiB,flops=35e12,bandwidth=900GB/s,link=25GB/s, or this machine, measured (default: %(default)s)",
    )
    parser.add_argument(
        "--optimizer",
        choices=tuple(OPTIMIZERS),
        default="none",
        help="whose state is on the device too; sgd is with momentum (default: %(default)s)",
    )
    parser.add_argument(
        "--workspace",
        choices=WORKSPACES,
        help="which algorithm convolutions use, on devices of the catalogue: the fastest, or one without workspace "
        "(default: fastest)",
    )
    parser.add_argument(
        "--cap",
        type=duration,
        metavar="SECONDS",
        help="how long to measure on this machine; what is left is estimated (default: 60)",
    )
    parser.add_argument("--threads", type=positive, metavar="N", help="threads of torch (default: torch's own choice)")


def fit_options(arguments: argparse.Namespace) -> Options:
    """The options of fit(), checked before anything is built."""
    budget = Budget.of(arguments.budget)
    return Options(
        budget,
        with_format(policy_or_default(arguments.policy, budget), arguments.format),
        frozenset(arguments.without),
        allow_lossy=arguments.allow_lossy,
    )


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


def duration(text: str) -> float:
    """Seconds from 0 up."""
    try:
        duration_s = float(text)
    except ValueError:
        duration_s = -1.0
    if not 0 <= duration_s < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 up")
    return duration_s
