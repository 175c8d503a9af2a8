"""Products with few rows or terms give MKL's bits in an order that is found, and only where they are faster."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from beside_torch import INF, NAN, forbidden, needs_kernels, normal
from codec_cases import num_threads as on_threads
from equivalence import assert_same_as_eager
from torch import nn

import memfit
from memfit import stand_ins
from memfit.capture.rewrites import product_orders, rewrite, trials
from memfit.capture.rewrites.proof import Proofs, same_bits
from memfit.stand_ins import convolutions, matrices
from memfit.stand_ins.matrices import Kind, kind_of, orders
from memfit.stand_ins.orders import Order
from memfit.torch_internals import resolve

pytestmark = needs_kernels
needs_avx512 = pytest.mark.skipif(not convolutions.are_there(), reason="there is no AVX-512")

MM, ADDMM = "aten.mm.default", "aten.addmm.default"


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    with on_threads(2):
        yield


def operands(kind: Kind, rows: int, columns: int, terms: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Two matrices that lie as that kind has them."""
    one, other = normal(rows, terms, seed=seed), normal(terms, columns, seed=seed + 1)
    if kind is Kind.WITH_ROWS:
        other = other.t().contiguous().t()
    if kind is Kind.OF_FEW_TERMS:
        one = one.t().contiguous().t()
    return one, other


def kind_of_tensors(one: torch.Tensor, other: torch.Tensor) -> Kind | None:
    return kind_of((one.shape, one.stride()), (other.shape, other.stride()))


def found(target: str, *args: torch.Tensor) -> Order:
    """The order in which our kernel makes what torch makes, of those that are tried."""
    expected = resolve(target)(*args)
    kind = kind_of_tensors(*args[-2:])
    assert kind is not None
    family = stand_ins.mm if target == MM else stand_ins.addmm
    for order in orders(kind, args[-1].shape[0]):
        if same_bits(expected, getattr(family, order.name)(*args)):
            return order
    pytest.skip("this machine's MKL adds up in none of the orders")


def test_the_kind_is_a_matter_of_layout() -> None:
    for kind, shape in ((Kind.WITH_ROWS, (8, 300, 400)), (Kind.WITH_COLUMNS, (8, 300, 400))):
        assert kind_of_tensors(*operands(kind, *shape)) is kind
    assert kind_of_tensors(*operands(Kind.OF_FEW_TERMS, 300, 400, 8)) is Kind.OF_FEW_TERMS
    many = operands(Kind.WITH_ROWS, 300, 300, 400)
    small = operands(Kind.WITH_ROWS, 8, 30, 40)
    sliced = (normal(8, 800)[:, ::2], normal(400, 300))
    of_many_terms = operands(Kind.OF_FEW_TERMS, 300, 400, 200)
    for others in (many, small, sliced, of_many_terms, (normal(8, 400), normal(400, 600)[:, :300])):
        assert kind_of_tensors(*others) is None
    assert kind_of(((8,), (1,)), ((8, 9), (9, 1))) is None


@needs_avx512
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("shape", [(16, 1000, 2048), (4, 1024, 1000), (33, 600, 700), (64, 512, 512), (16, 4096, 2500)])
def test_linear_layers_are_mkls(shape: tuple[int, int, int], num_threads: int) -> None:
    batch, num_out, num_in = shape
    input, weight, bias = normal(batch, num_in), normal(num_out, num_in, seed=1), normal(num_out)
    grad = normal(batch, num_out, seed=2)
    with on_threads(num_threads):
        forward = found(ADDMM, bias, input, weight.t())
        assert found(MM, input, weight.t()) == forward
        assert found(MM, grad, weight).num_summed == min(forward.num_summed, num_out)
        assert found(MM, grad.t(), input) == Order(batch)


@needs_avx512
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *((Kind.WITH_ROWS, shape) for shape in ((1, 700, 130), (5, 333, 257), (17, 401, 200), (64, 300, 301))),
        *((Kind.WITH_COLUMNS, shape) for shape in ((1, 700, 130), (5, 333, 257), (17, 401, 200), (64, 300, 301))),
        (Kind.OF_FEW_TERMS, (130, 700, 1)),  # more terms are one sum
    ],
)
def test_sums_are_added_up_in_the_order_that_is_asked_for(kind: Kind, shape: tuple[int, int, int]) -> None:
    """One product at a time, each rounded: that can be said in torch."""
    rows, columns, terms = shape
    one, other = operands(kind, rows, columns, terms)
    bias = normal(columns, seed=5)
    for start in (None, bias) if kind is Kind.WITH_ROWS else (None,):
        expected = torch.zeros(rows, columns) if start is None else start.expand(rows, columns)
        for term in range(terms):
            expected = expected + one[:, term : term + 1] * other[term]
        made = stand_ins.mm.sums_of_1(one, other) if start is None else stand_ins.addmm.sums_of_1(start, one, other)
        assert same_bits(expected, made)


@needs_avx512
@pytest.mark.parametrize("special", [0.0, -0.0, 1e-30, -1e-30, INF, -INF, NAN])
def test_numbers_of_all_kinds(special: float) -> None:
    input, weight, bias, grad = normal(16, 600), normal(400, 600, seed=1), normal(400), normal(16, 400)
    for each in (input, weight, grad):
        each[3] = special
        each[:, 5] = special
    bias[::7] = special
    for target, args in (
        (ADDMM, (bias, input, weight.t())),
        (MM, (input, weight.t())),
        (MM, (grad, weight)),
        (MM, (grad.t(), input)),
    ):
        calm = [torch.nan_to_num(each, 0.5, 0.5, 0.5) for each in args]
        order = found(target, *calm)
        made = getattr(stand_ins.mm if target == MM else stand_ins.addmm, order.name)(*args)
        expected = resolve(target)(*args)
        # What is no number has bits of which nobody says anything.
        assert torch.equal(expected.isnan(), made.isnan())
        assert same_bits(expected.nan_to_num(nan=1.0), made.nan_to_num(nan=1.0))


def test_others_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "_multiplied", None)
    input, weight, bias = normal(8, 300), normal(400, 300, seed=1), normal(400)
    turned = weight.t()
    for args in (
        (input.double(), turned.double()),
        (normal(300, 300), turned),
        (input, turned[:, ::2]),
        (normal(8, 30), normal(30, 40)),
    ):
        assert same_bits(resolve(MM)(*args), stand_ins.mm.sums_of_192(*args))
    for order in (Order(0), Order(7)):  # no sum of nothing, and few terms are added up at once
        assert same_bits(input.t() @ input, getattr(stand_ins.mm, order.name)(input.t(), input))
    assert same_bits(resolve(MM)(input, turned), stand_ins.mm(input, turned))
    added: tuple[tuple[torch.Tensor, dict[str, Any]], ...] = (
        (bias, {"beta": 0.5}),
        (bias, {"alpha": 2}),
        (normal(8, 400), {}),
        (normal(1), {}),
        (normal(800)[::2], {}),
    )
    for start, scales in added:
        made = stand_ins.addmm.sums_of_192(start, input, turned, **scales)
        assert same_bits(resolve(ADDMM)(start, input, turned, **scales), made)
    with forbidden():
        assert same_bits(resolve(MM)(input, turned), stand_ins.mm.sums_of_192(input, turned))
    with stand_ins.torchs_own():
        assert same_bits(resolve(MM)(input, turned), stand_ins.mm.sums_of_192(input, turned))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert same_bits(resolve(MM)(input, turned), stand_ins.mm.sums_of_192(input, turned))
    finally:
        torch.set_float32_matmul_precision(before)


def test_an_order_has_an_operator() -> None:
    assert resolve("memfit_ops.mm.sums_of_192") is resolve("memfit_ops.mm.sums_of_192")
    with pytest.raises(AttributeError, match="sums is no order of sums; those are named like sums_of_16"):
        stand_ins.addmm.sums


# --- in steps --------------------------------------------------------------------------------------------------------


class Net(nn.Sequential):
    """Layers with and without bias, zeros in between."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Linear(512, 1024), nn.ReLU(), nn.Dropout(0.5), nn.Linear(1024, 1024, bias=False), nn.ReLU()),
            nn.Linear(1024, 512),
        )


def inputs(batch: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 512),)


def kept(step: memfit.Step) -> list[str]:
    return [op.stand_in for op in step.ops if ".mm." in op.stand_in or ".addmm." in op.stand_in]


@pytest.fixture
def regardless_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anything remembered."""
    monkeypatch.setattr(trials, "is_faster", lambda plain, made: True)
    monkeypatch.setattr(Proofs, "_outcome", lambda self, rewrite, signature, experiment: experiment())


def stand_in(batch: int = 8) -> list[str]:
    names = kept(rewrite(memfit.capture(Net(), inputs(batch)), proofs=Proofs(None)))
    if not names:
        pytest.skip("this machine's MKL adds up in none of the orders")
    return names


@needs_avx512
def test_layers_of_small_batches_have_stand_ins(regardless_of_time: None) -> None:
    names = stand_in()
    # Three layers forward, two gradients of inputs, three of weights: two layers have a bias.
    assert sum(".addmm." in name for name in names) == 2 and len(names) == 8
    assert names.count("memfit_ops.mm.sums_of_8") >= 3
    assert kept(rewrite(memfit.capture(Net(), inputs(100)), proofs=Proofs(None))) == []


@needs_avx512
@pytest.mark.parametrize("policy", ["keep", "sqrt", "gist-lossless"])
def test_a_model_trains_as_in_eager(policy: str, regardless_of_time: None) -> None:
    names = stand_in(3)
    assert_same_as_eager(Net(), inputs, policy=policy)
    model = memfit.fit(Net(), policy=policy)
    model(*inputs(3)).square().sum().backward()
    text = model.memfit.code  # type: ignore[union-attr]
    assert text.count("stand_ins.addmm.sums_of_") + text.count("stand_ins.mm.sums_of_") >= len(names)


@needs_avx512
def test_they_stand_in_only_where_they_are_faster(regardless_of_time: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in()
    monkeypatch.setattr(trials, "is_faster", lambda plain, made: False)
    assert kept(rewrite(memfit.capture(Net(), inputs(8)), proofs=Proofs(None))) == []


@pytest.mark.parametrize("number", [0, -1])
def test_none_stands_in_where_its_bits_are_others(
    number: int, regardless_of_time: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the least that a number can be another: the first, or the last, which no trial on some columns sees."""
    multiplied = matrices._multiplied
    calls: list[Any] = []

    def wrongly(*args: Any) -> torch.Tensor:
        made = multiplied(*args)
        calls.append(made)
        at = made.data_ptr() + 4 * (number % made.numel())
        ctypes.c_int32.from_address(at).value ^= 1
        return made

    monkeypatch.setattr(matrices, "_multiplied", wrongly)
    assert kept(rewrite(memfit.capture(Net(), inputs(8)), proofs=Proofs(None))) == []
    assert bool(calls) == convolutions.are_there()


def test_without_avx512_there_are_none(regardless_of_time: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_orders, "are_there", lambda: False)
    assert kept(rewrite(memfit.capture(Net(), inputs(8)), proofs=Proofs(None))) == []
