"""The ledger against sums made by hand, and against what the program really holds."""

from __future__ import annotations

import torch
from torch import nn

import memfit
from memfit.capture.rewrites import rewrite
from memfit.capture.step import Kind
from memfit.plan.ledger import Ledger
from memfit.plan.lower import lower_keep
from memfit.plan.program import Boundary, Free, Give, Run

KIB = 1024


def chain() -> memfit.Step:
    """x (256 x 256 floats, 256 KiB) through two exps and a sum: each exp keeps its result."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(256, 256))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.w).exp().exp().sum()

    return memfit.capture(Chain(), (torch.zeros(256, 256),))


def test_bytes_by_kind_are_those_counted_by_hand() -> None:
    step = chain()
    ledger = Ledger.of(lower_keep(step))
    tensor = 256 * KIB
    assert step.parameter_bytes == tensor and step.gradient_bytes == tensor
    assert ledger.base_bytes == 2 * tensor  # the parameter and the input
    # Kept: both exps. In backward at most those two and two gradients, the tangent of the sum aside.
    forward = ledger.entries[: ledger.program.boundary]
    assert max(sum(e.bytes) for e in forward) - ledger.base_bytes <= 2 * tensor + 64
    assert 3 * tensor <= ledger.growth_bytes <= 4 * tensor + 64
    assert ledger.peak_bytes == ledger.base_bytes + ledger.growth_bytes
    assert ledger.activation_bytes <= ledger.growth_bytes
    assert "MiB at aten." in ledger.describe_peak()


def test_every_storage_is_freed_once_and_only_after_its_last_use() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 2))
    step = memfit.capture(model, (torch.randn(2, 3, 8, 8),))
    program = lower_keep(step)
    freed: set[int] = set()
    for instruction in program.instructions:
        match instruction:
            case Run(index):
                touched = {step.values[v].storage for v in (*step.ops[index].reads(), *step.ops[index].made)}
                assert not touched & freed
            case Free(storage):
                assert storage not in freed
                freed.add(storage)
            case Give() | Boundary():
                pass
    owned = {s.id for s in step.storages if s.kind in (Kind.SAVED, Kind.TRANSIENT)}
    outputs = {step.values[v].storage for v in step.outputs}
    assert owned - outputs <= freed, "nothing of the step's own is left"
    assert sum(isinstance(i, Give) for i in program.instructions) == len(step.gradients) == 6


def test_the_ledger_ends_with_gradients_and_what_was_there_before() -> None:
    ledger = Ledger.of(lower_keep(chain()))
    last = dict(zip(ledger.kinds, ledger.entries[-1].bytes, strict=True))
    assert last[Kind.TRANSIENT] == 0 and last[Kind.GRADIENT] == 256 * KIB
    assert last[Kind.SAVED] <= 64  # the output, a scalar


def test_a_gradient_in_parts_is_counted_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x).tanh())

    step = memfit.capture(Tied(), (torch.randn(2, 64),))
    assert len(step.gradients) == 2 and step.gradient_bytes == 64 * 64 * 4
    ledger = Ledger.of(lower_keep(step))
    last = dict(zip(ledger.kinds, ledger.entries[-1].bytes, strict=True))
    assert last[Kind.GRADIENT] == 64 * 64 * 4


def test_adding_up_parts_of_a_gradient_takes_a_block_of_its_own() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(256, 256, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x).tanh())

    step = rewrite(memfit.capture(Tied(), (torch.randn(2, 256),)))
    assert step.addition_bytes == (0, 256 * KIB)
    ledger = Ledger.of(lower_keep(step))
    assert isinstance(ledger.peak.instruction, Give) and ledger.peak.workspace_bytes == 256 * KIB
    assert ledger.growth_bytes >= 3 * 256 * KIB  # both parts and their sum
    assert "where the gradient of 'layer.weight' is handed over" in ledger.describe_peak()
