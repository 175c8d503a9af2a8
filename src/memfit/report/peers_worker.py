"""The process that does one thing for the comparison of peers: measure a peak, time an arm or two, or find a budget.

Started by memfit.report.peers_process, for peaks with malloc pinned; prints one JSON object. Whatever goes wrong in an
arm is an answer: a compiler that is missing or fails must not keep others from being measured.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

from memfit import zoo
from memfit.report.peak_worker import growth_by_gradients, in_a_fresh_arena
from memfit.report.peers_duel import duel
from memfit.report.peers_planning import Search
from memfit.report.peers_setting import PEERS, Kind, Setting
from memfit.report.peers_trial import is_warm, try_out
from memfit.report.step_module import TrainingStep
from memfit.resident import growth_bytes


def main() -> None:
    """Answer the request in the last argument on stdout."""
    request = json.loads(sys.argv[-1])
    # Compilers and networks print; stdout is for the answer.
    answer_to = os.dup(1)
    os.dup2(2, 1)
    try:
        answer = _answer(request)
    except Exception as error:
        answer = {"error": _first_line(error), "kind": type(error).__name__}
    with os.fdopen(answer_to, "w") as file:
        json.dump(answer, file)
    # Compilers leave pools of processes behind that interpreters wait for.
    sys.stderr.flush()
    os._exit(0)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    if request["threads"] is not None:
        torch.set_num_threads(request["threads"])
    sizes = {name: request[name] for name in ("batch", "image", "seed", "channels_last")}
    match request["task"]:
        case "peak":
            return _peak(Setting.from_dict(request["setting"]), request["network"], **sizes)
        case "trial":
            setting = Setting.from_dict(request["setting"])
            return try_out(setting, request["network"], steps=request["steps"], **sizes).to_dict()
        case "duel":
            setting, beside = (Setting.from_dict(request[name]) for name in ("setting", "beside"))
            return duel(setting, beside, request["network"], steps=request["steps"], **sizes).to_dict()
        case "budget":
            search = Search(request["policy"], request["network"], **sizes)
            return search.budget_for(request["target_bytes"]).to_dict()
        case "smallest":
            return Search(request["policy"], request["network"], **sizes).smallest().to_dict()
        case task:
            raise AssertionError(f"task {task!r}")


def _peak(setting: Setting, network: str, **loaded: Any) -> dict[str, Any]:
    """How far this process grows in a step that starts without gradients: in all, and without the gradients.

    `pinned_step_s` is under a pinned malloc: it says which of two settings of one peer is the faster, no more.
    """
    model, call = TrainingStep.of(zoo.load(network, **loaded))
    setting.apply(model)
    torch.default_generator.manual_seed(loaded["seed"])
    seconds: list[float] = []
    found: dict[str, int] = {}

    def step() -> None:
        model.zero_grad(set_to_none=True)
        start_s = time.perf_counter()
        model(*call).backward()
        seconds.append(time.perf_counter() - start_s)

    def take_steps() -> None:
        step()  # in new pages
        model.zero_grad(set_to_none=True)
        if PEERS[setting.peer].gives_gradients_at_once:
            found["peak_bytes"] = growth_bytes(step)
            found["activation_peak_bytes"] = _least_activations(model, call, found["peak_bytes"])
        else:
            stretches = growth_by_gradients(model, step)
            found["peak_bytes"] = stretches.whole_peak_bytes
            found["activation_peak_bytes"] = stretches.peak_bytes

    if PEERS[setting.peer].kind not in (Kind.EAGER, Kind.CHECKPOINT):
        step()  # compiles, or captures and plans
    # Until nobody plans again or reads the same marks of the kernel.
    while (fitted := model.__dict__.get("memfit")) is not None and not is_warm(fitted, len(seconds)):
        step()
    in_a_fresh_arena(take_steps)
    return {**found, "pinned_step_s": min(seconds[-2:])}


def _least_activations(model: TrainingStep, call: tuple[Any, ...], growth: int) -> int:
    """What a step that hands its gradients over all at once needs at least without them.

    Nobody sees how many of them are made when it is largest. So all of them are taken to be: what is left is too little
    rather than too much, but never less than the forward half alone takes. `growth` is that of the whole step, whose
    gradients are there.
    """
    gradient_bytes = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    model.zero_grad(set_to_none=True)
    forward_growth = growth_bytes(lambda: model(*call))
    return max(forward_growth, growth - gradient_bytes)


def _first_line(error: Exception) -> str:
    """What went wrong, without the traces and the advice that compilers add."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
