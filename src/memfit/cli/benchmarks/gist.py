"""Gist's networks at its batch: what is saved and what the maps take at most, by every way to count.

Two claims, kept apart: how much less lies between the halves (saved), and how much less all maps take at their worst
moment (peak), by two allocators. Each is beside eager's; what is saved also beside inductor's and beside memfit's own
keep plan. `report/gist_accounts.py` says what each account counts.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memfit.capture.rewrites import NAMES, rewrite
from memfit.capture.rewrites.proof import AssumedProofs
from memfit.cli.benchmarks import gist_accuracy, gist_measured, networks
from memfit.cli.benchmarks.gist_figures import (
    BATCH,
    LOSSLESS,
    NETWORKS,
    POOLED_SPARSITY,
    RELU_SPARSITY,
    row_figures,
    row_references,
    saved_target,
    summary_figures,
    summary_references,
)
from memfit.cli.screen import Screen, mebibytes
from memfit.cli.target import Target
from memfit.codecs.registry import ALL_NAMES
from memfit.cost.costs import Costs
from memfit.cost.densities import assumed_densities
from memfit.cost.devices import device
from memfit.cost.roofline import roofline
from memfit.errors import BadOption
from memfit.plan.decisions import Encode
from memfit.plan.footprint import Footprint
from memfit.plan.lower import lower_keep
from memfit.plan.planner import Planned, plan_step
from memfit.plan.policies.gist import FORMATS
from memfit.plan.program import Program
from memfit.plan.simulate import simulate
from memfit.report.gist_accounts import (
    Account,
    Saved,
    inductor_saved,
    published,
    published_baseline,
    reduced_image_bytes,
)
from memfit.report.gist_published import FORMAT_BYTES

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "feature maps in the bits that backward needs, Gist, Jain et al., ISCA 2018"

_DEVICE = "titan-x"
_SLOW_PASSES = 4
"""Over a tensor to pack its non-zeros on a GPU, at worst: count, add up, place, and what does not coalesce."""
_COUNTING = ("batch", "sparsity", "pooled_sparsity", "measured_batch", "measured_steps")
_TRAINING = ("seeds", "epochs", "formats", "workers")
_HEADER = (
    *("network", "mode", "saved", "of eager", "images too", "target", "of inductor", "of keep"),
    *(
        "static peak",
        "dynamic",
        "no copies",
        "dynamic of keep",
        "overhead",
        "packing slow",
        "paper saved",
        "paper static",
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which networks, at which batch, and how many zeros their maps are taken to have."""
    networks.add_arguments(parser)
    parser.add_argument(
        "--sparsity",
        type=_share,
        metavar="S",
        help=f"share of zeros behind ReLU (default: {RELU_SPARSITY})",
    )
    parser.add_argument(
        "--pooled-sparsity",
        type=_share,
        metavar="S",
        help=f"share of zeros behind ReLU and max-pooling (default: {POOLED_SPARSITY})",
    )
    gist_measured.add_arguments(parser)
    parser.add_argument(
        "--accuracy", action="store_true", help="instead train small networks on digits in every format, and compare"
    )
    gist_accuracy.add_arguments(parser)


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Count every network that was asked for, and put targets and published figures beside."""
    _refuse_idle(arguments)
    if arguments.accuracy:
        return gist_accuracy.run(arguments, screen)
    found = _counted(arguments, screen)
    names = [row["network"] for row in found["rows"]]
    found["measured"] = gist_measured.measured(arguments, names, screen.progress)
    screen.done()
    if screen.json:
        screen.object(found)
    else:
        _print(found, screen)
        gist_measured.print_measured(found["measured"], screen)
    return 0


def _refuse_idle(arguments: argparse.Namespace) -> None:
    """Raise for options that would do nothing."""
    idle = _COUNTING if arguments.accuracy else _TRAINING
    given = [f"--{name.replace('_', '-')}" for name in idle if getattr(arguments, name) is not None]
    if given:
        raise BadOption(f"{', '.join(given)}: without effect {'with' if arguments.accuracy else 'but with'} --accuracy")


def _counted(arguments: argparse.Namespace, screen: Screen) -> dict[str, Any]:
    """The part that is on paper: bytes by rules, seconds by the catalogue."""
    names = networks.networks_asked_for(arguments.networks) or list(NETWORKS)
    batch = arguments.batch or BATCH
    sparsity = (
        RELU_SPARSITY if arguments.sparsity is None else arguments.sparsity,
        POOLED_SPARSITY if arguments.pooled_sparsity is None else arguments.pooled_sparsity,
    )
    rows = []
    for name in names:
        screen.progress(f"counting {name} at {batch}")
        rows.append(_row(name, batch, *sparsity))
    screen.done()
    # The bars and the paper's figures are for these batches and zeros; statements on all five for all five.
    is_published = batch == BATCH and sparsity == (RELU_SPARSITY, POOLED_SPARSITY)
    is_complete = is_published and tuple(names) == NETWORKS
    for row in rows:
        for mode in row["modes"]:
            mode["saved_target"] = saved_target(row["network"], mode["mode"]) if is_published else None
        row["figures"] = list(row_figures(row)) if is_published else []
        row["references"] = list(row_references(row)) if is_published else []
    return {
        "benchmark": "gist",
        "device": _DEVICE,
        "sparsity": {"relu": sparsity[0], "pooled": sparsity[1]},
        "rows": rows,
        "figures": list(summary_figures(rows)) if is_complete else [],
        "references": list(summary_references(rows)) if is_complete else [],
    }


def _row(network: str, batch: int, relu_sparsity: float, pooled_sparsity: float) -> dict[str, Any]:
    target = Target.capture(network, batch=batch, image=None)
    eager_step = rewrite(target.step, without=frozenset(NAMES), proofs=AssumedProofs())
    counted = _Counted(target, lower_keep(eager_step), published_baseline(eager_step), relu_sparsity, pooled_sparsity)
    return {
        "network": target.network,
        "batch": target.batch,
        "image": target.image,
        "capture_s": target.capture_s,
        "saved": {name: _saved(saved) for name, saved in counted.saved.items()},
        "peak": {
            "eager": _footprints(counted.eager),
            "keep": _footprints(counted.keep),
            "paper_baseline": _footprints(counted.baseline),
        },
        "modes": [counted.mode(name) for name in (LOSSLESS, *FORMATS)],
    }


class _Counted:
    """One network, and the accounts that its modes are beside."""

    def __init__(
        self, target: Target, program: Program, baseline: Account, relu_sparsity: float, pooled_sparsity: float
    ) -> None:
        self.target = target
        self.program = program
        self.baseline = baseline
        self.eager = Account.of(program)
        self.keep = Account.of(lower_keep(target.rewritten))
        self.saved = {"eager": self.eager.saved, "inductor": inductor_saved(program), "keep": self.keep.saved}
        self.sparsity = {"relu_sparsity": relu_sparsity, "pooled_sparsity": pooled_sparsity}
        step = target.rewritten
        densities = assumed_densities(step, relu=1 - relu_sparsity, pooled=1 - pooled_sparsity)
        self.costs = replace(roofline(step, device(_DEVICE)), densities=densities)
        self.slow_costs = _packing_slow(self.costs)

    def mode(self, name: str) -> dict[str, Any]:
        """Everything about one mode: lossless, or a format."""
        step, format_ = self.target.rewritten, None if name == LOSSLESS else name
        policy = "gist-lossless" if format_ is None else f"gist-lossy:{format_}"
        planned = plan_step(step, self.costs, policy=policy, allow_lossy=format_ is not None)
        account = Account.of(planned.program)
        reduced = Saved(account.saved.map_bytes, reduced_image_bytes(step, format_))
        return {
            "mode": name,
            "policy": policy,
            "saved": _saved(account.saved) | {"reduced_image_bytes": reduced.image_bytes},
            "saved_ratio": {
                of: {
                    "images_left": saved.bytes / account.saved.bytes,
                    "images_reduced": saved.bytes / reduced.bytes,
                    "maps": saved.map_bytes / account.saved.map_bytes,
                }
                for of, saved in self.saved.items()
            },
            "peak": _footprints(account),
            "peak_ratio": _ratios(self.eager, account),
            # What the codes alone do: the rest of the ratio to eager is that of the rewrites, which are always on.
            "peak_ratio_of_keep": _ratios(self.keep, account),
            "overhead": planned.overhead,
            "overhead_packing_slow": simulate(planned.program, self.slow_costs).step_s / planned.keep.step_s - 1,
            "step_s": planned.step_s,
            "codes": _codes(planned),
            "paper": self._paper(format_),
        }

    def _paper(self, format_: str | None) -> dict[str, Any] | None:
        """The same by the paper's rules; None for formats it has not."""
        if format_ is not None and format_ not in FORMAT_BYTES:
            return None
        account = published(self.program, format_=format_, **self.sparsity)
        return {
            "saved": _saved(account.saved),
            "saved_ratio": self.eager.saved.bytes / account.saved.bytes,
            "peak": _footprints(account),
            "peak_ratio": _ratios(self.eager, account),
            # The paper owns the images, so its own ratio has them on both sides.
            "peak_ratio_of_baseline": _ratio(self.baseline.maps_and_images, account.maps_and_images),
        }


def _packing_slow(costs: Costs) -> Costs:
    """The same prices with several passes for codecs that pack non-zeros."""
    fast = costs.default_codec
    slow = replace(
        fast,
        encode_bytes_per_s=fast.encode_bytes_per_s / _SLOW_PASSES,
        decode_bytes_per_s=fast.decode_bytes_per_s / _SLOW_PASSES,
        call_s=_SLOW_PASSES * fast.call_s,
    )
    return replace(costs, codecs={name: slow for name in ALL_NAMES if name.startswith("sparse")})


def _saved(saved: Saved) -> dict[str, int]:
    return {"bytes": saved.bytes, "map_bytes": saved.map_bytes, "image_bytes": saved.image_bytes}


def _footprints(account: Account) -> dict[str, dict[str, int]]:
    return {"maps": _footprint(account.maps), "maps_and_images": _footprint(account.maps_and_images)}


def _footprint(found: Footprint) -> dict[str, int]:
    return {"static": found.static_bytes, "dynamic": found.dynamic_bytes, "direct": found.direct_bytes}


def _ratios(beside: Account, account: Account) -> dict[str, dict[str, float]]:
    return {
        "maps": _ratio(beside.maps, account.maps),
        "maps_and_images": _ratio(beside.maps_and_images, account.maps_and_images),
    }


def _ratio(beside: Footprint, found: Footprint) -> dict[str, float]:
    ours = _footprint(found)
    return {name: size / ours[name] for name, size in _footprint(beside).items()}


def _codes(planned: Planned) -> dict[str, int]:
    """How many storages each codec took."""
    assert planned.plan is not None
    names = (d.codec.partition(":")[0] for d in planned.plan.decisions.values() if isinstance(d, Encode))
    return dict(sorted(Counter(names).items()))


def _share(text: str) -> float:
    """A share from 0 to below 1."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share of zeros, from 0 to below 1")
    return number


def _print(found: Mapping[str, Any], screen: Screen) -> None:
    cells = [_cells(row, mode) for row in found["rows"] for mode in row["modes"]]
    screen.table(_HEADER, cells, right=_HEADER[2:])
    screen.line()
    for line in _legend(found):
        screen.line(line)
    for row in found["rows"]:
        for figure in row["figures"]:
            if figure["miss"] is not None:
                screen.line(f"{row['network']} misses: {figure['miss']}")
    for figure in found["figures"]:
        verdict = "met" if figure["met"] else "MISSED"
        screen.line(f"{verdict}: {figure['figure']} {figure['ours']:.3g}, target {figure['target']}")
    for figure in found["references"]:
        theirs, model, ours = figure["published"], figure["model"], figure["memfit"]
        screen.line(f"{figure['figure']}: published {theirs:g}, by our model of it {model:.2f}, memfit {ours:.2f}")


def _legend(found: Mapping[str, Any]) -> tuple[str, ...]:
    zeros = found["sparsity"]
    return (
        f"Assumed zeros: {zeros['relu']:.0%} behind ReLU, {zeros['pooled']:.0%} behind its pools. Ratios say how many",
        "times less is saved than by eager, inductor and keep; 'images too' is with the images in the format, as the",
        "paper counts. Peaks are eager's over ours, of feature and gradient maps: blocks shared for good (static),",
        "freed at their last use (dynamic), and so without decoded copies; of keep is what the codes do without the",
        f"rewrites. Overhead: beside the keep plan, on {found['device']} by the catalogue, all codecs at memory speed,",
        f"then those that pack non-zeros in {_SLOW_PASSES} passes. Paper: by its own rules; its peak is beside that of",
        "its own framework. Max-pool's backward on slots is a kernel for CPUs so far: a GPU would decode them first.",
    )


def _cells(row: Mapping[str, Any], mode: Mapping[str, Any]) -> tuple[str, ...]:
    ratio, peak, paper = mode["saved_ratio"], mode["peak_ratio"]["maps"], mode["paper"]
    target = mode["saved_target"]
    return (
        row["network"],
        mode["mode"],
        mebibytes(mode["saved"]["bytes"]),
        f"{ratio['eager']['images_left']:.2f}",
        f"{ratio['eager']['images_reduced']:.2f}",
        "" if target is None else f"{target:g}",
        f"{ratio['inductor']['images_left']:.2f}",
        f"{ratio['keep']['images_left']:.2f}",
        f"{peak['static']:.2f}",
        f"{peak['dynamic']:.2f}",
        f"{peak['direct']:.2f}",
        f"{mode['peak_ratio_of_keep']['maps']['dynamic']:.2f}",
        f"{mode['overhead']:.1%}",
        f"{mode['overhead_packing_slow']:.1%}",
        "" if paper is None else f"{paper['saved_ratio']:.2f}",
        "" if paper is None else f"{paper['peak_ratio_of_baseline']['static']:.2f}",
    )
