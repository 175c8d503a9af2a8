"""The process that measures workspaces: it is started fresh, with malloc pinned, and answers line by line.

Started by memfit.cost.profile as `python -P -c "<pin malloc>; from memfit.cost.profile_worker import main; main()"`.
A request on stdin is a pickled Call, an answer on stdout one line of JSON; a first line says that it is ready. Each op
runs here before it runs in the user's process, so a kernel that crashes on made-up operands takes nothing else down.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
from typing import Any

import torch

from memfit.cost.operands import Call, Operands
from memfit.cost.stopwatch import as_in_a_step
from memfit.resident import CannotMeasure, growth_bytes, require_linux

NOISE_BYTES = 256 * 1024  # Linux counts resident pages in batches, and malloc keeps small blocks
_MIN_CALL_BYTES = 2**20  # ops on less do not move a peak
_REPEATS = 2


def main() -> None:
    """Answer requests until stdin ends."""
    torch.set_num_threads(int(sys.argv[-1]))
    # What libraries print goes to stderr: stdout is for the answers.
    answer_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    gc.collect()
    gc.freeze()  # growth_bytes collects garbage each time; what is here now never is any
    print("ready", file=answer_to, flush=True)
    while True:
        try:
            call = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        print(json.dumps(answer(call)), file=answer_to, flush=True)


def answer(call: Call) -> dict[str, Any]:
    """The op's workspace; or why it cannot be run, or why the machine does not say."""
    try:
        return {"workspace_bytes": workspace_bytes(call)}
    except CannotMeasure as error:
        return {"cannot_measure": str(error)}
    except Exception as error:  # whatever a kernel raises on operands it does not like
        return {"cannot_run": f"{type(error).__name__}: {error}"}


def workspace_bytes(call: Call) -> int:
    """What the op holds beyond its operands and results at its peak, after a warm-up that fills primitive caches."""
    operands = Operands(call)
    with as_in_a_step(call):
        operands.run()
        if call.bytes < _MIN_CALL_BYTES:
            return 0
        require_linux()  # after the run: that it does not crash is worth knowing everywhere
        held: list[int] = []
        for _ in range(_REPEATS):
            operands.restore()
            results: list[Any] = []
            growth = growth_bytes(lambda: results.append(operands.run()))
            held.append(growth - operands.new_bytes(results))
            results.clear()
    # Results that the kernel never writes are not resident, so the difference may be negative.
    least = min(held)
    return least if least >= NOISE_BYTES else 0
