"""Calls of real CPU kernels for the rows of capture/needs.py, and how to run, change and compare them.

A `Call` is one invocation of an op with real inputs; `CALLS` has at least one for every row, in both states of its
condition.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memfit.capture.needs import Gate

torch.set_num_threads(1)

aten = torch.ops.aten
Outputs = list[torch.Tensor | None]


@dataclass(frozen=True)
class Call:
    """One op call. `tight`: operands the table leaves at VALUE are really read here (other dtypes may read less)."""

    op: str
    label: str
    arguments: dict[str, Any]
    tight: bool = True

    def __str__(self) -> str:
        return f"{self.op[5:].removesuffix('.default')}-{self.label}"

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self.arguments.items() if isinstance(value, torch.Tensor)}


def overload(op: str) -> Any:
    _, name, kind = op.split(".")
    return getattr(getattr(aten, name), kind)


def run(op: str, arguments: dict[str, Any]) -> Outputs:
    schema = overload(op)._schema
    args = [arguments[a.name] for a in schema.arguments if a.name in arguments and not a.kwarg_only]
    kwargs = {a.name: arguments[a.name] for a in schema.arguments if a.name in arguments and a.kwarg_only}
    torch.manual_seed(3)  # for the random ops
    result = overload(op)(*args, **kwargs)
    outputs: Outputs = [result] if isinstance(result, torch.Tensor) else list(result)
    # Uninitialised outputs have no bits to compare.
    return [
        torch.zeros_like(o) if (o is not None and ".empty_like" in op) or ".new_empty" in op else o for o in outputs
    ]


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    return t.detach().contiguous().reshape(-1).view(torch.uint8)


def same(a: Outputs, b: Outputs) -> bool:
    """Equal to the last bit, NaN payloads and signs of zero included, and laid out alike."""
    return len(a) == len(b) and all(
        (x is None and y is None)
        or (
            x is not None
            and y is not None
            and (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
            and torch.equal(as_bytes(x), as_bytes(y))
        )
        for x, y in zip(a, b, strict=True)
    )


def like(t: torch.Tensor, values: torch.Tensor | float) -> torch.Tensor:
    """A tensor with t's sizes, strides and dtype holding other values."""
    out = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
    return out.copy_(values) if isinstance(values, torch.Tensor) else out.fill_(values)


def altered(t: torch.Tensor) -> torch.Tensor:
    """Other contents of the same kind: legal indices stay legal, booleans flip."""
    if t.dtype is torch.bool:
        return like(t, ~t)
    if t.dtype.is_floating_point or t.dtype.is_complex:
        return like(t, 0.25 - 1.5 * t)
    return like(t, (t + 1) % (t.max() + 1))


def classes_of(gate: Gate, t: torch.Tensor) -> torch.Tensor:
    """The stand-in of every element: the codec a SIGN operand allows, in four lines."""
    wide, out = t.double(), torch.full(t.shape, gate.otherwise, dtype=torch.float64)
    for low, high, stand_in in reversed(gate.cells):
        out = torch.where((low <= wide) & (wide <= high), stand_in, out)
    return out


def channels_last(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous(memory_format=torch.channels_last if t.dim() == 4 else torch.channels_last_3d)


def contiguous(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous()


FORMATS = {"nchw": contiguous, "nhwc": channels_last}
MASKS = [list(mask) for mask in itertools.product((True, False), repeat=3)]


# --- the calls -------------------------------------------------------------------------------------------------------


def activations() -> Iterator[Call]:
    specials = [0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0, 3.0, -3.0, 6.0, 0.5, math.inf, -math.inf, math.nan, math.nan]
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        # 83 elements: whole vectors and a scalar tail, which do not always agree (hardtanh on NaN).
        x = torch.cat([torch.tensor(specials), torch.randn(55) * 3, torch.tensor(specials)]).to(dtype)
        g, kind = torch.randn(83).to(dtype), str(dtype)[6:]
        tests: list[tuple[str, str, dict[str, Any]]] = [
            ("threshold_backward.default", "relu", {"threshold": 0}),
            ("threshold_backward.default", "half", {"threshold": 0.5}),
            ("threshold_backward.default", "unplain", {"threshold": 0.3}),
            ("leaky_relu_backward.default", "input", {"negative_slope": 0.01, "self_is_result": False}),
            ("leaky_relu_backward.default", "result", {"negative_slope": 0.01, "self_is_result": True}),
            ("leaky_relu_backward.default", "negative", {"negative_slope": -0.5, "self_is_result": False}),
            ("hardtanh_backward.default", "relu6", {"min_val": 0, "max_val": 6}),
            ("hardtanh_backward.default", "tanh", {"min_val": -1.0, "max_val": 1.0}),
            ("hardtanh_backward.default", "unplain", {"min_val": -1.0, "max_val": 0.7}),
            ("hardsigmoid_backward.default", "", {}),
        ]
        for op, label, rest in tests:
            yield Call(f"aten.{op}", f"{label}-{kind}", {"grad_output": g, "self": x, **rest})
        for training in (True, False):
            rest = {"noise": torch.rand(83).to(dtype), "lower": 0.125, "upper": 0.375, "training": training}
            arguments = {"grad_output": g, "self": x, **rest, "self_is_result": False}
            yield Call("aten.rrelu_with_noise_backward.default", f"{training}-{kind}", arguments)
        yield Call("aten.sign.default", kind, {"self": x})
        yield Call("aten.sgn.default", kind, {"self": x})
        for name, other in itertools.product(("le", "lt", "ge", "gt", "eq", "ne"), (0, 6.0, -1, 0.3)):
            known = torch.cat([x[:-1], torch.tensor([other], dtype=dtype)])
            yield Call(f"aten.{name}.Scalar", f"{other}-{kind}", {"self": known, "other": other})
    z = torch.complex(torch.randn(20), torch.randn(20)) * torch.tensor([0.0, 1.0] * 10)
    yield Call("aten.sgn.default", "complex", {"self": z})
    for name in ("eq", "ne"):
        yield Call(f"aten.{name}.Scalar", "complex", {"self": z, "other": 0})
        yield Call(f"aten.{name}.Scalar", "bool", {"self": torch.rand(20) > 0.5, "other": 1})
        yield Call(f"aten.{name}.Scalar", "int", {"self": torch.arange(20) % 3, "other": 2})


def pools() -> Iterator[Call]:
    # Overlapping, padded, dilated, ceil_mode, and the default stride written as an empty list.
    windows = [(3, 2, 1, 1, True), (2, 2, 0, 1, False), (3, 1, 1, 2, False), (3, 2, 1, 2, True), (2, [], 0, 1, False)]
    for (form, lay), dims in itertools.product(FORMATS.items(), (2, 3)):
        x = lay(torch.randn(2, 3, *(5, 9, 8)[-dims:]))
        x[0, 0] = -math.inf  # a window without a greater element still has an index inside itself
        x[1, 1] = math.nan
        x[1, 2] = 1.0
        for k, s, p, d, ceil in windows:
            stride = s if isinstance(s, list) else [s] * dims
            geometry = {"kernel_size": [k] * dims, "stride": stride, "padding": [p] * dims}
            rest = {**geometry, "dilation": [d] * dims, "ceil_mode": ceil}
            y, indices = overload(f"aten.max_pool{dims}d_with_indices.default")(x, *rest.values())
            arguments = {"grad_output": torch.randn_like(y), "self": x, **rest, "indices": indices}
            label = f"{form}-k{k}s{s}p{p}d{d}{'c' if ceil else ''}"
            yield Call(f"aten.max_pool{dims}d_with_indices_backward.default", label, arguments)
            if d == 1:
                y = overload(f"aten.avg_pool{dims}d.default")(x, *geometry.values(), ceil, True, None)
                rest = {**geometry, "ceil_mode": ceil, "count_include_pad": True, "divisor_override": None}
                arguments = {"grad_output": torch.randn_like(y), "self": x, **rest}
                yield Call(f"aten.avg_pool{dims}d_backward.default", label, arguments)
        for size in ([3, 4, 2][-dims:], [1] * dims, [4, 5, 7][-dims:]):
            label = f"{form}-{'x'.join(map(str, size))}"
            y, indices = overload(f"aten.adaptive_max_pool{dims}d.default")(x, size)
            arguments = {"grad_output": torch.randn_like(y), "self": x, "indices": indices}
            yield Call(f"aten.adaptive_max_pool{dims}d_backward.default", label, arguments)
            y = overload(f"aten._adaptive_avg_pool{dims}d.default")(x, size)
            arguments = {"grad_output": torch.randn_like(y), "self": x}
            yield Call(f"aten._adaptive_avg_pool{dims}d_backward.default", label, arguments)
        rest = {"kernel_size": [2] * dims, "output_size": [3] * dims}
        x = lay(torch.randn_like(x))
        y, indices = overload(f"aten.fractional_max_pool{dims}d.default")(x, *rest.values(), torch.rand(2, 3, dims))
        arguments = {"grad_output": torch.randn_like(y), "self": x, **rest, "indices": indices}
        yield Call(f"aten.fractional_max_pool{dims}d_backward.default", form, arguments)
    for kind, dims in itertools.product(("reflection", "replication"), (1, 2, 3)):
        for form, lay in FORMATS.items() if dims > 1 else [("ncl", contiguous)]:
            x, padding = lay(torch.randn(2, 3, *(4, 6, 5)[-dims:])), [1, 2] * dims
            y = overload(f"aten.{kind}_pad{dims}d.default")(x, padding)
            arguments = {"grad_output": torch.randn_like(y), "self": x, "padding": padding}
            yield Call(f"aten.{kind}_pad{dims}d_backward.default", form, arguments)


def masks() -> Iterator[Call]:
    x, g, mask = torch.randn(4, 6), torch.randn(4, 6), torch.rand(4, 6) > 0.5
    yield Call("aten.native_dropout_backward.default", "", {"grad_output": g, "mask": mask, "scale": 2.0})
    yield Call("aten.where.self", "", {"condition": mask, "self": x, "other": g})
    yield Call("aten.masked_fill.Scalar", "", {"self": x, "mask": mask, "value": 7})
    yield Call("aten.masked_fill.Tensor", "", {"self": x, "mask": mask, "value": torch.tensor(7.0)})
    yield Call("aten.masked_scatter.default", "", {"self": x, "mask": mask, "source": g})
    yield Call("aten.masked_scatter_backward.default", "", {"grad_output": g, "mask": mask, "sizes": [24]})


def norms() -> Iterator[Call]:
    for (form, lay), dtype in itertools.product(FORMATS.items(), (torch.float32, torch.bfloat16)):
        x, kind = lay(torch.randn(4, 6, 5, 4).to(dtype)), f"{form}-{str(dtype)[6:]}"
        w, b, mean, var = torch.randn(6), torch.randn(6), torch.randn(6), torch.rand(6) + 0.5
        w, b, mean, var = w.to(dtype), b.to(dtype), mean.to(dtype), var.to(dtype)
        g = torch.randn_like(x)
        _, saved, invstd = aten.native_batch_norm(x, w, b, mean.clone(), var.clone(), True, 0.1, 1e-5)
        for train, mask in itertools.product((True, False), MASKS):
            label = f"{kind}-{train}-{''.join(str(int(m)) for m in mask)}"
            common = {"grad_out": g, "input": x, "weight": w, "running_mean": mean, "running_var": var}
            rest = {"save_invstd": invstd, "train": train, "eps": 1e-5, "output_mask": mask}
            arguments = {**common, "save_mean": saved, **rest}
            yield Call("aten.native_batch_norm_backward.default", label, arguments)
            rest = {"save_var": invstd, "update": train, "eps": 1e-5, "output_mask": mask}
            # The reserve belongs to cuDNN: empty on CPU.
            arguments = {**common, "save_mean": saved, **rest, "reserve": torch.empty(0, dtype=torch.uint8)}
            yield Call("aten.batch_norm_backward.default", label, arguments)
        _, saved, rstd = aten.native_group_norm(x, w, b, 4, 6, 20, 2, 1e-5)
        for mask in MASKS:
            if form == "nhwc" and not mask[0]:
                continue  # torch 2.13 itself segfaults: its channels_last kernel writes dinput unasked
            label = f"{kind}-{''.join(str(int(m)) for m in mask)}"
            common = {"grad_out": g, "input": x, "mean": saved, "rstd": rstd, "weight": w}
            arguments = {**common, "N": 4, "C": 6, "HxW": 20, "group": 2, "output_mask": mask}
            yield Call("aten.native_group_norm_backward.default", label, arguments)
    for dtype, mask in itertools.product((torch.float32, torch.float64, torch.bfloat16), MASKS):
        x, w, b = torch.randn(6, 5, 16).to(dtype), torch.randn(16).to(dtype), torch.randn(16).to(dtype)
        _, saved, rstd = aten.native_layer_norm(x, [16], w, b, 1e-5)
        common = {"grad_out": torch.randn_like(x), "input": x, "normalized_shape": [16], "mean": saved, "rstd": rstd}
        label = f"{str(dtype)[6:]}-{''.join(str(int(m)) for m in mask)}"
        arguments = {**common, "weight": w, "bias": b, "output_mask": mask}
        yield Call("aten.native_layer_norm_backward.default", label, arguments)


def convolutions() -> Iterator[Call]:
    plain, strided = (1, 1, 1, False, 1), (2, 1, 1, False, 1)
    kinds: dict[str, tuple[list[int], list[int], tuple[int, int, int, bool, int]]] = {
        "3x3": ([2, 4, 9, 8], [6, 4, 3, 3], plain),
        "1x1": ([2, 4, 9, 8], [6, 4, 1, 1], (1, 0, 1, False, 1)),
        "batch": ([17, 4, 5, 5], [6, 4, 1, 1], (1, 0, 1, False, 1)),
        "strided": ([2, 4, 9, 8], [6, 4, 3, 3], strided),
        "depthwise": ([2, 4, 9, 8], [4, 1, 3, 3], (1, 1, 1, False, 4)),
        "grouped": ([2, 4, 9, 8], [6, 2, 3, 3], (1, 2, 2, False, 2)),
        "transposed": ([2, 4, 9, 8], [4, 6, 3, 3], (2, 1, 1, True, 1)),
        "1d": ([2, 4, 9], [6, 4, 3], plain),
        "3d": ([2, 4, 5, 6, 7], [6, 4, 3, 3, 3], plain),
    }
    for (kind, (xs, ws, (s, p, d, transposed, groups))), mask in itertools.product(kinds.items(), MASKS):
        if kind != "3x3" and mask not in ([True, False, False], [False, True, True]):
            continue  # every mask for one kind, the two halves of a split convolution for the others
        n = len(xs) - 2
        for dtype, form in itertools.product((torch.float32, torch.float64, torch.bfloat16), ("nchw", "nhwc", "mixed")):
            if form != "nchw" and n == 1:
                continue
            x, w = torch.randn(xs).to(dtype), torch.randn(ws).to(dtype)
            x = channels_last(x) if form == "nhwc" else x
            w = channels_last(w) if form != "nchw" else w
            rest = [[s] * n, [p] * n, [d] * n, transposed, [0] * n, groups]
            y = aten.convolution(x, w, None, *rest)
            names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
            common = {"grad_output": torch.randn_like(y), "input": x, "weight": w, "bias_sizes": [y.shape[1]]}
            arguments = {**common, **dict(zip(names, rest, strict=True)), "output_mask": mask}
            label = f"{kind}-{form}-{str(dtype)[6:]}-{''.join(str(int(m)) for m in mask)}"
            # Only oneDNN, so only float32, makes the weight's gradient when asked for the bias's alone.
            tight = dtype is torch.float32 or mask[1] or not mask[2]
            yield Call("aten.convolution_backward.default", label, arguments, tight)


def losses() -> Iterator[Call]:
    for reduction, weighted in itertools.product((0, 1, 2), (False, True)):
        for name, xs, ts in (("nll_loss", [7, 5], [7]), ("nll_loss2d", [2, 5, 3, 4], [2, 3, 4])):
            x, target, w = torch.randn(xs).log_softmax(1), torch.randint(0, 5, ts), torch.rand(5) if weighted else None
            target.view(-1)[1] = 2  # the ignored one
            y, total = overload(f"aten.{name}_forward.default")(x, target, w, reduction, 2)
            common = {"grad_output": torch.randn_like(y), "self": x, "target": target, "weight": w}
            arguments = {**common, "reduction": reduction, "ignore_index": 2, "total_weight": total}
            yield Call(f"aten.{name}_backward.default", f"{reduction}-{weighted}", arguments)


def made_alike() -> Iterator[Call]:
    rest: dict[str, dict[str, Any]] = {
        **{f"{name}_like.default": {} for name in ("empty", "zeros", "ones", "rand", "randn")},
        "full_like.default": {"fill_value": 2.0},
        "randint_like.default": {"high": 9},
        **{f"new_{name}.default": {"size": [3]} for name in ("empty", "zeros", "ones")},
        "new_full.default": {"size": [3], "fill_value": 2.0},
        "new_empty_strided.default": {"size": [3], "stride": [1]},
        **{f"{name}.default": {} for name in ("zero", "uniform", "normal_functional")},
        "fill.Scalar": {"value": 2.0},
        "fill.Tensor": {"value": torch.tensor(2.0)},
        "copy.default": {"src": torch.randn(6)},
        "bernoulli.p": {"p": 0.5},
    }
    for (op, more), turned in itertools.product(rest.items(), (False, True)):
        x = torch.randn(6, 4).t() if turned else torch.randn(4, 6)
        yield Call(f"aten.{op}", "turned" if turned else "", {"self": x, **more})


def calls() -> list[Call]:
    torch.manual_seed(0)
    families = (activations, pools, masks, norms, convolutions, losses, made_alike)
    return [call for family in families for call in family()]


CALLS = calls()
OPS = sorted({call.op for call in CALLS})
