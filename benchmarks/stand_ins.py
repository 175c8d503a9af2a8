"""Time what stands in for torch's own kernels beside these: `python benchmarks/stand_ins.py [--json] [--threads 2]`.

Both are called in turn on the same operands, which are out of the cache each time, as in a step; the lower quartile of
the rounds counts. `bits` says whether the results were the same. Beside ours on torch's threads is ours on new ones,
which have to share their cores with torch's while these spin.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from memfit import stand_ins
from memfit.capture.rewrites.proof import same_bits
from memfit.stand_ins import matrices
from memfit.stand_ins.convolutions import orders
from memfit.torch_internals import resolve, thread_team

NUM_ROUNDS = 15
SWEEP_BYTES = 64 << 20
SIZES = (  # of convolutions: samples, channels before and after, height and width, window
    (4, 256, 128, 56, 1),
    (4, 512, 128, 28, 1),
    (8, 1024, 256, 14, 1),
    (4, 128, 32, 56, 3),
    (8, 64, 64, 56, 3),
)
LAYERS = ((16, 25088, 4096), (16, 4096, 4096), (64, 1024, 1024))  # linear: batch, features before and after
MASKS: dict[str, list[bool]] = {
    "convolution": [],
    "gradient of its input": [True, False, False],
    "gradient of its weight": [False, True, False],
}

Case = tuple[str, Callable[[], tuple[object, ...]]]


def cases() -> dict[str, Case]:
    """What is timed, by name: torch's operator, and what gives its operands."""
    found: dict[str, Case] = {}
    for shape in ((4, 256, 56, 56), (4, 64, 112, 112), (4, 512, 14, 14), (8, 64, 56, 56)):

        def batch_norm(shape: tuple[int, ...] = shape) -> tuple[object, ...]:
            vectors = [torch.rand(shape[1]) for _ in range(4)]
            return (torch.randn(shape), *vectors, True, 0.1, 1e-5)

        found[f"batch norm {shape}"] = ("aten.native_batch_norm.default", batch_norm)
    for shape in ((4, 128, 56, 56), (4, 512, 28, 28)):

        def backward(shape: tuple[int, ...] = shape) -> tuple[object, ...]:
            maps = (torch.randn(shape), torch.randn(shape))
            return (*maps, *(torch.rand(shape[1]) for _ in range(5)), True, 1e-5, [True] * 3)

        found[f"its gradients {shape}"] = ("aten.native_batch_norm_backward.default", backward)

        def rows(shape: tuple[int, ...] = shape) -> torch.Tensor:
            return torch.randn(shape).contiguous(memory_format=torch.channels_last)

        def norm_of_rows(shape: tuple[int, ...] = shape) -> tuple[object, ...]:
            return (rows(shape), *(torch.rand(shape[1]) for _ in range(4)), True, 0.1, 1e-5)

        def gradients(shape: tuple[int, ...] = shape) -> tuple[object, ...]:
            return (rows(shape), rows(shape), *(torch.rand(shape[1]) for _ in range(5)), True, 1e-5, [True] * 3)

        found[f"batch norm {shape}, channels last"] = ("aten.native_batch_norm.default", norm_of_rows)
        found[f"its gradients {shape}, channels last"] = ("aten.native_batch_norm_backward.default", gradients)
    for shape, kernel, padding in (((4, 64, 112, 112), 3, 1), ((2, 64, 256, 256), 2, 0)):

        def pool(shape: tuple[int, ...] = shape, kernel: int = kernel, padding: int = padding) -> tuple[object, ...]:
            return (torch.randn(shape).relu_(), [kernel] * 2, [2, 2], [padding] * 2)

        found[f"max pool {shape}, {kernel} x {kernel}"] = ("aten.max_pool2d_with_indices.default", pool)
    for shape in ((4, 128, 56, 56), (4, 512, 14, 14)):

        def averages(shape: tuple[int, ...] = shape) -> tuple[object, ...]:
            return (torch.randn(shape), [2, 2], [2, 2])

        def spread(shape: tuple[int, ...] = shape) -> tuple[object, ...]:
            samples, channels, height, width = shape
            gradient = torch.randn(samples, channels, height // 2, width // 2)
            return (gradient, torch.randn(shape), [2, 2], [2, 2], [0, 0], False, True, None)

        found[f"average pool {shape}, 2 x 2"] = ("aten.avg_pool2d.default", averages)
        found[f"its gradient {shape}, 2 x 2"] = ("aten.avg_pool2d_backward.default", spread)
    found["bernoulli (12, 768, 768)"] = ("aten.bernoulli_.float", lambda: (torch.empty(12, 768, 768), 0.9))
    for sizes in SIZES:
        for what, mask in MASKS.items():

            def convolution(sizes: tuple[int, ...] = sizes, mask: list[bool] = mask) -> tuple[object, ...]:
                samples, ins, outs, size, window = sizes
                settings = ([1, 1], [window // 2] * 2, [1, 1], False, [0, 0], 1)
                input, weight = torch.randn(samples, ins, size, size), torch.randn(outs, ins, window, window)
                if not mask:
                    return (input, weight, None, *settings)
                return (torch.randn(samples, outs, size, size), input, weight, None, *settings, mask)

            samples, ins, outs, size, window = sizes
            name = f"{what} ({samples}, {ins}, {size}, {size}) to {outs}, {window} x {window}"
            found[name] = ("aten.convolution_backward.default" if mask else "aten.convolution.default", convolution)
    for layer in LAYERS:
        found |= products(*layer)
    return found


def products(batch: int, num_in: int, num_out: int) -> dict[str, Case]:
    """What a linear layer is made of."""

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns)

    name = f"({batch}, {num_in}) to {num_out}"
    return {
        f"linear layer {name}": (
            "aten.addmm.default",
            lambda: (torch.randn(num_out), matrix(batch, num_in), matrix(num_out, num_in).t()),
        ),
        f"gradient of its input {name}": (
            "aten.mm.default",
            lambda: (matrix(batch, num_out), matrix(num_out, num_in)),
        ),
        f"gradient of its weight {name}": (
            "aten.mm.default",
            lambda: (matrix(batch, num_out).t(), matrix(batch, num_in)),
        ),
    }


def stand_in_of(target: str, operands: tuple[Any, ...]) -> str:
    """Its name; of a convolution or a product, that which adds up in torch's order, or else a convolution's product."""
    if target in stand_ins.PRODUCTS:
        return stand_in_of_product(target, operands)
    usual = stand_ins.STAND_INS[target]
    if target in stand_ins.CONVOLUTIONS:
        mask = operands[-1] if "backward" in target else []
        weight, (samples, _, *image) = operands[2 if mask else 1], operands[0].shape
        made = resolve(target)(*operands)
        for order in orders(weight.shape, samples, image, mask):
            name = f"{usual.removesuffix('.default')}.{order.name}"
            if same_bits(made, resolve(name)(*operands)):
                return name
    return usual


def stand_in_of_product(target: str, operands: tuple[Any, ...]) -> str:
    """torch's own, if our kernel adds up in no order that gives its bits."""
    one, other = operands[-2:]
    kind = matrices.kind_of((one.shape, one.stride()), (other.shape, other.stride()))
    assert kind is not None
    made = resolve(target)(*operands)
    for order in matrices.orders(kind, len(other)):
        name = f"memfit_ops.{target.split('.')[1]}.{order.name}"
        if same_bits(made, resolve(name)(*operands)):
            return name
    return target


def measure(target: str, operands: tuple[object, ...]) -> dict[str, object]:
    """Milliseconds of torch's, of ours, and of ours on new threads."""
    stand_in = stand_in_of(target, operands)
    kernels, sweep = stand_ins.kernels(), torch.zeros(SWEEP_BYTES, dtype=torch.uint8)
    times_s: dict[str, list[float]] = {"torch": [], "ours": [], "ours, new threads": []}
    results = {}
    for _ in range(NUM_ROUNDS + 1):  # the first warms up
        for name, taken_s in times_s.items():
            if kernels is not None:
                kernels.memfit_use_team(None if name == "ours, new threads" else thread_team())
            call = resolve(target if name == "torch" else stand_in)
            torch.manual_seed(0)
            sweep.add_(1)
            begin_s = time.perf_counter()
            made = call(*operands)
            taken_s.append(time.perf_counter() - begin_s)
            results[name] = made.clone() if isinstance(made, torch.Tensor) else made
    if kernels is not None:
        kernels.memfit_use_team(thread_team())
    quartile = {name: 1e3 * sorted(taken_s[1:])[NUM_ROUNDS // 4] for name, taken_s in times_s.items()}
    return {**quartile, "bits": same_bits(results["torch"], results["ours"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of torch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with torch.no_grad():
        rows = {name: measure(target, operands()) for name, (target, operands) in cases().items()}
    if arguments.json:
        print(json.dumps({"threads": arguments.threads, "milliseconds": rows}))
        return
    print(f"{'':64}{'torch':>10}{'ours':>10}{'on new threads':>16}   bits")
    for name, row in rows.items():
        columns = f"{row['torch']:>10.2f}{row['ours']:>10.2f}{row['ours, new threads']:>16.2f}"
        print(f"{name:64}{columns}   {'the same' if row['bits'] else 'others'}")


if __name__ == "__main__":
    main()
