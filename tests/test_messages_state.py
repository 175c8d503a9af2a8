"""Randomness and state outside torch are refused by name, with the way out, before they change."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from equivalence import Apply, bits, seeded
from refusals import Outer, line_of, refusal, refusal_of, rows
from torch import nn

import memfit
from memfit.errors import CaptureError, MemfitError
from memfit.tiers.disk import DiskSettings, DiskTier

# --- randomness ------------------------------------------------------------------------------------------------------


def test_pythons_random_in_forward_is_refused() -> None:
    text = refusal(lambda m, y: y if random.random() < 0.5 else -y)
    assert "Python's `random`" in text and "torch.rand" in text and "frozen" in text


def test_draws_are_seen_while_our_own_threads_move_bytes(tmp_path: Path) -> None:
    tier = DiskTier(DiskSettings(directory=str(tmp_path)))
    parcel = tier.send(torch.ones(1000))
    parcel.sent()
    assert any(thread.name.startswith("memfit-disk") for thread in threading.enumerate())
    assert "numpy's generator" in refusal(lambda m, y: y * float(numpy.random.rand()))
    assert "Python's `random`" in refusal(lambda m, y: y * random.random())
    parcel.release()
    tier.close()


def test_numpys_draws_are_seen_beside_other_threads() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        model = memfit.fit(Outer(lambda m, y: y * float(numpy.random.rand())))
        with pytest.raises(CaptureError, match="numpy's generator"):
            model(rows())
    finally:
        stop.set()
        thread.join()


def test_numpys_random_in_forward_is_refused() -> None:
    text = refusal(lambda m, y: y * float(numpy.random.rand()))
    assert "numpy's generator" in text and "torch.rand" in text


@pytest.mark.parametrize(
    "seeds",
    [lambda: torch.manual_seed(3), lambda: torch.set_rng_state(torch.get_rng_state()), lambda: torch.seed()],
    ids=["manual_seed", "set_rng_state", "seed"],
)
def test_seeding_in_forward_is_refused(seeds: Any) -> None:
    def body(m: Any, y: torch.Tensor) -> torch.Tensor:
        seeds()
        return F.dropout(y, 0.5)

    text = refusal_of(seeded(lambda: Outer(body)), lambda m: m(rows()), trains=False)
    assert "generator" in text and "outside the model" in text


def test_a_forked_generator_in_forward_is_refused() -> None:
    def body(m: Any, y: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return F.dropout(y, 0.5)

    text = refusal(body)
    assert "generator" in text and "outside the model" in text


# --- state of the model ----------------------------------------------------------------------------------------------


def test_a_counter_changed_in_forward_is_refused_by_its_name() -> None:
    def counts(m: Any, y: torch.Tensor) -> torch.Tensor:
        m.calls += 1
        return y * m.calls

    model = seeded(lambda: Outer(counts))
    text = refusal_of(model, lambda m: m(rows()), trains=False)
    assert "'blocks.1.calls'" in text and "register_buffer" in text
    assert model.blocks[1].calls == 0


def test_a_list_grown_in_forward_is_refused_by_its_name() -> None:
    def logs(m: Any, y: torch.Tensor) -> torch.Tensor:
        m.log.append(y.shape[0])
        return y

    model = seeded(lambda: Outer(logs))
    text = refusal_of(model, lambda m: m(rows()), trains=False)
    assert "'blocks.1.log'" in text
    assert model.blocks[1].log == []


class Holder:
    def __init__(self) -> None:
        self.count = 0
        self.items: list[int] = []


def test_an_object_of_the_models_own_changed_in_forward_is_refused() -> None:
    def counts(m: Any, y: torch.Tensor) -> torch.Tensor:
        m.holder.count += 1
        return y * m.holder.count

    model = seeded(lambda: Outer(counts))
    model.blocks[1].holder = Holder()
    text = refusal_of(model, lambda m: m(rows()), trains=False)
    assert "'blocks.1.holder" in text
    assert model.blocks[1].holder.count == 0


def test_a_nested_list_grown_in_forward_is_refused() -> None:
    def logs(m: Any, y: torch.Tensor) -> torch.Tensor:
        m.log[0].append(1)
        return y

    model = seeded(lambda: Outer(logs))
    model.blocks[1].log.append([])
    text = refusal_of(model, lambda m: m(rows()), trains=False)
    assert "'blocks.1.log'" in text
    assert model.blocks[1].log == [[]]


def test_detached_activations_appended_to_a_list_are_appended_as_in_eager() -> None:
    def keeps(m: Any, y: torch.Tensor) -> torch.Tensor:
        m.log.append(y.detach())
        return y

    eager, fitted = seeded(lambda: Outer(keeps)), memfit.fit(seeded(lambda: Outer(keeps)))
    for step in range(3):
        for model in (eager, fitted):
            torch.manual_seed(step)
            model(rows())
        assert [bits(t) for t in fitted.blocks[1].log] == [bits(t) for t in eager.blocks[1].log]


# --- state outside the model -----------------------------------------------------------------------------------------

TABLES: dict[int, torch.Tensor] = {}


def table_of(length: int) -> torch.Tensor:
    if length not in TABLES:
        TABLES[length] = torch.arange(float(length))  # here
    return TABLES[length]


def test_a_tensor_kept_in_a_cache_outside_the_model_is_refused_where_it_is_made() -> None:
    TABLES.clear()
    model = memfit.fit(seeded(lambda: Outer(lambda m, y: y + table_of(6))))
    with pytest.raises(CaptureError) as caught:
        model(rows())
    text = str(caught.value)
    assert "outside the model" in text and line_of(table_of) in text and "buffer" in text
    TABLES[6] = torch.arange(6.0)  # made before: a constant
    model(rows()).sum().backward()
    TABLES.clear()


def test_a_parameter_from_a_closure_is_refused() -> None:
    outside = nn.Parameter(torch.ones(6))

    def body(m: Any, y: torch.Tensor) -> torch.Tensor:
        return y * outside  # here

    model = memfit.fit(seeded(lambda: Outer(body)))
    with pytest.raises(CaptureError) as caught:
        model(rows())
    text = str(caught.value)
    assert "blocks.1" in text and line_of(body) in text and "requires grad" in text
    assert "Register it as a parameter" in text


def test_the_models_own_parameter_reached_through_a_closure_is_refused() -> None:
    held: dict[str, nn.Module] = {}

    def body(m: Any, y: torch.Tensor) -> torch.Tensor:
        return y * held["model"].norm.weight  # here

    model = seeded(lambda: Outer(body))
    held["model"] = model
    memfit.fit(model)
    with pytest.raises(CaptureError) as caught:
        model(rows())
    text = str(caught.value)
    assert "blocks.1" in text and line_of(body) in text and "through `self`" in text


def test_a_constant_from_a_closure_is_used_as_it_is_at_each_call() -> None:
    outside = torch.ones(6)
    model = memfit.fit(seeded(lambda: Apply(lambda m, x: m.l(x) * outside, l=nn.Linear(6, 6))))
    first = model(rows())
    outside.mul_(3)
    assert torch.equal(model(rows()), first * 3)


def test_an_attribute_that_holds_last_steps_graph_and_is_read_is_refused() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.state = torch.zeros(3, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.state = torch.tanh(self.layer(x) + self.state)
            return self.state

    model = memfit.fit(seeded(Recurrent))
    model(rows())
    with pytest.raises(MemfitError, match=r"(?s)'state'.*[Dd]etach"):
        model(rows())
