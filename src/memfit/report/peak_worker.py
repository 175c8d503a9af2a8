"""The process that measures one arm's peak: it is started fresh, with malloc pinned, and prints one JSON object.

Started by memfit.report.measure as `python -P -c "<pin malloc>; from memfit.report.peak_worker import main; main()"`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from memfit import zoo
from memfit.api import fit
from memfit.capture.structure import take_apart
from memfit.errors import MemfitError
from memfit.report.resident import growth_bytes
from memfit.report.step_module import TrainingStep

_NUM_WARM_UP = 1  # pairs of micro-batches: oneDNN's scratch and primitive caches, and the capture itself


def main() -> None:
    """Answer the request in the last argument on stdout."""
    request = json.loads(sys.argv[-1])
    # What the user's module prints goes to stderr: stdout is for the answer.
    answer_to = os.dup(1)
    os.dup2(2, 1)
    try:
        answer = measure(request)
    except MemfitError as error:
        answer = {"error": str(error), "kind": type(error).__name__}
    with os.fdopen(answer_to, "w") as file:
        json.dump(answer, file)


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Growth of this process in a step whose gradients are absent before it, and in a second micro-batch after it."""
    if request["threads"] is not None:
        torch.set_num_threads(request["threads"])
    example = zoo.load(request["network"], batch=request["batch"], image=request["image"], seed=request["seed"])
    model, call = TrainingStep.of(example)
    inputs, _ = take_apart(call)
    if request["fit"] is not None:
        fit(model, **request["fit"])
    torch.default_generator.manual_seed(request["seed"])

    def step() -> None:
        model(*call).backward()

    first: list[int] = []
    second: list[int] = []
    for _ in range(_NUM_WARM_UP + request["repeats"]):
        model.zero_grad(set_to_none=True)
        for tensor in inputs:
            tensor.grad = None
        first.append(growth_bytes(step))
        second.append(growth_bytes(step))
    return {"peak_bytes": max(first[_NUM_WARM_UP:]), "activation_peak_bytes": max(second[_NUM_WARM_UP:])}
