"""take_apart and put_together: any nesting of tensors comes apart and goes together again."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from equivalence import structure_of

from memfit.capture.structure import fingerprint, put_together, take_apart
from memfit.errors import CaptureError


class Pair(NamedTuple):
    left: Any
    right: Any = None


@dataclasses.dataclass
class Record:
    value: Any
    items: list[Any] = dataclasses.field(default_factory=list)
    note: str = "note"


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    value: Any


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


class WithSlots:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Strict:
    """Cannot be made without arguments, and does not want its attributes set."""

    def __init__(self, value: Any, *, must: bool) -> None:
        object.__setattr__(self, "value", value)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("read-only")


class MyList(list):
    pass


class MyTuple(tuple):
    pass


def t(value: float = 0.0) -> torch.Tensor:
    return torch.full((2,), float(value))


NESTINGS: dict[str, Any] = {
    "tensor": t(),
    "tuple": (t(1), t(2)),
    "list": [t(1), [t(2)]],
    "dict": {"a": t(1), "b": {"c": t(2)}},
    "dict with odd keys": {1: t(1), (2, 3): t(2), None: 3},
    "ordered dict": collections.OrderedDict([("b", t(1)), ("a", t(2))]),
    "defaultdict": collections.defaultdict(list, {"a": t(1)}),
    "namedtuple": Pair(t(1)),
    "torch's own return type": torch.randn(3, 4).max(1),
    "dataclass": Record(t(1), [t(2)]),
    "frozen dataclass": Frozen(t(1)),
    "dataclass with slots": Slotted(t(1)),
    "object": Plain(t(1)),
    "object with slots": WithSlots(t(1)),
    "object that resists": Strict(t(1), must=True),
    "list subclass": MyList([t(1)]),
    "tuple subclass": MyTuple([t(1)]),
    "nothing": None,
    "numbers": (1, 2.5, True, "text", b"bytes", 3j),
    "torch things": (torch.float32, torch.device("cpu"), torch.Size([2, 3]), t(1)),
    "empty": ((), [], {}),
    "deep": [[[[[[{"a": (t(1), [t(2), Record(Pair(t(3), t(4)))])}]]]]]],
}


@pytest.mark.parametrize("thing", list(NESTINGS.values()), ids=list(NESTINGS))
def test_what_comes_apart_goes_together_again(thing: Any) -> None:
    tensors, skeleton = take_apart(thing)
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)
    again = put_together(skeleton, tensors)
    assert type(again) is type(thing)
    assert structure_of(again) == structure_of(thing)
    others = [tensor + 100 for tensor in tensors]
    replaced = put_together(skeleton, others)
    found, _ = take_apart(replaced)
    assert all(a is b for a, b in zip(found, others, strict=True))
    assert structure_of(replaced) == structure_of(thing)


def test_putting_together_twice_gives_two_containers() -> None:
    tensors, skeleton = take_apart({"a": [t(1)], "r": Record(t(2)), "o": Plain(t(3))})
    first, second = put_together(skeleton, tensors), put_together(skeleton, tensors)
    assert first is not second and first["a"] is not second["a"]
    assert first["r"] is not second["r"] and first["o"] is not second["o"]
    first["a"].append("mine")
    assert len(second["a"]) == 1 and len(put_together(skeleton, tensors)["a"]) == 1


def test_the_original_is_not_changed_by_putting_together() -> None:
    original = collections.OrderedDict(a=t(1))
    _, skeleton = take_apart(original)
    put_together(skeleton, [t(9)])
    assert original["a"][0] == 1


def test_a_tensor_that_occurs_twice_is_one_tensor() -> None:
    x = t(1)
    tensors, skeleton = take_apart((x, {"again": x}, [x, t(2)]))
    assert len(tensors) == 2
    a, b, c = put_together(skeleton, tensors)
    assert a is b["again"] is c[0]


def test_views_of_one_storage_are_two_tensors() -> None:
    x = t(1)
    assert len(take_apart((x, x[:1], x.view(2)))[0]) == 3


def test_things_without_tensors_come_back_as_they_are() -> None:
    settings, function = Plain(3), len
    tensors, skeleton = take_apart((settings, function, torch.nn.Linear, {"k": settings}))
    assert tensors == []
    again = put_together(skeleton, [])
    assert again[0] is settings and again[1] is function and again[3]["k"] is settings


def test_a_module_is_not_opened() -> None:
    layer = torch.nn.Linear(2, 2)
    tensors, skeleton = take_apart([layer, t(1)])
    assert len(tensors) == 1
    assert put_together(skeleton, tensors)[0] is layer


def test_order_is_that_of_the_container() -> None:
    tensors, _ = take_apart({"z": t(1), "a": t(2), "m": [t(3), t(4)]})
    assert [int(tensor[0]) for tensor in tensors] == [1, 2, 3, 4]


def test_parameters_count_as_tensors() -> None:
    p = torch.nn.Parameter(t(1.0))
    tensors, skeleton = take_apart([p])
    assert tensors[0] is p and put_together(skeleton, tensors)[0] is p


def test_what_refers_to_itself_is_refused_with_a_way_out() -> None:
    loop: list[Any] = [t(1)]
    loop.append(loop)
    with pytest.raises(CaptureError, match=r"list.*nested more than.*flat tuple or dict"):
        take_apart(loop)


# --- fingerprints ----------------------------------------------------------------------------------------------------


def print_of(thing: Any) -> Any:
    return fingerprint(take_apart(thing)[1])


@pytest.mark.parametrize("thing", list(NESTINGS.values()), ids=list(NESTINGS))
def test_fingerprints_are_hashable_and_equal_for_equal_things(thing: Any) -> None:
    assert hash(print_of(thing)) == hash(print_of(thing)) and print_of(thing) == print_of(thing)


DIFFERENT: list[tuple[Any, Any]] = [
    (1, 1.0),
    (1, True),
    (0, None),
    (0.0, -0.0),
    ("1", 1),
    ((t(), t()), [t(), t()]),
    ({"a": t(), "b": 1}, {"a": t(), "c": 1}),
    ({"a": t(), "b": t()}, {"b": t(), "a": t()}),
    (Record(t()), Record(t(), note="other")),
    (Record(t()), Frozen(t())),
    (Plain(t()), WithSlots(t())),
    ([t(), None], [None, t()]),
    ((t(), 3), (t(), 4)),
    (torch.float32, torch.float64),
    (torch.Size([2]), torch.Size([3])),
    (Pair(t(), 1), Pair(1, t())),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT, ids=lambda pair: type(pair).__name__)
def test_fingerprints_tell_different_things_apart(one: Any, other: Any) -> None:
    assert print_of(one) != print_of(other)


def test_one_tensor_twice_and_two_tensors_have_different_fingerprints() -> None:
    x = t()
    assert print_of((x, x)) != print_of((t(), t()))


def test_nan_has_one_fingerprint() -> None:
    assert print_of(float("nan")) == print_of(float("nan"))


def test_fingerprints_do_not_read_tensor_contents() -> None:
    assert print_of([t(1)]) == print_of([t(2)])


def test_settings_objects_with_equal_contents_but_changed_attributes_differ() -> None:
    settings = Plain(3)
    before = print_of((t(), settings))
    settings.value = 4
    assert print_of((t(), settings)) != before
