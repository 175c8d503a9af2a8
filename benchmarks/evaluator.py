"""Time one evaluation of a plan, in C and in Python: `python benchmarks/evaluator.py [--json]`.

Networks of the zoo at their published batch and size, on made-up prices; states drawn at random, from almost all kept
to almost none, over two tiers; half of them with a budget. Each is evaluated several times, and the fastest counts.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from memfit import zoo
from memfit.capture.rewrites import rewrite
from memfit.capture.rewrites.proof import AssumedProofs
from memfit.capture.trace import capture
from memfit.cost.costs import Link, free_of_charge
from memfit.plan.evaluate import Evaluator, PythonEvaluator
from memfit.plan.problem import AWAY, DROP, KEEP, Problem
from memfit.report.step_module import loss_of

NETWORKS = ("resnet50", "densenet201", "gpt2", "resnet152")
LINKS = {"disk": Link("disk", "disk", "disk", 2e9, 3e9, 1e-4), "host": Link("host", "out", "back", 12e9, 12e9, 1e-5)}
NUM_STATES, NUM_STATES_PYTHON, NUM_REPEATS = 200, 5, 10


def problem_of(network: str) -> Problem:
    """The network's step at a microsecond per op."""
    example = zoo.load(network, device="meta")
    example.model.train()
    step = capture(
        example.model,
        example.args,
        example.kwargs,
        loss=lambda output, *targets: loss_of(output, example.loss, targets),
        targets=example.targets,
        device="cpu",
        name=network,
    )
    step = rewrite(step, proofs=AssumedProofs())
    return Problem.of(step, replace(free_of_charge(step), links=LINKS))


def drawn_states(problem: Problem, rng: random.Random) -> list[int]:
    """A random mix of keep, drop and away."""
    reruns = problem.reruns
    states, share = problem.default_states(), rng.random()
    for storage in reruns.owned:
        if rng.random() < share:
            options = [KEEP] + [DROP] * (storage in reruns.recomputable)
            options += [AWAY, AWAY + 1] * (not reruns.why_not_offload(storage))
            states[storage] = rng.choice(options)
    return states


def fastest_us(call: Callable[..., object], *args: object, repeats: int) -> float:
    """Microseconds of the fastest of several calls: the others were disturbed."""
    durations = []
    for _ in range(repeats):
        start = time.perf_counter()
        call(*args)
        durations.append(time.perf_counter() - start)
    return min(durations) * 1e6


def measure(network: str) -> dict[str, Any]:
    problem, rng = problem_of(network), random.Random(0)
    native, twin = Evaluator.of(problem), PythonEvaluator(problem)
    peak_bytes = native.evaluate(problem.default_states()).peak_bytes
    cases: list[tuple[Any, int | None]] = [
        (native.array(drawn_states(problem, rng)), rng.choice([None, int(peak_bytes * rng.uniform(0.3, 1))]))
        for _ in range(NUM_STATES)
    ]
    row: dict[str, Any] = {"network": network, "num_ops": problem.num_ops, "num_storages": len(cases[0][0])}
    if native.is_native:
        times = [fastest_us(native.evaluate, *case, repeats=NUM_REPEATS) for case in cases]
        row |= {"native_us": round(statistics.median(times), 1), "native_worst_us": round(max(times), 1)}
    times = [fastest_us(twin.evaluate, *case, repeats=2) for case in cases[:NUM_STATES_PYTHON]]
    return row | {"python_us": round(statistics.median(times), 1)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("networks", nargs="*", default=NETWORKS, help=f"default: {' '.join(NETWORKS)}")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with a row for each network")
    options = parser.parse_args(argv)
    rows = []
    for network in options.networks:
        rows.append(measure(network))
        if not options.json:
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if options.json:
        print(json.dumps({"rows": rows}, indent=2))


if __name__ == "__main__":
    main()
