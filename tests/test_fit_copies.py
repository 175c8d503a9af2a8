"""Fitted models copied, nested, wrapped and hooked: each trains by itself, as eager does."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from equivalence import bits, own_forward_calls, seeded
from small_net import Net, net, train
from torch import nn

import memfit
from memfit.errors import MemfitError

# --- copies ----------------------------------------------------------------------------------------------------------


def through_deepcopy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [through_deepcopy, through_pickle, through_torch_save])
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "after training"])
def test_a_copy_is_fitted_too_and_trains_by_itself(copied: Any, used: bool) -> None:
    original, eager = memfit.fit(net()), net()
    if used:
        train(original)
        train(eager)
    other = copied(original)
    assert other.memfit is not original.memfit and other.memfit.model is other
    assert other.memfit.num_captures == 0
    before = [bits(p) for p in original.parameters()]
    with own_forward_calls(other) as calls:
        assert train(other, seed=1) == train(eager, seed=1)
    assert not calls and other.memfit.num_captures == 1
    assert [bits(p) for p in original.parameters()] == before
    assert other.second.weight is other.first.weight


def test_a_copy_of_a_parent_keeps_its_fitted_child_apart() -> None:
    parent = nn.Sequential(memfit.fit(net()), nn.Linear(6, 2))
    other = copy.deepcopy(parent)
    assert other[0].memfit.model is other[0] is not parent[0]
    train(other)
    assert other[0].memfit.num_captures == 1 and parent[0].memfit.num_captures == 0


def test_a_state_dict_saved_from_a_fitted_model_loads_anywhere() -> None:
    model = memfit.fit(net())
    train(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = net()
    other.load_state_dict(torch.load(file, weights_only=True))
    assert [bits(t) for t in other.state_dict().values()] == [bits(t) for t in model.state_dict().values()]


# --- parts and nests -------------------------------------------------------------------------------------------------


def parent() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(6, 6), Net(), nn.ReLU(), nn.Linear(6, 2)))


def test_a_fitted_submodule_trains_the_same() -> None:
    plain, part = parent(), parent()
    memfit.fit(part[1])
    assert train(part) == train(plain)
    assert part[1].memfit.num_captures == 1


def test_a_fitted_module_in_a_fitted_module_is_captured_once_by_the_outer_one() -> None:
    plain, nested = parent(), parent()
    memfit.fit(nested[1])
    memfit.fit(nested)
    assert train(nested) == train(plain)
    assert nested.memfit.num_captures == 1 and nested[1].memfit.num_captures == 0
    memfit.unfit(nested)
    assert train(nested, seed=1) == train(plain, seed=1)
    assert nested[1].memfit.num_captures == 1


def test_the_inner_one_may_be_fitted_after_the_outer_one_and_taken_away() -> None:
    plain, nested = parent(), parent()
    memfit.fit(nested)
    assert train(nested) == train(plain)
    memfit.fit(nested[1])
    assert train(nested, seed=1) == train(plain, seed=1)
    memfit.unfit(nested[1])
    assert train(nested, seed=2) == train(plain, seed=2)


def test_every_layer_fitted_by_itself_trains_the_same() -> None:
    plain, parts = parent(), parent()
    for child in parts.modules():
        if not list(child.children()):
            memfit.fit(child)
    assert train(parts) == train(plain)


def test_a_fitted_model_inside_data_parallel_like_wrappers_trains_the_same() -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

    assert train(Wrapper(memfit.fit(net()))) == train(Wrapper(net()))
    assert train(memfit.fit(Wrapper(net()))) == train(Wrapper(net()))


def test_the_averaged_model_of_swa_works_on_a_fitted_model() -> None:
    model = memfit.fit(net())
    averaged = torch.optim.swa_utils.AveragedModel(model)
    train(model)
    averaged.update_parameters(model)
    assert averaged.eval()(torch.randn(2, 6)).shape == (2, 6)


# --- hooks -----------------------------------------------------------------------------------------------------------


def test_hooks_on_the_fitted_module_itself_run_once_per_call_with_real_tensors() -> None:
    plain, model = net(), memfit.fit(net())
    logs = []
    for each in (plain, model):
        log: list[Any] = []

        def before(module: nn.Module, args: Any, log: list[Any] = log) -> Any:
            log.append(("before", bits(args[0])))
            return (args[0] * 2,)

        def after(module: nn.Module, args: Any, output: Any, log: list[Any] = log) -> Any:
            log.append(("after", bits(output)))
            return output + 1

        each.register_forward_pre_hook(before)
        each.register_forward_hook(after)
        each.register_full_backward_hook(lambda m, gi, go, log=log: log.append(("backward", bits(go[0]))))
        log.append(train(each))
        logs.append(log)
    assert logs[0] == logs[1]


def test_a_hook_added_to_a_submodule_after_a_capture_is_not_overlooked() -> None:
    model = memfit.fit(net())
    train(model)
    handle = model.first.register_forward_hook(lambda m, a, o: o * 2)
    with pytest.raises(MemfitError, match=r"module 'first'.*hook"):
        train(model)
    handle.remove()
    train(model)
