"""`memfit capture NET`: what a training step does and holds, without running it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from memfit.capture.step import Kind, Origin, Step, Storage
from memfit.cli.options import add_network, positive
from memfit.cli.screen import Screen, mebibytes, seconds
from memfit.cli.target import Target
from memfit.plan.ledger import Ledger
from memfit.plan.lower import lower_keep
from memfit.resident import peak_bytes

_NUM_LARGEST = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_network(parser)
    parser.add_argument("--device", default="cpu", help="where the step is to run (default: %(default)s)")
    parser.add_argument("--no-loss", action="store_true", help="the model alone, without its loss")
    parser.add_argument(
        "--table", type=positive, nargs="?", const=0, metavar="ROWS", help="print the ops, or the first ROWS of them"
    )


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """Capture on the meta device: nothing of the network's size is allocated, whatever its batch."""
    screen.progress(f"capturing {arguments.network}")
    target = Target.capture(
        arguments.network,
        batch=arguments.batch,
        image=arguments.image,
        device=arguments.device,
        with_loss=not arguments.no_loss,
        anew=True,  # its seconds are shown
    )
    step = target.step
    screen.progress("planning")
    ledger = Ledger.of(lower_keep(target.rewritten))
    screen.done()

    table = None if arguments.table is None else step.table(max_rows=arguments.table or None)
    found = _summary(step, ledger) | {"capture_s": target.capture_s, "rss_bytes": peak_bytes()}
    if screen.json:
        screen.object(found if table is None else found | {"table": table})
        return 0
    if table is not None:
        screen.line(table)
        screen.line()
    _print(found, ledger, screen)
    return 0


def _summary(step: Step, ledger: Ledger) -> dict[str, Any]:
    """The step in numbers, as captured; the ledger is that of the keep policy, with all rewrites."""
    inputs = {step.values[s.value].storage for s in step.sources if s.origin is Origin.INPUT}
    saved = [s for s in step.storages if s.kind is Kind.SAVED and s.first_backward is not None]
    largest = largest_first(saved)[:_NUM_LARGEST]
    return {
        "network": step.name,
        "ops": len(step.ops),
        "forward_ops": step.num_forward,
        "backward_ops": len(step.ops) - step.num_forward,
        "storages": len(step.storages),
        "saved_storages": len(saved),
        "saved_bytes": step.saved_bytes,
        "parameter_bytes": step.parameter_bytes,
        "gradient_bytes": step.gradient_bytes,
        "input_bytes": sum(step.storage_bytes[storage] for storage in inputs),
        "ledger_peak_bytes": ledger.peak_bytes,
        "ledger_growth_bytes": ledger.growth_bytes,
        "largest_saved": [described(step, storage) for storage in largest],
        "digest": step.digest,
    }


def largest_first(storages: Iterable[Storage]) -> list[Storage]:
    return sorted(storages, key=lambda s: (-s.bytes, s.id))


def described(step: Step, storage: Storage) -> dict[str, Any]:
    """A storage by the op that made it."""
    value = step.values[storage.values[0]]
    found: dict[str, Any] = {"bytes": storage.bytes, "value": value.describe(), "op": "", "module": "", "source": ""}
    if storage.maker is not None:
        op = step.ops[storage.maker]
        found |= {"op": op.target, "module": op.path, "source": op.source}
    return found


def _print(found: dict[str, Any], ledger: Ledger, screen: Screen) -> None:
    screen.facts(
        [
            ("network", found["network"]),
            ("ops", f"{found['forward_ops']:,} forward, {found['backward_ops']:,} backward"),
            ("storages", f"{found['storages']:,}, of which {found['saved_storages']:,} saved for backward"),
            ("saved", mebibytes(found["saved_bytes"])),
            ("parameters", mebibytes(found["parameter_bytes"])),
            ("gradients", mebibytes(found["gradient_bytes"])),
            ("inputs", mebibytes(found["input_bytes"])),
            ("peak, by the ledger", ledger.describe_peak()),
            ("  added by the step", mebibytes(ledger.growth_bytes)),
            ("captured in", f"{seconds(found['capture_s'])}, with {mebibytes(found['rss_bytes'])} of RAM in all"),
            ("digest", found["digest"]),
        ]
    )
    if found["largest_saved"]:
        screen.line()
        screen.table(
            ("largest saved", "tensor", "made by", "module", "source"),
            [
                (mebibytes(s["bytes"]), s["value"], s["op"], s["module"] or "(root)", s["source"])
                for s in found["largest_saved"]
            ],
            right=("largest saved",),
        )
