"""Capture: run a module's forward and backward once on fake tensors and write down what it does.

    capture(model, (x,))                      the model alone; tangents come from outside
    capture(model, (x,), loss=fn, targets=(y,))   the loss in the graph too; the step starts from its gradient, one

Nothing real is computed and nothing real is touched: the model is replaced by a twin that holds fake tensors.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from memfit.capture.bystanders import held_objects, unchanged
from memfit.capture.effects import effects_refused
from memfit.capture.escapes import Made, refuse_escaped
from memfit.capture.explain import explained
from memfit.capture.gradients import GradientParts
from memfit.capture.libraries import tracing_hidden
from memfit.capture.recorder import Recorder
from memfit.capture.shadow import Guard, Shadows
from memfit.capture.step import Gradient, Half, Origin, Step
from memfit.capture.structure import Skeleton, put_together, take_apart
from memfit.capture.twin import Slot, changed_attributes, make_twin, refuse_modules, slots_of, snapshot
from memfit.errors import BadOption, CaptureError
from memfit.torch_internals import (
    AUTOCAST_DEVICES,
    FakeTensor,
    fake_mode,
    no_autocast,
    saved_tensors_hooks_removed,
)

# A capture stands in for a few of torch's functions, so two threads must not do it at once.
_ONE_AT_A_TIME = threading.RLock()
Autocast = tuple[tuple[str, bool, torch.dtype], ...]


@dataclass(frozen=True)
class Layout:
    """Shape of a tensor that is not there: what a fake is made from."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool = False
    is_leaf: bool = True

    @classmethod
    def of(cls, tensor: torch.Tensor, *, device: str | None = None) -> Layout:
        return cls(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
            device or str(tensor.device),
            tensor.requires_grad,
            tensor.is_leaf,
        )

    def fake(self) -> torch.Tensor:
        """A tensor of this layout; call it under a fake mode."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return tensor.requires_grad_(self.requires_grad) if self.requires_grad else tensor


@dataclass(frozen=True)
class Incoming:
    """What the backward half is given: the layout of each tangent (None: undefined), and autocast's state."""

    tangents: tuple[tuple[int, ...] | None, ...] | None = None
    autocast: Autocast = ()


@dataclass(frozen=True)
class Assigned:
    """An attribute that the forward pass sets: on which module, under which name, to which output or constant."""

    path: str
    table: str
    key: str
    skeleton: Skeleton


@dataclass(frozen=True)
class Capture:
    """A Step, and what ties it to the model and the call that it was captured from.

    `blueprint` is the model as it was then, with fakes for tensors: a later capture of the same call starts from it,
    whatever has been done to the model since. `reached_from` says from which of the step's outputs each source's
    gradient comes.
    """

    step: Step
    blueprint: nn.Module
    slots: tuple[tuple[Slot, ...], ...]
    num_inputs: int
    constants: Mapping[int, torch.Tensor]
    opaque: tuple[Any, ...]
    output: Skeleton
    reached_from: Mapping[int, frozenset[int]]
    passed_through: tuple[int | None, ...]
    assigned: tuple[Assigned, ...] = ()
    guards: tuple[Guard, ...] = ()
    incoming: Incoming = field(default_factory=Incoming)


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    targets: Sequence[Any] = (),
    device: str | None = None,
    name: str = "",
) -> Step:
    """Capture the training step of `model` on these inputs as a Step.

    Args:
        model: any module; it may hold meta tensors, and is not touched.
        args, kwargs: what its forward takes. Only shapes are read (and the values of small integer tensors).
        loss: called as `loss(output, *targets)`; its ops become part of the step.
        device: where the step is to run if the tensors are on the meta device ("cpu" unless given).
        name: what the step is called in reports.
    """
    _check_device(device)
    return capture_call(
        model, tuple(args), dict(kwargs or {}), loss=loss, targets=tuple(targets), device=device, name=name
    ).step


def capture_call(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    targets: tuple[Any, ...] = (),
    device: str | None = None,
    name: str = "",
    autocast: Autocast = (),
    incoming: Incoming | None = None,
) -> Capture:
    """Capture a call with all that is needed to run it; `incoming` says what the backward half will be given."""
    with _ONE_AT_A_TIME:
        made: list[Made] = []
        captured = _capture_call(
            model, args, kwargs, loss, targets, device, name, autocast, incoming or Incoming(), made
        )
        refuse_escaped(made)
        return captured


def _capture_call(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Callable[..., torch.Tensor] | None,
    targets: tuple[Any, ...],
    device: str | None,
    name: str,
    autocast: Autocast,
    incoming: Incoming,
    made: list[Made],
) -> Capture:
    """The capture itself; notes in `made` the tensors that must be gone once it has returned."""
    refuse_modules(model)
    inputs, skeleton = take_apart((args, kwargs, targets))
    mode = fake_mode()
    shadows = Shadows()
    recorder = Recorder(shadows)
    with effects_refused(recorder), tracing_hidden(), unchanged(model):
        with mode:
            fakes, slots = _fake_state(model, recorder, device)
            given = _fake_inputs(inputs, recorder, shadows, device)
        recorder.known_objects = held_objects(model, skeleton)
        blueprint = make_twin(model, fakes)
        twin = make_twin(model, fakes, lambda path, forward, *a, **k: _enter(recorder, path, forward, a, k))
        before = snapshot(twin)
        with mode, recorder, explained(recorder, twin), _autograd_plain():
            with _autocast(autocast):
                call_args, call_kwargs, call_targets = put_together(skeleton, given)
                # The root's own hooks run around our forward, not in it.
                output = twin.forward(*call_args, **call_kwargs)
                if loss is not None:
                    output = loss(output, *call_targets)
            made += recorder.made_tensors()
            captured = _finish(recorder, twin, before, output, given, slots, incoming, shadows, name)
    # Break the cycles, so that the twin and its tensors go now and not at some later garbage collection.
    recorder.forget()
    for module in list(twin.modules()):
        module.__dict__.pop("forward")
    return replace(captured, blueprint=blueprint)


def _finish(
    recorder: Recorder,
    twin: nn.Module,
    before: dict[tuple[str, str], Any],
    output: Any,
    given: list[torch.Tensor],
    slots: tuple[tuple[Slot, ...], ...],
    incoming: Incoming,
    shadows: Shadows,
    name: str,
) -> Capture:
    """Take the outputs apart, run the backward half, and close the record."""
    for path, parameter in twin.named_parameters():
        if parameter.grad is not None:
            raise CaptureError(
                f"the forward pass runs a backward pass of its own: parameter '{path}' got a gradient, which replaying "
                "would not give it. Use torch.autograd.grad inside the model, or call backward outside"
            )
    changed = list(changed_attributes(twin, before))
    everything = (output, [value for _, _, value in changed])
    outputs, skeleton = take_apart(everything)
    assert hasattr(skeleton, "parts")
    assigned = tuple(
        _assigned(path, attribute, part)
        for (path, attribute, _), part in zip(changed, skeleton.parts[1].parts, strict=True)
    )
    passed_through = tuple(recorder.source_that_is(tensor) for tensor in outputs)
    _refuse_written_inputs(recorder, given)
    # An output that is the very tensor of an input or parameter is handed back as it came.
    differentiable = [
        through is None and tensor.requires_grad for tensor, through in zip(outputs, passed_through, strict=True)
    ]
    recorder.half = Half.BACKWARD
    tangents, tangent_values = _tangents(recorder, outputs, differentiable, passed_through, incoming)
    gradients, reached_from = _backward(recorder, outputs, tangents, incoming)
    step = Step(
        ops=tuple(recorder.ops),
        values=tuple(recorder.values),
        sources=tuple(recorder.sources),
        outputs=tuple(
            recorder.value_of(tensor)
            for tensor, through in zip(outputs, passed_through, strict=True)
            if through is None
        ),
        tangents=tuple(v for v, through in zip(tangent_values, passed_through, strict=True) if through is None),
        gradients=gradients,
        storage_bytes=tuple(recorder.storage_bytes),
        name=name or type(twin).__name__,
    )
    made = [position for position, through in enumerate(passed_through) if through is None]
    made_position = {position: index for index, position in enumerate(made)}
    return Capture(
        step=step,
        blueprint=twin,  # until the caller puts the real one in its place
        slots=slots,
        num_inputs=len(given),
        constants=dict(recorder.constants),
        opaque=tuple(recorder.opaque),
        output=skeleton,
        reached_from={
            source: frozenset(made_position[position] for position in positions)
            for source, positions in reached_from.items()
        },
        passed_through=passed_through,
        assigned=assigned,
        guards=tuple(shadows.guards),
        incoming=replace(
            incoming,
            tangents=tuple(
                None if t is None else tuple(t.stride())
                for t, through in zip(tangents, passed_through, strict=True)
                if through is None
            ),
        ),
    )


def _fake_state(
    model: nn.Module, recorder: Recorder, device: str | None
) -> tuple[dict[int, torch.Tensor], tuple[tuple[Slot, ...], ...]]:
    """Fakes of all tensors in the module tree, each once however often it hangs there, named as sources."""
    places: dict[int, list[Slot]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for slot, tensor in slots_of(model):
        places.setdefault(id(tensor), []).append(slot)
        tensors[id(tensor)] = tensor
    fakes: dict[int, torch.Tensor] = {}
    for key, tensor in tensors.items():
        slot = min(places[key], key=lambda s: s.origin is Origin.ATTRIBUTE)
        refuse_layout(tensor, f"{slot.origin.value} '{slot.name}'")
        if slot.origin is Origin.ATTRIBUTE and tensor.grad_fn is not None:
            # Left from an earlier step. Most are overwritten before anybody reads them; a read is refused.
            fakes[key] = recorder.add_stale(
                Layout.of(tensor, device=_device(tensor, device)).fake().detach(), slot.name
            )
            del places[key]
            continue
        fake = Layout.of(tensor, device=_device(tensor, device)).fake()
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake.detach(), requires_grad=tensor.requires_grad)
        fakes[key] = fake
        recorder.know_real(tensor, fake)
        recorder.add_source(fake, slot.origin, slot.name)
    return fakes, tuple(tuple(places[key]) for key in tensors if key in places)


def _fake_inputs(
    inputs: list[torch.Tensor], recorder: Recorder, shadows: Shadows, device: str | None
) -> list[torch.Tensor]:
    """Fakes of the inputs, as the model is given them."""
    given = []
    for index, tensor in enumerate(inputs):
        refuse_layout(tensor, f"input {index}")
        fake = Layout.of(tensor, device=_device(tensor, device)).fake()
        recorder.add_source(fake, Origin.INPUT, f"input_{index}")
        shadows.know(fake, tensor, input_index=index)
        given.append(_NotALeaf.apply(fake) if tensor.requires_grad and not tensor.is_leaf else fake)
        if given[-1] is not fake:
            recorder.alias(given[-1], fake)
    return given


class _NotALeaf(torch.autograd.Function):
    """Make a tensor the result of some op, as the caller's was, so that in-place writes are judged as eager would."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _tangents(
    recorder: Recorder,
    outputs: list[torch.Tensor],
    differentiable: list[bool],
    passed_through: tuple[int | None, ...],
    incoming: Incoming,
) -> tuple[list[torch.Tensor | None], list[int | None]]:
    """A fake tangent for each differentiable output, of the layout that `incoming` names or else the output's own."""
    wanted: Iterator[Any] = iter(incoming.tangents or ())
    tangents: list[torch.Tensor | None] = []
    values: list[int | None] = []
    for index, (output, needs) in enumerate(zip(outputs, differentiable, strict=True)):
        stride = tuple(output.stride())
        if incoming.tangents is not None and passed_through[index] is None:
            stride = next(wanted)
        if not needs or stride is None:
            tangents.append(None)
            values.append(None)
            continue
        with _quiet(recorder):
            tangent = torch.empty_strided(output.shape, stride, dtype=output.dtype, device=output.device)
        tangents.append(tangent)
        values.append(recorder.add_source(tangent, Origin.TANGENT, f"tangent_{index}"))
    return tangents, values


def _backward(
    recorder: Recorder, outputs: list[torch.Tensor], tangents: list[torch.Tensor | None], incoming: Incoming
) -> tuple[tuple[Gradient, ...], dict[int, frozenset[int]]]:
    """Run autograd on the fakes: the gradients as the engine hands them over, and which outputs reach each source."""
    wanted = [recorder.tensor_of(source.value) for source in recorder.sources if source.requires_grad]
    started = [(i, o, t) for i, (o, t) in enumerate(zip(outputs, tangents, strict=True)) if t is not None]
    if not wanted or not started:
        return (), {}
    positions, starts = [i for i, _, _ in started], [o for _, o, _ in started]
    parts = GradientParts(starts, wanted)
    reached = parts.reached_from(starts)
    # A forward pass is captured inside the caller's autocast; its backward usually runs outside.
    with no_autocast(AUTOCAST_DEVICES), _autocast(incoming.autocast):
        found = torch.autograd.grad(starts, wanted, [t for _, _, t in started], allow_unused=True)
    sources = [recorder.value_of_source(tensor) for tensor in wanted]
    gradients = tuple(Gradient(sources[i], recorder.value_of(part)) for i, part in parts.in_order(found))
    return gradients, {source: frozenset(positions[o] for o in r) for source, r in zip(sources, reached, strict=True)}


def _assigned(path: str, attribute: str, part: Skeleton) -> Assigned:
    table, _, key = attribute.rpartition(".")
    table = table if table in ("_parameters", "_buffers") else ""
    name = ".".join(p for p in (path, key or attribute) if p)
    if not _holds_tensor(part):
        raise CaptureError(
            f"the forward pass changes '{name}', which is not a tensor, so replaying it would not. Keep such state in "
            "a buffer (register_buffer) or outside forward"
        )
    return Assigned(path, table, key if table else attribute, part)


def _holds_tensor(part: Any) -> bool:
    return hasattr(part, "index") or any(_holds_tensor(p) for p in getattr(part, "parts", ()))


def refuse_layout(tensor: torch.Tensor, what: str) -> None:
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_quantized:
        return  # nearly always
    odd = None
    if tensor.layout is not torch.strided:
        odd = str(tensor.layout).removeprefix("torch.").replace("_", " ")
    elif tensor.is_quantized:
        odd = "quantised"
    elif type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor):
        odd = type(tensor).__name__
    elif tensor.is_complex() and tensor.is_conj():
        odd = "lazily conjugated"
    if odd is not None:
        raise CaptureError(
            f"{what} is a {odd} tensor of shape {tuple(tensor.shape)}; memfit needs dense, strided tensors. "
            "Convert it (to_dense(), dequantize()) before the call"
        )


def _refuse_written_inputs(recorder: Recorder, given: list[torch.Tensor]) -> None:
    """Raise if the model writes into an input that requires grad: the caller's tensor would need a new history."""
    written = {storage for op in recorder.ops for storage in op.writes}
    for index, tensor in enumerate(given):
        if tensor.requires_grad and recorder.values[recorder.value_of(tensor)].storage in written:
            op = next(o for o in recorder.ops if recorder.values[recorder.value_of(tensor)].storage in o.writes)
            raise CaptureError(
                f"module '{op.path or '(root)'}' at {op.source} writes in place ({op.target}) into input {index}, "
                "which requires grad. Pass a clone() of it, or make that module not in-place"
            )


def _device(tensor: torch.Tensor, device: str | None) -> str:
    return (device or "cpu") if tensor.device.type == "meta" else str(tensor.device)


def _check_device(name: str | None) -> None:
    """Raise if this torch cannot even imagine tensors there: asked for their backward pass, it ends the process."""
    if name is None:
        return
    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        raise BadOption(f"device {name!r}: no such device. Try cpu") from error
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if kind != "cpu" and (accelerator is None or kind != accelerator.type):
        raise BadOption(f"device {name!r}: not supported by torch {torch.__version__} on this machine. Capture for cpu")


def _enter(recorder: Recorder, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    recorder.path.append(path)
    result = forward(*args, **kwargs)
    recorder.path.pop()  # not in a finally: an error keeps the path it happened on
    return result


@contextlib.contextmanager
def _quiet(recorder: Recorder) -> Iterator[None]:
    """Let fakes be made without recording it."""
    from memfit.torch_internals import without_mode

    with without_mode(recorder):
        yield


@contextlib.contextmanager
def _autograd_plain() -> Iterator[None]:
    """Autograd on, without what the caller may have around the call: anomaly detection, hooks on saved tensors."""
    with torch.enable_grad(), torch.autograd.set_detect_anomaly(False), saved_tensors_hooks_removed():
        yield


@contextlib.contextmanager
def _autocast(state: Autocast) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for device, enabled, dtype in state:
            cached = torch.is_autocast_cache_enabled()
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cached))
        yield
