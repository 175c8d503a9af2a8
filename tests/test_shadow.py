"""Models that ask things of small integers: the answer is a guard, another answer is another capture, both exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equivalence import Apply, assert_same_as_eager, seeded
from torch import nn

import memfit
from memfit.capture.trace import capture_call


def model_of(body: Callable[..., Any], **held: Any) -> nn.Module:
    return seeded(lambda: Apply(body, l=nn.Linear(6, 6), k=nn.Linear(6, 6), **held))


def alternate(*makers: Callable[[int], Any]) -> Callable[[int], Any]:
    """Inputs that take turns; both arms of a comparison see the same turns if the number of steps is a multiple."""
    calls = {"n": 0}

    def inputs(n: int) -> Any:
        calls["n"] += 1
        return makers[(calls["n"] - 1) % len(makers)](n)

    return inputs


def with_mask(mask: Callable[[int], torch.Tensor]) -> Callable[[int], Any]:
    return lambda n: (torch.randn(n, 6), mask(n))


def ones(n: int) -> torch.Tensor:
    return torch.ones(n, dtype=torch.long)


def some(n: int) -> torch.Tensor:
    return (torch.arange(n) > 0).long()


QUESTIONS: dict[str, Callable[..., Any]] = {
    "all": lambda m, x, mask: m.l(x) if mask.all() else m.k(x) * mask[:, None],
    "all equal one": lambda m, x, mask: m.l(x) if (mask == 1).all() else m.k(x) * mask[:, None],
    "any zero": lambda m, x, mask: m.k(x) if (mask == 0).any() else m.l(x),
    "item of sum": lambda m, x, mask: m.l(x) * mask.sum().item(),
    "int of max": lambda m, x, mask: m.l(x)[: int(mask.sum())],
    "equal": lambda m, x, mask: m.l(x) if torch.equal(mask, torch.ones_like(mask)) else m.k(x),
    "minimum in an if": lambda m, x, mask: m.l(x) if mask.min() > 0 else m.k(x),
    "through views": lambda m, x, mask: m.l(x) if mask.view(1, -1).expand(2, -1)[:, 0].bool().all() else m.k(x),
    "through arithmetic": lambda m, x, mask: (
        m.l(x) if (mask.cumsum(0) - torch.arange(len(mask)) == 1).all() else m.k(x)
    ),
    "after a write": lambda m, x, mask: m.l(x) if mask.clone().add_(1).eq(2).all() else m.k(x),
    "after a write into a view": lambda m, x, mask: m.l(x) if _write_view(mask).all() else m.k(x),
    "two questions": lambda m, x, mask: (m.l(x) if mask[0] > 0 else m.k(x)) * (2 if mask[-1] > 0 else 3),
    "a loop": lambda m, x, mask: _repeat(m.l, x, int(mask.sum())),
}


def _write_view(mask: torch.Tensor) -> torch.Tensor:
    copy = mask.clone()
    copy[:1].fill_(1)
    return copy * mask


def _repeat(layer: nn.Module, x: torch.Tensor, times: int) -> torch.Tensor:
    for _ in range(times):
        x = layer(x)
    return x


@pytest.mark.parametrize("body", list(QUESTIONS.values()), ids=list(QUESTIONS))
def test_each_answer_has_its_capture_and_each_is_exact(body: Any) -> None:
    inputs = alternate(with_mask(ones), with_mask(some), with_mask(ones), with_mask(some))
    fitted = assert_same_as_eager(model_of(body), inputs, steps=4, other_batch=None)
    assert fitted.memfit.num_captures == 2


def test_values_that_give_the_same_answer_share_a_capture() -> None:
    masks = [torch.tensor([0, 1, 1]), torch.tensor([1, 0, 1]), torch.tensor([1, 1, 0]), torch.tensor([0, 0, 0])]
    inputs = alternate(*(with_mask(lambda n, mask=mask: mask.clone()) for mask in masks))
    fitted = assert_same_as_eager(model_of(QUESTIONS["all"]), inputs, steps=4, other_batch=None)
    assert fitted.memfit.num_captures == 1


def test_integers_that_nobody_asks_about_are_no_guard() -> None:
    model = model_of(lambda m, x, i: m.l(x)[i])
    inputs = alternate(with_mask(lambda n: torch.arange(n)), with_mask(lambda n: torch.arange(n).flip(0)))
    fitted = assert_same_as_eager(model, inputs, steps=4, other_batch=None)
    assert fitted.memfit.num_captures == 1


def test_booleans_may_be_asked_too() -> None:
    inputs = alternate(with_mask(lambda n: ones(n).bool()), with_mask(lambda n: some(n).bool()))
    fitted = assert_same_as_eager(model_of(QUESTIONS["all"]), inputs, steps=4, other_batch=None)
    assert fitted.memfit.num_captures == 2


def test_a_number_given_as_an_integer_tensor_may_be_asked() -> None:
    model = model_of(lambda m, x, depth: _repeat(m.l, x, depth.item()))
    depths = alternate(*(with_mask(lambda n, d=d: torch.tensor(d)) for d in (1, 3, 2, 1, 3, 2)))
    fitted = assert_same_as_eager(model, depths, steps=6, other_batch=None)
    assert fitted.memfit.num_captures == 3


def test_constants_made_in_forward_may_be_asked() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(4)
        scale = 2 if steps.sum() == 6 and bool((steps < 4).all()) else 3
        return m.l(x) * scale * int(torch.tensor([1, 2, 3]).max())

    fitted = assert_same_as_eager(model_of(body), lambda n: (torch.randn(n, 6),))
    assert fitted.memfit.num_captures == 2  # one per batch size


def test_floating_point_data_is_never_asked() -> None:
    model = memfit.fit(model_of(lambda m, x: m.l(x) if x.sum() > 0 else m.k(x)))
    with pytest.raises(memfit.MemfitError, match="asks for the value of a tensor"):
        model(torch.randn(3, 6))


def test_the_caller_s_mask_is_not_written_by_asking() -> None:
    mask = some(3)
    model = memfit.fit(model_of(QUESTIONS["after a write"]))
    for _ in range(2):
        model(torch.randn(3, 6), mask)
    assert mask.tolist() == [0, 1, 1]


def test_a_mask_the_model_itself_writes_is_asked_before_and_after() -> None:
    def body(m: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        first = mask.all()
        mask[0] = 1
        return (m.l(x) if first else m.k(x)) * (2 if mask.all() else 3)

    inputs = alternate(with_mask(ones), with_mask(some), with_mask(lambda n: torch.zeros(n, dtype=torch.long)))
    fitted = assert_same_as_eager(model_of(body), inputs, steps=6, other_batch=None)
    assert fitted.memfit.num_captures == 3


def test_a_large_integer_tensor_is_not_asked_for() -> None:
    model = memfit.fit(model_of(lambda m, x, i: m.l(x) * i.sum().item()))
    with pytest.raises(memfit.MemfitError, match="asks for the value of a tensor"):
        model(torch.randn(3, 6), torch.ones(1 << 21, dtype=torch.uint8))


def test_an_integer_buffer_is_not_asked_since_it_may_change_at_any_step() -> None:
    model = memfit.fit(model_of(lambda m, x: m.l(x) if m.phase == 0 else m.k(x), phase=torch.tensor(0)))
    with pytest.raises(memfit.MemfitError, match="asks for the value of a tensor"):
        model(torch.randn(3, 6))


def test_guards_are_recorded_with_the_capture() -> None:
    model = model_of(QUESTIONS["two questions"])
    captured = capture_call(model, (torch.randn(3, 6), ones(3)), {})
    assert len(captured.guards) == 2
    assert all(guard.holds([torch.randn(3, 6), ones(3)]) for guard in captured.guards)
    assert [guard.holds([torch.randn(3, 6), some(3)]) for guard in captured.guards] == [False, True]


def test_a_guard_does_not_write_into_what_it_is_asked_about() -> None:
    model = model_of(QUESTIONS["after a write into a view"])
    captured = capture_call(model, (torch.randn(3, 6), some(3)), {})
    mask = some(3)
    assert all(guard.holds([torch.randn(3, 6), mask]) for guard in captured.guards)
    assert mask.tolist() == [0, 1, 1]


def test_the_backward_of_a_guarded_capture_may_come_in_another_layout() -> None:
    """The step is captured again for the other layout, with integers of the same answers."""
    inputs = alternate(with_mask(ones), with_mask(some))
    assert_same_as_eager(
        model_of(QUESTIONS["all"]), inputs, steps=4, other_batch=None, loss=lambda output, model: output.sum()
    )
