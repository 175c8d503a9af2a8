"""Turn torch's reasons for not tracing a model into ours: the module, the line, and what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from memfit.capture.recorder import Recorder
from memfit.capture.step import Half
from memfit.errors import CaptureError, MemfitError
from memfit.torch_internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

# In the text of errors that come from tensors without data.
_SIGNS_OF_FAKES = ("FakeTensor", "fake", "data pointer", "data is not allocated", "tensor subclasses", "TorchScript")


@contextlib.contextmanager
def explained(recorder: Recorder, twin: nn.Module) -> Iterator[None]:
    """Turn torch's reasons for not tracing into ours, with the place."""
    try:
        yield
    except MemfitError:
        raise
    except DataDependentOutputException as error:
        raise CaptureError(
            f"{_place(recorder, error)} asks for the value of a tensor ({error.func}): an .item(), an if or a "
            "loop that depends on data. Use tensor ops (torch.where), or compute it outside the model and pass it in"
            + _hint(recorder, twin)
        ) from error
    except DynamicOutputShapeException as error:
        raise CaptureError(
            f"{_place(recorder, error)} makes a tensor whose shape depends on data ({error.func}). "
            "Use a mask of fixed shape, or do it outside the model"
        ) from error
    except (UnsupportedFakeTensorException, UnsupportedOperatorException) as error:
        raise CaptureError(f"{_place(recorder, error)} cannot be run on fake tensors: {error}") from error
    except (RuntimeError, NotImplementedError) as error:
        text = str(error)
        if recorder.half is Half.BACKWARD:
            hint = ""
            if "use_reentrant" in text:
                hint = ". Turn checkpointing off in the model (memfit recomputes instead), or use use_reentrant=False"
            raise CaptureError(f"{recorder.where_in_backward()}: eager's backward pass fails: {text}{hint}") from error
        if any(sign in text for sign in _SIGNS_OF_FAKES):
            raise CaptureError(f"{_place(recorder, error)} cannot be run on fake tensors: {text}") from error
        raise


def _hint(recorder: Recorder, twin: nn.Module) -> str:
    """What is known about modules that ask for values."""
    module = twin.get_submodule(recorder.path[-1]) if recorder.path else twin
    if getattr(module, "num_batches_tracked", None) is not None and getattr(module, "momentum", 0.1) is None:
        return ". Batch norm with momentum=None reads its count of batches: give it a momentum"
    return ""


def _place(recorder: Recorder, error: BaseException) -> str:
    """Module path and the innermost line of the model's own source in the error's traceback."""
    line = recorder.line_of(error)
    path = recorder.path[-1] if recorder.path else ""
    return f"module '{path or '(root)'}'" + (f" at {line}" if line else "")
