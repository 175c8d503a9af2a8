"""Hold every row of capture/needs.py against the real CPU kernel, bit for bit and in both directions.

A `Call` is one invocation of an op with real inputs. For each of its tensor operands the table says what is read, and
the test changes the rest (nothing may change) and then what is read (something must). A row that no call exercises, or
whose condition is never false, fails `test_every_row_is_exercised`.

Run as a script it is the sandbox of the ghost test: it forks per call, because a ghost that is read is a segfault.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from memfit.capture import needs
from memfit.capture.needs import GHOSTABLE, GHOSTABLE_IF_ALIKE, NULLABLE, ROWS, Gate, Need, gate_of, needs_of

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


def channels_last(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous(memory_format=torch.channels_last if t.dim() == 4 else torch.channels_last_3d)


def contiguous(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous()


FORMATS = {"nchw": contiguous, "nhwc": channels_last}
MASKS = [list(mask) for mask in itertools.product((True, False), repeat=3)]


# ---- The calls.


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


# ---- One check per need. Each: leave what is read alone, and nothing changes; change it, and something does.


def check_value(call: Call, name: str) -> None:
    t = call.tensors[name]
    if call.tight and t.numel() > 0:
        changed = run(call.op, {**call.arguments, name: altered(t)})
        assert not same(changed, run(call.op, call.arguments)), f"{name} is not read, so the table asks too much"


def check_shape(call: Call, name: str) -> None:
    t, before = call.tensors[name], run(call.op, call.arguments)
    for contents in (like(t, math.nan), like(t, torch.randn(t.shape) * 1e3), altered(t)):
        assert same(run(call.op, {**call.arguments, name: contents}), before)


def classes_of(gate: Gate, t: torch.Tensor) -> torch.Tensor:
    """The stand-in of every element: the codec a SIGN operand allows, in four lines."""
    wide, out = t.double(), torch.full(t.shape, gate.otherwise, dtype=torch.float64)
    for low, high, stand_in in reversed(gate.cells):
        out = torch.where((low <= wide) & (wide <= high), stand_in, out)
    return out


def shuffled_within(gate: Gate, t: torch.Tensor) -> torch.Tensor:
    """Give every element another value of its own class, with as odd values as there are."""
    edges = [edge for low, high, _ in gate.cells for edge in (low, high) if math.isfinite(edge)]
    odd = torch.tensor([*edges, 0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 1e-3, -1e-3, 100, -100])
    odd = torch.cat([odd, torch.randn(40) * 5]).to(t.dtype)
    if t.dtype.is_floating_point:
        up, down = torch.tensor([math.inf], dtype=t.dtype), torch.tensor([-math.inf], dtype=t.dtype)
        odd = torch.cat([odd, torch.nextafter(odd, up), torch.nextafter(odd, down)])
    kinds, out = classes_of(gate, odd), like(t, t)
    own = classes_of(gate, t)
    for i in range(t.numel()):
        peers = odd[(kinds == own[i]) | (kinds.isnan() & own[i].isnan())]
        out[i] = peers[torch.randint(len(peers), ())]
    return out


def check_sign(call: Call, name: str) -> None:
    t, before = call.tensors[name], run(call.op, call.arguments)
    gate = gate_of(call.op, name, call.arguments)
    assert gate is not None
    stand_in = like(t, classes_of(gate, t))
    assert same(run(call.op, {**call.arguments, name: stand_in}), before)
    if t.dtype.is_floating_point:
        for _ in range(3):
            assert same(run(call.op, {**call.arguments, name: shuffled_within(gate, t)}), before)
    # Every class does something else than some other: stand-ins rotated give another result.
    values = [value for value in gate.stand_ins if not math.isnan(value)]
    for old, new in itertools.permutations(values, 2):
        if (stand_in == old).any():
            moved = like(t, torch.where(stand_in == old, torch.tensor(new, dtype=t.dtype), stand_in))
            assert not same(run(call.op, {**call.arguments, name: moved}), before), f"{old} and {new} are one class"


def check_mask(call: Call, name: str) -> None:
    t = call.tensors[name]
    assert t.dtype is torch.bool
    for i in range(t.numel()):
        flipped = t.clone()
        flipped.view(-1)[i] ^= True
        assert not same(run(call.op, {**call.arguments, name: flipped}), run(call.op, call.arguments))


def window_starts(call: Call, axis: int, length: int, size: int) -> tuple[torch.Tensor, int, int]:
    """First position of each window along an axis, the step inside it, and how many slots it may have."""
    o = torch.arange(length)
    if "kernel_size" not in call.arguments:
        starts, ends = o * size // length, -(-(o + 1) * size // length)
        return starts, 1, int((ends - starts).max())
    kernel, padding, dilation = (call.arguments[key] for key in ("kernel_size", "padding", "dilation"))
    stride = call.arguments["stride"] or kernel
    return o * stride[axis] - padding[axis], dilation[axis], kernel[axis]


def slots_and_back(call: Call, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode indices as slots of their windows and decode them from slots and geometry alone."""
    sizes = call.arguments["self"].shape[2:]
    rest, slot, back, weight, scale = indices.clone(), torch.zeros_like(indices), torch.zeros_like(indices), 1, 1
    for axis in reversed(range(len(sizes))):
        position, rest = rest % sizes[axis], rest // sizes[axis]
        starts, step, width = window_starts(call, axis, indices.shape[2 + axis], sizes[axis])
        starts = starts.view(-1, *[1] * (len(sizes) - 1 - axis))
        own = (position - starts) // step
        assert ((own >= 0) & (own < width)).all()
        slot += own * weight
        weight *= width
        back += (starts + own * step) * scale
        scale *= sizes[axis]
    assert int(slot.max()) < weight
    return slot, like(indices, back)


def check_window(call: Call, name: str) -> None:
    indices, before = call.tensors[name], run(call.op, call.arguments)
    slots, decoded = slots_and_back(call, indices)
    # What the encoding is for: eight bytes become one, unless an adaptive window is the whole plane.
    assert "kernel_size" not in call.arguments or slots.max() <= 255
    assert same(run(call.op, {**call.arguments, name: decoded}), before)
    check_value(call, name)


CHECKS: dict[Need, Callable[[Call, str], None]] = {
    Need.VALUE: check_value,
    Need.SIGN: check_sign,
    Need.WINDOW: check_window,
    Need.MASK: check_mask,
    Need.SHAPE: check_shape,
}


@pytest.mark.parametrize("op", OPS)
def test_table_holds_against_the_kernel(op: str) -> None:
    torch.manual_seed(1)
    for call in (call for call in CALLS if call.op == op):
        found = needs_of(op, call.arguments)
        assert set(found) == set(call.arguments)
        for name in call.tensors:
            try:
                CHECKS[found[name]](call, name)
            except Exception as error:
                raise AssertionError(f"{call}: {name} is said to need {found[name].name}") from error


def test_every_row_is_exercised() -> None:
    for row in ROWS:
        own = [call for call in CALLS if call.op == row.op]
        states = {row.when is None or row.when(call.arguments) for call in own if row.operand in call.tensors}
        assert True in states, f"no call exercises {row.op} {row.operand}"
        assert row.when is None or False in states, f"no call shows that {row.op} {row.operand} is conditional"
        assert (row.gate is not None) == (row.need is Need.SIGN)


def test_names_exist_in_the_schemas() -> None:
    listed = {(row.op, row.operand) for row in ROWS}
    for op, operand in listed:
        types = {a.name: str(a.type) for a in overload(op)._schema.arguments}
        assert "Tensor" in types[operand], (op, operand)
    assert listed >= GHOSTABLE | GHOSTABLE_IF_ALIKE | NULLABLE
    for call in CALLS:
        required = [a.name for a in overload(call.op)._schema.arguments if not a.has_default_value()]
        assert set(required) <= set(call.arguments), call


def test_shape_really_is_read_where_it_makes_the_output() -> None:
    for call in CALLS:
        for name, need in needs_of(call.op, call.arguments).items():
            if need is not Need.SHAPE or name != "self" or "rrelu" in call.op or "fill" in call.op:
                continue
            t = call.tensors[name]
            try:
                wider = run(call.op, {**call.arguments, name: torch.zeros(*[2 * n for n in t.shape]).double()})
            except (RuntimeError, IndexError):
                continue
            assert not same(wider, run(call.op, call.arguments)), str(call)


def test_unknown_operations_need_everything() -> None:
    assert needs_of("aten.mm.default", {"self": 1, "mat2": 2}) == {"self": Need.VALUE, "mat2": Need.VALUE}
    assert needs_of("mine.op.default", {}) == {}
    # Without an output mask, a flag or a dtype to go by, doubt ends at VALUE.
    assert needs_of("aten.convolution_backward.default", {"input": "x"}) == {"input": Need.VALUE}
    assert needs_of("aten.sgn.default", {"self": "x"}) == {"self": Need.VALUE}
    assert needs_of("aten.threshold_backward.default", {"self": "y"}) == {"self": Need.VALUE}
    assert gate_of("aten.threshold_backward.default", "self", {"self": "y", "threshold": 0.3}) is None


def test_needs_is_pure_data() -> None:
    code = f"import sys, runpy; runpy.run_path({needs.__file__!r}, run_name='needs'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_relu_gates_are_shared_and_let_nan_pass() -> None:
    relu = gate_of("aten.threshold_backward.default", "self", {"threshold": 0})
    assert relu == gate_of("aten.le.Scalar", "self", {"other": 0.0})
    assert relu is not None and len(relu.stand_ins) == 2 and relu.otherwise > 0
    leaky = gate_of("aten.leaky_relu_backward.default", "self", {})
    assert leaky is not None and leaky != relu and leaky.otherwise <= 0
    relu6 = gate_of("aten.hardtanh_backward.default", "self", {"min_val": 0, "max_val": 6})
    assert relu6 is not None and len(relu6.stand_ins) == 3


def test_unplain_scalars_have_no_gate_for_a_reason() -> None:
    y, g = torch.full((40,), 0.3).bfloat16(), torch.ones(40).bfloat16()
    passes = aten.threshold_backward(g, y, 0.3) != 0
    assert (passes != ~(y <= 0.3)).all(), "kernel and comparison now agree: the _plain condition may be dropped"


def test_hardtanh_needs_nan_for_a_reason() -> None:
    passes = aten.hardtanh_backward(torch.ones(67), torch.full((67,), math.nan), -1, 1)
    assert 0 < passes.sum() < 67, "vector loop and tail now agree: one bit would do for hardtanh"


def test_batch_norm_takes_none_for_unused_statistics() -> None:
    for call in CALLS:
        for name in (name for op, name in NULLABLE if op == call.op):
            training = call.arguments.get("train", call.arguments.get("update"))
            if training is name.startswith("running"):
                assert needs_of(call.op, call.arguments)[name] is Need.SHAPE
                assert same(run(call.op, {**call.arguments, name: None}), run(call.op, call.arguments)), call


# ---- Real training graphs: change what autograd saved, while it runs.

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


# ---- Ghosts.


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
