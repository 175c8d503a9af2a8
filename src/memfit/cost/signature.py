"""The signature of an op: all that decides how long its kernel takes and what it allocates.

Ops of one signature are measured once. It is a readable string:
`aten.add_.Tensor(f32[2,8]:8,1; f32[2,8]:8,1@0; alpha=1)` adds a tensor to itself, in place.
"""

from __future__ import annotations

from typing import Any

import torch

from memfit.capture.step import Ghost, Op, Opaque, Ref, Step

_SHORT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
_KEPT = "_memfit_signatures"  # beside a Step's own cached properties, which know nothing of costs
BY_SHORT = {short: dtype for dtype, short in _SHORT.items()}


def signature(step: Step, op: Op) -> str:
    """The op's name, and of each operand its layout or literal; operands that share a storage say with which."""
    seen: dict[int, int] = {}

    def text(arg: Any) -> str:
        if isinstance(arg, Ref):
            value = step.values[arg.value]
            shared = f"@{seen[value.storage]}" if value.storage in seen else ""
            seen.setdefault(value.storage, len(seen))
            return layout(value.shape, value.stride, value.dtype) + shared
        if isinstance(arg, Ghost):
            return "ghost " + layout(arg.shape, arg.stride, arg.dtype)
        if isinstance(arg, Opaque):
            return arg.text
        if isinstance(arg, (tuple, list)):
            return f"[{', '.join(map(text, arg))}]"
        return repr(arg)

    parts = [text(arg) for arg in op.args]
    parts += [f"{key}={text(arg)}" for key, arg in op.kwargs]
    return f"{op.called}({'; '.join(parts)})"


def signatures(step: Step) -> tuple[str, ...]:
    """The signature of every op, in order; written once for each Step, as planners ask for them over and over."""
    if _KEPT not in step.__dict__:
        step.__dict__[_KEPT] = tuple(signature(step, op) for op in step.ops)
    found: tuple[str, ...] = step.__dict__[_KEPT]
    return found


def layout(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> str:
    """`f32[2,3]:3,1`."""
    kind = _SHORT.get(dtype, str(dtype).removeprefix("torch."))
    return f"{kind}[{','.join(map(str, shape))}]:{','.join(map(str, stride))}"
