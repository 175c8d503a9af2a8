"""Hold every row of capture/needs.py against the real CPU kernel, bit for bit and in both directions.

For each tensor operand of a call the table says what is read, and the test changes the rest (nothing may change) and
then what is read (something must). A row that no call exercises, or whose condition is never false, fails
`test_every_row_is_exercised`.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from kernel_calls import CALLS, OPS, Call, altered, aten, classes_of, like, overload, run, same

from memfit.capture import needs
from memfit.capture.needs import GHOSTABLE, GHOSTABLE_IF_ALIKE, NULLABLE, ROWS, Gate, Need, gate_of, needs_of


def check_value(call: Call, name: str) -> None:
    t = call.tensors[name]
    if call.tight and t.numel() > 0:
        changed = run(call.op, {**call.arguments, name: altered(t)})
        assert not same(changed, run(call.op, call.arguments)), f"{name} is not read, so the table asks too much"


def check_shape(call: Call, name: str) -> None:
    t, before = call.tensors[name], run(call.op, call.arguments)
    for contents in (like(t, math.nan), like(t, torch.randn(t.shape) * 1e3), altered(t)):
        assert same(run(call.op, {**call.arguments, name: contents}), before)


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
