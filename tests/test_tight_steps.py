"""Tight rewrites: the gradient of a batch norm's input, and that of the logits, written over what dies there.

Asked for by a policy, they are exact like the others; each kernel gives the bits of the calls that it stands for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence import assert_same_as_eager
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from planning import planned_network
from torch import nn

import memfit
from memfit import operators
from memfit.capture.rewrites import batch_norm_in_place, loss_in_place, rewrite
from memfit.capture.rewrites.draft import touched_bytes
from memfit.capture.rewrites.proof import PROOFS, AssumedProofs, Proofs, same_bits
from memfit.capture.rewrites.tight import TIGHT_NAMES, tight_above_bytes, tighten
from memfit.capture.step import Kind, Step
from memfit.cost import devices
from memfit.cost.costs import Costs, free_of_charge
from memfit.cost.operands import Call, Operands
from memfit.cost.roofline import roofline
from memfit.plan.check import check
from memfit.plan.decisions import Decision, Keep, Recompute
from memfit.plan.lower import lower
from memfit.plan.plan import Plan, WrongPlan
from memfit.plan.planner import plan_step
from memfit.plan.policies.policy import Decided, Policy
from memfit.plan.policies.registry import POLICIES
from memfit.plan.rerun import Reruns
from memfit.plan.simulate import simulate

BATCH_NORM = "memfit_ops.batch_norm_backward_.default"
LOSS = "memfit_ops.nll_loss_log_softmax_backward_.default"

aten = torch.ops.aten


def count(step: Step, target: str) -> int:
    return sum(op.target == target for op in step.ops)


def names(step: Step) -> set[str]:
    """Which of the tight rewrites were applied."""
    return {entry.partition(">")[0] for entry in step.rewrites} & set(TIGHT_NAMES)


@pytest.fixture
def tightening(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """A policy that plans the tight form of the step; small tensors count too, in blocks smaller still."""
    monkeypatch.setattr(batch_norm_in_place, "_WORTH_BYTES", 0)
    monkeypatch.setattr(operators, "_BLOCK_BYTES", 1 << 10)
    made: list[str] = []

    def policy(*rewrites: str, share: float = 0.0) -> str:
        def decide(step: Step, costs: Costs, budget_bytes: int | None) -> Decided:
            tight = tighten(step, proofs=Proofs(None))
            assert names(tight) == set(rewrites), "other rewrites than the test is about"
            recomputable = sorted(s for s in Reruns(tight).recomputable if tight.storage[s].first_backward is not None)
            chosen: dict[int, Decision] = {s: Keep() for s in recomputable}
            chosen |= {s: Recompute() for s in recomputable[: round(share * len(recomputable))]}
            return Decided(chosen, free_of_charge(tight), step=tight)

        name = f"tightening-{len(made)}"
        made.append(name)
        POLICIES[name] = Policy(name, "for tests", decide)
        return name

    yield policy
    for name in made:
        del POLICIES[name]


class Block(nn.Module):
    """Batch norms whose gradients die there, one whose gradient is read once more, one without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 9, 3, padding=1), nn.BatchNorm2d(9), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(9, 9, 3, padding=1), nn.BatchNorm2d(9, affine=False), nn.ReLU())
        self.third = nn.Sequential(nn.Conv2d(9, 9, 3, padding=1), nn.BatchNorm2d(9))
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h = F.relu(self.third(self.second(h)) + h)
        return self.head(self.drop(h.mean((2, 3))))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_batch_norm_in_place_is_exact(share: float, tightening: Callable[..., str]) -> None:
    fitted = assert_same_as_eager(
        Block(),
        lambda batch: (torch.randn(batch, 3, 7, 6),),
        policy=tightening("batch-norm-in-place", share=share),
        debug=True,
    )
    assert count(fitted.memfit.step, BATCH_NORM) == 2, "that of `third` is read by the shortcut too"
    assert count(fitted.memfit.step, "aten.native_batch_norm_backward.default") == 1


def test_batch_norm_of_sequences_is_exact(tightening: Callable[..., str]) -> None:
    model = nn.Sequential(nn.Conv1d(3, 6, 3), nn.BatchNorm1d(6), nn.Tanh(), nn.Flatten(), nn.Linear(6 * 14, 4))
    fitted = assert_same_as_eager(
        model, lambda batch: (torch.randn(batch, 3, 16),), policy=tightening("batch-norm-in-place"), debug=True
    )
    assert count(fitted.memfit.step, BATCH_NORM) == 1


class Words(nn.Module):
    """Rows of logits, and their loss."""

    def __init__(self, num_words: int = 37, **loss: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(num_words, 6)
        self.head = nn.Linear(6, num_words)
        self.loss = nn.CrossEntropyLoss(**loss)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.words(x))
        return self.loss(self.head(h).flatten(0, 1), x.flatten())


def sentences(batch: int) -> tuple[torch.Tensor, ...]:
    return (torch.randint(37, (batch, 9)),)


LOSSES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "weights": {"weight": torch.linspace(0.1, 2.0, 37)},
    "some labels are left out": {"ignore_index": 5},
    "weights, none": {"weight": torch.linspace(0.1, 2.0, 37), "reduction": "none", "ignore_index": 0},
}


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_in_place_is_exact(name: str, share: float, tightening: Callable[..., str]) -> None:
    fitted = assert_same_as_eager(
        Words(**LOSSES[name]), sentences, policy=tightening("loss-in-place", share=share), debug=True
    )
    step = fitted.memfit.step
    assert count(step, LOSS) == 1
    assert not any("nll_loss_backward" in op.target or "softmax_backward_data" in op.target for op in step.ops)


class Shown(Words):
    """Log-probabilities that the caller sees must not be overwritten."""

    def forward(self, x: torch.Tensor) -> Any:
        found = F.log_softmax(self.head(torch.tanh(self.words(x))).flatten(0, 1), dim=1)
        return F.nll_loss(found, x.flatten()), found


class ReadTwice(Words):
    """The gradient of the log-probabilities has another part."""

    def forward(self, x: torch.Tensor) -> Any:
        found = F.log_softmax(self.head(torch.tanh(self.words(x))).flatten(0, 1), dim=1)
        return F.nll_loss(found, x.flatten()) + found.square().mean()


class Pixels(nn.Module):
    """Another loss kernel, over another axis."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 37, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layer(x[:, None].float()), x)


class Smoothed(Words):
    """Reads the log-probabilities besides."""

    def __init__(self) -> None:
        super().__init__(label_smoothing=0.1)


@pytest.mark.parametrize("model", [Shown, ReadTwice, Smoothed, Pixels])
def test_what_does_not_match_is_left_alone(model: type[nn.Module], tightening: Callable[..., str]) -> None:
    inputs = sentences if model is not Pixels else lambda batch: (torch.randint(37, (batch, 4, 5)),)
    assert_same_as_eager(model(), inputs, policy=tightening(), debug=True)


def test_other_tangents_are_captured_as_tight(tightening: Callable[..., str]) -> None:
    """Backward from a part of the outputs: another backward half over the forward half of the tight step."""

    class Two(Block):
        def forward(self, x: torch.Tensor) -> Any:
            h = self.first(x)
            return self.second(h), h.mean()

    def one_of_them(output: Any, model: nn.Module) -> torch.Tensor:
        return output[0].sum()

    fitted = assert_same_as_eager(
        Two(),
        lambda batch: (torch.randn(batch, 3, 7, 6),),
        loss=one_of_them,
        other_batch=None,
        policy=tightening("batch-norm-in-place"),
    )
    variants = [v for v in fitted.memfit.newest._variants.values() if v is not None]
    assert variants and all(count(v.compiled.program.step, BATCH_NORM) for v in variants)


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9)),
    affine=st.booleans(),
    block_bytes=st.sampled_from([1, 300, 4096, 1 << 20]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_batch_norm_kernel(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], affine: bool, block_bytes: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(operators, "_BLOCK_BYTES", block_bytes)
    generator = torch.Generator().manual_seed(sum(shape))
    x, grad = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))
    weight = torch.randn(shape[1], generator=generator, dtype=dtype) if affine else None
    if x.numel() == shape[1]:
        return  # one element per channel: torch refuses to train on it
    _, mean, invstd = aten.native_batch_norm.default(x * 3 + 1, weight, None, None, None, True, 0.1, 1e-5)
    rest = (x * 3 + 1, weight, None, None, mean, invstd, True, 1e-5, [True, affine, affine])
    plain = aten.native_batch_norm_backward.default(grad, *rest)
    written = torch.ops.memfit_ops.batch_norm_backward_.default(grad, *rest)
    assert written[0].data_ptr() == grad.data_ptr() and same_bits(list(plain), list(written))


def test_kernels_hold_no_more_than_a_block() -> None:
    """By torch's own account of what is alive at once: less than one more map."""
    x, grad = torch.randn(4, 64, 64, 64), torch.randn(4, 64, 64, 64)
    _, mean, invstd = aten.native_batch_norm.default(x, None, None, None, None, True, 0.1, 1e-5)
    rest = (x, None, None, None, mean, invstd, True, 1e-5, [True, False, False])
    assert most_at_once(lambda: aten.native_batch_norm_backward.default(grad, *rest)) >= grad.nbytes
    in_place = most_at_once(lambda: torch.ops.memfit_ops.batch_norm_backward_.default(grad, *rest))
    # Two copies, and two that torch's kernel allocates for each result, of which it fills one.
    assert 0 < in_place <= 4 * operators._BLOCK_BYTES <= grad.nbytes // 2

    logits, target = torch.randn(512, 5000).log_softmax(1), torch.randint(5000, (512,))
    _, total = aten.nll_loss_forward.default(logits, target, None, 1, -100)
    args = (torch.tensor(1.0), logits, target, None, 1, -100, total, torch.float32)
    in_place = most_at_once(lambda: torch.ops.memfit_ops.nll_loss_log_softmax_backward_.default(*args))
    assert 0 < in_place <= operators._BLOCK_BYTES < logits.nbytes // 2

    w = torch.randn(8, 64, 3, 3)
    settings_ = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    whole = most_at_once(lambda: aten.convolution.default(x, w, None, *settings_))
    chunked = most_at_once(lambda: torch.ops.memfit_ops.convolution_in_chunks.default(x, w, None, *settings_, 4))
    result = 4 * 8 * 64 * 64 * 4
    held, held_in_chunks = whole - result, chunked - result
    assert held_in_chunks <= held / 4 + result / 4 + (64 << 10), "a chunk of it, and of what the kernel holds"


def most_at_once(run: Callable[[], object]) -> int:
    """The most bytes that torch's CPU allocator had given out at once in the call, and not yet taken back."""
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        made = run()
    del made
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


NETWORKS = {"vgg16_bn": (BATCH_NORM, 64), "gpt2": (LOSS, None)}


@pytest.mark.parametrize("name", NETWORKS)
def test_tight_steps_of_networks_are_legal_and_smaller(name: str) -> None:
    target, image = NETWORKS[name]
    step = planned_network(name, batch=16 if image else 1, image=image)
    tight = tighten(step, proofs=AssumedProofs())
    assert count(tight, target) and tight.digest != step.digest
    assert tight.ops[: tight.num_forward] == step.ops[: step.num_forward], "the forward half is as it was"
    assert tight.storage_bytes == step.storage_bytes
    device = devices.device("titan-x")
    costs = roofline(step, device, also=[tight])
    assert costs.covers(step) and costs.covers(tight) and not roofline(step, device).covers(tight)
    timelines = [simulate(lower(form, {}, costs), costs) for form in (step, tight)]
    workspaces = [cost.workspace_bytes for cost in costs.of(tight)]
    check(timelines[1].program, workspace_bytes=workspaces, peak_bytes=timelines[1].peak_bytes)
    assert largest(tight) < largest(step)
    assert timelines[1].peak_bytes <= timelines[0].peak_bytes and timelines[1].step_ps <= timelines[0].step_ps


def test_only_ops_above_a_size_are_tightened() -> None:
    step = planned_network("vgg16_bn", batch=16, image=64)
    sizes = sorted(touched_bytes(step, op) for op in step.ops if "batch_norm_backward" in op.target)
    tight = tighten(step, above_bytes=sizes[-1] - 1, proofs=AssumedProofs())
    assert 0 < count(tight, BATCH_NORM) <= sizes.count(sizes[-1]) and not count(tight, LOSS)
    assert tight_above_bytes(tight) == sizes[-1] - 1 and tight_above_bytes(step) is None
    assert count(tighten(step, proofs=AssumedProofs()), BATCH_NORM) > count(tight, BATCH_NORM)
    assert tighten(step, above_bytes=sizes[-1], proofs=AssumedProofs()) is step


def largest(step: Step) -> int:
    """The most bytes that one op reads and makes, parameters and their gradients aside."""
    fixed = {s.id for s in step.storages if s.kind in (Kind.PARAMETER, Kind.GRADIENT)}
    touched = [{step.values[v].storage for v in (*op.reads(), *op.made)} - fixed for op in step.ops]
    return max(sum(step.storage_bytes[s] for s in storages) for storages in touched)


def test_tight_ops_can_be_run_alone() -> None:
    """So that they are measured like any other op."""
    step = tighten(planned_network("vgg16_bn", batch=16, image=64), proofs=AssumedProofs())
    for target in (BATCH_NORM, LOSS):
        op = next(op for op in step.ops if op.target == target)
        call = Call.of(step, op)
        operands = Operands(call)
        made = operands.run()
        first = made[0] if isinstance(made, (tuple, list)) else made
        assert call.written and torch.isfinite(first).all() and not call.is_view


class Refusing(Proofs):
    def __init__(self) -> None:
        super().__init__(None)
        self.asked: set[str] = set()

    def holds(self, rewrite: str, signature: Any, experiment: Callable[[], bool]) -> bool:
        self.asked.add(rewrite)
        return False


def test_what_fails_its_self_test_is_left_alone() -> None:
    step = planned_network("vgg16_bn", batch=16, image=64)
    refusing = Refusing()
    assert tighten(step, proofs=refusing) is step
    assert refusing.asked == {"batch-norm in place", "loss in place"}


def test_self_tests_hold_here_and_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    step = planned_network("vgg16_bn", batch=16, image=64)
    tight = tighten(step, proofs=Proofs(None))
    assert count(tight, BATCH_NORM) and count(tight, LOSS)
    for module, target in ((batch_norm_in_place, BATCH_NORM), (loss_in_place, LOSS)):
        original = module.resolve

        def other(name: str, target: str = target, original: Any = original) -> Any:
            def off_by_a_bit(*args: Any) -> Any:
                made = original(name)(*args)
                first = made[0] if isinstance(made, (tuple, list)) else made
                first.view(torch.int32).view(-1)[-1] ^= 1
                return made

            return off_by_a_bit if name == target else original(name)

        with monkeypatch.context() as patch:
            patch.setattr(module, "resolve", other)
            assert not count(tighten(step, proofs=Proofs(None)), target)


def test_a_plan_of_a_tight_step_comes_back_with_it(tightening: Callable[..., str]) -> None:
    model = Block()
    step = rewrite(memfit.capture(model.train(), (torch.randn(4, 3, 7, 6),)), proofs=PROOFS)
    plan = plan_step(step, free_of_charge(step), policy=tightening("batch-norm-in-place", share=0.5)).plan
    assert plan is not None and plan.step.digest != step.digest
    assert json.loads(plan.to_json())["tight_above_bytes"] == 0
    back = Plan.from_json(plan.to_json(), step, device="none")
    assert back.step.digest == plan.step.digest and back.to_json() == plan.to_json()
    for above in (None, 10**9):
        with pytest.raises(WrongPlan, match="this plan is for step"):
            Plan.from_dict(plan.to_dict() | {"tight_above_bytes": above}, step, device="none")
    here = replace(plan, device="here").to_dict()
    with pytest.raises(WrongPlan, match="this plan is for step"):
        Plan.from_dict(here, step, device="here", proofs=Refusing())
