"""What goes in and what comes out: any nesting, any aliasing, any state the model keeps, as in eager."""

from __future__ import annotations

import collections
import dataclasses
import enum
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from equivalence import Apply, assert_same_as_eager, seeded, tensors_in, weighted_sum
from torch import nn


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor | None = None


@dataclasses.dataclass
class Record:
    logits: torch.Tensor
    hidden: list[torch.Tensor] | None = None
    name: str = "record"
    count: int = 3


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: torch.Tensor


class Plain:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.note = "plain"


class Slotted:
    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Colour(enum.Enum):
    RED = 1


class Bag(dict):
    """A dict with attributes, as libraries make them."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def rows(n: int) -> tuple[torch.Tensor]:
    return (torch.randn(n, 6),)


def wanting(n: int) -> tuple[torch.Tensor]:
    return (torch.randn(n, 6, requires_grad=True),)


def model_of(body: Any, **held: Any) -> nn.Module:
    return seeded(lambda: Apply(body, l=nn.Linear(6, 6), k=nn.Linear(6, 6), b=(6,), **held))


OUTPUTS = {
    "tensor": lambda m, x: m.l(x),
    "tuple": lambda m, x: (m.l(x), m.k(x)),
    "list": lambda m, x: [m.l(x), m.k(x)],
    "dict": lambda m, x: {"a": m.l(x), "b": m.k(x)},
    "dict out of order": lambda m, x: {"z": m.k(x), "a": m.l(x)},
    "ordered dict": lambda m, x: collections.OrderedDict([("z", m.k(x)), ("a", m.l(x))]),
    "defaultdict": lambda m, x: collections.defaultdict(list, {"z": m.k(x)}),
    "dict subclass": lambda m, x: Bag(a=m.l(x), n=3),
    "dict with integer keys": lambda m, x: {0: m.l(x), 1: {2: m.k(x)}},
    "namedtuple": lambda m, x: Pair(m.l(x), m.k(x)),
    "namedtuple with none": lambda m, x: Pair(m.l(x)),
    "dataclass": lambda m, x: Record(m.l(x), [m.k(x), x]),
    "frozen dataclass": lambda m, x: Frozen(m.l(x)),
    "plain object": lambda m, x: Plain(m.l(x)),
    "nested": lambda m, x: {"a": [m.l(x), (m.k(x), {"b": Record(m.l(x) * 2)})], "n": None, "s": "text", "f": 2.5},
    "return type of torch": lambda m, x: m.l(x).max(1),
    "empty containers": lambda m, x: (m.l(x), (), [], {}, None),
    "non-tensors": lambda m, x: (m.l(x), 3, "text", None, True, 2.5, x.shape[0], Colour.RED),
    "sizes": lambda m, x: (m.l(x), x.shape[1], torch.float32),
    "none among tensors": lambda m, x: (None, m.l(x), None, m.k(x)),
    "same tensor twice": lambda m, x: (lambda y: (y, y))(m.l(x)),
    "same tensor twice, nested": lambda m, x: (lambda y: {"a": y, "b": [y, {"c": y}]})(m.l(x)),
    "view beside its base": lambda m, x: (lambda y: (y, y[:, :2], y.t()))(m.l(x)),
    "two views of one storage": lambda m, x: m.l(x).chunk(2, 1),
    "split": lambda m, x: m.l(x).split(2, 1),
    "unbind": lambda m, x: m.l(x).unbind(1),
    "the input": lambda m, x: (m.l(x), x),
    "the input alone beside a loss": lambda m, x: (x, m.l(x).sum()),
    "view of the input": lambda m, x: (m.l(x), x[:, :2], x.t()),
    "a parameter": lambda m, x: (m.l(x), m.b),
    "view of a parameter": lambda m, x: (m.l(x), m.b[:2], m.l.weight.t()),
    "a buffer": lambda m, x: (m.l(x), m.seen),
    "view of a buffer": lambda m, x: (m.l(x), m.seen[1:]),
    "detached": lambda m, x: (lambda y: (y, y.detach(), y.detach() * 2))(m.l(x)),
    "detached input": lambda m, x: (m.l(x), x.detach()),
    "constant": lambda m, x: (m.l(x), torch.arange(4), torch.zeros(2)),
    "integers": lambda m, x: (lambda y: (y, y.argmax(1), y > 0))(m.l(x)),
    "expanded": lambda m, x: m.l(x)[:, :1].expand(-1, 5),
    "transposed": lambda m, x: m.l(x).t(),
    "non-contiguous": lambda m, x: m.l(x)[:, ::2],
    "zero-dimensional": lambda m, x: m.l(x).sum(),
    "empty": lambda m, x: (m.l(x), m.l(x)[:0]),
    "double": lambda m, x: (m.l(x), m.l(x).double()),
    "outputs of different depth": lambda m, x: (lambda a: (a, m.k(F.relu(a)), m.b * 2))(m.l(x)),
    "output read later in the model": lambda m, x: (lambda a: (a, (a * a).sum(), a.exp()))(m.l(x)),
    "output saved for backward": lambda m, x: (lambda a: (a, m.k(a)))(torch.sigmoid(m.l(x))),
    "output of dropout and its input": lambda m, x: (lambda a: (a, F.dropout(a, 0.5)))(m.l(x)),
    "in-place written and returned": lambda m, x: (lambda a: (a.relu_(), m.k(a)))(m.l(x)),
    "view written and base returned": lambda m, x: (lambda a: (a[:, 0].mul_(2), a)[1])(m.l(x) * 1),
}


@pytest.mark.parametrize("body", list(OUTPUTS.values()), ids=list(OUTPUTS))
@pytest.mark.parametrize("inputs", [rows, wanting], ids=["data", "wanting gradients"])
def test_outputs_of_any_structure_match(body: Any, inputs: Any) -> None:
    assert_same_as_eager(model_of(body, seen=torch.zeros(3)), inputs)


def test_an_object_with_slots_comes_back_as_one() -> None:
    def loss(output: Slotted, model: nn.Module) -> torch.Tensor:
        assert type(output) is Slotted
        return output.tensor.square().sum()

    assert_same_as_eager(model_of(lambda m, x: Slotted(m.l(x))), rows, loss=loss)


# --- which outputs the loss reads ---------------------------------------------------------------------------------


def heads(m: Any, x: Any) -> Any:
    shared = F.relu(m.l(x))
    return {"a": m.k(shared), "b": shared @ m.l.weight + m.b, "c": shared.sum()}


READERS = {
    "a": lambda o, m: o["a"].square().sum(),
    "b": lambda o, m: o["b"].square().sum(),
    "c": lambda o, m: o["c"] * 2,
    "a and c": lambda o, m: o["a"].square().sum() + o["c"],
    "a expanded": lambda o, m: o["a"].sum(),
    "a mean": lambda o, m: o["a"].mean(),
    "a transposed": lambda o, m: (o["a"].t() @ o["a"]).sum(),
    "a row": lambda o, m: o["a"][0].sum(),
    "a twice": lambda o, m: (o["a"] * o["a"].detach()).sum() + o["a"].max(),
    "with a parameter of the model": lambda o, m: o["a"].square().sum() + m.b.square().sum() + m.l.weight.sum(),
}


@pytest.mark.parametrize("loss", list(READERS.values()), ids=list(READERS))
def test_a_loss_that_reads_only_some_outputs_gives_the_same_gradients_and_the_same_nones(loss: Any) -> None:
    assert_same_as_eager(model_of(heads), wanting, loss=loss)


def test_the_loss_may_read_other_outputs_from_step_to_step() -> None:
    order = [READERS[k] for k in ("a", "b", "a and c", "a expanded", "c", "a", "b")]
    calls = {"n": 0}

    def loss(output: Any, model: nn.Module) -> torch.Tensor:
        calls["n"] += 1
        return order[(calls["n"] - 1) % len(order)](output, model)

    assert_same_as_eager(model_of(heads), wanting, loss=loss, steps=7, other_batch=None)


def test_an_output_the_loss_modifies_in_place_matches() -> None:
    def loss(output: torch.Tensor, model: nn.Module) -> torch.Tensor:
        output.mul_(2).relu_()
        return output.sum()

    assert_same_as_eager(model_of(lambda m, x: m.k(m.l(x))), rows, loss=loss)


def test_two_outputs_of_one_storage_one_modified_in_place_by_the_loss_match() -> None:
    def loss(output: Any, model: nn.Module) -> torch.Tensor:
        return (output[0] * 1).mul_(3).sum() + output[1].square().sum()

    assert_same_as_eager(model_of(lambda m, x: (lambda y: (y, y[:, :2]))(m.l(x))), rows, loss=loss)


# --- arguments ------------------------------------------------------------------------------------------------------


def optional(m: Any, x: Any, y: Any = None, *, scale: float = 2.0, flag: bool = False, mode: str = "a") -> Any:
    h = m.l(x) * scale
    if y is not None:
        h = h + m.k(y)
    return -h if flag or mode == "b" else h


ARGUMENTS = {
    "positional": (optional, lambda n: (torch.randn(n, 6), torch.randn(n, 6))),
    "keywords": (optional, lambda n: {"x": torch.randn(n, 6), "y": torch.randn(n, 6), "scale": 3.0}),
    "mixed": (optional, lambda n: ((torch.randn(n, 6),), {"flag": True})),
    "defaults": (optional, rows),
    "none": (optional, lambda n: (torch.randn(n, 6), None)),
    "integers": (lambda m, x, i: m.l(x)[i], lambda n: (torch.randn(n, 6), torch.arange(n).flip(0))),
    "booleans": (lambda m, x, b: m.l(x) * b, lambda n: (torch.randn(n, 6), torch.rand(n, 6) > 0.5)),
    "boolean mask for where": (
        lambda m, x, b: torch.where(b, m.l(x), m.b),
        lambda n: (torch.randn(n, 6), torch.rand(n, 6) > 0.5),
    ),
    "uint8 images": (lambda m, x: m.l(x.float() / 255), lambda n: (torch.randint(0, 256, (n, 6), dtype=torch.uint8),)),
    "nested": (
        lambda m, batch: m.l(batch["x"]) + m.k(batch["more"][0]) * batch["scale"],
        lambda n: ({"x": torch.randn(n, 6), "more": [torch.randn(n, 6)], "scale": 2},),
    ),
    "dataclass": (lambda m, r: m.l(r.logits) * r.count, lambda n: (Record(torch.randn(n, 6)),)),
    "namedtuple": (lambda m, p: m.l(p.left) + m.k(p.right), lambda n: (Pair(*torch.randn(2, n, 6)),)),
    "the same tensor twice": (
        lambda m, x, y: m.l(x) * m.k(y),
        lambda n: (lambda x: (x, x))(torch.randn(n, 6, requires_grad=True)),
    ),
    "two views of one tensor": (
        lambda m, x, y: m.l(x) * m.k(y),
        lambda n: (lambda x: (x[:, :6], x[:, 6:]))(torch.randn(n, 12)),
    ),
    "overlapping views": (
        lambda m, x, y: m.l(x) * m.k(y),
        lambda n: (lambda x: (x[:, :6], x[:, 2:]))(torch.randn(n, 8)),
    ),
    "a leaf that requires grad": (lambda m, x: m.l(x), wanting),
    "no leaf": (lambda m, x: m.l(x), lambda n: (torch.randn(n, 6, requires_grad=True) * 2,)),
    "view of a leaf": (lambda m, x: m.l(x), lambda n: (torch.randn(n, 8, requires_grad=True)[:, 1:7],)),
    "some require grad": (
        lambda m, x, y: m.l(x) * m.k(y),
        lambda n: (torch.randn(n, 6), torch.randn(n, 6, requires_grad=True)),
    ),
    "unused input that requires grad": (
        lambda m, x, y: m.l(x),
        lambda n: (torch.randn(n, 6), torch.randn(n, 6, requires_grad=True)),
    ),
    "transposed": (lambda m, x: m.l(x), lambda n: (torch.randn(6, n).t(),)),
    "strided": (lambda m, x: m.l(x), lambda n: (torch.randn(n, 12)[:, ::2],)),
    "expanded": (lambda m, x: m.l(x), lambda n: (torch.randn(1, 6).expand(n, 6),)),
    "transposed, wanting gradients": (
        lambda m, x: m.l(x),
        lambda n: (torch.randn(6, n).t().requires_grad_(),),
    ),
    "one row": (lambda m, x: m.l(x), lambda n: (torch.randn(1, 6),)),
    "no row": (lambda m, x: m.l(x), lambda n: (torch.randn(0, 6),)),
    "a number that is a tensor": (lambda m, x, s: m.l(x) * s, lambda n: (torch.randn(n, 6), torch.tensor(1.5))),
    "written by the model": (lambda m, x: m.l(x.mul_(2)), rows),
    "written by the model and its view": (
        lambda m, x, y: m.l(x.mul_(2)) + m.k(y),
        lambda n: (lambda x: (x[:, :6], x[:, 2:]))(torch.randn(n, 8)),
    ),
    "integers written by the model": (
        lambda m, x, i: m.l(x)[i.add_(1).remainder_(x.shape[0])],
        lambda n: (torch.randn(n, 6), torch.arange(n)),
    ),
    "only keywords, only integers": (
        lambda m, *, ids: m.l(F.one_hot(ids, 6).float()),
        lambda n: {"ids": torch.arange(n)},
    ),
    "var args": (lambda m, *xs: sum(m.l(x) for x in xs), lambda n: tuple(torch.randn(n, 6) for _ in range(3))),
    "var keywords": (lambda m, **xs: sum(m.l(x) for x in xs.values()), lambda n: {"p": torch.randn(n, 6)}),
    "no tensor at all": (lambda m, n: m.b * n, lambda n: (3,)),
    "nothing": (lambda m: m.b * m.l.bias, lambda n: ()),
}


@pytest.mark.parametrize(("body", "inputs"), list(ARGUMENTS.values()), ids=list(ARGUMENTS))
def test_arguments_of_any_kind_match(body: Any, inputs: Any) -> None:
    assert_same_as_eager(model_of(body), inputs)


def test_non_tensor_arguments_that_change_each_step_match() -> None:
    calls = {"n": 0}

    def inputs(n: int) -> Any:
        calls["n"] += 1
        step = (calls["n"] - 1) % 4
        return (torch.randn(n, 6),), {"scale": 1.0 + step, "flag": step == 2, "mode": "ab"[step % 2]}

    fitted = assert_same_as_eager(model_of(optional), inputs, steps=4, other_batch=None)
    assert fitted.memfit.num_captures == 4


def test_true_one_and_one_point_zero_are_different_arguments() -> None:
    values = iter([1, 1.0, True, 1, 1.0, True])
    model = model_of(lambda m, x, s: (m.l(x), s, type(s).__name__))
    assert_same_as_eager(model, lambda n: (torch.randn(n, 6), next(values)), other_batch=None)


# --- state of the model ---------------------------------------------------------------------------------------------


class Counter(nn.Module):
    """Counts its calls in a buffer and normalises by a running mean."""

    def __init__(self, assign: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.assign = assign
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.assign:
            self.calls = self.calls + 1
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        else:
            self.calls += 1
            self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return (y - self.mean) / self.calls


@pytest.mark.parametrize("assign", [False, True], ids=["in place", "by assignment"])
def test_buffers_changed_in_forward_match(assign: bool) -> None:
    assert_same_as_eager(seeded(lambda: Counter(assign)), rows)


class Queue(nn.Module):
    """A MoCo-like queue, written at a pointer that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("queue", torch.randn(8, 6))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        scores = y @ self.queue.clone().t()
        with torch.no_grad():
            places = (self.place + torch.arange(x.shape[0])) % 8
            self.queue.index_copy_(0, places, y)
            self.place.add_(x.shape[0]).remainder_(8)
        return scores


def test_a_queue_written_in_forward_matches() -> None:
    assert_same_as_eager(seeded(Queue), rows)


class Ema(nn.Module):
    """A teacher that follows its student inside forward (BYOL)."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(6, 6)
        self.teacher = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            target = self.teacher(x)
        return F.mse_loss(self.student(x), target)


def test_a_teacher_that_follows_its_student_in_forward_matches() -> None:
    assert_same_as_eager(seeded(Ema), rows)


class Aux(nn.Module):
    """Keeps an auxiliary loss as an attribute for the caller to add."""

    def __init__(self, first: str) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.gate = nn.Linear(6, 6)
        if first == "none":
            self.aux = None
        elif first == "zero":
            self.aux = torch.zeros(())
        elif first == "number":
            self.aux = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = self.gate(x).softmax(1)
        self.aux = gates.square().sum()
        return self.layer(x) * gates


@pytest.mark.parametrize("first", ["absent", "none", "zero", "number"])
@pytest.mark.parametrize("nested", [False, True], ids=["on the root", "on a child"])
def test_an_attribute_set_in_forward_and_used_by_the_loss_matches(first: str, nested: bool) -> None:
    def loss(output: torch.Tensor, model: nn.Module) -> torch.Tensor:
        return output.square().sum() + 0.1 * (model[0] if nested else model).aux

    model = seeded(lambda: nn.Sequential(Aux(first), nn.ReLU()) if nested else Aux(first))
    assert_same_as_eager(model, rows, loss=loss)


@pytest.mark.parametrize("first", ["absent", "none"])
def test_an_attribute_set_in_forward_that_the_loss_ignores_matches(first: str) -> None:
    assert_same_as_eager(seeded(lambda: Aux(first)), rows, loss=weighted_sum)


class Keeps(nn.Module):
    """Keeps its activations in a list and a dict, made anew in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.kept: Any = []
        self.by_name: Any = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.kept = [x, y]
        self.by_name = {"y": y, "n": x.shape[0]}
        return y.relu()


def test_activations_kept_in_a_fresh_list_match() -> None:
    def loss(output: torch.Tensor, model: nn.Module) -> torch.Tensor:
        assert model.by_name["n"] == output.shape[0]
        return output.sum() + model.kept[1].square().sum() + model.by_name["y"].sum()

    assert_same_as_eager(seeded(Keeps), rows, loss=loss)


class Remembers(nn.Module):
    """Carries a detached state from call to call, as truncated back-propagation does."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.cell = nn.Linear(6, 6)
        if buffer:
            self.register_buffer("state", torch.zeros(1, 6))
        else:
            self.state = torch.zeros(1, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.cell(x) + self.state)
        self.state = y.detach().mean(0, keepdim=True)
        return y


@pytest.mark.parametrize("buffer", [False, True], ids=["plain attribute", "buffer"])
def test_a_state_carried_from_call_to_call_matches(buffer: bool) -> None:
    assert_same_as_eager(seeded(lambda: Remembers(buffer)), rows)


class Lazy(nn.Module):
    """Makes a constant at the first call and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.cache: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cache is None:
            self.cache = torch.arange(6.0) + 1
        return self.layer(x) * self.cache


def test_a_constant_made_at_the_first_call_matches() -> None:
    assert_same_as_eager(seeded(Lazy), rows)


class Table(nn.Module):
    """Caches a table per length, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.tables: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] not in self.tables:
            self.tables[x.shape[0]] = torch.arange(float(x.shape[0]))[:, None]
        return self.layer(x) + self.tables[x.shape[0]]


def test_a_table_cached_per_length_matches() -> None:
    assert_same_as_eager(seeded(Table), rows)


class Ordered(nn.Module):
    """Walks over an OrderedDict of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.order = collections.OrderedDict(a=self.first, b=self.second)
        self.scales = collections.OrderedDict(a=2.0, b=3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, layer in self.order.items():
            x = layer(x) * self.scales[name]
        return x


def test_modules_walked_through_an_ordered_dict_match() -> None:
    assert_same_as_eager(seeded(Ordered), rows)


SHARING = {
    "one layer twice": lambda: Apply(lambda m, x: m.l(F.relu(m.l(x))), l=nn.Linear(6, 6)),
    "one layer under two names": lambda: two_names(nn.Linear(6, 6)),
    "tied weights": lambda: tied(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))),
    "tied transposed": lambda: Apply(lambda m, x: F.linear(F.relu(F.linear(x, m.w)), m.w.t()), w=(5, 6)),
    "tied buffer": lambda: Apply(
        lambda m, x: m.l(x) * m.s + m.t, l=nn.Linear(6, 6), s=(BUFFER := torch.ones(6)), t=BUFFER
    ),
    "batch norm twice": lambda: Apply(lambda m, x: m.n(m.n(m.l(x))), l=nn.Linear(6, 6), n=nn.BatchNorm1d(6)),
    "dropout twice": lambda: Apply(lambda m, x: m.d(m.l(m.d(x))), l=nn.Linear(6, 6), d=nn.Dropout(0.5)),
    "recursive": lambda: Apply(lambda m, x: recurse(m, x, 4), l=nn.Linear(6, 6)),
    "module list": lambda: Apply(
        lambda m, x: sum(layer(x) for layer in m.ls), ls=nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
    ),
    "module dict": lambda: Apply(
        lambda m, x: m.ls["b"](m.ls["a"](x)), ls=nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)})
    ),
    "parameter list": lambda: Apply(
        lambda m, x: sum(x * p for p in m.ps), ps=nn.ParameterList(nn.Parameter(torch.randn(6)) for _ in range(3))
    ),
    "parameter dict": lambda: Apply(
        lambda m, x: x * m.ps["a"] + m.ps["b"], ps=nn.ParameterDict({"a": torch.randn(6), "b": torch.randn(6)})
    ),
    "layer skipped": lambda: Apply(lambda m, x: m.l(x), l=nn.Linear(6, 6), unused=nn.Linear(6, 6)),
    "parameter used as data only": lambda: Apply(lambda m, x: m.l(x) * m.s.detach(), l=nn.Linear(6, 6), s=(6,)),
    "child called by a method": lambda: Apply(
        lambda m, x: Apply.forward(m.c, x), c=Apply(lambda m, x: x * m.s, s=(6,))
    ),
    "parameters that are views": lambda: views_of_one(),
}


def two_names(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.ReLU(), layer)


def tied(model: nn.Sequential) -> nn.Module:
    model[2].weight = model[0].weight
    return model


def recurse(m: Any, x: torch.Tensor, depth: int) -> torch.Tensor:
    return x if depth == 0 else torch.tanh(m.l(recurse(m, x, depth - 1)))


def views_of_one() -> nn.Module:
    """Two parameters that look at one flat storage, as flattened optimizers make them."""
    flat = torch.randn(12)
    return Apply(lambda m, x: x * m.p + m.q, p=nn.Parameter(flat[:6]), q=nn.Parameter(flat[6:]))


@pytest.mark.parametrize("build", list(SHARING.values()), ids=list(SHARING))
def test_shared_and_tied_things_match(build: Any) -> None:
    assert_same_as_eager(seeded(build), rows)


def test_outputs_of_hooks_on_the_root_match() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU()))
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.register_forward_hook(lambda module, args, output: output + 1)
    assert_same_as_eager(model, rows)


def test_modules_without_any_parameter_match() -> None:
    assert_same_as_eager(nn.Sequential(nn.ReLU(), nn.Softmax(1)), wanting)
    assert_same_as_eager(nn.Identity(), wanting, loss=lambda o, m: o.square().sum())


def test_a_model_whose_output_needs_no_gradient_matches() -> None:
    model = model_of(lambda m, x: (m.l(x).detach(), m.b))
    assert_same_as_eager(model, rows, loss=lambda o, m: (o[0] * o[1]).sum())


def test_every_tensor_of_a_hundred_outputs_matches() -> None:
    model = model_of(lambda m, x: [m.l(x) * i for i in range(100)])
    fitted = assert_same_as_eager(model, rows, steps=2)
    assert len(tensors_in(fitted(torch.randn(3, 6)))) == 100
