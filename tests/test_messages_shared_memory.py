"""Sources that share memory, one of which the step writes to: refused by name where something is made again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equivalence import Apply, assert_same_as_eager

import memfit
from memfit.errors import UnsupportedUse


def deep(h: torch.Tensor, m: Any) -> torch.Tensor:
    """So many layers that the first of them are made again."""
    for _ in range(12):
        h = torch.sigmoid(h * m.scale)
    return h


def remembering(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What it makes of x could be made again after y, or its own memory, was written to."""
    h = torch.sigmoid(x + m.bias)
    with torch.no_grad():
        m.memory.add_(1)
    return deep(h, m) + y.sum()


def writing(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h = torch.sigmoid(x + m.bias)
    with torch.no_grad():
        y.add_(1)
    return deep(h, m)


def model(body: Any) -> Apply:
    return Apply(body, bias=(8,), scale=(8,), memory=torch.zeros(16, 8))


def test_an_input_that_is_written_to_and_another_one() -> None:
    fitted = memfit.fit(model(writing), policy="sqrt")
    whole = torch.randn(12, 8)
    before = whole.clone()
    text = (
        r"fitted Apply: input 1 and input 0 share memory, and aten.add_.Tensor in module '\(root\)' writes to input 1: "
        r"what the step makes again from input 0 could be wrong. Give one of them memory of its own \(tensor\.clone"
    )
    with pytest.raises(UnsupportedUse, match=text):
        fitted(whole[:8], whole[4:])
    assert torch.equal(whole, before), "nothing has been done by then"
    fitted(whole[:6], whole[6:]).sum().backward()  # side by side is not the same place
    with pytest.raises(UnsupportedUse, match="share memory"):
        fitted(whole[:6], whole[5:11])


def test_a_buffer_that_is_written_to_and_an_input() -> None:
    fitted = memfit.fit(model(remembering), policy="sqrt")
    with pytest.raises(
        UnsupportedUse, match=r"buffer 'memory' and input 0 share memory, and aten\.add_\.Tensor in module"
    ):
        fitted(fitted.memory[3:5], torch.randn(3))
    fitted(torch.randn(2, 8), fitted.memory[15:]).sum().backward()  # from the second nothing is made again
    fitted(torch.randn(2, 8), torch.randn(3)).sum().backward()
    fitted.memory = torch.cat([fitted.memory, fitted.memory])[8:24]  # it may move, and is looked at where it is
    with pytest.raises(UnsupportedUse, match="share memory"):
        fitted(fitted.memory[:2], torch.randn(3))


def test_two_buffers_one_of_which_is_written_to() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = torch.sigmoid(x * m.first)
        with torch.no_grad():
            m.memory.add_(1)
        return deep(h, m)

    made = model(body)
    made.register_buffer("first", made.memory[0])
    with pytest.raises(UnsupportedUse, match="buffer 'memory' and buffer 'first' share memory"):
        memfit.fit(made, policy="sqrt")(torch.randn(2, 8))


def test_where_nothing_is_made_again_all_is_as_in_eager() -> None:
    def inputs(num: int) -> tuple[torch.Tensor, ...]:
        whole = torch.randn(num + 2, 8)
        return whole[:-2], whole[2:]

    assert_same_as_eager(model(writing), inputs)
    assert_same_as_eager(model(remembering), inputs)


def test_what_is_only_read_may_share_memory() -> None:
    def body(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x * m.scale) + torch.tanh(y + m.bias)

    def inputs(num: int) -> tuple[torch.Tensor, ...]:
        whole = torch.randn(num + 1, 8)
        return whole[:-1], whole[1:]

    for policy in ("keep", "sqrt"):
        assert_same_as_eager(model(body), inputs, policy=policy)


def test_inputs_that_are_written_to_side_by_side_are_as_in_eager() -> None:
    def inputs(num: int) -> tuple[torch.Tensor, ...]:
        whole = torch.randn(2 * num, 8)
        return whole[:num], whole[num:]

    for policy in ("keep", "sqrt"):
        assert_same_as_eager(model(writing), inputs, policy=policy)
        assert_same_as_eager(model(remembering), inputs, policy=policy)
