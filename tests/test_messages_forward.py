"""What a forward may not do is refused by module, line and way out, and nothing is left half-fitted."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from equivalence import Apply, seeded
from refusals import Outer, line_of, refusal, refusal_of, rows
from torch import nn

import memfit
from memfit.errors import CaptureError

HERE = "tests/test_messages_forward.py"

# --- things a forward pass may do that cannot be replayed ------------------------------------------------------------


def asks_item(m: Any, y: torch.Tensor) -> torch.Tensor:
    return y * y.sum().item()  # here


def branches_on_data(m: Any, y: torch.Tensor) -> torch.Tensor:
    if y.sum() > 0:  # here
        return y
    return -y


def loops_on_data(m: Any, y: torch.Tensor) -> torch.Tensor:
    while y.norm() > 1:  # here
        y = y * 0.5
    return y


def asserts_on_data(m: Any, y: torch.Tensor) -> torch.Tensor:
    assert not y.isnan().any()  # here
    return y


def prints_a_float(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.log.append(float(y.mean()))  # here
    return y


def to_list(m: Any, y: torch.Tensor) -> torch.Tensor:
    return y * sum(y.sum(0).tolist())  # here


def finds_nonzero(m: Any, y: torch.Tensor) -> torch.Tensor:
    return y[y.sum(1).nonzero().squeeze(1)]  # here


def indexes_by_condition(m: Any, y: torch.Tensor) -> torch.Tensor:
    return y[y > 0]  # here


def selects_masked(m: Any, y: torch.Tensor) -> torch.Tensor:
    return y.masked_select(y > 0)  # here


def finds_unique(m: Any, y: torch.Tensor) -> torch.Tensor:
    return y.sum() * torch.unique(y.detach()).sum()  # here


def converts_to_numpy(m: Any, y: torch.Tensor) -> torch.Tensor:
    return y * torch.from_numpy(y.detach().numpy().copy())  # here


def converts_by_numpy_function(m: Any, y: torch.Tensor) -> torch.Tensor:
    return y * float(numpy.mean(y.detach().cpu().numpy()))  # here


def reads_data_pointer(m: Any, y: torch.Tensor) -> torch.Tensor:
    return y * (y.data_ptr() % 2)  # here


def computes_ctc(m: Any, y: torch.Tensor) -> torch.Tensor:
    targets = torch.ones(1, 1, dtype=torch.long)
    return F.ctc_loss(y[:, None].log_softmax(2), targets, (y.shape[0],), (1,))  # here


def makes_sparse(m: Any, y: torch.Tensor) -> torch.Tensor:
    return torch.sparse.mm(torch.eye(y.shape[0]).to_sparse(), y)  # here


def assigns_data(m: Any, y: torch.Tensor) -> torch.Tensor:
    y.data = y.detach() * 2
    return y + 1  # here


def makes_a_generator(m: Any, y: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return y + torch.rand(6, generator=generator)  # here


def hooks_a_parameter(m: Any, y: torch.Tensor) -> torch.Tensor:
    m.layer.weight.register_hook(lambda gradient: gradient * 2)  # here
    return y


DATA = [asks_item, branches_on_data, loops_on_data, asserts_on_data, prints_a_float, to_list]
SHAPES = [finds_nonzero, indexes_by_condition, selects_masked, finds_unique]
OTHERS = [converts_to_numpy, converts_by_numpy_function, reads_data_pointer, makes_sparse, computes_ctc]
OTHERS += [assigns_data, makes_a_generator, hooks_a_parameter]
name_of = lambda body: body.__name__  # noqa: E731


@pytest.mark.parametrize("body", DATA, ids=name_of)
def test_reading_data_in_forward_names_the_module_the_line_and_the_way_out(body: Any) -> None:
    text = refusal(body)
    assert f"module 'blocks.1' at {line_of(body)}" in text
    assert "asks for the value of a tensor" in text
    assert "torch.where" in text and "pass it in" in text


@pytest.mark.parametrize("body", SHAPES, ids=name_of)
def test_shapes_that_depend_on_data_name_the_module_the_line_and_the_way_out(body: Any) -> None:
    text = refusal(body)
    assert f"module 'blocks.1' at {line_of(body)}" in text
    assert "shape depends on data" in text
    assert "mask of fixed shape" in text


@pytest.mark.parametrize("body", OTHERS, ids=name_of)
def test_leaving_torch_or_dense_tensors_names_the_module_and_the_line(body: Any) -> None:
    text = refusal(body)
    assert f"module 'blocks.1' at {line_of(body)}" in text


def test_a_shape_that_does_not_fit_is_an_error_of_the_same_kind_and_nothing_is_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)5.*6"):
        memfit.fit(nn.Linear(6, 6))(torch.randn(3, 5))
    assert capfd.readouterr() == ("", "")


def test_a_model_that_fails_by_itself_fails_with_its_own_error() -> None:
    def raises(m: Any, y: torch.Tensor) -> torch.Tensor:
        raise KeyError("the model's own trouble")

    model = memfit.fit(Outer(raises))
    with pytest.raises(KeyError, match="the model's own trouble"):
        model(rows())


LOOKS = {
    "product of all": lambda y, m: y.prod(),
    "product of rows": lambda y, m: y.prod(1),
    "running product": lambda y, m: y.cumprod(1),
    "maximum of all": lambda y, m: y.max(),
    "minimum of all": lambda y, m: y.min(),
    "median of all": lambda y, m: y.median(),
    "median of all but nan": lambda y, m: y.nanmedian(),
    "filled with a parameter": lambda y, m: y.masked_fill(m.mask, y[0, 0]),
}


@pytest.mark.parametrize("looks", list(LOOKS.values()), ids=list(LOOKS))
def test_gradients_that_look_at_the_data_are_refused(looks: Any) -> None:
    """Autograd has formulas that choose by the values; what they would choose is not known at capture."""

    def body(m: Any, y: torch.Tensor) -> torch.Tensor:
        return y * looks(y, m).sum()

    text = refusal(body)
    assert f"module 'blocks.1' at {HERE}:" in text
    assert "looks at the data" in text and "Write it with other ops" in text and "amax" in text


# --- hooks and layers ------------------------------------------------------------------------------------------------

HOOKS = {
    "forward": lambda m: m.register_forward_hook(lambda module, args, output: None),
    "forward pre": lambda m: m.register_forward_pre_hook(lambda module, args: None),
    "full backward": lambda m: m.register_full_backward_hook(lambda module, given, got: None),
    "full backward pre": lambda m: m.register_full_backward_pre_hook(lambda module, got: None),
}


@pytest.mark.parametrize("register", list(HOOKS.values()), ids=list(HOOKS))
def test_hooks_on_submodules_are_refused_by_name(register: Any) -> None:
    model = seeded(lambda: Outer(lambda m, y: y))
    register(model.blocks[1].layer)
    text = refusal_of(model, lambda m: m(rows()))
    assert "module 'blocks.1.layer' (Linear) has a hook" in text
    assert "handle.remove()" in text


def test_a_hook_on_an_activation_with_effects_outside_is_refused() -> None:
    seen: list[Any] = []

    def body(m: Any, y: torch.Tensor) -> torch.Tensor:
        y.register_hook(seen.append)  # here
        return y

    text = refusal(body)
    assert "hook" in text and "blocks.1" in text and line_of(body) in text


def test_a_scripted_child_is_refused_by_name() -> None:
    model = memfit.fit(seeded(lambda: Apply(lambda m, x: m.s(x), s=torch.jit.script(nn.Linear(6, 6)))))
    with pytest.raises(CaptureError, match=r"module 's'.*[Ss]cript"):
        model(rows())


def test_a_batch_norm_without_momentum_is_refused_with_the_way_out() -> None:
    """It divides by a counter that it reads from its buffer, another number at every step."""
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None)))
    text = refusal_of(model, lambda m: m(rows()))
    assert "module '1'" in text and "momentum=None" in text and "give it a momentum" in text
