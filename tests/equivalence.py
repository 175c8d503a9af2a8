"""The one question of the exactness tests: does a fitted model do, bit for bit, what the same model does eagerly?

    assert_same_as_eager(nn.Linear(4, 2), lambda n: (torch.randn(n, 4),))

Both arms are deep copies of the model, see the same inputs and the same random stream, and take the same optimizer
steps. Everything a user could look at is compared: outputs with their nesting, layout and aliasing, the loss, each
gradient (also whether there is one), input gradients, inputs, buffers, parameters, and the state of the generator.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

import memfit

torch.set_num_threads(1)

Inputs = Callable[[int], Any]
Loss = Callable[..., torch.Tensor]


class Apply(nn.Module):
    """A module made of one function: `Apply(lambda m, x: x @ m.w, w=(3, 4))`. Tuples become parameters."""

    def __init__(self, body: Callable[..., Any], **held: Any) -> None:
        super().__init__()
        self.body = body
        for name, value in held.items():
            if isinstance(value, tuple):
                value = nn.Parameter(torch.randn(value))
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The model that `build` makes from this seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def weighted_sum(output: Any, model: nn.Module | None = None) -> torch.Tensor:
    """A loss that reads every differentiable tensor of the output, each element with a weight of its own."""
    terms = []
    for index, tensor in enumerate(t for t in tensors_in(output) if t.requires_grad):
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        count = torch.arange(tensor.numel(), dtype=torch.float64).reshape(tensor.shape)
        terms.append((tensor * torch.cos(count + index + 2).to(tensor.dtype)).sum())
    return functools.reduce(torch.add, terms)


def assert_same_as_eager(
    model: nn.Module | Callable[[], nn.Module],
    inputs: Inputs,
    *,
    steps: int = 3,
    batch: int = 3,
    other_batch: int | None = 2,
    loss: Loss = weighted_sum,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    backward_inside: bool = False,
    micro_batches: int = 1,
    between: Callable[[nn.Module, int], None] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    train: bool = True,
    **options: Any,
) -> nn.Module:
    """Train a copy eagerly and a copy fitted, and compare all there is; returns the fitted copy.

    Args:
        model: the model, or for one that cannot be deep-copied a function that builds it.
        inputs: given a batch size, the call's arguments: a tuple, a dict of keywords, or (tuple, dict).
        other_batch: a last step runs with this batch size (None: it does not).
        loss: called as loss(output, model).
        around: a context that forward runs in; `backward_inside` puts backward in it too.
        micro_batches: how many forwards and backwards accumulate before each optimizer step.
        between: called as between(model, step) before each step, on both arms.
    """
    batches = [batch] * steps + ([other_batch] if other_batch is not None else [])
    train_arm = functools.partial(
        _train,
        inputs=inputs,
        batches=batches,
        loss=loss,
        around=around,
        backward_inside=backward_inside,
        micro_batches=micro_batches,
        between=between,
        optimizer=optimizer or functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    )

    def fresh() -> nn.Module:
        made = copy.deepcopy(model) if isinstance(model, nn.Module) else seeded(model)
        return made.train() if train else made

    expected = train_arm(fresh())
    fitted = memfit.fit(fresh(), **options)
    with own_forward_calls(fitted) as calls:
        found = train_arm(fitted)
    assert fitted.memfit.num_captures >= 1, "the fitted model never captured"
    assert not calls, f"the fitted model's own forward ran {len(calls)} times"
    assert_same_trace(expected, found)
    return fitted


def _train(
    model: nn.Module,
    *,
    inputs: Inputs,
    batches: list[int],
    loss: Loss,
    around: Callable[[], contextlib.AbstractContextManager[Any]],
    backward_inside: bool,
    micro_batches: int,
    between: Callable[[nn.Module, int], None] | None,
    optimizer: Callable[..., torch.optim.Optimizer],
) -> dict[str, Any]:
    """Take one step per batch size; what could be seen on the way, by name."""
    trace: dict[str, Any] = {}
    parameters = list(model.parameters())
    updates = optimizer(parameters) if parameters else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        for step, batch in enumerate(batches):
            if between is not None:
                between(model, step)
            for micro in range(micro_batches):
                where = f"step {step}.{micro}" if micro_batches > 1 else f"step {step}"
                args, kwargs = make_call(inputs, batch, seed=1000 + 10 * step + micro)
                passed = tensors_in((args, kwargs))
                for tensor in passed:
                    if tensor.requires_grad and not tensor.is_leaf:
                        tensor.retain_grad()
                with around():
                    output = model(*args, **kwargs)
                    if backward_inside:
                        value = loss(output, model)
                        _record_forward(trace, where, model, output, passed, value)
                        value.backward()
                if not backward_inside:
                    value = loss(output, model)
                    _record_forward(trace, where, model, output, passed, value)
                    value.backward()
                _record_backward(trace, where, model, passed)
                del output, value
            if updates is not None:
                updates.step()
                updates.zero_grad(set_to_none=True)
        record_state(trace, "end", model)
    return trace


def make_call(inputs: Inputs, batch: int, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments from `inputs`, drawn from a generator state of their own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = inputs(batch)
    if isinstance(made, dict):
        return (), made
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], tuple) and isinstance(made[1], dict):
        return made
    assert isinstance(made, tuple), "inputs() returns a tuple, a dict, or (tuple, dict)"
    return made, {}


def _record_forward(
    trace: dict[str, Any], where: str, model: nn.Module, output: Any, passed: list[Any], loss: torch.Tensor
) -> None:
    trace[f"{where}: output structure"] = structure_of(output)
    trace[f"{where}: aliases"] = aliases_of(output, passed, model)
    for index, tensor in enumerate(tensors_in(output)):
        trace[f"{where}: output {index}"] = bits(tensor)
    for index, tensor in enumerate(passed):
        trace[f"{where}: input {index} after forward"] = bits(tensor)
    trace[f"{where}: loss"] = bits(loss)
    record_state(trace, f"{where} forward", model)


def _record_backward(trace: dict[str, Any], where: str, model: nn.Module, passed: list[Any]) -> None:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        trace[f"{where}: gradient of {name}"] = bits(parameter.grad)
    for index, tensor in enumerate(passed):
        if tensor.requires_grad:
            trace[f"{where}: gradient of input {index}"] = bits(tensor.grad)
    record_state(trace, f"{where} backward", model)


def record_state(trace: dict[str, Any], where: str, model: nn.Module) -> None:
    """Parameters, buffers and the generator, as they are now."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        trace[f"{where}: parameter {name}"] = bits(parameter)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        trace[f"{where}: buffer {name}"] = bits(buffer)
    trace[f"{where}: generator"] = bits(torch.get_rng_state())


def assert_same_trace(expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Fail on the first entry that differs, with what was expected and found."""
    assert list(expected) == list(found)
    for name, value in expected.items():
        assert value == found[name], f"{name} differs{_difference(value, found[name])}"


def _difference(eager: Any, fitted: Any) -> str:
    """Where two entries differ: the first element, or else the layouts."""
    if isinstance(eager, Bits) and isinstance(fitted, Bits) and len(eager.data) == len(fitted.data):
        size = eager.dtype.itemsize
        starts = range(0, len(eager.data), size)
        wrong = [i // size for i in starts if eager.data[i : i + size] != fitted.data[i : i + size]]
        if wrong and eager.dtype == fitted.dtype:
            values = [_element(held, wrong[0]) for held in (eager, fitted)]
            return f" in {len(wrong)} of {len(starts)} elements; number {wrong[0]}: {values[0]!r} != {values[1]!r}"
    return f"\n  eager:  {_show(eager)}\n  fitted: {_show(fitted)}"


def _element(held: Bits, number: int) -> Any:
    size = held.dtype.itemsize
    return torch.frombuffer(bytearray(held.data[number * size : (number + 1) * size]), dtype=held.dtype).item()


def _show(value: Any) -> str:
    if isinstance(value, Bits):
        return f"{value.dtype}{list(value.shape)} stride {value.stride} requires_grad {value.requires_grad}"
    return repr(value)


@dataclasses.dataclass(frozen=True)
class Bits:
    """A tensor's layout and bytes; equal only if every bit is."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    data: bytes


def bits(tensor: torch.Tensor | None) -> Bits | None:
    """The tensor as comparable bits; None stays None."""
    if tensor is None:
        return None
    if tensor.layout is not torch.strided:
        return bits(tensor.detach().to_dense())
    # Every parameter of both arms comes by here twice in each step: no copies but the one that is kept.
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    data = plain.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    strides = tuple(s if n != 1 else -1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))
    return Bits(tensor.dtype, tuple(tensor.shape), strides, tensor.requires_grad, data)


def tensors_in(thing: Any) -> list[torch.Tensor]:
    """The tensors of a nested thing, in order, repeats included."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    return [tensor for _, part in parts_of(thing) for tensor in tensors_in(part)]


def parts_of(thing: Any) -> list[tuple[Any, Any]]:
    if isinstance(thing, Mapping):
        return list(thing.items())
    if isinstance(thing, (tuple, list)):
        return list(enumerate(thing))
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return [(f.name, getattr(thing, f.name)) for f in dataclasses.fields(thing)]
    if isinstance(getattr(thing, "__dict__", None), dict) and not isinstance(thing, (type, nn.Module)):
        return list(vars(thing).items())
    return []


def structure_of(thing: Any) -> Any:
    """Types, labels and non-tensor contents of a nested thing; tensors by whether autograd knows them."""
    if isinstance(thing, torch.Tensor):
        return (type(thing).__name__, thing.requires_grad, thing.grad_fn is not None)
    parts = parts_of(thing)
    if parts or isinstance(thing, (tuple, list, dict)):
        return (type(thing).__name__, [(label, structure_of(part)) for label, part in parts])
    return (type(thing).__name__, thing if isinstance(thing, (bool, int, float, str, type(None))) else "")


def aliases_of(output: Any, passed: list[Any], model: nn.Module) -> list[tuple[str, str]]:
    """For each output tensor what it is (an input, a parameter, an earlier output), and whose storage it looks at."""
    known = [(f"input {i}", t) for i, t in enumerate(passed)]
    known += [(f"parameter {n}", p) for n, p in model.named_parameters()]
    known += [(f"buffer {n}", b) for n, b in model.named_buffers()]
    found = []
    for index, tensor in enumerate(tensors_in(output)):
        same = next((name for name, t in known if t is tensor), "new")
        where = next((name for name, t in known if _storage(t) == _storage(tensor)), "new")
        found.append((same, where))
        known.append((f"output {index}", tensor))
    return found


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextlib.contextmanager
def own_forward_calls(model: nn.Module) -> Iterator[list[None]]:
    """A list that grows by one each time the model's own forward runs on the model itself (capture runs on a twin)."""
    calls: list[None] = []
    kind = type(model)
    forward = kind.forward

    @functools.wraps(forward)
    def counting(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is model:
            calls.append(None)
        return forward(self, *args, **kwargs)

    held = "forward" in kind.__dict__
    kind.forward = counting
    try:
        yield calls
    finally:
        if held:
            kind.forward = forward
        else:
            del kind.forward
