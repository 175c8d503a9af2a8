"""The arithmetic of one op: how many flops, of which class, in which type.

Only ops that multiply matrices count; everything else moves bytes for longer than it computes. A multiply-add is two
flops. Causal attention counts as full, as torch's own flop counter has it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from memfit.capture.schemas import named_operands
from memfit.capture.step import Op, Ref, Step
from memfit.cost.convolutions import convolution_of


class Work(enum.Enum):
    """Kernels that get about the same share of a device's peak."""

    CONVOLUTION = "convolution"
    MATMUL = "matmul"
    ATTENTION = "attention"


@dataclass(frozen=True, slots=True)
class Arithmetic:
    flops: int
    work: Work
    dtype: torch.dtype


def arithmetic_of(step: Step, op: Op) -> Arithmetic | None:
    """The arithmetic of the op; None if it only moves bytes."""
    packet = op.target.rpartition(".")[0]
    if (convolution := convolution_of(step, op)) is not None:
        return Arithmetic(convolution.flops, Work.CONVOLUTION, convolution.dtype)
    if packet.startswith(_ATTENTION):
        named = _shown(step, op)
        count = _attention_backward(named) if packet.endswith("_backward") else _attention(named)
        return Arithmetic(count, Work.ATTENTION, named["query"].dtype)
    packet = packet.removesuffix("_")  # in place or not, it multiplies the same
    if packet in _MATMULS:
        left, right = _MATMULS[packet]
        named = _shown(step, op)
        return Arithmetic(_matmul(named[left], named[right]), Work.MATMUL, named[left].dtype)
    if packet in _OTHERS:
        named = _shown(step, op)
        first = named["input"] if "input" in named else named["self"]
        return Arithmetic(_OTHERS[packet](named), Work.MATMUL, first.dtype)
    return None


def _shown(step: Step, op: Op) -> dict[str, Any]:
    """The arguments by name, with layouts in the place of references."""

    def show(arg: Any) -> Any:
        if isinstance(arg, Ref):
            return step.values[arg.value]
        return [show(item) for item in arg] if isinstance(arg, (tuple, list)) else arg

    return {name: show(arg) for name, arg in named_operands(op).items()}


# ---- Products of two operands, which stand under these names.

_MATMULS = {
    "aten.mm": ("self", "mat2"),
    "aten.addmm": ("mat1", "mat2"),
    "aten._addmm_activation": ("mat1", "mat2"),
    "aten.bmm": ("self", "mat2"),
    "aten.baddbmm": ("batch1", "batch2"),
    "aten.addbmm": ("batch1", "batch2"),
    "aten.mv": ("self", "vec"),
    "aten.addmv": ("mat", "vec"),
}


def _matmul(left: Any, right: Any) -> int:
    columns = right.shape[-1] if len(right.shape) > 1 else 1
    return 2 * prod(left.shape) * columns


# ---- Attention: batch, heads, positions, width.

_ATTENTION = "aten._scaled_dot_product_"


def _attention(named: dict[str, Any]) -> int:
    """Scores from queries and keys, then values weighted by them."""
    query, key, value = named["query"], named["key"], named["value"]
    return 2 * prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward(named: dict[str, Any]) -> int:
    """Five products: the scores once more; through the weighting to scores and values; to queries and to keys."""
    query, key, value = named["query"], named["key"], named["value"]
    return 2 * prod(query.shape[:-1]) * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


# ---- Layers that are one op.


def _linear(named: dict[str, Any]) -> int:
    return 2 * prod(named["input"].shape) * named["weight"].shape[0]


def _linear_backward(named: dict[str, Any]) -> int:
    """As much as forward for each of the input's and the weight's gradient."""
    passes = sum(map(bool, named["output_mask"][:2]))
    return passes * 2 * prod(named["self"].shape) * named["weight"].shape[0]


def _recurrent(named: dict[str, Any]) -> int:
    """Every matrix among the weights meets every position of every sequence once."""
    weights = named["weight"] if "weight" in named else [w for name, w in named.items() if name.startswith("weight")]
    num_positions = prod(named["input"].shape[:-1])
    return 2 * num_positions * sum(prod(weight.shape) for weight in weights if len(weight.shape) == 2)


def _recurrent_backward(named: dict[str, Any]) -> int:
    """As much as forward for the gradients of the states, and again for those of the weights."""
    return 2 * _recurrent(named)


_OTHERS: dict[str, Callable[[dict[str, Any]], int]] = {
    "aten.linear": _linear,
    "aten.linear_backward": _linear_backward,
    "aten.mkldnn_rnn_layer": _recurrent,
    "aten.mkldnn_rnn_layer_backward": _recurrent_backward,
    "aten._cudnn_rnn": _recurrent,
    "aten._cudnn_rnn_backward": _recurrent_backward,
}
