"""Say what each ATen op truly reads of each of its tensor operands.

A saved activation is only worth its bytes if something reads them. ReLU's backward reads one comparison per element,
max-pool's backward only the shape of its input, batch-norm's backward in training none of the running statistics.
This file is the one table of such facts; everything not in it needs VALUE, which is always safe.

    needs_of("aten.threshold_backward.default", {"grad_output": g, "self": y, "threshold": 0})
    -> {"grad_output": VALUE, "self": SIGN, "threshold": VALUE}

It is pure data: no torch, and tensors among the arguments may be anything (fake tensors, graph nodes, names).
`tests/test_needs_table.py` holds every row against the real CPU kernel, in both states of its condition. On CUDA the
rows are what the kernels' formulas say, but no test of ours has run there.

[Note: left at VALUE on purpose]
- log_sigmoid_backward: what it reads of `self` and of `buffer` depends on the device, which a row cannot see.
- elu, _prelu_kernel, hardswish, softplus, mish: the derivative, or the weight's gradient, reads the magnitude.
- fractional_max_pool indices: the windows come from random samples, so a slot cannot be turned back into an index.
- hardshrink, softshrink: they compare with a number of their own, which is seldom a plain one.
- _embedding_bag, _cdist (p = 1), _segment_reduce: some operands are unread, but they are small or rare.
- cudnn_batch_norm_backward and other CUDA-only ops: no CPU kernel to test a row against.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

_INF = float("inf")
_NAN = float("nan")

Arguments = Mapping[str, object]
Cell = tuple[float, float, float]


class Need(enum.Enum):
    """What one use of a tensor reads of it. A tensor with several uses needs the union of them."""

    VALUE = "value"
    """Every bit of every element."""
    SIGN = "sign"
    """The outcome of comparing each element with constants, nothing of its magnitude; `gate_of` gives the classes.
    For ReLU that is `~(y <= 0)`, not `y > 0`: NaN passes. What NaN does differs from op to op, so ask the gate."""
    WINDOW = "window"
    """Max-pool indices: only which slot of its own window won, counted row-major inside the window. Window o starts
    at `o * stride - padding` and steps by `dilation`; an adaptive one starts at `o * in // out`."""
    MASK = "mask"
    """One boolean per element. (Any bool tensor packs into bits; these operands are never anything but bool.)"""
    SHAPE = "shape"
    """Sizes, strides, dtype and device at most; not one byte of the contents. Covers operands not read at all."""


@dataclass(frozen=True)
class Gate:
    """The classes that the elements of a SIGN operand fall into, each with a value to stand for it.

    A cell (low, high, stand_in) holds `low <= y <= high`; the first cell that fits wins. `otherwise` stands for what
    no cell fits, NaN always included. Putting the stand-in for every element changes no output bit.
    Bounds and stand-ins are exact in every float dtype, so it does not matter in which dtype one compares.
    """

    cells: tuple[Cell, ...]
    otherwise: float

    @property
    def stand_ins(self) -> tuple[float, ...]:
        """The distinct stand-ins, which is to say the classes: two fit in one bit, three or four in two."""
        # By repr because NaN != NaN; -0.0 never occurs among them.
        return tuple({repr(value): value for value in (*(cell[2] for cell in self.cells), self.otherwise)}.values())


@dataclass(frozen=True)
class Row:
    """One fact: what `op` reads of `operand`, why, and for which arguments it holds (None: always)."""

    op: str
    operand: str
    need: Need
    why: str
    when: Callable[[Arguments], bool] | None = None
    gate: Callable[[Arguments], Gate] | None = None  # present exactly where need is SIGN


def needs_of(op: str, arguments: Arguments) -> dict[str, Need]:
    """Map every argument of a call, named as in the op's schema, to what the call reads of it."""
    return {name: Need.VALUE if (row := _row_of(op, name, arguments)) is None else row.need for name in arguments}


def gate_of(op: str, operand: str, arguments: Arguments) -> Gate | None:
    """Return the gate of a SIGN operand, else None. Two uses can share one encoding if their gates are equal."""
    row = _row_of(op, operand, arguments)
    return None if row is None or row.gate is None else row.gate(arguments)


def _row_of(op: str, operand: str, arguments: Arguments) -> Row | None:
    # The form that writes into a given tensor is the same kernel.
    op = op.removesuffix(".grad_input") + ".default" if op.endswith(".grad_input") else op
    for row in _BY_OPERAND.get((op, operand), ()):
        if row.when is None or row.when(arguments):
            return row
    return None


# ---- Conditions. Each answers False when it cannot tell, so that doubt ends at VALUE.


def _unasked(*slots: int) -> Callable[[Arguments], bool]:
    """None of these outputs is asked for by `output_mask`."""

    def when(arguments: Arguments) -> bool:
        mask = arguments.get("output_mask")
        return isinstance(mask, list | tuple) and not any(mask[slot] for slot in slots)

    return when


def _flag(name: str, value: bool) -> Callable[[Arguments], bool]:
    return lambda arguments: arguments.get(name) is value


def _either(*conditions: Callable[[Arguments], bool]) -> Callable[[Arguments], bool]:
    return lambda arguments: any(condition(arguments) for condition in conditions)


def _both(*conditions: Callable[[Arguments], bool]) -> Callable[[Arguments], bool]:
    return lambda arguments: all(condition(arguments) for condition in conditions)


def _plain(value: object) -> bool:
    """Exact in every float dtype, and so are value - 1 and value + 1: at most 8 significant bits.

    Without it a gate is not well defined: for bfloat16 `threshold_backward(g, y, 0.3)` compares with float32's 0.3,
    `y <= 0.3` with bfloat16's, and they disagree on y = bfloat16(0.3).
    """
    return isinstance(value, int | float) and abs(value) <= 31 and float(value * 8).is_integer()


def _plain_scalar(name: str) -> Callable[[Arguments], bool]:
    return lambda arguments: _plain(arguments.get(name))


def _plain_range(arguments: Arguments) -> bool:
    low, high = arguments.get("min_val"), arguments.get("max_val")
    if not (isinstance(low, int | float) and isinstance(high, int | float) and _plain(low) and _plain(high)):
        return False
    return low < high and _plain((low + high) / 2)


def _real(arguments: Arguments) -> bool:
    """`self` shows a dtype and it is not complex: sgn, eq and ne also take complex numbers, which have no order."""
    dtype = getattr(arguments.get("self"), "dtype", None)
    return dtype is not None and "complex" not in str(dtype)


def _no_mean(arguments: Arguments) -> bool:
    return arguments.get("reduction") in (0, 2)  # at::Reduction: none, sum; a mean is 1


def _row_major(arguments: Arguments) -> bool:
    """`self` shows strides and they are those of a plain contiguous tensor.

    torch 2.13's channels_last_3d max-pool on CPU gives a window that is -inf throughout an index outside itself.
    """
    stride, shape = getattr(arguments.get("self"), "stride", None), getattr(arguments.get("self"), "shape", None)
    if not callable(stride) or shape is None:
        return False
    steps = [1]
    for size in reversed(shape[1:]):
        steps.insert(0, steps[0] * size)
    return list(stride()) == steps


# ---- Gates. `_number` is only reached after _plain has let the scalar through.


def _number(arguments: Arguments, name: str) -> float:
    value = arguments[name]
    assert isinstance(value, int | float)
    return float(value)


def _at_most(name: str) -> Callable[[Arguments], Gate]:
    """`y <= s` against the rest, NaN with the rest."""

    def gate(arguments: Arguments) -> Gate:
        s = _number(arguments, name)
        return Gate(((-_INF, s, s),), otherwise=s + 1)

    return gate


def _above(name: str) -> Callable[[Arguments], Gate]:
    """`y > s` against the rest, NaN with the rest."""

    def gate(arguments: Arguments) -> Gate:
        s = _number(arguments, name)
        return Gate(((-_INF, s, s), (s, _INF, s + 1)), otherwise=s)

    return gate


def _at_least(arguments: Arguments) -> Gate:
    s = _number(arguments, "other")
    return Gate(((s, _INF, s),), otherwise=s - 1)


def _below(arguments: Arguments) -> Gate:
    s = _number(arguments, "other")
    return Gate(((s, _INF, s), (-_INF, s, s - 1)), otherwise=s)


def _equal(arguments: Arguments) -> Gate:
    s = _number(arguments, "other")
    return Gate(((s, s, s),), otherwise=s - 1 if s > 0 else s + 1)  # towards zero: a bool holds only 0 and 1


def _positive(arguments: Arguments) -> Gate:
    return Gate(((-_INF, 0.0, 0.0), (0.0, _INF, 1.0)), otherwise=0.0)


def _three_way(arguments: Arguments) -> Gate:
    return Gate(((0.0, 0.0, 0.0), (-_INF, 0.0, -1.0), (0.0, _INF, 1.0)), otherwise=_NAN)


def _hardtanh(arguments: Arguments) -> Gate:
    low, high = _number(arguments, "min_val"), _number(arguments, "max_val")
    # NaN is a class of its own: the CPU kernel blocks it in its vector loop and lets it pass in the scalar tail.
    return Gate(((-_INF, low, low), (high, _INF, low), (low, high, (low + high) / 2)), otherwise=_NAN)


def _hardsigmoid(arguments: Arguments) -> Gate:
    return Gate(((-_INF, -3.0, 3.0), (3.0, _INF, 3.0), (-3.0, 3.0, 0.0)), otherwise=3.0)


# ---- The table.


_WINDOWED = (
    "max_pool2d_with_indices_backward max_pool3d_with_indices_backward "
    "adaptive_max_pool2d_backward adaptive_max_pool3d_backward"
)
_FRACTIONAL = "fractional_max_pool2d_backward fractional_max_pool3d_backward"
_AVERAGES = "avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward"
_PADS = (
    "reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward "
    "replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward"
)
_NORMS = "native_layer_norm_backward native_group_norm_backward"
_NLL = "nll_loss_backward nll_loss2d_backward"
_LIKES = "empty_like zeros_like ones_like full_like rand_like randn_like randint_like"
_NEWS = "new_empty new_empty_strided new_zeros new_ones new_full"


def _name(op: str) -> str:
    return f"aten.{op}" if "." in op else f"aten.{op}.default"


def _shape(ops: str, operands: str, why: str, when: Callable[[Arguments], bool] | None = None) -> Iterable[Row]:
    return (Row(_name(op), operand, Need.SHAPE, why, when) for op in ops.split() for operand in operands.split())


def _sign(
    ops: str, why: str, gate: Callable[[Arguments], Gate], when: Callable[[Arguments], bool] | None = None
) -> Iterable[Row]:
    return (Row(_name(op), "self", Need.SIGN, why, when, gate) for op in ops.split())


def _batch_norm(op: str, train: str, save_var: str) -> Iterable[Row]:
    """The eager op and its successor differ only in what they call their arguments."""
    training, evaluating = _flag(train, True), _flag(train, False)
    batch = "the batch's own statistics are saved"
    yield from _shape(op, "running_mean", batch + ", else only dweight reads it", _either(training, _unasked(1)))
    yield from _shape(op, "running_var", batch, _either(training, _unasked(0, 1)))
    yield from _shape(op, f"save_mean {save_var}", "running statistics are used", _either(evaluating, _unasked(0, 1)))
    # A frozen statistic makes the input's gradient linear in grad_out: only the weight's gradient reads the input.
    yield from _shape(op, "input", "only dweight reads it", _either(_both(evaluating, _unasked(1)), _unasked(0, 1)))
    yield from _shape(op, "weight", "only scales the input's gradient", _unasked(0))
    yield from _shape(op, "grad_out", "no output asked for", _unasked(0, 1, 2))


ROWS: tuple[Row, ...] = (
    # Activations.
    *_sign("threshold_backward", "g where ~(y <= threshold)", _at_most("threshold"), _plain_scalar("threshold")),
    *_sign("leaky_relu_backward", "g or g * slope, by y > 0, whichever of input and result y is", _positive),
    *_sign("hardtanh_backward", "g where min < x < max", _hardtanh, _plain_range),
    *_sign("hardsigmoid_backward", "g / 6 where -3 < x < 3", _hardsigmoid),
    *_shape("rrelu_with_noise_backward", "self", "g * noise", _flag("training", True)),
    *_shape("rrelu_with_noise_backward", "noise", "leaky ReLU with the mean slope", _flag("training", False)),
    *_sign("rrelu_with_noise_backward", "leaky ReLU when evaluating", _positive, _flag("training", False)),
    # What abs, clamp and hand-written gates leave in a backward graph.
    *_sign("sign", "-1, 0 or 1", _three_way),
    *_sign("sgn", "-1, 0 or 1, unless complex", _three_way, _real),
    *_sign("le.Scalar", "compares with a constant", _at_most("other"), _plain_scalar("other")),
    *_sign("gt.Scalar", "compares with a constant", _above("other"), _plain_scalar("other")),
    *_sign("ge.Scalar", "compares with a constant", _at_least, _plain_scalar("other")),
    *_sign("lt.Scalar", "compares with a constant", _below, _plain_scalar("other")),
    *_sign("eq.Scalar ne.Scalar", "compares with a constant", _equal, _both(_plain_scalar("other"), _real)),
    # Pooling and padding: gradients are routed by geometry, or by the index that won.
    *_shape(_WINDOWED, "self", "the indices say who won"),
    *_shape(_FRACTIONAL, "self", "the indices say who won"),
    *(
        Row(
            _name(op),
            "indices",
            Need.WINDOW,
            "an index lies in its output's window",
            _row_major if "3d_with" in op else None,
        )
        for op in _WINDOWED.split()
    ),
    *_shape(_AVERAGES, "self", "spreads g evenly"),
    *_shape(_PADS, "self", "folds g back"),
    # Masks.
    Row(_name("native_dropout_backward"), "mask", Need.MASK, "g * mask * scale"),
    Row(_name("where.self"), "condition", Need.MASK, "picks one of two"),
    *(
        Row(_name(op), "mask", Need.MASK, "picks elements")
        for op in ("masked_fill.Scalar", "masked_fill.Tensor", "masked_scatter", "masked_scatter_backward")
    ),
    # Normalisation.
    *_batch_norm("native_batch_norm_backward", "train", "save_invstd"),
    *_batch_norm("batch_norm_backward", "update", "save_var"),
    *_shape("native_layer_norm_backward", "bias", "its gradient is a sum of grad_out"),
    *_shape(_NORMS, "weight", "only scales dinput", _unasked(0)),
    *_shape(_NORMS, "input mean rstd", "the bias's gradient is a sum of grad_out", _unasked(0, 1)),
    *_shape(_NORMS, "grad_out", "no output asked for", _unasked(0, 1, 2)),
    # Convolution. bias_sizes is a list of ints. The bias's gradient needs no input, but oneDNN makes it together with
    # the weight's, from the input, and hands both back whatever the mask says: slot 2 must be unasked too.
    *_shape("convolution_backward", "input", "only dweight reads it", _unasked(1, 2)),
    *_shape("convolution_backward", "weight", "only dinput reads it", _unasked(0)),
    *_shape("convolution_backward", "grad_output", "no output asked for", _unasked(0, 1, 2)),
    # Losses.
    *_shape(_NLL, "self", "the gradient is -weight[target], wherever self stands"),
    *_shape(_NLL, "total_weight", "only a mean divides by it", _no_mean),
    # Made like something, or written over: the old contents do not matter.
    *_shape(_LIKES, "self", "only its metadata"),
    *_shape(_NEWS, "self", "only its dtype and device"),
    *_shape("zero fill.Scalar fill.Tensor copy bernoulli.p uniform normal_functional", "self", "overwritten"),
)

_BY_OPERAND: dict[tuple[str, str], tuple[Row, ...]] = {}
for _row in ROWS:
    _BY_OPERAND[_row.op, _row.operand] = (*_BY_OPERAND.get((_row.op, _row.operand), ()), _row)


def _pairs(ops: str, operand: str) -> Iterable[tuple[str, str]]:
    return ((_name(op), operand) for op in ops.split())


GHOSTABLE: frozenset[tuple[str, str]] = frozenset(
    (
        *_pairs(_WINDOWED, "self"),
        *_pairs(_FRACTIONAL, "self"),
        *_pairs(_AVERAGES, "self"),
        *_pairs(_PADS, "self"),
        *_pairs("convolution_backward", "grad_output"),
        *_pairs("rrelu_with_noise_backward", "self"),
        *_pairs("rrelu_with_noise_backward", "noise"),
        *_pairs("native_layer_norm_backward", "bias"),
        *_pairs(_NLL, "self"),
        *_pairs(_LIKES, "self"),
        *_pairs(_NEWS, "self"),
        *_pairs("fill.Scalar fill.Tensor copy bernoulli.p", "self"),
    )
)
"""Operands that, whenever they need only SHAPE, may be a ghost on CPU: sizes and strides over a storage of zero bytes,
contiguous or channels_last. The kernels of the others ask for the data pointer: most raise, `zero`, `uniform` and
`normal_functional` (clone, then overwrite) kill the process. Never try one in a process that matters."""

GHOSTABLE_IF_ALIKE: frozenset[tuple[str, str]] = frozenset(_pairs("convolution_backward", "input"))
"""As GHOSTABLE, but only for float32, four dimensions, and the memory format of the weight. Elsewhere the kernel calls
contiguous() or narrow() on the ghost: conv1d and grouped float64 raise, a contiguous ghost beside a channels_last
weight kills the process, and so does a channels_last one of float64 in a transposed conv3d."""

NULLABLE: frozenset[tuple[str, str]] = frozenset(
    (
        *(
            (_name("native_batch_norm_backward"), f)
            for f in ("running_mean", "running_var", "save_mean", "save_invstd")
        ),
        *((_name("batch_norm_backward"), f) for f in ("running_mean", "running_var", "save_mean", "save_var")),
    )
)
"""Statistics of which None may be passed in the mode that uses the others: running ones in training, saved ones in
evaluation. That is all: in evaluation without a weight's gradient running_mean is unread, yet None breaks it.
(A layer-norm bias is optional in its schema as well, but None there means that no gradient of it is returned.)"""
