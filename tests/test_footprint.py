"""What the maps of a step take: both allocators against their definitions, and against the ledger."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from planning import TENSOR, chain, planned_network, tanh_storages
from torch import nn

import memfit
from memfit.capture.step import Kind
from memfit.cost.costs import free_of_charge
from memfit.plan.decisions import Encode, Offload, Recompute
from memfit.plan.footprint import Buffer, Footprint, Role, buffers_of, dynamic_bytes, image_storages, static_bytes
from memfit.plan.ledger import KINDS, Ledger
from memfit.plan.lower import lower, lower_keep
from memfit.plan.program import Program

GENERATE = settings(phases=[Phase.explicit, Phase.generate], deadline=None, max_examples=300)


@st.composite
def buffers(draw: st.DrawFn) -> list[Buffer]:
    found = []
    for number in range(draw(st.integers(0, 12))):
        first = draw(st.integers(0, 15))
        role = draw(st.sampled_from([Role.FEATURE, Role.DECODED, Role.GRADIENT]))
        found.append(Buffer(draw(st.integers(0, 6)), first, first + draw(st.integers(0, 8)), role, number))
    return found


def cntk(given: list[Buffer]) -> list[list[Buffer]]:
    """The groups, word by word: by size, each into the first group without an overlap."""
    groups: list[list[Buffer]] = []
    for buffer in sorted(given, key=lambda b: (-b.bytes, b.first, b.last)):
        for group in groups:
            if not any(set(alive(buffer)) & set(alive(member)) for member in group):
                group.append(buffer)
                break
        else:
            groups.append([buffer])
    return groups


def alive(buffer: Buffer) -> range:
    return range(buffer.first, buffer.last + 1)


@GENERATE
@given(buffers())
def test_both_are_what_they_are_defined_to_be(drawn: list[Buffer]) -> None:
    assert static_bytes(drawn) == sum(max(b.bytes for b in group) for group in cntk(drawn))
    moments = [sum(b.bytes for b in drawn if at in alive(b)) for at in range(30)]
    assert dynamic_bytes(drawn) == max(moments)
    assert dynamic_bytes(drawn) <= static_bytes(drawn) <= sum(b.bytes for b in drawn)
    for one in drawn:
        for other in drawn:
            assert one.overlaps(other) == bool(set(alive(one)) & set(alive(other)))


@GENERATE
@given(buffers())
def test_decoded_copies_cost_nothing_where_kernels_read_codes(drawn: list[Buffer]) -> None:
    found = Footprint.of(drawn)
    assert (found.static_bytes, found.dynamic_bytes) == (static_bytes(drawn), dynamic_bytes(drawn))
    without = [replace(b, bytes=0) if b.role is Role.DECODED else b for b in drawn]
    assert found.direct_bytes == dynamic_bytes(without) <= found.dynamic_bytes


def test_thousands_of_buffers_take_no_time() -> None:
    draw = torch.Generator().manual_seed(0)
    first = torch.randint(0, 4000, (4000,), generator=draw).tolist()
    length = torch.randint(0, 2000, (4000,), generator=draw).tolist()
    size = torch.randint(1, 1 << 20, (4000,), generator=draw).tolist()
    many = [Buffer(*b, Role.FEATURE, 0) for b in zip(size, first, map(int.__add__, first, length), strict=True)]
    start_s = time.perf_counter()
    assert dynamic_bytes(many) < static_bytes(many) < sum(size)
    assert time.perf_counter() - start_s < 5


def test_a_chain_by_hand() -> None:
    step = chain(3)
    found = buffers_of(lower_keep(step))
    maps = [b for b in found if b.role is Role.FEATURE and b.bytes == TENSOR]
    gradients = [b for b in found if b.role is Role.GRADIENT and b.bytes == TENSOR]
    # x * w and three tanhs; the sum's gradient is an expanded number, and the last product is handed over.
    assert len(maps) == 4 and len(gradients) == 3
    assert {b.storage for b in maps} >= set(tanh_storages(step))
    # The first tanh of backward finds three results; later ones one less, and the gradient before.
    assert dynamic_bytes(found) // TENSOR == 4
    assert static_bytes(found) // TENSOR == 4
    assert image_storages(step) and all(b.role is not Role.IMAGE for b in found)
    with_images = buffers_of(lower_keep(step), with_images=True)
    (image,) = [b for b in with_images if b.role is Role.IMAGE]
    assert (image.bytes, image.first) == (TENSOR, 0) and len(with_images) == len(found) + 1
    assert dynamic_bytes(with_images) // TENSOR == 5


def assert_as_the_ledger_says(program: Program) -> list[Buffer]:
    """The bytes of maps at every instruction are the ledger's, by code that shares nothing with it."""
    found = buffers_of(program)
    wanted = [KINDS.index(Kind.SAVED), KINDS.index(Kind.TRANSIENT)]
    entries = [sum(entry.bytes[k] for k in wanted) for entry in Ledger.of(program).entries]
    changes = [0] * (len(entries) + 1)
    for buffer in found:
        changes[buffer.first] += buffer.bytes
        changes[buffer.last + 1] -= buffer.bytes
    assert list(accumulate(changes))[:-1] == entries
    assert dynamic_bytes(found) == max(entries) > 0
    return found


def test_dynamic_is_the_ledgers_whatever_is_decided() -> None:
    step = chain(6)
    tanhs = tanh_storages(step)
    costs = free_of_charge(step, tiers=["host"])
    for decisions in (
        {},
        {tanhs[1]: Recompute(), tanhs[2]: Recompute()},
        {tanhs[1]: Offload("host"), tanhs[3]: Offload("host")},
        {tanhs[0]: Encode("bf16"), tanhs[4]: Encode("fp8")},
    ):
        assert_as_the_ledger_says(lower(step, decisions, costs))


def test_a_second_copy_goes_with_the_call_that_makes_it() -> None:
    step = planned_network("alexnet", batch=2)
    (pool, *_) = [op for op in step.ops if op.target == "aten.max_pool2d_with_indices.default"]
    result, winners = (step.values[value].storage for value in pool.made)
    found = assert_as_the_ledger_says(lower(step, {result: Recompute()}, free_of_charge(step)))
    kept, copy = sorted((b for b in found if b.storage == winners), key=lambda b: b.first)
    assert kept.first < copy.first == copy.last < kept.last
    assert len([b for b in found if b.storage == result]) == 2  # two lives


@pytest.mark.parametrize(
    ("name", "rewritten"), [("alexnet", True), ("alexnet", False), ("resnet18", True), ("googlenet", False)]
)
def test_dynamic_is_the_ledgers_of_networks(name: str, rewritten: bool) -> None:
    found = assert_as_the_ledger_says(lower_keep(planned_network(name, batch=2, rewritten=rewritten)))
    assert dynamic_bytes(found) <= static_bytes(found) < sum(b.bytes for b in found)


class Twice(nn.Module):
    """One weight, two uses: its gradient comes in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x @ self.w).tanh() @ self.w).sum()


def test_no_part_of_a_parameters_gradient_is_a_map() -> None:
    step = memfit.capture(Twice(), (torch.zeros(8, 32),))
    parts = {step.values[gradient.value].storage for gradient in step.gradients}
    assert len(parts) == 2
    found = buffers_of(lower_keep(step))
    assert not parts & {b.storage for b in found}
    assert {b.role for b in found} == {Role.FEATURE, Role.GRADIENT}


def test_codes_and_decoded_copies_are_told_apart() -> None:
    step = chain(6)
    third = tanh_storages(step)[2]
    found = buffers_of(lower(step, {third: Encode("bf16")}, free_of_charge(step)))
    (code,) = [b for b in found if b.role is Role.CODE]
    (decoded,) = [b for b in found if b.role is Role.DECODED]
    (plain,) = [b for b in found if b.storage == third]
    assert (code.bytes, decoded.bytes, plain.bytes) == (TENSOR // 2, TENSOR, TENSOR)
    # One after the other, with a moment in between at which both are there.
    assert plain.overlaps(code) and code.overlaps(decoded) and not plain.overlaps(decoded)
