"""Functions of one trainable tensor: how the tests of operators run them against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equivalence import Apply, assert_same_as_eager, seeded
from torch import nn


def rows(n: int) -> tuple[torch.Tensor]:
    return (torch.randn(n, 6),)


def wanting(n: int) -> tuple[torch.Tensor]:
    return (torch.randn(n, 6, requires_grad=True),)


def check(bodies: dict[str, Any]) -> Any:
    return pytest.mark.parametrize("body", list(bodies.values()), ids=list(bodies))


def run(body: Any, inputs: Any = rows, **held: Any) -> None:
    """`body(h, m)` gets a trainable (n, 6) tensor that is no leaf, and the module, which has weights to use."""
    model = seeded(
        lambda: Apply(
            lambda m, x: body(m.l(x), m),
            l=nn.Linear(6, 6),
            w=(6, 6),
            b=(6,),
            mask=torch.tensor([True, False, True, True, False, False]),
            index=torch.tensor([3, 0, 5]),
            **held,
        )
    )
    assert_same_as_eager(model, inputs)


def bodies_in(namespace: dict[str, Any]) -> dict[str, Any]:
    """The functions of `h` and `m` that a test file has defined so far, by name."""
    return {
        name.replace("_", " "): thing
        for name, thing in list(namespace.items())
        if getattr(thing, "__code__", None) and thing.__code__.co_varnames[:2] == ("h", "m")
    }
