"""Time each codec's kernels beside memcpy: `python benchmarks/codecs.py [--json] [--megabytes 64] [--threads 1]`.

Figures are gigabytes of the tensor per second, whatever the code's size: what the tensor's side of a step sees. Each
round times memcpy and every kernel once, so that a busy moment hits all alike; the fastest of the rounds counts. The
memory is touched before, so that page faults are not in the figures. memcpy is a copy of the same tensor.

Backward ops that read a code are there too, in bytes of the gradient they make: ReLU's from its mask, max-pool's from
the slots of its windows. Beside each is torch's own, which reads the tensor or the indices. ReLU's that are not in
place take fresh memory at every call, and that is in their figures.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

from memfit.codecs import kernels
from memfit.codecs.gating import threshold_backward, threshold_backward_
from memfit.codecs.pool import Pool
from memfit.codecs.pooling import max_pool_backward
from memfit.codecs.registry import ALL_NAMES, codec
from memfit.codecs.samples import sample

NUM_ROUNDS = 7


def calls(num_bytes: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """What is timed, by name: the bytes that count, and the call."""
    source = torch.randn(num_bytes // 4)
    target = torch.empty_like(source)
    found: dict[str, tuple[int, Callable[[], object]]] = {"memcpy": (source.nbytes, lambda: target.copy_(source))}
    for name in ALL_NAMES:
        chosen, drawn = codec(name), sample(name, num_bytes)
        code = chosen.encode(drawn.tensor, drawn.settings)
        like = torch.zeros_like(drawn.tensor)

        def encode(chosen=chosen, drawn=drawn, code=code) -> None:
            # Into the same memory each time: an allocator that maps fresh pages is not what is measured.
            if hasattr(chosen, "pack"):
                chosen.pack(drawn.tensor, code, drawn.settings)
            else:
                chosen.encode(drawn.tensor, drawn.settings)

        def decode(chosen=chosen, drawn=drawn, code=code, like=like) -> None:
            chosen.decode(code, like, drawn.settings)

        found[f"{name} encode"] = (drawn.tensor.nbytes, encode)
        found[f"{name} decode"] = (drawn.tensor.nbytes, decode)
        if name == "mask":
            gradient = torch.randn_like(drawn.tensor)

            def gate_in_place(gradient=gradient, code=code, drawn=drawn) -> None:
                threshold_backward_(gradient, code, drawn.settings)

            def gate(gradient=gradient, code=code, drawn=drawn) -> None:
                threshold_backward(gradient, code, drawn.settings)

            def torchs(gradient=gradient, drawn=drawn) -> None:
                torch.ops.aten.threshold_backward(gradient, drawn.tensor, 0)

            found["relu backward, in place"] = (gradient.nbytes, gate_in_place)
            found["relu backward"] = (gradient.nbytes, gate)
            found["relu backward, torch"] = (gradient.nbytes, torchs)
    return {**found, **poolings(num_bytes)}


POOLINGS = {
    "2x2": Pool((112, 112), (2, 2), (2, 2), (0, 0), (1, 1)),
    "3x3": Pool((56, 56), (3, 3), (2, 2), (1, 1), (1, 1)),
}


def poolings(num_bytes: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """Max-pool's backward from the code of its indices, and torch's from the indices."""
    found: dict[str, tuple[int, Callable[[], object]]] = {}
    backward = torch.ops.aten.max_pool2d_with_indices_backward.grad_input
    for name, pool in POOLINGS.items():
        for place, memory_format in (("", torch.contiguous_format), (", nhwc", torch.channels_last)):
            num_images = max(num_bytes // (4 * 64 * pool.input_size[0] * pool.input_size[1]), 1)
            inputs = torch.randn(num_images, 64, *pool.input_size).relu_().contiguous(memory_format=memory_format)
            geometry = (pool.kernel, pool.stride, pool.padding, pool.dilation)
            _, indices = torch.nn.functional.max_pool2d(inputs, *geometry, return_indices=True)
            settings = tuple(map(float, pool.numbers()))
            code = codec("window").encode(indices, settings)
            gradient = torch.empty_like(indices, dtype=torch.float32).normal_()

            def fused(gradient=gradient, code=code, like=inputs, settings=settings) -> None:
                max_pool_backward(gradient, code, like, settings)

            def torchs(gradient=gradient, like=inputs, geometry=geometry, indices=indices) -> None:
                backward(gradient, like, *geometry, False, indices, grad_input=like)

            found[f"pool {name}{place}"] = (inputs.nbytes, fused)
            found[f"pool {name}{place}, torch"] = (inputs.nbytes, torchs)
    return found


def measure(num_bytes: int) -> dict[str, float]:
    """Gigabytes per second, by name."""
    todo = calls(num_bytes)
    fastest_s = dict.fromkeys(todo, float("inf"))
    for _ in range(NUM_ROUNDS):
        for name, (_, call) in todo.items():
            begun = time.perf_counter()
            call()
            fastest_s[name] = min(fastest_s[name], time.perf_counter() - begun)
    return {name: todo[name][0] / seconds / 1e9 for name, seconds in fastest_s.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--megabytes", type=int, default=64, help="size of each tensor")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    speeds = measure(options.megabytes * 1_000_000)
    copy = speeds["memcpy"]
    if options.json:
        how = {"threads": options.threads, "megabytes": options.megabytes, "avx2": kernels.has_avx2()}
        print(json.dumps({**how, "gb_per_s": speeds}, indent=2))
        return
    print(f"{options.megabytes} MB, {options.threads} thread(s), AVX2 {'used' if kernels.has_avx2() else 'not there'}")
    for name, speed in speeds.items():
        print(f"{name:<24} {speed:7.2f} GB/s   {speed / copy:5.2f} of memcpy")


if __name__ == "__main__":
    main()
