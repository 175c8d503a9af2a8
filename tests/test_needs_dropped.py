"""Take away what capture/needs.py says is not read: from real training graphs, and as ghosts without bytes.

Run as a script it is the sandbox of the ghost test: it forks per call, because a ghost that is read is a segfault.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_calls import CALLS, Call, classes_of, like, run, same

from memfit.capture.needs import GHOSTABLE, GHOSTABLE_IF_ALIKE, ROWS, Need, gate_of, needs_of

# --- real training graphs: change what autograd saved, while it runs -------------------------------------------------

Change = Callable[[torch.Tensor], torch.Tensor]
MEAN, VAR, BIAS = torch.randn(3), torch.rand(3) + 0.5, torch.randn(8, requires_grad=True)


def gated(op: str, **arguments: Any) -> Change:
    gate = gate_of(op, "self", arguments)
    assert gate is not None
    return lambda t: like(t, classes_of(gate, t))


def poison(t: torch.Tensor) -> torch.Tensor:
    return like(t, math.nan) if t.dtype.is_floating_point else t


def poison_only(*victims: torch.Tensor) -> Change:
    pointers = [victim.data_ptr() for victim in victims]
    return lambda t: poison(t) if t.data_ptr() in pointers else t


TRAINED: dict[str, tuple[Change, Change]] = {
    "relu": (F.relu, gated("aten.threshold_backward.default", threshold=0)),
    "leaky_relu": (F.leaky_relu, gated("aten.leaky_relu_backward.default")),
    "relu6": (F.relu6, gated("aten.hardtanh_backward.default", min_val=0, max_val=6)),
    "hardsigmoid": (F.hardsigmoid, gated("aten.hardsigmoid_backward.default")),
    "abs": (torch.abs, gated("aten.sign.default")),
    "clamp_min": (lambda x: x.clamp_min(0.5), gated("aten.ge.Scalar", other=0.5)),
    "clamp_max": (lambda x: x.clamp_max(0.5), gated("aten.le.Scalar", other=0.5)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1), poison),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), poison),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1), poison),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 3), poison),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 3), poison),
    "reflect": (lambda x: F.pad(x, [1, 1, 1, 1], mode="reflect"), poison),
    "nll_loss2d": (lambda x: F.nll_loss(x, torch.zeros(2, 8, 8).long(), reduction="sum"), poison),
    "batch_norm": (lambda x: F.batch_norm(x, MEAN, VAR, None, None, True, 0.0), poison_only(MEAN, VAR)),
    "layer_norm": (lambda x: F.layer_norm(x, [8], None, BIAS), poison_only(BIAS)),
}


@pytest.mark.parametrize("name", TRAINED)
def test_autograd_does_not_miss_what_we_drop(name: str) -> None:
    torch.manual_seed(2)
    forward, change = TRAINED[name]
    x, changed = torch.randn(2, 3, 8, 8, requires_grad=True), []

    def unpack(t: torch.Tensor) -> torch.Tensor:
        other = change(t)
        if other is not t:
            changed.append(other)
        return other

    y = forward(x)
    g = torch.randn_like(y)  # not a function of y: a closed gate must have something to stop
    (expected,) = torch.autograd.grad(y, x, g)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        y = forward(x)
    (found,) = torch.autograd.grad(y, x, g)
    assert changed, "autograd saved nothing that we may change, so the case shows nothing"
    assert same([found], [expected])


# --- ghosts ----------------------------------------------------------------------------------------------------------


def outcome(call: Call, name: str) -> str:
    """Run a call in a fork with a zero-byte `name`: same, different, the error's first words, or a signal."""
    expected, (reader, writer) = run(call.op, call.arguments), os.pipe()
    child = os.fork()
    if child == 0:
        t = call.tensors[name]
        ghost = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
        ghost.untyped_storage().resize_(0)
        try:
            said = "same" if same(run(call.op, {**call.arguments, name: ghost}), expected) else "different"
        except RuntimeError as error:
            said = f"raises {str(error)[:40]}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return said or f"signal {os.WTERMSIG(status)}"


def alike(call: Call) -> bool:
    """Where GHOSTABLE_IF_ALIKE makes its promise."""
    t, weight = call.tensors["input"], call.tensors["weight"]
    return t.dtype is torch.float32 and t.dim() == 4 and t.is_contiguous() == weight.is_contiguous()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_ghosts_are_safe_exactly_where_we_say() -> None:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=True)
    told: dict[tuple[str, str], dict[int, str]] = {}
    for op, operand, index, said in json.loads(done.stdout):
        told.setdefault((op, operand), {})[index] = said
    assert set(told) == {(row.op, row.operand) for row in ROWS if row.need is Need.SHAPE}
    for pair, outcomes in told.items():
        if pair in GHOSTABLE_IF_ALIKE:
            for index, said in outcomes.items():
                assert said == "same" or not alike(CALLS[index]), (str(CALLS[index]), said)
            assert any("mixed" in CALLS[i].label and said.startswith("signal") for i, said in outcomes.items())
        else:
            refused = {str(CALLS[index]): said for index, said in outcomes.items() if said != "same"}
            assert (pair in GHOSTABLE) == (not refused), (pair, refused)


def haunt() -> None:
    """Try a ghost for the SHAPE operands of the calls and print what came of it."""
    told, refused = [], set()
    for index, call in enumerate(CALLS):
        for name, need in needs_of(call.op, call.arguments).items():
            # One refusal is enough to keep an operand off the list; a fork is 10 ms.
            if need is Need.SHAPE and name in call.tensors and (call.op, name) not in refused:
                said = outcome(call, name)
                told.append((call.op, name, index, said))
                if said != "same" and (call.op, name) not in GHOSTABLE_IF_ALIKE:
                    refused.add((call.op, name))
    print(json.dumps(told))


if __name__ == "__main__":
    haunt()
