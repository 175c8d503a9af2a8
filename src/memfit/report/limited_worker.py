"""The process that trains within a limit on its own memory: it is started fresh and prints one JSON object.

Started by memfit.report.limited as `python -P -c "<malloc>; from memfit.report.limited_worker import main; main()"`.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import resource
import sys
import time
from typing import Any

import torch
from torch import nn

from memfit import zoo
from memfit.api import fit
from memfit.codecs import dense
from memfit.errors import MemfitError, is_out_of_memory
from memfit.plan.decisions import Keep, Recompute, to_text, untimed
from memfit.plan.planner import Planned
from memfit.report.step_module import loss_of
from memfit.resident import CannotMeasure, high_water_bytes, reset_high_water, resident_bytes

_LEARNING_RATE = 0.01


def main() -> None:
    """Answer the request in the last argument on stdout."""
    request = json.loads(sys.argv[-1])
    # What libraries print goes to stderr: stdout is for the answer.
    answer_to = os.dup(1)
    os.dup2(2, 1)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    answer = train(request)
    with os.fdopen(answer_to, "w") as file:
        json.dump(answer, file)


def train(request: dict[str, Any]) -> dict[str, Any]:
    """Train, within the limit if there is one: losses, peak and times, and the error that ended it."""
    if request["threads"] is not None:
        torch.set_num_threads(request["threads"])
    _warm_up()
    gc.collect()
    before_data, before_resident = _data_bytes(), resident_bytes()
    if request["allowance_bytes"] is not None:
        limit = before_data + request["allowance_bytes"]
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    found: dict[str, Any] = {"baseline_bytes": before_data, "peak_bytes": 0, "losses": [], "step_s": [], "error": None}
    try:
        _train(request, found, before_data, before_resident)
    except (RuntimeError, MemoryError, MemfitError) as error:
        found["error"] = " ".join(str(error).split()) or type(error).__name__
        found["is_out_of_memory"] = is_out_of_memory(error)
    return found


def _train(request: dict[str, Any], found: dict[str, Any], before_data: int, before_resident: int) -> None:
    example = zoo.load(request["network"], batch=request["batch"], image=request["image"], seed=request["seed"])
    model = example.model
    if not model.training:
        model.train()
    if request["fit"] is not None:
        fit(model, **request["fit"])
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
    torch.default_generator.manual_seed(request["seed"])
    for _ in range(request["steps"]):
        # Each step anew: memfit sets the mark back itself in the first two steps, which it watches.
        reset_high_water()
        start_s = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(model(*example.args, **example.kwargs), example.loss, example.targets)
        loss.backward()
        optimizer.step()
        # As hex: a decimal rounds, and these are to be compared to the bit.
        found["losses"].append(float(loss.detach()).hex())
        found["step_s"].append(time.perf_counter() - start_s)
        found["peak_bytes"] = max(found["peak_bytes"], high_water_bytes() - before_resident)
        del loss  # with it goes what the graph holds
        found["between_steps"] = {
            "data_bytes": _data_bytes() - before_data,
            "resident_bytes": resident_bytes() - before_resident,
            "tensor_bytes": _tensor_bytes(model, example),
        }
    found["weights"] = _digest(model)
    fitted = model.__dict__.get("memfit")
    if fitted is not None:
        found["plan"] = _plan(fitted.planned) | {"num_fallbacks": dense.num_fallbacks()}


def _warm_up() -> None:
    """A step of a tiny network, both ways: threads are started, and libraries have what they hold for good."""
    tiny = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 2))
    optimizer = torch.optim.SGD(tiny.parameters(), lr=_LEARNING_RATE)
    for model in (tiny, fit(tiny)):
        model(torch.zeros(2, 3, 8, 8)).sum().backward()
        optimizer.step()


def _data_bytes() -> int:
    """What RLIMIT_DATA limits: private memory that can be written, whether it was touched or not."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    raise CannotMeasure("/proc/self/status has no VmData, from which the limit on the process is set")


def _tensor_bytes(model: nn.Module, example: zoo.Example) -> int:
    """What weights, buffers, gradients and the batch take."""
    held = [*model.parameters(), *model.buffers(), *(weight.grad for weight in model.parameters())]
    batch = (*example.args, *example.kwargs.values(), *example.targets)
    storages = [each.untyped_storage() for each in (*held, *batch) if isinstance(each, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _digest(model: nn.Module) -> str:
    """A hash of every bit of the weights and buffers."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(name.encode())
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _plan(planned: Planned) -> dict[str, Any]:
    """What was decided, in counts and bytes, and what it was predicted to cost."""
    assert planned.plan is not None
    decided: dict[str, dict[str, int]] = {}
    step, decisions = planned.step, planned.plan.decisions
    for storage in step.storages:
        if storage.maker is None or storage.maker >= step.num_forward:
            continue
        decision = decisions.get(storage.id)
        held_for_reruns = decision is not None and not isinstance(decision, Recompute)
        if storage.first_backward is None and not held_for_reruns:
            continue
        row = decided.setdefault(to_text(untimed(decision or Keep())), {"count": 0, "bytes": 0})
        row["count"] += 1
        row["bytes"] += storage.bytes
    return {
        "policy": planned.policy,
        "note": planned.note,
        "decisions": dict(sorted(decided.items())),
        "budget_bytes": planned.budget_bytes,
        "peak_bytes": planned.peak_bytes,
        "keep_peak_bytes": planned.keep_peak_bytes,
        "overhead": planned.overhead,
        "lower_bound_overhead": planned.lower_bound_overhead,
        "plan_s": planned.plan_s,
    }
