"""Steps as JSON: they come back whole, to the type of every literal, or are refused; and the steps kept on disk."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from planning import chain, planned_network

from memfit.capture import step_cache
from memfit.capture.step import Ghost, Opaque, Ref, Step
from memfit.capture.step_cache import StepCache
from memfit.capture.step_json import WrongStep, step_from_json, step_to_json, step_to_lists
from memfit.cli.target import Target
from memfit.cost.costs import free_of_charge
from memfit.json_folder import JsonFolder
from memfit.plan.lower import lower

STEP = chain(2)
LITERALS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.complex_numbers(allow_nan=False),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda:1"), torch.strided, torch.channels_last]),
    st.integers(0, 3).map(Ref),
    st.just(Ghost((2, 3), (3, 1), torch.float32, "cpu")),
    st.just(Opaque(0, "Generator")),
)
OPERANDS = st.recursive(
    LITERALS, lambda inner: st.one_of(st.lists(inner, max_size=3), st.tuples(inner, inner)), max_leaves=6
)


def with_operands(step: Step, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...] = ()) -> Step:
    return replace(step, ops=(replace(step.ops[0], args=args, kwargs=kwargs), *step.ops[1:]))


def typed(thing: Any) -> Any:
    """The operand with the type of everything in it: 1 == 1.0 == True."""
    if isinstance(thing, (tuple, list)):
        return type(thing), [typed(item) for item in thing]
    return type(thing), repr(thing)


@settings(max_examples=80, deadline=None, phases=[Phase.explicit, Phase.generate], derandomize=True)
@given(st.lists(OPERANDS, max_size=4), st.lists(st.tuples(st.text(max_size=3), OPERANDS), max_size=2))
def test_every_operand_comes_back_with_its_type(args: list[Any], kwargs: list[tuple[str, Any]]) -> None:
    step = with_operands(STEP, tuple(args), tuple(kwargs))
    back = step_from_json(step_to_json(step))
    assert back == step
    assert typed(back.ops[0].args) == typed(tuple(args))
    assert [(k, typed(v)) for k, v in back.ops[0].kwargs] == [(k, typed(v)) for k, v in kwargs]


def test_numbers_that_are_none_come_back() -> None:
    step = with_operands(STEP, (math.inf, -math.inf, math.nan, -0.0))
    found = step_from_json(step_to_json(step)).ops[0].args
    assert found[0] == math.inf and found[1] == -math.inf and math.isnan(found[2])
    assert math.copysign(1, found[3]) == -1


@pytest.mark.parametrize(
    ("name", "image", "rewritten"), [("resnet18", 32, False), ("resnet18", 32, True), ("unet", 64, True)]
)
def test_networks_come_back_equal_and_are_lowered_to_the_same_program(name: str, image: int, rewritten: bool) -> None:
    step = planned_network(name, batch=2, image=image, rewritten=rewritten)
    back = step_from_json(step_to_json(step))
    assert back == step and back is not step
    assert back.digest == step.digest
    assert back.storages == step.storages and back.uses == step.uses
    costs = free_of_charge(step)
    assert lower(back, {}, costs).instructions == lower(step, {}, costs).instructions


DAMAGES = {
    "a value that is not there": lambda d: d["ops"][0][1].append({"v": 10**6}),
    "a storage that is not there": lambda d: d["values"][0].__setitem__(1, 10**6),
    "an unknown kind": lambda d: d["ops"][0][1].append({"pickle": "x"}),
    "two kinds at once": lambda d: d["ops"][0][1].append({"v": 0, "dtype": "torch.int8"}),
    "no dtype": lambda d: d["texts"].__setitem__(d["values"][0][5], "torch.nothing"),
    "no ops": lambda d: d.pop("ops"),
    "an op cut short": lambda d: d["ops"][0].pop(),
    "bytes that are no number": lambda d: d["storage_bytes"].__setitem__(0, "4"),
    "no origin": lambda d: d["sources"][0].__setitem__(1, "moon"),
    "ops that are a number": lambda d: d.update(ops=7),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_step_is_refused(damage: str) -> None:
    data = json.loads(json.dumps(step_to_lists(STEP)))
    DAMAGES[damage](data)
    with pytest.raises(WrongStep, match="is damaged"):
        step_from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "7", "[]", '{"format": 0}', "[" * 100_000])
def test_what_is_no_step_is_refused(text: str) -> None:
    with pytest.raises(WrongStep, match="not a step"):
        step_from_json(text)


def test_an_operand_without_a_text_form_is_refused() -> None:
    with pytest.raises(WrongStep, match="an operand of type object has no JSON form"):
        step_to_json(with_operands(STEP, (object(),)))


# ---- steps on disk ----


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    return tmp_path / "steps"


def capture_resnet(**options: Any) -> Target:
    return Target.capture("resnet18", **({"batch": 2, "image": 32} | options))


def test_the_second_capture_of_a_zoo_network_is_from_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = capture_resnet()
    monkeypatch.setattr("memfit.cli.target.capture", lambda *_, **__: pytest.fail("captured"))
    second = capture_resnet()
    assert not first.was_kept and second.was_kept
    assert second.step == first.step and second.step.digest == first.step.digest
    assert (second.network, second.batch, second.image) == (first.network, first.batch, first.image)
    assert second.rewritten == first.rewritten
    with pytest.raises(pytest.fail.Exception, match="captured"):
        capture_resnet(anew=True)


@pytest.mark.parametrize("options", [{"batch": 3}, {"image": 64}, {"with_loss": False}])
def test_other_sizes_are_other_steps(folder: Path, options: dict[str, Any]) -> None:
    capture_resnet()
    other = capture_resnet(**options)
    assert not other.was_kept
    assert other.step == capture_resnet(anew=True, **options).step


def test_what_decides_a_step_is_in_the_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture_resnet()
    monkeypatch.setattr(step_cache, "sources_digest", lambda *_: "other sources")
    assert not capture_resnet().was_kept
    assert capture_resnet().was_kept
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert not capture_resnet().was_kept
    with monkeypatch.context() as patched:
        patched.setattr(torch.backends.mkldnn, "enabled", False, raising=False)
        key = step_cache.step_key("resnet18", {})
    assert key != step_cache.step_key("resnet18", {}) or torch.backends.mkldnn.enabled is False


@pytest.mark.parametrize(
    "content", ["", "{", '{"key": 1}', "null", '{"key": KEY, "content": {"step": 7, "digest": ""}}']
)
def test_a_damaged_file_is_ignored_and_replaced(folder: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    capture_resnet()
    (file,) = folder.iterdir()
    whole = file.read_text()
    file.write_text(content.replace("KEY", json.dumps(json.loads(whole)["key"])))
    with caplog.at_level(logging.DEBUG, logger="memfit"):
        assert not capture_resnet().was_kept
    assert any(r.getMessage().startswith(f"ignoring {file}") for r in caplog.records)
    assert file.read_text() == whole
    assert capture_resnet().was_kept


def test_a_step_that_was_tampered_with_is_captured_again(folder: Path) -> None:
    step = capture_resnet().step
    (file,) = folder.iterdir()
    data = json.loads(file.read_text())
    changed = copy.deepcopy(data)
    changed["content"]["step"]["storage_bytes"][0] += 4
    file.write_text(json.dumps(changed))
    found = capture_resnet()
    assert not found.was_kept and found.step == step


def test_a_users_own_network_is_captured_every_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import torch\n\ndef tiny():\n    return torch.nn.Linear(2, 2), torch.zeros(1, 2)\n"
    (tmp_path / "networks_of_users.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):
        assert not Target.capture("networks_of_users:tiny", batch=None, image=None).was_kept
    assert not folder.exists()


def test_the_folder_is_bounded_and_what_is_used_stays(tmp_path: Path) -> None:
    folder = JsonFolder(tmp_path / "some", max_files=3, max_bytes=10_000)
    for number in range(3):
        folder.write(number, "x")
        _is_older(folder.file(number), by_s=100 - number)
    assert folder.read(0) == "x"  # the oldest, but used now
    folder.write(3, "x")
    assert [folder.read(n) is not None for n in range(4)] == [True, False, True, True]
    folder.write(4, "y" * 9_900)
    assert folder.read(4) is not None and sum(f.stat().st_size for f in folder.folder.iterdir()) <= 10_000
    folder.write(5, "z" * 20_000)
    assert folder.read(5) is None, "larger than all that is kept"
    (folder.folder / "left.part").write_text("of a process that was ended")
    _is_older(folder.folder / "left.part", by_s=500)
    for number in range(10, 14):
        folder.write(number, "x")
    assert not (folder.folder / "left.part").exists()


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    folder = JsonFolder(tmp_path / "file", max_files=3, max_bytes=100)
    folder.write("key", "x")
    assert folder.read("key") is None
    step, was_kept = StepCache(folder).step("net", {}, lambda: STEP)
    assert step == STEP and not was_kept


def _is_older(file: Path, *, by_s: float) -> None:
    then = time.time() - by_s
    os.utime(file, (then, then))
