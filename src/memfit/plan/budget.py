"""Budgets: bytes in all, or a share of what the keep plan's activations need on top of what no plan can change."""

from __future__ import annotations

import re
from dataclasses import dataclass

from memfit.capture.step import Step
from memfit.errors import BadOption

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")

# Pages that are used in part, and Python's own objects: 0.1 to 3.5 % beyond the ledger, where we measured.
_HEADROOM_BYTES, _HEADROOM_SHARE = 2 << 20, 200
_LEAST_WITH_HEADROOM = 64 << 20

# Bytes of state per byte of a trainable parameter. Plain SGD without momentum has none: that is "none".
OPTIMIZERS = {"none": 0, "sgd": 1, "adam": 2}


@dataclass(frozen=True, slots=True)
class Budget:
    """What the user asked for: bytes, or a share of the keep plan's activations."""

    num_bytes: int | None = None
    share: float | None = None

    @classmethod
    def parse(cls, text: int | str) -> Budget:
        """From 6_000_000_000, "6GB", "6GiB" or "60%"."""
        if isinstance(text, bool) or not isinstance(text, (int, str)):
            raise BadOption(f"budget={text!r}: give bytes as an int, or a string such as '6GiB', '800MB' or '60%'")
        if isinstance(text, int):
            return cls._of_bytes(text, text)
        share = _SHARE.fullmatch(text)
        if share is not None:
            if float(share[1]) <= 0:
                raise BadOption(f"budget={text!r}: must be more than zero")
            return cls(share=float(share[1]) / 100)
        size = _SIZE.fullmatch(text)
        if size is None or size[2].lower() not in _UNITS:
            raise BadOption(
                f"budget={text!r}: not a size. Write bytes, a number with KB, MB, GB, KiB, MiB or GiB, or a percentage"
            )
        return cls._of_bytes(text, float(size[1]) * _UNITS[size[2].lower()])

    @classmethod
    def _of_bytes(cls, text: int | str, size: float) -> Budget:
        if size <= 0:
            raise BadOption(f"budget={text!r}: must be more than zero bytes")
        return cls(num_bytes=int(size))

    @classmethod
    def of(cls, budget: int | str | None) -> Budget | None:
        """The budget that was asked for; None stays None."""
        return None if budget is None else cls.parse(budget)

    @property
    def text(self) -> int | str:
        """What parse would take for it."""
        return self.num_bytes if self.num_bytes is not None else f"{100 * (self.share or 0):.12g}%"

    def resolve(self, *, fixed_bytes: int, activation_bytes: int) -> int:
        """The budget in bytes, given what no plan can change and what the keep plan's activations need."""
        if self.num_bytes is not None:
            return self.num_bytes
        assert self.share is not None
        return fixed_bytes + int(self.share * activation_bytes)


def headroom_bytes(room_bytes: int) -> int:
    """What is set aside of that much room for what a process holds besides tensors; nothing of little room."""
    return _HEADROOM_BYTES + room_bytes // _HEADROOM_SHARE if room_bytes >= _LEAST_WITH_HEADROOM else 0


def with_headroom(num_bytes: int) -> int:
    """The least room of which so much is left when what a process holds besides tensors is set aside."""
    if num_bytes < _LEAST_WITH_HEADROOM:
        return num_bytes
    left_bytes = num_bytes + _HEADROOM_BYTES
    return left_bytes + (left_bytes - 1) // (_HEADROOM_SHARE - 1)  # a part of what is added is set aside, too


def optimizer_bytes(step: Step, optimizer: str) -> int:
    """The state that the optimizer keeps for the parameters that are trained.

    "sgd" is SGD with momentum; "none" is no optimizer, or SGD without.
    """
    if optimizer not in OPTIMIZERS:
        raise BadOption(f"optimizer {optimizer!r}: unknown. Choose from {', '.join(OPTIMIZERS)}")
    trained = {step.values[s.value].storage for s in step.sources if s.requires_grad and s.origin.value == "parameter"}
    return OPTIMIZERS[optimizer] * sum(step.storage_bytes[storage] for storage in trained)
