"""`memfit bench overlap`: Hascoet et al.'s result beside ours, on paper, and each trick on paper and on this disk."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from memfit.capture.step import Step
from memfit.cli.options import positive
from memfit.cli.screen import Screen, mebibytes, seconds
from memfit.cli.target import Target
from memfit.cost.costs import Costs, Link
from memfit.cost.devices import device
from memfit.cost.roofline import WORKSPACES, roofline
from memfit.errors import BadOption
from memfit.plan.decisions import Decisions, Moments, Offload
from memfit.plan.lower import lower
from memfit.plan.planner import plan_step
from memfit.plan.policies.network_wide import NETWORK_WIDE
from memfit.plan.policies.overlap import decide
from memfit.plan.simulate import Timeline, simulate
from memfit.report.disk_ablation import Trained, disk_ablation

SUMMARY = "overlapped offloading, Hascoet et al., JSEA 2019, and what each of its tricks is worth"

_NETWORK, _DEVICE, _BATCH = "vgg19", "titan-x", 64
_REAL_BATCH, _REAL_IMAGE, _REAL_STEPS = 8, 112, 4  # of what is run here, in minutes

# Of the paper only the abstract was at hand. It names neither batch nor image, nor what the baseline allocates.
_PUBLISHED = MappingProxyType(
    {
        "source": "Hascoet et al., JSEA 12(8), 2019, abstract",
        "network": "vgg19",
        "device": "Titan X",
        "memory_cut": 0.35,
        "time_overhead": 0.21,
        "not_stated_there": "batch, image, baseline in bytes and seconds, which layers travel, the ablation",
    }
)
BASELINES = MappingProxyType(
    {
        "eager": "liveness: PyTorch's own ops, each tensor freed at its last use; times are over this one's",
        "keep": "liveness, with memfit's exact rewrites: what the plans below start from",
        "network-wide": "every map of the network resident, two gradient buffers, one workspace (frameworks of 2016)",
    }
)

PAGEABLE_SHARE = 1 / 3
"""Of the rate of pinned copies, assumed: the driver stages pageable memory through a pinned buffer of its own, and a
core copies it there, while the call does not return."""

_Change = Callable[[Moments, int], Moments]


def _in_line(when: Moments, last_forward: int) -> Moments:
    """In the order of compute: out after the last reader, back before the first one, everything else stands still."""
    return Moments(last_forward + 1, last_forward + 1, when.fetched, when.fetched)


def _end_of_layer(when: Moments, last_forward: int) -> Moments:
    """vDNN's rule: nothing goes on past the op beside which it was copied out."""
    return replace(when, sent=last_forward + 1)


def _on_demand(when: Moments, last_forward: int) -> Moments:
    return replace(when, fetch=when.fetched)


def _as_planned(when: Moments, last_forward: int) -> Moments:
    return when


_TRICKS: tuple[tuple[str, _Change, float, str], ...] = (
    ("pageable", _in_line, PAGEABLE_SHARE, "a third of the rate, and compute waits"),
    ("pinned, one stream", _in_line, 1.0, "the full rate, in one line with compute"),
    ("two streams", _on_demand, 1.0, "copies out beside compute, back on demand"),
    ("two streams, prefetch", _as_planned, 1.0, "and back one ahead: the policy itself"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All are for what is run here: the tables on paper have the published size."""
    parser.add_argument("--batch", type=positive, metavar="N", help=f"of what is run here (default: {_REAL_BATCH})")
    parser.add_argument("--image", type=positive, metavar="S", help=f"of what is run here (default: {_REAL_IMAGE})")
    parser.add_argument("--steps", type=positive, metavar="N", help=f"timed, of each kind (default: {_REAL_STEPS})")
    parser.add_argument("--no-real", action="store_true", help="on paper only, run nothing")


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Exit code 0, or 1 if a step that was run here was not exact."""
    if arguments.no_real and any((arguments.batch, arguments.image, arguments.steps)):
        raise BadOption("--batch, --image and --steps are for what is run here: leave them out, or --no-real")
    screen.progress(f"capturing {_NETWORK} at {_BATCH}")
    target = Target.capture(_NETWORK, batch=_BATCH, image=None)
    simulated = [row for workspace in WORKSPACES for row in simulated_rows(target, workspace)]
    tricks = [row for workspace in WORKSPACES for row in simulated_ablation(target.rewritten, workspace)]
    batch, image = arguments.batch or _REAL_BATCH, arguments.image or _REAL_IMAGE
    trained: list[Trained] = []
    if not arguments.no_real:
        trained = disk_ablation(
            _NETWORK,
            batch=batch,
            image=image,
            steps=arguments.steps or _REAL_STEPS,
            progress=screen.progress,
        )
    screen.done()
    if screen.json:
        screen.object(
            {
                "benchmark": "overlap",
                "network": _NETWORK,
                "device": _DEVICE,
                "batch": _BATCH,
                "published": dict(_PUBLISHED),
                "baselines": dict(BASELINES),
                "simulated": simulated,
                "ablation_simulated": tricks,
                "ablation_real": [row.to_dict() for row in trained],
                "real_batch": batch,
                "real_image": image,
            }
        )
    else:
        _print_simulated(simulated, screen)
        _print_tricks(tricks, screen)
        if trained:
            _print_trained(trained, f"{_NETWORK}, batch {batch}, image {image}", screen)
    return 0 if all(row.exact for row in trained) else 1


def simulated_rows(target: Target, workspace: str) -> list[dict[str, Any]]:
    """Peak and time by every policy, beside the baselines."""
    as_captured = target.step_for(NETWORK_WIDE)
    step = target.rewritten
    eager_costs, costs = _costs(as_captured, workspace), _costs(step, workspace)
    eager = simulate(lower(as_captured, {}, eager_costs), eager_costs)
    network_wide = plan_step(as_captured, eager_costs, policy="network-wide").peak_bytes
    overlap = decide(step, costs, None)

    def row(name: str, timeline: Timeline | None, peak_bytes: int) -> dict[str, Any]:
        return {
            "workspace": workspace,
            "policy": name,
            "peak_bytes": peak_bytes,
            "peak_over_eager": peak_bytes / eager.peak_bytes,
            "peak_over_network_wide": peak_bytes / network_wide,
            "step_s": None if timeline is None else timeline.step_s,
            "time_ratio": None if timeline is None else timeline.step_ps / eager.step_ps,
            "sent_bytes": 0 if timeline is None else _sent_bytes(timeline),
            "at_the_peak": None if timeline is None else timeline.ledger.describe_peak(),
        }

    timelines = {
        "eager": eager,
        "keep": simulate(lower(step, {}, costs), costs),
        "sqrt": plan_step(step, costs, policy="sqrt").simulated,
        "overlap, waiting at the end of every layer": _changed(step, costs, overlap, _end_of_layer),
        "overlap": _changed(step, costs, overlap, _as_planned),
    }
    rows = [row(name, timeline, timeline.peak_bytes) for name, timeline in timelines.items()]
    return [*rows[:2], row("network-wide", None, network_wide), *rows[2:]]


def simulated_ablation(step: Step, workspace: str) -> list[dict[str, Any]]:
    """The same storages out and back with more and more of the tricks; times are over keeping everything."""
    costs = _costs(step, workspace)
    decisions = decide(step, costs, None)
    keep = simulate(lower(step, {}, costs), costs)
    rows = []
    for name, change, share, meaning in _TRICKS:
        timeline = _changed(step, _slowed(costs, share), decisions, change)
        rows.append(
            {
                "workspace": workspace,
                "tricks": name,
                "meaning": meaning,
                "time_ratio": timeline.step_ps / keep.step_ps,
                "stall_s": timeline.stall_ps / 10**12,
                "peak_bytes": timeline.peak_bytes,
                "peak_over_keep": timeline.peak_bytes / keep.peak_bytes,
            }
        )
    return rows


def _changed(step: Step, costs: Costs, decisions: Decisions, change: _Change) -> Timeline:
    """What becomes of the step if the same storages travel at other moments."""
    moved = {}
    for storage, decision in decisions.items():
        assert isinstance(decision, Offload) and decision.when is not None
        last_forward = step.storage[storage].last_forward
        assert last_forward is not None
        moved[storage] = replace(decision, when=change(decision.when, last_forward))
    return simulate(lower(step, moved, costs), costs)


def _costs(step: Step, workspace: str) -> Costs:
    return roofline(step, device(_DEVICE), workspace=workspace)


def _slowed(costs: Costs, share: float) -> Costs:
    """The same prices with every link at that share of its rate."""

    def slowed(link: Link) -> Link:
        return replace(
            link,
            send_bytes_per_s=link.send_bytes_per_s * share,
            fetch_bytes_per_s=link.fetch_bytes_per_s * share,
        )

    return replace(costs, links={tier: slowed(link) for tier, link in costs.links.items()})


def _sent_bytes(timeline: Timeline) -> int:
    step = timeline.program.step
    return sum(step.storage_bytes[i.what] for i in timeline.busy.get("d2h", ()))


def _print_simulated(simulated: list[dict[str, Any]], screen: Screen) -> None:
    cut, overhead = _PUBLISHED["memory_cut"], _PUBLISHED["time_overhead"]
    screen.line(f"published: -{cut:.0%} memory at +{overhead:.0%} time, {_NETWORK} on a Titan X (Hascoet et al. 2019);")
    screen.line("neither batch nor baseline is known. Ours:")
    screen.line()
    screen.line(f"{_NETWORK} at batch {_BATCH} on {_DEVICE}, simulated")
    header = ("workspace", "policy", "peak", "of eager", "of network-wide", "time ratio", "sent")
    screen.table(
        header,
        [
            (
                row["workspace"],
                row["policy"],
                mebibytes(row["peak_bytes"]),
                f"{row['peak_over_eager'] - 1:+.1%}",
                f"{row['peak_over_network_wide'] - 1:+.1%}",
                "" if row["time_ratio"] is None else f"{row['time_ratio']:.3f}",
                mebibytes(row["sent_bytes"]) if row["sent_bytes"] else "",
            )
            for row in simulated
        ],
        right=header[2:],
    )
    screen.line()
    for name, meaning in BASELINES.items():
        screen.line(f"{name}: {meaning}")
    for workspace in WORKSPACES:
        (peak,) = (r["at_the_peak"] for r in simulated if (r["workspace"], r["policy"]) == (workspace, "overlap"))
        screen.line(f"overlap, workspace {workspace}: its peak is {peak}")


def _print_tricks(tricks: list[dict[str, Any]], screen: Screen) -> None:
    screen.line()
    screen.line("each trick, simulated; times over the keep plan's")
    header = ("workspace", "tricks", "time ratio", "waiting", "peak", "of keep", "")
    screen.table(
        header,
        [
            (
                row["workspace"],
                row["tricks"],
                f"{row['time_ratio']:.3f}",
                seconds(row["stall_s"]),
                mebibytes(row["peak_bytes"]),
                f"{row['peak_over_keep'] - 1:+.1%}",
                row["meaning"],
            )
            for row in tricks
        ],
        right=header[2:6],
    )


def _print_trained(trained: list[Trained], title: str, screen: Screen) -> None:
    screen.line()
    screen.line(f"each trick, run here: {title}; times over eager's, step by step in turn")
    header = ("disk", "threads", "fetched", "time ratio", "step", "eager", "out", "back", "waiting", "exact")
    screen.table(
        header,
        [
            (
                _file_of(row),
                str(row.num_threads),
                row.reload,
                f"{row.time_ratio:.3f}",
                seconds(row.step_s),
                seconds(row.eager_step_s),
                mebibytes(row.bytes_out),
                mebibytes(row.bytes_in),
                seconds(row.waited_s),
                "yes" if row.exact else "NO",
            )
            for row in trained
        ],
        right=header[3:9],
    )


def _file_of(row: Trained) -> str:
    if not row.direct:
        return "buffered"
    return "direct" if row.is_direct else "direct refused, buffered"
