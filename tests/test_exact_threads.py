"""Several fitted models in one graph, and several threads: as eager, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from equivalence import assert_same_trace, bits, record_state, seeded
from torch import nn
from training_models import rows

import memfit


def test_two_fitted_models_in_one_graph_match() -> None:
    traces = []
    for fit in (False, True):
        pair = seeded(lambda: nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Sequential(nn.Linear(6, 6), nn.Dropout())}))
        if fit:
            memfit.fit(pair["a"]), memfit.fit(pair["b"])
        trace: dict[str, Any] = {}
        torch.manual_seed(2)
        for _ in range(3):
            x = torch.randn(3, 6)
            (pair["a"](x) * pair["b"](pair["a"](x))).square().sum().backward()
        for name, parameter in pair.named_parameters():
            trace[name] = bits(parameter.grad)
        traces.append(trace)
    assert_same_trace(*traces)


def test_gan_training_with_two_fitted_models_matches() -> None:
    traces = []
    for fit in (False, True):
        maker = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6)))
        judge = seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(6, 1)))
        if fit:
            memfit.fit(maker), memfit.fit(judge)
        makes, judges = torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())
        torch.manual_seed(2)
        trace: dict[str, Any] = {}
        for step in range(3):
            real, noise = torch.randn(5, 6), torch.randn(5, 4)
            judges.zero_grad()
            made = maker(noise)
            (F.softplus(-judge(real)).mean() + F.softplus(judge(made.detach())).mean()).backward()
            judges.step()
            makes.zero_grad()
            F.softplus(-judge(made)).mean().backward()
            makes.step()
            record_state(trace, f"{step} maker", maker)
            record_state(trace, f"{step} judge", judge)
        traces.append(trace)
    assert_same_trace(*traces)


def _train_quietly(model: nn.Module, inputs: Any, steps: int, seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        model(torch.randn(3, 6, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [bits(p) for p in model.parameters()]


def quiet_mlp(seed: int = 0) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4)), seed)


def in_threads(*actions: Callable[[], Any]) -> list[Any]:
    results: list[Any] = [None] * len(actions)

    def run(index: int) -> None:
        try:
            results[index] = actions[index]()
        except BaseException as error:  # handed to the test below
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def test_threads_that_train_models_of_their_own_match() -> None:
    expected = [_train_quietly(quiet_mlp(seed), rows, 10, seed) for seed in range(4)]
    models = [memfit.fit(quiet_mlp(seed)) for seed in range(4)]  # built here: threads share the generator
    found = in_threads(*(lambda seed=seed: _train_quietly(models[seed], rows, 10, seed) for seed in range(4)))
    assert found == expected


def test_threads_that_call_one_fitted_model_at_once_get_their_own_results() -> None:
    model = memfit.fit(quiet_mlp())
    reference = quiet_mlp()

    def gradients(model: nn.Module, seed: int, rows: int) -> list[Any]:
        found = []
        generator = torch.Generator().manual_seed(seed)
        for _ in range(10):
            x = torch.randn(rows, 6, generator=generator, requires_grad=True)
            found += [bits(g) for g in torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])]
        return found

    sizes = (2, 3, 3, 4)
    expected = [gradients(reference, seed, n) for seed, n in enumerate(sizes)]
    found = in_threads(*(lambda seed=seed, n=n: gradients(model, seed, n) for seed, n in enumerate(sizes)))
    assert found == expected


def test_backward_in_another_thread_than_forward_matches() -> None:
    traces = []
    for fit in (False, True):
        model = quiet_mlp()
        if fit:
            memfit.fit(model)
        loss = model(torch.ones(3, 6)).square().sum()
        in_threads(loss.backward)
        traces.append([bits(p.grad) for p in model.parameters()])
    assert traces[0] == traces[1]
