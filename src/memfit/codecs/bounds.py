"""Between which numbers the indices lie that an op takes, as far as its arguments say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from memfit.codecs.pool import pool_of


def bounds_of(target: str, operand: str, arguments: Mapping[str, Any]) -> tuple[int, int] | None:
    """The least and the largest index that the operand may hold, or None.

    The op itself refuses others, or ignores them, so these are what a code should have room for. They are checked again
    when a tensor is encoded: an index that an op does not look at may be anything.
    """
    op = target.removeprefix("aten.").partition(".")[0]
    match op, operand:
        case "embedding_dense_backward", "indices":
            return 0, int(arguments["num_weights"]) - 1
        case (("nll_loss_backward" | "nll_loss2d_backward"), "target"):
            shape, ignored = _shape(arguments), int(arguments["ignore_index"])
            classes = shape[1] if len(shape) > 1 else shape[0]
            return min(0, ignored), max(classes - 1, ignored)
        case "value_selecting_reduction_backward", "indices":
            sizes = tuple(arguments["sizes"])
            return 0, (sizes[int(arguments["dim"])] if sizes else 1) - 1
        case "index_select_backward", "index":
            return 0, int(arguments["self_sizes"][int(arguments["dim"])]) - 1
        case (("gather" | "scatter" | "scatter_" | "scatter_add" | "scatter_add_"), "index"):
            shape = _shape(arguments)
            return 0, (shape[int(arguments["dim"])] if shape else 1) - 1
        case _, "indices" if (pool := pool_of(target, arguments)) is not None:
            return 0, math.prod(pool.input_size) - 1
    return None


def _shape(arguments: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(arguments["self"].shape)
