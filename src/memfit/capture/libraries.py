"""Facts about other libraries that a capture has to know."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

# Attributes that a library sets once for itself in a forward pass; replaying need not.
HARMLESS_ATTRIBUTES = frozenset({"_output_capturing_hooks_installed"})  # transformers 5

# Hooks of these packages compute tensors and nothing else, so they are captured like any other code.
_PURE_HOOKS = ("torch.nn.utils", "transformers.")


def is_pure_hook(hook: Any) -> bool:
    """True for hooks that are known to do nothing but tensor work."""
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return module.startswith(_PURE_HOOKS) or type(hook).__module__.startswith(_PURE_HOOKS)


@contextlib.contextmanager
def tracing_hidden() -> Iterator[None]:
    """Keep libraries from noticing fake tensors: they would take their tracing path, not eager's."""
    transformers = sys.modules.get("transformers.utils.import_utils")
    if transformers is None or not hasattr(transformers, "is_fake_tensor"):
        yield
        return
    with mock.patch.object(transformers, "is_fake_tensor", return_value=False):
        yield
