"""memfit.capture: what a Step says about a training step."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equivalence import Apply, bits, seeded
from torch import nn

import memfit
from memfit.capture.needs import Need
from memfit.capture.step import Half, Kind, Origin, Step


def step_of(body: Any, *args: Any, **held: Any) -> Step:
    model = seeded(lambda: Apply(body, **held))
    return memfit.capture(model, args or (torch.randn(3, 6),))


def op_of(step: Step, name: str, half: Half = Half.FORWARD) -> Any:
    (found,) = [op for op in step.ops if op.half is half and op.target.split(".")[1] == name]
    return found


def storage_of_output(step: Step, name: str) -> int:
    return step.values[op_of(step, name).made[0]].storage


def net() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(36, 2),
        )
    )


# --- aliases and writes ----------------------------------------------------------------------------------------------

VIEWS: dict[str, tuple[Any, str]] = {
    "view": (lambda m, x: (x * m.w).view(-1, 2, 3) * 2, "view"),
    "transpose": (lambda m, x: (x * m.w).t() * 2, "t"),
    "slice": (lambda m, x: (x * m.w)[:, :2] * 2, "slice"),
    "expand": (lambda m, x: (x * m.w)[:, None].expand(3, 2, 6) * 2, "expand"),
    "select": (lambda m, x: (x * m.w)[0] * 2, "select"),
    "permute": (lambda m, x: (x * m.w).permute(1, 0) * 2, "permute"),
    "detach": (lambda m, x: (x * m.w).detach() * m.w, "detach"),
    "unsqueeze": (lambda m, x: (x * m.w).unsqueeze(0) * 2, "unsqueeze"),
    "as_strided": (lambda m, x: (x * m.w).as_strided((2, 2), (6, 1)) * 2, "as_strided"),
    "diagonal": (lambda m, x: (x * m.w).diagonal() * 2, "diagonal"),
}


@pytest.mark.parametrize(("body", "name"), list(VIEWS.values()), ids=list(VIEWS))
def test_views_share_the_storage_of_their_base(body: Any, name: str) -> None:
    step = step_of(body, w=(6,))
    product = next(op for op in step.ops if op.target == "aten.mul.Tensor")
    assert storage_of_output(step, name) == step.values[product.made[0]].storage
    view = step.values[op_of(step, name).made[0]]
    storage = step.storage[view.storage]
    assert view.id in storage.values and len(storage.values) >= 2
    assert storage.bytes == 3 * 6 * 4


def test_a_copy_has_a_storage_of_its_own() -> None:
    step = step_of(lambda m, x: (x * m.w).t().contiguous() * 2, w=(6,))
    assert storage_of_output(step, "clone") != storage_of_output(step, "t")


def test_views_of_parameters_are_on_the_parameters_storage() -> None:
    step = step_of(lambda m, x: x @ m.w.t(), w=(4, 6))
    source = next(s for s in step.sources if s.origin is Origin.PARAMETER)
    assert storage_of_output(step, "t") == step.values[source.value].storage
    assert step.storage[storage_of_output(step, "t")].kind is Kind.PARAMETER


def test_writes_are_recorded_with_the_storage_they_change() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * m.w
        y[:, :2].mul_(2)
        return y.relu_()

    step = step_of(body, w=(6,))
    product = next(op for op in step.ops if op.target == "aten.mul.Tensor" and op.half is Half.FORWARD)
    storage = step.values[product.made[0]].storage
    writers = [op.target for op in step.ops if storage in op.writes]
    assert writers == ["aten.mul_.Tensor", "aten.relu_.default"]
    assert step.storage[storage].writers == tuple(i for i, op in enumerate(step.ops) if op.writes == (storage,))


def test_a_write_makes_a_new_value_on_the_same_storage() -> None:
    step = step_of(lambda m, x: (x * m.w).add_(1).mul_(2), w=(6,))
    made = [
        step.values[op.made[0]] for op in step.ops if op.half is Half.FORWARD and op.target.split(".")[1] != "clone"
    ]
    assert len({value.id for value in made}) == len(made) == 3
    assert len({value.storage for value in made}) == 1


def test_batch_norm_writes_its_running_statistics() -> None:
    step = memfit.capture(net(), (torch.randn(2, 3, 8, 8),))
    written = {
        step.source_of[v].name
        for op in step.ops
        for s in op.writes
        for v in step.storage[s].values
        if v in step.source_of
    }
    assert written == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_writes_into_an_input_are_seen() -> None:
    step = step_of(lambda m, x: x.mul_(2) * m.w, w=(6,))
    (source,) = [s for s in step.sources if s.origin is Origin.INPUT]
    assert step.values[source.value].storage in op_of(step, "mul_").writes


# --- halves, sources, gradients --------------------------------------------------------------------------------------


def test_forward_ops_come_first_and_backward_ops_follow() -> None:
    step = memfit.capture(net(), (torch.randn(2, 3, 8, 8),))
    halves = [op.half for op in step.ops]
    assert halves == sorted(halves, key=lambda half: half is Half.BACKWARD)
    assert 0 < step.num_forward < len(step.ops)
    assert halves[: step.num_forward] == [Half.FORWARD] * step.num_forward


def test_sources_say_what_each_tensor_is() -> None:
    step = memfit.capture(net(), (torch.randn(2, 3, 8, 8),))
    by_origin = {origin: [s.name for s in step.sources if s.origin is origin] for origin in Origin}
    assert by_origin[Origin.PARAMETER] == ["0.weight", "0.bias", "1.weight", "1.bias", "5.weight", "5.bias"]
    assert by_origin[Origin.BUFFER] == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert by_origin[Origin.INPUT] == ["input_0"] and len(by_origin[Origin.TANGENT]) == 1
    assert all(s.requires_grad == (s.origin is Origin.PARAMETER) for s in step.sources)


def test_there_is_a_gradient_for_each_parameter_in_the_order_they_are_made() -> None:
    step = memfit.capture(net(), (torch.randn(2, 3, 8, 8),))
    names = [step.source_of[g.of].name for g in step.gradients]
    assert names == ["5.bias", "5.weight", "1.weight", "1.bias", "0.weight", "0.bias"]
    for gradient in step.gradients:
        assert step.values[gradient.value].shape == step.values[gradient.of].shape


def test_a_frozen_parameter_has_no_gradient() -> None:
    model = net()
    model[0].weight.requires_grad_(False)
    step = memfit.capture(model, (torch.randn(2, 3, 8, 8),))
    assert "0.weight" not in [step.source_of[g.of].name for g in step.gradients]


def test_a_tied_weight_is_one_source() -> None:
    step = step_of(lambda m, x: F.linear(F.relu(F.linear(x, m.w)), m.w.t()), w=(5, 6))
    assert sum(s.origin is Origin.PARAMETER for s in step.sources) == 1


def test_kinds_of_storages_add_up() -> None:
    model = net()
    step = memfit.capture(model, (torch.randn(2, 3, 8, 8),))
    parameters = sum(p.numel() * 4 for p in model.parameters())
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    assert step.parameter_bytes == parameters + buffers
    assert step.gradient_bytes == parameters
    assert step.saved_bytes > 0
    assert {storage.kind for storage in step.storages} == set(Kind)


def test_lives_of_storages_are_consistent() -> None:
    step = memfit.capture(net(), (torch.randn(2, 3, 8, 8),))
    for storage in step.storages:
        if storage.maker is not None:
            uses = [i for i in (storage.last_forward, storage.first_backward, storage.last_backward) if i is not None]
            assert all(storage.maker <= use for use in uses)
        if storage.first_backward is not None:
            assert step.num_forward <= storage.first_backward <= storage.last_backward
        if storage.last_forward is not None:
            assert storage.last_forward < step.num_forward


def test_random_ops_are_marked() -> None:
    step = step_of(lambda m, x: F.dropout(x * m.w, 0.5), w=(6,))
    assert len([op for op in step.ops if op.random]) == 1
    assert not any(op.random for op in step.ops if op.half is Half.BACKWARD)


def test_needs_say_what_a_use_reads() -> None:
    step = memfit.capture(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), (torch.randn(3, 6),))
    backward = next(i for i, op in enumerate(step.ops) if op.target == "aten.threshold_backward.default")
    needs = {use.operand: use.need for use in step.uses if use.op == backward}
    assert Need.SIGN in needs.values() and Need.VALUE in needs.values()


# --- where it comes from ---------------------------------------------------------------------------------------------


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x * self.weight)


LINE = Scale.forward.__code__.co_firstlineno + 1


def test_each_op_names_its_module_and_the_line_that_asked_for_it() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ModuleDict({"deep": Scale()})["deep"])
    model = nn.Sequential(model, Scale())
    step = memfit.capture(model, (torch.randn(3, 6),))
    for target in ("aten.mul.Tensor", "aten.sigmoid.default"):
        found = [(op.path, op.source) for op in step.ops if op.target == target and op.half is Half.FORWARD]
        assert found == [("0.1", f"tests/test_capture.py:{LINE}"), ("1", f"tests/test_capture.py:{LINE}")]


def test_backward_ops_name_the_module_and_line_of_the_forward_op_they_belong_to() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 6), Scale()), nn.Linear(6, 2))
    step = memfit.capture(model, (torch.randn(3, 6),))
    backward = [op for op in step.ops if op.half is Half.BACKWARD]
    (sigmoid,) = [op for op in backward if op.target == "aten.sigmoid_backward.default"]
    assert (sigmoid.path, sigmoid.source) == ("0.1", f"tests/test_capture.py:{LINE}")
    assert {op.path for op in backward} >= {"1", "0.1", "0.0"}
    order = list(dict.fromkeys(op.path for op in backward))
    assert order.index("1") < order.index("0.1") < order.index("0.0")


def test_the_loss_can_be_part_of_the_step() -> None:
    model = nn.Sequential(nn.Linear(6, 5))
    args = (torch.randn(3, 6),)
    alone = memfit.capture(model, args)
    whole = memfit.capture(model, args, loss=F.cross_entropy, targets=(torch.tensor([0, 1, 2]),))
    assert len(whole.ops) > len(alone.ops)
    assert any("nll_loss" in op.target for op in whole.ops)
    assert [whole.values[v].shape for v in whole.outputs] == [()]
    assert [s.name for s in whole.sources if s.origin is Origin.INPUT] == ["input_0", "input_1"]


# --- nothing real ----------------------------------------------------------------------------------------------------


def test_capture_touches_nothing() -> None:
    model = net().train()
    before = {name: bits(t) for name, t in model.state_dict().items()}
    held = {name: dict(m.__dict__) for name, m in model.named_modules()}
    torch.manual_seed(0)
    state = torch.get_rng_state()
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    copy = x.clone()
    memfit.capture(model, (x,), loss=lambda y: y.sum())
    assert {name: bits(t) for name, t in model.state_dict().items()} == before
    assert {name: dict(m.__dict__) for name, m in model.named_modules()} == held
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(x, copy)


def test_a_model_on_the_meta_device_is_captured_for_the_device_asked() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(100_000, 100_000), nn.ReLU(), nn.Linear(100_000, 10))
    x = torch.empty(1_000_000, 100_000, device="meta")
    step = memfit.capture(model, (x,))
    assert {value.device for value in step.values} == {"cpu"}
    assert step.parameter_bytes > 40 * 10**9 and step.saved_bytes > 300 * 10**9
    with pytest.raises(memfit.MemfitError, match="device 'nowhere'"):
        memfit.capture(model, (x,), device="nowhere")


def test_a_meta_model_and_a_real_one_give_the_same_step() -> None:
    real = memfit.capture(net(), (torch.randn(2, 3, 8, 8),))
    with torch.device("meta"):
        model = net()
        x = torch.randn(2, 3, 8, 8)
    assert memfit.capture(model, (x,)).digest == real.digest


# --- pure data -------------------------------------------------------------------------------------------------------


def test_a_step_is_json() -> None:
    step = memfit.capture(net(), (torch.randn(2, 3, 8, 8),))
    text = json.dumps(step.to_dict())
    assert json.loads(text) == json.loads(json.dumps(memfit.capture(net(), (torch.randn(2, 3, 8, 8),)).to_dict()))


def test_a_step_holds_no_tensor() -> None:
    import gc

    step = memfit.capture(net(), (torch.randn(2, 3, 8, 8),))
    seen: set[int] = set()
    stack: list[Any] = [step.ops, step.values, step.sources, step.gradients, step.outputs]
    while stack:
        thing = stack.pop()
        if id(thing) in seen or isinstance(thing, (str, int, float, type)):
            continue
        seen.add(id(thing))
        assert not isinstance(thing, (torch.Tensor, nn.Module))
        stack += [r for r in gc.get_referents(thing) if not isinstance(r, type)]


def test_the_digest_is_stable_and_tells_steps_apart() -> None:
    def digest(model: nn.Module, *args: Any, **options: Any) -> str:
        return memfit.capture(model, args, **options).digest

    x = torch.randn(2, 3, 8, 8)
    first = digest(net(), x)
    assert first == digest(net(), torch.randn(2, 3, 8, 8))
    assert first != digest(net(), torch.randn(3, 3, 8, 8))
    assert first != digest(net().double(), x.double())
    assert first != digest(net(), x, loss=lambda y: y.sum())
    assert first != digest(net().requires_grad_(False).train(), x.requires_grad_())
    assert len(first) == 16 and int(first, 16) >= 0


def test_the_digest_is_the_same_in_another_process() -> None:
    script = (
        "import torch, memfit; from torch import nn; torch.set_num_threads(1);"
        "m = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5));"
        "print(memfit.capture(m, (torch.randn(2, 3, 8, 8),), name='n').digest)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))
    assert memfit.capture(model, (torch.randn(2, 3, 8, 8),), name="n").digest == run.stdout.strip()


def test_capturing_twice_in_one_process_gives_the_same_digest_after_other_captures() -> None:
    first = memfit.capture(net(), (torch.randn(2, 3, 8, 8),)).digest
    memfit.capture(nn.Linear(3, 3), (torch.randn(2, 3),))
    assert memfit.capture(net(), (torch.randn(2, 3, 8, 8),)).digest == first


def test_a_step_prints_as_a_table() -> None:
    step = memfit.capture(net(), (torch.randn(2, 3, 8, 8),), name="small")
    table = str(step)
    lines = table.splitlines()
    assert lines[0].split() == ["#", "half", "op", "makes", "bytes", "kind", "module", "source"]
    assert len(lines) == len(step.ops) + 3
    assert "aten.convolution.default" in table and "1 " in table and "writes" in table and "saved" in table
    assert lines[-1] == repr(step) and repr(step).startswith("Step(small: ")
    assert f"{step.num_forward} forward" in repr(step)
    short = step.table(max_rows=3).splitlines()
    assert len(short) == 7 and "more ops" in short[-2]


@pytest.mark.parametrize("kwargs", [{"x": torch.ones(3, 6)}, {"x": torch.ones(3, 6), "scale": 2.0}])
def test_keywords_are_passed(kwargs: dict[str, Any]) -> None:
    model = seeded(lambda: Apply(lambda m, *, x, scale=1.0: x * m.w * scale, w=(6,)))
    assert memfit.capture(model, kwargs=kwargs).num_forward >= 2


def test_a_fitted_model_can_be_captured_and_stays_fitted() -> None:
    model = memfit.fit(net())
    step = memfit.capture(model, (torch.randn(2, 3, 8, 8),))
    assert step.digest == memfit.capture(memfit.unfit(net()), (torch.randn(2, 3, 8, 8),)).digest
    assert "memfit" in model.__dict__ and model.memfit.num_captures == 0
