"""The process that measures one arm's peak: it is started fresh, with malloc pinned, and prints one JSON object.

Started by memfit.report.measure as `python -P -c "<pin malloc>; from memfit.report.peak_worker import main; main()"`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from memfit import zoo
from memfit.api import fit
from memfit.capture.structure import take_apart
from memfit.errors import MemfitError
from memfit.report.step_module import TrainingStep
from memfit.resident import Stretches, growth_bytes

_NUM_WARM_UP = 1  # rounds in either thread: oneDNN's scratch and primitive caches, the capture, the observed step


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
    """Growth of this process in a step whose gradients are absent before it, and in a second micro-batch after it.

    And once more in such a step, without the gradients.
    """
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

    def forget_gradients() -> None:
        model.zero_grad(set_to_none=True)
        for tensor in inputs:
            tensor.grad = None

    first: list[int] = []
    second: list[int] = []
    activations: list[int] = []

    def take_steps(times: int) -> None:
        for _ in range(times):
            forget_gradients()
            first.append(growth_bytes(step))
            second.append(growth_bytes(step))
            forget_gradients()
            activations.append(growth_by_gradients(model, step).peak_bytes)

    take_steps(_NUM_WARM_UP)
    in_a_fresh_arena(lambda: take_steps(_NUM_WARM_UP + request["repeats"]))
    return {
        "peak_bytes": max(first[2 * _NUM_WARM_UP :]),
        "accumulating_peak_bytes": max(second[2 * _NUM_WARM_UP :]),
        "activation_peak_bytes": max(activations[2 * _NUM_WARM_UP :]),
    }


def in_a_fresh_arena(work: Callable[[], None]) -> None:
    """Do it in a thread of its own: glibc gives that an arena of its own.

    Capturing and planning leave the main arena full of holes, tens of MiB that large tensors are put into wherever they
    fit, so that the pages of one that is freed stay resident with its neighbours.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        thread.submit(work).result()


def growth_by_gradients(model: torch.nn.Module, step: Callable[[], None]) -> Stretches:
    """Growth in a step, and less the gradients made by then: read each time a gradient has been handed over.

    A layer's gradients are made together and handed over one after the other, so they count as made with the first.
    """
    stretches = Stretches()
    layer_of: dict[torch.Tensor, list[torch.Tensor]] = {}
    for module in model.modules():
        own: list[torch.Tensor] = [p for p in module.parameters(recurse=False) if p.requires_grad and p not in layer_of]
        layer_of |= dict.fromkeys(own, own)

    def handed_over(parameter: torch.Tensor) -> None:
        layer = layer_of[parameter]
        stretches.end_stretch(sum(p.nbytes for p in layer))
        layer.clear()

    handles = [p.register_post_accumulate_grad_hook(handed_over) for p in layer_of]
    step()
    stretches.end_stretch(0)
    for handle in handles:
        handle.remove()
    return stretches
