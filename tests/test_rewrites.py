"""Each rewrite does what it says, can be left out, and gives way where its self-test fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence import assert_same_as_eager
from torch import nn

import memfit
from memfit.capture.rewrites import NAMES, proof, rewrite
from memfit.capture.rewrites.proof import AssumedProofs, Proofs, same_bits
from memfit.capture.step import Ghost, Step
from memfit.errors import BadOption


class Net(nn.Module):
    """A network in which every rewrite finds something to do; its loss is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        h = F.relu(self.body(h) + h)
        return F.cross_entropy(self.head(F.avg_pool2d(h, 4).flatten(1)), y)


def inputs(batch: int) -> tuple[Any, ...]:
    return torch.randn(batch, 3, 8, 8), torch.randint(5, (batch,))


def plain() -> Step:
    return memfit.capture(Net(), inputs(2))


def targets(step: Step) -> Counter[str]:
    return Counter(op.target for op in step.ops)


def num_ghosts(step: Step) -> int:
    return sum(isinstance(arg, Ghost) for op in step.ops for _, arg in op.operands())


class Refused(Proofs):
    """Finds that no rewrite holds."""

    def __init__(self) -> None:
        super().__init__(None)
        self.asked: set[str] = set()

    def holds(self, rewrite: str, signature: Any, experiment: Callable[[], bool]) -> bool:
        self.asked.add(rewrite)
        return False

    def found(self, rewrite: str, signature: Any, search: Callable[[], str]) -> str:
        self.asked.add(rewrite)
        return ""


EFFECTS: dict[str, Callable[[Step], Any]] = {
    "detach": lambda step: targets(step)["aten.detach.default"],
    "running-stats": lambda step: sum(
        step.source_of[v].name.endswith("running_mean")
        for op in step.ops
        if "batch_norm_backward" in op.target
        for v in op.reads()
        if v in step.source_of
    ),
    "pool-swap": lambda step: (
        [op.target for op in step.ops if op.target.startswith("aten.max_pool2d_with_indices_b")] and step.saved_bytes
    ),
    "conv-split": lambda step: targets(step)["aten.convolution_backward.default"],
    "shape-only": num_ghosts,
    "log-softmax": lambda step: targets(step)["aten._log_softmax.out"],
    "reinplace": lambda step: targets(step)["aten.threshold_backward.grad_input"],
    "batch-norm": lambda step: sum(bool(op.again) for op in step.ops),
    "stand-ins": lambda step: sum(bool(op.stand_in) for op in step.ops),
}


@pytest.mark.parametrize("name", NAMES)
def test_each_rewrite_has_an_effect_and_can_be_left_out(name: str) -> None:
    with_all = rewrite(plain(), proofs=AssumedProofs())
    without = rewrite(plain(), proofs=AssumedProofs(), without=frozenset({name}))
    assert name in with_all.rewrites and name not in without.rewrites
    assert EFFECTS[name](with_all) != EFFECTS[name](without)


@pytest.mark.parametrize("name", [*NAMES, "all", "none"])
def test_whatever_is_left_out_the_step_is_exact(name: str) -> None:
    without = NAMES if name == "all" else () if name == "none" else (name,)
    assert_same_as_eager(Net(), inputs, loss=lambda output, model: output, without=without)


def test_rewrites_that_fail_their_self_test_leave_the_plain_ops() -> None:
    refused = Refused()
    step = rewrite(plain(), proofs=refused)
    assert refused.asked == {
        "pool-swap",
        "conv-split",
        "shape-only",
        "log-softmax",
        "reinplace",
        "batch-norm by evaluation",
        "stand-ins",
    }
    bare = rewrite(plain(), without=frozenset(NAMES) - {"detach", "running-stats"})
    assert targets(step) == targets(bare) and num_ghosts(step) == 0
    assert not any(op.again or op.stand_in for op in step.ops)


def test_self_tests_hold_here_and_are_remembered(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "selftests.json"
    first = rewrite(plain(), proofs=Proofs(file))
    assert targets(first) == targets(rewrite(plain(), proofs=AssumedProofs()))
    asked: list[str] = []

    class Counting(Proofs):
        def _try(self, rewrite: str, signature: Any, experiment: Callable[[], bool | str]) -> bool | str:
            asked.append(rewrite)
            return super()._try(rewrite, signature, experiment)

    again = rewrite(plain(), proofs=Counting(file))
    assert targets(again) == targets(first) and not asked


def test_a_damaged_cache_is_ignored_and_written_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "selftests.json"
    file.write_text("{not json")
    assert Proofs(file).holds("reinplace", ("a",), lambda: True)
    assert "ignoring the damaged self-test cache" in caplog.text
    assert Proofs(file).holds("reinplace", ("a",), lambda: False), "the outcome on disk counts"


def test_outcomes_are_others_where_libraries_are_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "selftests.json"
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert Proofs(file).holds("reinplace", ("a",), lambda: True)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert not Proofs(file).holds("reinplace", ("a",), lambda: False)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    assert Proofs(file).holds("reinplace", ("a",), lambda: False)


def test_outcomes_are_of_one_model_of_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that can do the same may be given other kernels, by vendor."""
    file = tmp_path / "selftests.json"
    assert Proofs(file).holds("reinplace", ("a",), lambda: True)
    monkeypatch.setattr(proof, "cpu_name", lambda: "another")
    assert not Proofs(file).holds("reinplace", ("a",), lambda: False)


@pytest.mark.parametrize(
    "error", [RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), MemoryError()]
)
def test_for_want_of_memory_nothing_is_tested_and_nothing_is_kept(tmp_path: Path, error: Exception) -> None:
    file = tmp_path / "selftests.json"
    tried: list[int] = []

    def ends() -> bool:
        tried.append(1)
        raise error

    here = Proofs(file)
    assert not here.holds("reinplace", ("a",), ends)
    assert not here.holds("reinplace", ("a",), ends) and len(tried) == 1, "once in a process"
    assert here.holds("reinplace", ("b",), lambda: True)
    assert Proofs(file).holds("reinplace", ("a",), lambda: True), "another one may have room for it"


def test_what_a_search_found_is_remembered_too(tmp_path: Path) -> None:
    file = tmp_path / "selftests.json"
    assert Proofs(file).found("stand-ins", ("a",), lambda: "the second") == "the second"
    assert Proofs(file).found("stand-ins", ("a",), lambda: "the third") == "the second"
    assert Proofs(file).found("stand-ins", ("b",), lambda: "") == ""
    assert Proofs(file).found("stand-ins", ("b",), lambda: "the third") == ""
    assert AssumedProofs().found("stand-ins", ("a",), lambda: "the third") == "", "it is another machine"


def test_a_self_test_that_raises_is_a_refusal() -> None:
    def broken() -> bool:
        raise RuntimeError("no such kernel")

    assert not Proofs(None).holds("reinplace", ("b",), broken)


def test_a_rewrite_that_changes_one_bit_is_refused() -> None:
    x = torch.tensor([0.0, 1.0])
    assert same_bits(x, x.clone()) and not same_bits(x, torch.tensor([-0.0, 1.0]))
    assert same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not same_bits(torch.zeros(2, 3), torch.zeros(3, 2).t())


def test_unknown_rewrites_are_refused_by_name() -> None:
    with pytest.raises(BadOption, match=r"without=\['nonsense'\]: no such rewrite. Rewrites: detach, running-stats"):
        memfit.fit(nn.Linear(2, 2), without=["nonsense"])


def test_generated_code_names_modules_and_ghosts() -> None:
    model = memfit.fit(Net())
    model(*inputs(2)).backward()
    code = model.memfit.code
    assert "# stem.0  tests/test_rewrites.py:" in code and "ghost_0" in code and "def backward_0(S):" in code
    compile(code, "code", "exec")
