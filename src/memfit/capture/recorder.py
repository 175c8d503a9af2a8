"""Write down every ATen call of a training step as it is dispatched, below autograd and autocast.

What is recorded is what eager would run: the same calls in the same order, in-place writes and views included. That is
why replaying the record is bit-identical by construction, and every later rewrite is a change that must prove itself.
"""

from __future__ import annotations

import keyword
import os
import re
import sys
import weakref
from collections import Counter
from typing import Any

import torch

from memfit.capture.escapes import Made
from memfit.capture.shadow import Shadows
from memfit.capture.step import Half, Op, Opaque, Origin, Ref, Source, Value, refs_in
from memfit.errors import CaptureError
from memfit.torch_internals import (
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    current_backward_name,
    current_backward_sequence,
    fills_by_a_differentiable_value,
    is_random,
    next_forward_sequence,
    normalised,
    storage_key,
    target_of,
    written_arguments,
)

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(__file__) + os.sep
_OURS = (_HERE, os.path.join(os.path.dirname(os.path.dirname(__file__)), "run") + os.sep)
_LITERALS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
# Autograd nodes whose formula depends on the data where tensors are real, and does not where they are fake.
_LOOKS_AT_DATA = frozenset(
    {
        "ProdBackward0",
        "ProdBackward1",
        "CumprodBackward0",
        "MaxBackward1",  # of all elements at once; along a dimension is another node
        "MinBackward1",
        "MedianBackward0",
        "NanmedianBackward0",
    }
)
_LIFT = "aten.lift_fresh.default"
TAKEN_NAMES = re.compile(
    r"S|I|P|made|float|torch|aten|ops|memfit|operators|stand_ins|alias|as_captured|taking|tiers|forward"
    r"|_\d+|(ghost|opaque|back|backward)_\d+|away_\w+"
)
"""What generated code (run/codegen.py) calls things of its own: a buffer of that name would stand in their place."""


class Recorder(TorchDispatchMode):
    """A dispatch mode that sits on a fake mode and turns what passes through it into ops and values."""

    def __init__(self, shadows: Shadows) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.values: list[Value] = []
        self.sources: list[Source] = []
        self.storage_bytes: list[int] = []
        self.constants: dict[int, torch.Tensor] = {}
        self.opaque: list[Any] = []
        self.half = Half.FORWARD
        self.reseeded = False
        self.known_objects: set[int] = set()
        self.path: list[str] = []
        self._shadows = shadows
        self._value_of: dict[int, int] = {}
        self._fake_of_real: dict[int, torch.Tensor] = {}
        self._alive: list[Any] = []  # ids stand for tensors, so none may die while recording
        self._storages: dict[int, int] = {}
        self._source_tensors: dict[int, torch.Tensor] = {}
        self._source_objects: dict[int, int] = {}
        self._stale: dict[int, str] = {}
        self._names: Counter[str] = Counter()
        self._op_of_sequence: dict[int, int] = {}

    def add_source(self, fake: torch.Tensor, origin: Origin, name: str) -> int:
        """Name a tensor that is there before the step begins."""
        value = self._add_value(fake, name)
        self._source_tensors[value] = fake
        self._source_objects[id(fake)] = value
        self.sources.append(Source(value, origin, name, fake.requires_grad))
        return value

    def know_real(self, real: torch.Tensor, fake: torch.Tensor) -> None:
        """If this real tensor meets an op, its fake is meant."""
        self._alive.append(real)
        self._fake_of_real[id(real)] = fake

    def add_stale(self, fake: torch.Tensor, name: str) -> torch.Tensor:
        """Note a tensor that belongs to an earlier step's graph: it may be overwritten, but not read."""
        self._alive.append(fake)
        self._stale[id(fake)] = name
        return fake

    def value_of(self, tensor: torch.Tensor) -> int:
        """The value that this tensor is now."""
        found = self._value_of.get(id(tensor))
        if id(tensor) in self._stale:
            raise CaptureError(
                f"{self.where()} reads attribute '{self._stale[id(tensor)]}', which holds a tensor of an earlier "
                "step's graph. Detach it when storing it, or pass it as an argument"
            )
        if found is not None and self._storages.get(storage_key(tensor)) != self.values[found].storage:
            raise CaptureError(
                f"{self.where()} gave a tensor another storage (set_, .data = ...); write into it instead"
            )
        if found is None:
            raise CaptureError(
                f"{self.where()} uses a tensor{tuple(tensor.shape)} that was made outside the captured step. "
                "Register it as a buffer, or pass it as an argument"
            )
        return found

    def alias(self, tensor: torch.Tensor, of: torch.Tensor) -> None:
        """`tensor` is the same value as the source `of`, in another Python object."""
        self._alive.append(tensor)
        self._value_of[id(tensor)] = self._value_of[id(of)]
        self._source_objects[id(tensor)] = self._source_objects[id(of)]

    def source_that_is(self, tensor: torch.Tensor) -> int | None:
        """The source whose very object this tensor is, if it is one."""
        return self._source_objects.get(id(tensor))

    def tensor_of(self, value: int) -> torch.Tensor:
        """The fake that stands for a source."""
        return self._source_tensors[value]

    def value_of_source(self, tensor: torch.Tensor) -> int:
        """The source that this fake stands for, whatever was written into it since."""
        return self._source_objects[id(tensor)]

    def made_tensors(self) -> list[Made]:
        """Weak references to the tensors that ops have made, each with its place."""
        sources = {source.value for source in self.sources}
        # Casts of weights stay in autocast's own cache for as long as the caller's autocast lasts.
        maker = {
            value: op
            for op in self.ops
            for value in op.made
            if not (op.target == "aten._to_copy.default" and sources.issuperset(op.reads()))
        }
        return [
            Made(weakref.ref(tensor), op.path, op.source)
            for tensor in self._alive
            if isinstance(tensor, torch.Tensor)
            and id(tensor) not in self._source_objects
            and (op := maker.get(self._value_of.get(id(tensor), -1))) is not None
        ]

    def forget(self) -> None:
        """Let go of every tensor; what was recorded stays."""
        for held in (self._alive, self._value_of, self._fake_of_real, self._source_tensors, self._stale):
            held.clear()
        self._shadows.forget()

    def line_of(self, error: BaseException) -> str:
        """The innermost line of the model's own source that the error passed through."""
        found = ""
        trace = error.__traceback__
        while trace is not None:
            file = trace.tb_frame.f_code.co_filename
            if self._is_users(file):
                found = self._short(file, trace.tb_lineno)
            trace = trace.tb_next
        return found

    def where(self) -> str:
        """The module now running and the line of the model's source."""
        path = self.path[-1] if self.path else ""
        source = self._source()
        return f"module '{path or '(root)'}'" + (f" at {source}" if source else "")

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        known, answer = self._shadows.ask(func, args, kwargs)
        if known:
            return answer
        given = args
        args, kwargs = self._fake(args), {key: self._fake(arg) for key, arg in kwargs.items()}
        out = _each_its_own(func(*args, **kwargs))
        outs = list(out) if isinstance(out, (tuple, list)) else [] if out is None else [out]
        makes_tensor = any(isinstance(o, torch.Tensor) for o in outs)
        if not makes_tensor and not written_arguments(target_of(func)) and out is not None:
            return out
        self._record(func, args, kwargs, out, outs)
        if self.half is Half.FORWARD:
            if target_of(func) == _LIFT and isinstance(given[0], torch.Tensor) and not isinstance(given[0], FakeTensor):
                self._shadows.know_constant(out, given[0])
            else:
                self._shadows.follow(func, args, kwargs, out)
        return out

    def _record(self, func: OpOverload, args: Any, kwargs: Any, out: Any, outs: list[Any]) -> None:
        target = target_of(func)
        recorded_args = tuple(self._operand(arg) for arg in args)
        recorded_kwargs = tuple((key, self._operand(arg)) for key, arg in kwargs.items())
        named = normalised(target, recorded_args, recorded_kwargs)
        writes = tuple(
            dict.fromkeys(
                self.values[value].storage
                for name in sorted(written_arguments(target))
                for value in refs_in(named.get(name))
            )
        )
        if self.half is Half.BACKWARD and is_random(target):
            raise CaptureError(
                f"{self.where()} draws random numbers in the backward pass ({target}), as torch.utils.checkpoint does "
                "around dropout. Turn checkpointing off in the model: memfit recomputes instead"
            )
        if self.reseeded and is_random(target):
            raise CaptureError(
                f"{self.where()} draws random numbers ({target}) after setting the generator's state in the model. Set "
                "the state outside the model"
            )
        if target == _LIFT:
            # A fresh constant on every call: copied, since the model may write to it.
            target = "aten.clone.default"
        name = target.split(".")[1].strip("_")
        outputs = tuple(self._add_value(o, name, written=writes) if isinstance(o, torch.Tensor) else None for o in outs)
        path, source = self._origin_of_op()
        self.ops.append(
            Op(
                target=target,
                args=recorded_args,
                kwargs=recorded_kwargs,
                outputs=outputs,
                returns_many=isinstance(out, (tuple, list)),
                half=self.half,
                path=path,
                source=source,
                writes=writes,
                random=is_random(target),
            )
        )

    def _origin_of_op(self) -> tuple[str, str]:
        """Module path and source line: of the forward op itself, or of the forward op that a backward op belongs to."""
        if self.half is Half.FORWARD:
            self._op_of_sequence.setdefault(next_forward_sequence() - 1, len(self.ops))
            return (self.path[-1] if self.path else ""), self._source()
        name = current_backward_name()
        if name in _LOOKS_AT_DATA or fills_by_a_differentiable_value():
            raise CaptureError(
                f"{self.where_in_backward()}: the gradient of this op ({name}) takes another path in eager, one that "
                "looks at the data, so it could not be equal bit for bit. Write it with other ops (amax for max, prod "
                "as exp of a sum of logs, for instance), or fit the parts of the model around it"
            )
        return self._forward_place()

    def _forward_place(self) -> tuple[str, str]:
        """Path and source line of the forward op whose backward is running."""
        sequence = current_backward_sequence()
        index = self._op_of_sequence.get(sequence) if sequence is not None else None
        twin = self.ops[index] if index is not None else self.ops[-1] if self.ops else None
        return (twin.path, twin.source) if twin else ("", "")

    def where_in_backward(self) -> str:
        """The module and line whose backward is running, or was when an error came."""
        path, source = self._forward_place()
        return f"module '{path or '(root)'}'" + (f" at {source}" if source else "")

    def _source(self) -> str:
        frame = sys._getframe(1)
        while frame is not None:
            file = frame.f_code.co_filename
            if self._is_users(file):
                return self._short(file, frame.f_lineno)
            frame = frame.f_back  # type: ignore[assignment]
        return ""

    @staticmethod
    def _is_users(file: str) -> bool:
        return not file.startswith((_TORCH, *_OURS, "<"))

    @staticmethod
    def _short(file: str, line: int) -> str:
        return f"{os.sep.join(file.split(os.sep)[-2:])}:{line}"

    def _fake(self, arg: Any) -> Any:
        """The argument with every real tensor replaced by its fake; an unknown real tensor becomes a constant."""
        if isinstance(arg, torch.Tensor) and not isinstance(arg, FakeTensor):
            fake = self._fake_of_real.get(id(arg))
            if fake is None:
                fake = self._constant(arg)
            elif arg.requires_grad:
                raise CaptureError(
                    f"{self.where()} reaches a parameter of the model from outside its module tree (a closure or a "
                    "global), so its gradient cannot be followed. Reach it through `self`"
                )
            return fake
        if isinstance(arg, (list, tuple)):
            return type(arg)(self._fake(item) for item in arg)
        return arg

    def _constant(self, real: torch.Tensor) -> torch.Tensor:
        if real.requires_grad:
            raise CaptureError(
                f"{self.where()} uses a tensor{tuple(real.shape)} that requires grad and is neither a parameter nor an "
                "input. Register it as a parameter, or pass it as an argument"
            )
        if real.layout is not torch.strided or real.is_quantized:
            raise CaptureError(f"{self.where()} uses a {_layout(real)} tensor; memfit needs dense, strided tensors")
        fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=real.device)
        value = self.add_source(fake, Origin.CONSTANT, f"constant_{len(self.constants)}")
        self.constants[value] = real
        self.know_real(real, fake)
        return fake

    def _operand(self, arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            return Ref(self.value_of(arg))
        if isinstance(arg, (list, tuple)):
            return tuple(self._operand(item) for item in arg)
        if isinstance(arg, _LITERALS):
            return arg
        if isinstance(arg, torch.Generator) and id(arg) not in self.known_objects:
            raise CaptureError(
                f"{self.where()} draws from a generator made in the forward pass; replaying would go on with the same "
                "one instead. Keep the generator on the module, or pass it as an argument"
            )
        self.opaque.append(arg)
        return Opaque(len(self.opaque) - 1, type(arg).__name__)

    def _add_value(self, tensor: torch.Tensor, name: str, *, written: tuple[int, ...] = ()) -> int:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            where = self.where() if self.half is Half.FORWARD else self.where_in_backward()
            raise CaptureError(
                f"{where} makes a {_layout(tensor)} tensor; memfit needs dense, strided tensors. Convert it with "
                "to_dense() or dequantize(); embeddings take sparse=False"
            )
        key = storage_key(tensor)
        storage = self._storages.setdefault(key, len(self.storage_bytes))
        if storage == len(self.storage_bytes):
            self.storage_bytes.append(0)
        self.storage_bytes[storage] = int(tensor.untyped_storage().nbytes())
        old = self._value_of.get(id(tensor))
        if old is not None and storage != self.values[old].storage:
            raise CaptureError(
                f"{self.where()} gives a tensor another storage (set_, .data = ...); write into it instead"
            )
        value = Value(
            id=len(self.values),
            name=self._fresh_name(name),
            storage=storage,
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()),
            dtype=tensor.dtype,
            device=str(tensor.device),
        )
        self.values.append(value)
        self._alive.append(tensor)
        self._value_of[id(tensor)] = value.id
        return value.id

    def _fresh_name(self, name: str) -> str:
        """A Python identifier that no other value has, nor anything else in generated code."""
        name = re.sub(r"\W", "_", name)
        if keyword.iskeyword(name) or not name.isidentifier() or TAKEN_NAMES.fullmatch(name):
            name = f"v_{name}"
        fresh = name
        while fresh in self._names:
            self._names[name] += 1
            fresh = f"{name}_{self._names[name]}"
        self._names[fresh] = 1
        return fresh


def _layout(tensor: torch.Tensor) -> str:
    return "quantised" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.").replace("_", " ")


def _each_its_own(out: Any) -> Any:
    """The results with a tensor of its own in each place.

    Some kernels' fakes return one tensor in two places where the kernel makes two: the biases' gradients of an LSTM.
    """
    if not isinstance(out, tuple) or len({id(o) for o in out if o is not None}) == sum(o is not None for o in out):
        return out
    seen: set[int] = set()
    found = []
    for result in out:
        if isinstance(result, torch.Tensor) and id(result) in seen:
            result = torch.empty_strided(
                result.shape, result.stride(), dtype=result.dtype, device=result.device
            ).requires_grad_(result.requires_grad)
        seen.add(id(result))
        found.append(result)
    return tuple(found)
