"""Time one op alone as it would run inside a training step, on this CPU.

[Note: caches]
An op run in a loop finds its operands in the cache, its code too, and its result in the memory it has just given back.
In a step, hundreds of megabytes pass between two ops of a kind. Measured on six networks, loops are 10 to 30 % too fast
in sum, and up to four times for small ops. So before each run the cache is swept: as much memory as the last-level
cache holds is written. That is too slow for the one operand that the op before has just made, and right for weights,
saved activations and the interpreter itself; in sum it is within a few per cent of the ops' time in a real step.

[Note: fresh memory]
In steady state malloc serves activations from what the step before gave back, up to blocks of 32 MiB, which always come
fresh from the kernel. Gradients outlive the step, so nearly all of their pages are fresh in every step, at one page
fault per 4 KiB. A loop does not see these faults, so they are priced apart (`fresh_s_per_byte`), and so is the time
autograd takes to accept a gradient (`handover_s`).
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from memfit.codecs.registry import codec
from memfit.codecs.samples import sample
from memfit.cost.operands import Call, Operands
from memfit.torch_internals import AUTOCAST_DEVICES, below_autograd, no_autocast, real_tensors, resolve

MALLOC_KEEPS_BYTES = 32 * 2**20  # glibc's DEFAULT_MMAP_THRESHOLD_MAX: bigger blocks are never recycled

_SLICE_S = 0.1
_MIN_RUNS, _MAX_RUNS = 3, 9
_SLOW_S = 0.5  # an op this slow is run once after its warm-up: chance weighs less, and the time cap more
_MAX_SWEEP_BYTES = 64 * 2**20
_VIEWS_IN_A_ROW = 4  # they come in bunches, and only the first finds the interpreter swept out
_NUM_LINKS = 16
_FAULT_BYTES = 16 * 2**20
_CODEC_BYTES = 16 << 20
_COPY_BYTES = 64 * 2**20


class Stopwatch:
    """Times calls one at a time; holds no memory but what sweeps the cache."""

    def op_s(self, call: Call) -> float:
        """Seconds of one run: the lower quartile of several, because what disturbs a run only makes it slower."""
        operands = Operands(call)
        with as_in_a_step(call):
            first_s = _seconds(lambda: self._once(operands))
            begun = time.perf_counter()
            times: list[float] = []
            while not times or self._goes_on(first_s, len(times), time.perf_counter() - begun):
                operands.restore()
                if call.bytes < 2 * len(self._sweep):  # a bigger one sweeps the cache itself
                    self._sweep.add_(1)
                times.append(_seconds(lambda: self._once(operands)))
        return sorted(times)[len(times) // 4]

    @staticmethod
    def _once(operands: Operands) -> None:
        # The result is dropped inside the time: in a step, too, every block that is taken is given back.
        operands.run()

    @staticmethod
    def _goes_on(first_s: float, num_runs: int, elapsed_s: float) -> bool:
        if first_s > _SLOW_S:
            return False
        return num_runs < _MIN_RUNS or (num_runs < _MAX_RUNS and elapsed_s < _SLICE_S)

    def view_s(self) -> float:
        """Seconds of an op that only makes a view: they differ little, so one stands for all."""
        tensor, view = torch.empty(8, 8), resolve("aten.view.default")
        times = []
        for _ in range(_MAX_RUNS):
            self._sweep.add_(1)
            times.append(_seconds(lambda: [view(tensor, [64]) for _ in range(_VIEWS_IN_A_ROW)]) / _VIEWS_IN_A_ROW)
        return sorted(times)[len(times) // 4]

    def fresh_s_per_byte(self) -> float:
        """What the first touch of a byte costs more than the second: the page fault, shared by its page."""
        gains = []
        for _ in range(3):
            fresh = _mapped(_FAULT_BYTES)
            first_s = _seconds(fresh.zero_)
            gains.append(first_s - min(_seconds(fresh.zero_) for _ in range(2)))
        return max(sorted(gains)[1], 0.0) / _FAULT_BYTES

    def copy_bytes_per_s(self) -> float:
        """How fast a big tensor is copied."""
        source, target = _mapped(_COPY_BYTES).zero_(), _mapped(_COPY_BYTES).zero_()
        return _COPY_BYTES / min(_seconds(lambda: target.copy_(source)) for _ in range(3))

    def codec_bytes_per_s(self, name: str) -> tuple[float, float]:
        """How fast a codec encodes and decodes a tensor that it is made for, in bytes of the tensor."""
        chosen, drawn = codec(name), sample(name, _CODEC_BYTES)
        tensor, settings = drawn.tensor, drawn.settings
        code, like = chosen.encode(tensor, settings), torch.empty_like(tensor)
        encode_s = min(_seconds(lambda: chosen.encode(tensor, settings)) for _ in range(3))
        decode_s = min(_seconds(lambda: chosen.decode(code, like, settings)) for _ in range(3))
        return tensor.nbytes / encode_s, tensor.nbytes / decode_s

    def codec_call_s(self) -> float:
        """Seconds that a codec takes with next to nothing to do."""
        chosen, drawn = codec("mask"), sample("mask", 256)
        return min(_seconds(lambda: chosen.encode(drawn.tensor, drawn.settings)) for _ in range(20))

    def handover_s(self) -> float:
        """Seconds to hand one gradient over to autograd: making the node, and going from node to node in backward."""
        parameters = [torch.zeros(16, requires_grad=True) for _ in range(_NUM_LINKS)]
        gaps: list[float] = []
        left_at = 0.0

        class Link(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, link: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
                return torch.empty(0)

            @staticmethod
            def backward(ctx: Any, *tangents: torch.Tensor) -> Any:
                nonlocal left_at
                gaps.append(time.perf_counter() - left_at)
                self._sweep.add_(1)
                left_at = time.perf_counter()
                return tangents[0], torch.zeros(16)

        with real_tensors(), torch.enable_grad(), no_autocast(AUTOCAST_DEVICES):
            begun = time.perf_counter()
            link = torch.empty(0, requires_grad=True)
            for parameter in parameters:
                link = Link.apply(link, parameter)
            making_s = (time.perf_counter() - begun) / _NUM_LINKS
            link.sum().backward()
        return making_s + sorted(gaps[1:])[len(gaps) // 4]

    @cached_property
    def _sweep(self) -> torch.Tensor:
        return _mapped(min(_last_level_cache_bytes(), _MAX_SWEEP_BYTES))


@contextlib.contextmanager
def as_in_a_step(call: Call) -> Iterator[None]:
    """Call kernels the way the runtime does, and leave the caller's random state as it was."""
    below = below_autograd() if call.is_forward else contextlib.nullcontext()
    with (
        real_tensors(),
        torch.random.fork_rng(devices=[]),
        torch.set_grad_enabled(call.is_forward),
        no_autocast(AUTOCAST_DEVICES),
        below,
    ):
        yield


def _seconds(run: Callable[[], object]) -> float:
    # One thread that computes never waits, so its own clock leaves out only the turns of other processes.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begun = clock()
    run()
    return clock() - begun


def _mapped(num_bytes: int) -> torch.Tensor:
    """Memory straight from the kernel: big blocks freed through malloc would change what it keeps from then on."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.empty(num_bytes, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def _last_level_cache_bytes() -> int:
    """As Linux has it; elsewhere a guess that is large enough for most."""
    found = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(file.read_text().strip().removesuffix("K")) * 1024)
    return max(found) or 32 * 2**20
