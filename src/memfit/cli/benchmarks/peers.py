"""`memfit bench peers`: other ways to train in less memory beside ours, on this machine, at equal measured peak."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from memfit import zoo
from memfit.cli.benchmarks.networks import networks_asked_for
from memfit.cli.benchmarks.peers_table import in_a_line, print_peers
from memfit.cli.options import duration, positive
from memfit.cli.screen import Screen
from memfit.errors import BadOption
from memfit.plan.budget import Budget
from memfit.report.peers import FIRST, SWEEPS, Comparison, Contest
from memfit.report.peers_journal import Journal, journal
from memfit.report.peers_process import Case, Workers
from memfit.report.peers_setting import AUTO, EAGER, MEMORY_BUDGETS, PEERS, Kind, Peer, peer_named
from memfit.report.peers_verdict import verdicts

SUMMARY = "eager, torch.utils.checkpoint, torch.compile's memory budget and our policies, at equal measured peak"

SIZES = MappingProxyType(
    {
        # (batch, image or tokens). A step takes seconds, and half of its activations are not much less than all of its
        # gradients: a budget counts both, and could not be felt before the last gradients are there.
        "vgg16_bn": (16, 112),
        "resnet50": (8, 224),
        "densenet121": (4, 224),
        "unet": (2, 256),
        "gpt2": (1, 768),
    }
)
_SHARES = (0.5,)
_MORE_SHARES = MappingProxyType({"resnet50": (0.4,)})
_STEPS = 10
_TIMEOUT_S = 900.0
_MEMORY_BUDGETS = ", ".join(f"{share:g}" for share in MEMORY_BUDGETS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which networks at which sizes, which peers, at which shares of eager's activation peak."""
    default = ", ".join(f"{name} {batch} x {image}" for name, (batch, image) in SIZES.items())
    parser.add_argument("--networks", metavar="A,B,C", help=f"networks of the zoo (default: {default})")
    parser.add_argument("--peers", metavar="A,B,C", help=f"eager and these (default: all of {', '.join(PEERS)})")
    parser.add_argument(
        "--share",
        metavar="50%,...",
        help="of eager's measured activation peak, what activations may take (default: 50%%; of resnet50 also 40%%)",
    )
    parser.add_argument("--batch", metavar="N|NET=N,...", help="batch of all networks, or of each that is named")
    parser.add_argument("--image", metavar="S|NET=S,...", help="image side or sequence length, likewise")
    parser.add_argument(
        "--channels-last",
        action="store_true",
        help="images with channels last, in all arms alike (default: of all the networks, those that take images)",
    )
    parser.add_argument(
        "--steps", type=positive, default=_STEPS, metavar="K", help="timed; long ones fewer (default: %(default)s)"
    )
    parser.add_argument("--memory-budgets", metavar="X,Y,...", help=f"of torch.compile (default: {_MEMORY_BUDGETS})")
    parser.add_argument(
        "--sweep",
        choices=SWEEPS,
        help="of these find the largest within the share, of divisions for torch.utils.checkpoint the one that "
        "recomputes least; or try all (default: first)",
    )
    parser.add_argument(
        "--timeout",
        type=duration,
        default=_TIMEOUT_S,
        metavar="SECONDS",
        help="for each process of each peer (default: %(default)g)",
    )
    parser.add_argument(
        "--journal",
        type=Path,
        metavar="FILE",
        help="write down each answer as it comes, and do not measure again what is in it: the whole takes hours",
    )
    parser.add_argument("--threads", type=positive, metavar="N", help="threads of torch (default: torch's own choice)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, data and dropout (default: %(default)s)")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Exit code 0; 1 if a step of ours was not exact, auto was above its budget, or it or eager was not measured."""
    networks = networks_asked_for(arguments.networks) or [
        name for name in SIZES if _has_images(name) or not arguments.channels_last
    ]
    peers = _peers(arguments.peers)
    batches = _sizes("--batch", arguments.batch, networks)
    images = _sizes("--image", arguments.image, networks)
    memory_budgets = _memory_budgets(arguments, peers)
    shares = {name: _shares(arguments.share, name) for name in networks}
    without_images = [name for name in networks if not _has_images(name)]
    if arguments.channels_last and without_images:
        raise BadOption(f"--channels-last: {', '.join(without_images)} takes no images. Leave it out of --networks")
    for name, image in images.items():
        zoo.spec(name).check_image(image)
    workers = Workers(
        steps=arguments.steps, seed=arguments.seed, threads=arguments.threads, timeout_s=arguments.timeout
    )
    found = []
    with _written_down(arguments.journal, workers) as asked:
        for name in networks:
            published = zoo.spec(name)
            batch, image = SIZES.get(name, (published.batch, published.image))
            contest = Contest(
                Case(name, batches.get(name, batch), images.get(name, image), arguments.channels_last),
                asked,
                memory_budgets=memory_budgets,
                sweep=arguments.sweep or FIRST,
                progress=screen.progress,
            )
            found.append(contest.compare(peers, shares[name]))
            screen.note(in_a_line(found[-1]))
    screen.done()
    report = _report(found, arguments.threads) | {
        "channels_last": arguments.channels_last,
        "journal": asked.to_dict() if isinstance(asked, Journal) else None,
    }
    if screen.json:
        screen.object(report)
    else:
        print_peers(found, screen)
    return 0 if _promises_kept(found) else 1


def _written_down(file: Path | None, workers: Workers) -> contextlib.AbstractContextManager[Workers | Journal]:
    return contextlib.nullcontext(workers) if file is None else journal(file, workers)


def _has_images(network: str) -> bool:
    return zoo.spec(network).task != "next_token"


def _report(found: Sequence[Comparison], threads: int | None) -> dict[str, Any]:
    rows = [row for comparison in found for row in comparison.rows]
    return {
        "benchmark": "peers",
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "num_cores": os.cpu_count(),
            "threads": threads or torch.get_num_threads(),
            "torch": torch.__version__,
        },
        "rows": [row.to_dict() for row in rows],
        "verdicts": [verdict.to_dict() for verdict in verdicts(rows)],
        "smallest": [
            {"network": c.case.network, **(c.smallest or {}), "failure": c.smallest_failure}
            for c in found
            if c.smallest is not None or c.smallest_failure
        ],
    }


def _promises_kept(found: Sequence[Comparison]) -> bool:
    rows = [row for comparison in found for row in comparison.rows]
    was_measured = all(row.trial is not None for row in rows if row.peer in (EAGER, AUTO))
    exact = all(row.exact is not False for row in rows if row.is_ours)
    return was_measured and exact and all(verdict.within_budget is not False for verdict in verdicts(rows))


def _peers(text: str | None) -> list[Peer]:
    if text is None:
        return list(PEERS.values())
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise BadOption(f"--peers {text!r} names no peer. Known peers: {', '.join(PEERS)}")
    return [peer_named(name) for name in dict.fromkeys((EAGER, *names))]


def _shares(text: str | None, network: str) -> tuple[float, ...]:
    if text is None:
        return (*_SHARES, *_MORE_SHARES.get(network, ()))
    found: dict[float, None] = {}
    for part in text.split(","):
        share = Budget.parse(part.strip()).share if part.strip() else None
        if share is None or not 0 < share <= 1:
            raise BadOption(f"--share {text!r}: give per cent of eager's activation peak, such as 50%, at most 100%")
        found[share] = None
    return tuple(found)


def _sizes(option: str, text: str | None, networks: Sequence[str]) -> Mapping[str, int]:
    """From '8' for all networks, or 'resnet50=8,unet=1' for each that is named."""
    if text is None:
        return {}
    if "=" not in text:
        return dict.fromkeys(networks, _number(option, text))
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if name not in networks:
            raise BadOption(f"{option} {part.strip()}: {name!r} is not among the networks: {', '.join(networks)}")
        found[name] = _number(option, number)
    return found


def _number(option: str, text: str) -> int:
    try:
        return positive(text)
    except argparse.ArgumentTypeError as error:
        raise BadOption(f"{option}: {error}. Write one number for all, or NET=N,NET=N") from None


def _memory_budgets(arguments: argparse.Namespace, peers: Sequence[Peer]) -> tuple[float, ...]:
    text = arguments.memory_budgets
    kinds = {peer.kind for peer in peers}
    if text is not None and Kind.COMPILE not in kinds:
        raise BadOption("--memory-budgets: without effect where torch.compile is not among the peers")
    if arguments.sweep is not None and not kinds & {Kind.COMPILE, Kind.CHECKPOINT}:
        raise BadOption("--sweep: without effect where neither torch.compile nor checkpoint is among the peers")
    if text is None:
        return MEMORY_BUDGETS
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 <= share <= 1 for share in found):
        raise BadOption(f"--memory-budgets {text!r}: give numbers from 0 to 1, separated by commas")
    return found
