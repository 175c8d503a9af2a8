"""Batch norm run again from the statistics it saved: the same bits, less work, and statistics that are never lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from check_programs import broken, made_by, op_of, recompute
from check_programs import keep as kept
from equivalence import Apply, assert_same_as_eager, seeded
from torch import nn

import memfit
from memfit import operators
from memfit.capture.rerun_form import BATCH_NORMS, rerun_form
from memfit.capture.rewrites import rewrite
from memfit.capture.rewrites.proof import AssumedProofs, Proofs, same_bits
from memfit.capture.step import Step
from memfit.cost.costs import OpCost, free_of_charge
from memfit.cost.devices import device
from memfit.cost.profile import measure
from memfit.cost.roofline import roofline
from memfit.cost.signature import signature
from memfit.plan.check import Rule, check
from memfit.plan.decisions import Recompute
from memfit.plan.lower import lower
from memfit.plan.policies.policy import Policy
from memfit.plan.policies.registry import POLICIES
from memfit.plan.program import Free, Run
from memfit.plan.rerun import Reruns
from memfit.plan.simulate import simulate
from memfit.run.codegen import generate


def net(**options: Any) -> nn.Module:
    block = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, **options), nn.ReLU(inplace=True)]
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, **options), nn.ReLU(), *block, nn.Flatten(), nn.Linear(288, 2)
    )


def image_step(**options: Any) -> Step:
    return rewrite(memfit.capture(seeded(net), (torch.randn(2, 3, 8, 8),)), proofs=AssumedProofs(), **options)


def norms(step: Step) -> list[int]:
    return [i for i, op in enumerate(step.ops) if op.target == "aten.native_batch_norm.default"]


def drop_all(step: Step) -> dict[int, Recompute]:
    return dict.fromkeys(Reruns(step).recomputable, Recompute())


SHAPES = [(2, 3), (4, 1, 7), (3, 5, 9, 8), (2, 32, 17, 3), (1, 4, 2, 2), (2, 6, 3, 4, 5), (2, 17, 1, 1), (8, 3, 31, 33)]


@pytest.mark.parametrize("is_affine", [True, False])
@pytest.mark.parametrize("is_channels_last", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (1e-3, 100.0), (1e4, -7.0)])
def test_the_result_is_made_again_bit_for_bit(
    shape: tuple[int, ...], is_channels_last: bool, is_affine: bool, scale: float, shift: float
) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator) * scale + shift
    if is_channels_last and len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    weight, bias = (torch.randn(shape[1], generator=generator) for _ in range(2)) if is_affine else (None, None)
    out, mean, invstd = torch.ops.aten.native_batch_norm.default(x, weight, bias, None, None, True, 0.1, 1e-5)
    again = torch.ops.memfit_ops.renormalise.default(x, weight, bias, mean, invstd)
    assert same_bits(out, again)


@pytest.mark.parametrize("shape", [(2, 1, 8, 8), (4, 2), (2, 3, 4, 4)])
def test_the_self_test_finds_out_a_form_that_is_not_the_same(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_multiplying(x: Any, weight: Any, bias: Any, mean: Any, invstd: Any, is_rectified: bool) -> torch.Tensor:
        column = [1, -1, *[1] * (x.dim() - 2)]
        alpha = invstd * weight
        made: torch.Tensor = x * alpha.view(column) + (bias - mean * alpha).view(column)
        return made.relu() if is_rectified else made

    monkeypatch.setattr(operators, "renormalise", by_multiplying)
    norm = (nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(shape[1])
    step = rewrite(memfit.capture(seeded(lambda: norm), (torch.randn(shape),)), proofs=Proofs(None))
    assert not any(op.again for op in step.ops)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_run_again_whole(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 3), nn.BatchNorm2d(1)).to(dtype)
    step = rewrite(memfit.capture(model, (torch.randn(2, 1, 8, 8).to(dtype),)), proofs=AssumedProofs())
    assert any(op.target in BATCH_NORMS for op in step.ops) and not any(op.again for op in step.ops)


def test_other_layouts_are_run_again_whole() -> None:
    model = Apply(lambda m, x: m.norm(x.transpose(2, 3)), norm=nn.BatchNorm2d(3))
    step = rewrite(memfit.capture(model, (torch.randn(2, 3, 8, 6),)), proofs=AssumedProofs())
    assert any(op.target in BATCH_NORMS for op in step.ops) and not any(op.again for op in step.ops)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_signs_of_zeros_and_factors_that_overflow_come_out_alike(dtype: torch.dtype) -> None:
    x = torch.randn(4, 3, 5, 5, dtype=dtype) * 1e-20
    weight = torch.tensor([-0.0, torch.finfo(dtype).max, 1.0], dtype=dtype)
    bias = torch.tensor([-0.0, 1.0, -0.0], dtype=dtype)
    out, mean, invstd = torch.ops.aten.native_batch_norm.default(x, weight, bias, None, None, True, 0.1, 1e-30)
    again = torch.ops.memfit_ops.renormalise.default(x, weight, bias, mean, invstd)
    assert not torch.isfinite(out[:, 1]).any() and (out[:, 0] == 0).all()
    assert same_bits(out.nan_to_num(), again.nan_to_num()) and torch.equal(out.isnan(), again.isnan())


def test_infinities_and_nan_come_out_alike() -> None:
    x = torch.randn(4, 3, 5, 5)
    x[0, 0, 0, 0], x[1, 1, 2, 2] = float("inf"), float("nan")
    out, mean, invstd = torch.ops.aten.native_batch_norm.default(x, None, None, None, None, True, 0.1, 1e-5)
    assert same_bits(out, torch.ops.memfit_ops.renormalise.default(x, None, None, mean, invstd))


@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.3, "momentum": 0.9}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_training_with_everything_recomputed_matches_eager(
    options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POLICIES, "drop-all", Policy("drop-all", "", lambda step, costs, budget: drop_all(step)))
    assert_same_as_eager(
        net(**options).to(dtype), lambda n: (torch.randn(n, 3, 8, 8).to(dtype),), steps=3, policy="drop-all"
    )


def test_the_statistics_pass_is_not_run_again() -> None:
    step = image_step()
    program = lower(step, drop_all(step), free_of_charge(step))
    again = {i.op for i in program.instructions if isinstance(i, Run) and i.again}
    assert again >= set(norms(step)[:1])
    text = generate(program).text
    assert text.count("native_batch_norm(") == len(norms(step))
    assert text.count("operators.renormalise(") == len(again & set(norms(step)))


def test_left_out_or_not_bit_equal_the_norm_itself_is_run_again() -> None:
    class Unequal(Proofs):
        def holds(self, rewrite: str, signature: Any, experiment: Any) -> bool:
            return not rewrite.startswith("batch-norm")

    plain = memfit.capture(seeded(net), (torch.randn(2, 3, 8, 8),))
    for step in (rewrite(plain, proofs=Unequal(None)), image_step(without=frozenset({"batch-norm"}))):
        for norm in norms(step):
            assert not step.ops[norm].again
            assert rerun_form(step.ops[norm]).target == "aten.native_batch_norm.default"
        text = generate(lower(step, drop_all(step), free_of_charge(step))).text
        assert "renormalise" not in text and text.count("native_batch_norm(") > len(norms(step))


def test_the_statistics_are_never_dropped() -> None:
    step = image_step()
    reruns = Reruns(step)
    for norm in norms(step):
        out, mean, invstd = (made_by(step, norm, nth) for nth in range(3))
        assert out in reruns.recomputable and not {mean, invstd} & reruns.recomputable
        assert reruns.why_not_recompute(mean) == "its maker is re-run from it"
        assert reruns.rerun_makes[norm] == (out,) and {mean, invstd} <= set(reruns.rerun_touches[norm])


def test_the_checker_wants_the_statistics_here() -> None:
    step = image_step()
    norm, relu = norms(step)[1], op_of(step, "relu_", nth=1)
    program = recompute(kept(step), made_by(step, norm), norm, relu)
    check(program)
    mean = made_by(step, norm, 1)
    instructions = list(program.instructions)
    instructions.remove(Free(mean))
    instructions.insert(instructions.index(Run(norm, again=True)), Free(mean))
    broken(replace(program, instructions=tuple(instructions)), Rule.READ, "it is read but not here")


def test_prices_know_both_forms() -> None:
    step = image_step()
    first, second = norms(step)
    for costs in (measure(step, cap_s=30.0), roofline(step, device("titan-x"))):
        assert signature(step, rerun_form(step.ops[first])) in costs.by_signature
        priced = costs.of(step)[first]
        assert priced.rerun_ps == costs.by_signature[signature(step, rerun_form(step.ops[first]))].time_ps
    free = free_of_charge(step)
    cheap = dict(free.by_signature) | {signature(step, rerun_form(step.ops[n])): OpCost(7) for n in (first, second)}
    program = lower(step, drop_all(step), free)
    num_again = sum(isinstance(i, Run) and i.again and i.op in (first, second) for i in program.instructions)
    saved_ps = simulate(program, free).step_ps - simulate(program, replace(free, by_signature=cheap)).step_ps
    assert num_again and saved_ps == num_again * (1_000_000 - 7)
