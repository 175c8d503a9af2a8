"""What is decided about a storage: keep it, recompute it, offload it, encode it, or encode and then offload it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from memfit.errors import BadOption


@dataclass(frozen=True, slots=True)
class Keep:
    """Hold it until its last use. For one that backward does not read: hold it as a place to recompute from."""


@dataclass(frozen=True, slots=True)
class Recompute:
    """Drop it after its last forward use; if backward needs it, make it again right before.

    Made again it is held until its last use. If it is made again for the sake of a backward op before `held_from`, it
    is dropped after that, and made once more when it is needed once more: less memory for more compute.
    """

    held_from: int = 0


@dataclass(frozen=True, slots=True)
class Moments:
    """When a storage travels, for policies with a schedule of their own: each is in front of the op of that number.

    Attributes:
        send: the copy out begins. Nobody writes it from here on, but it may still be read.
        sent: compute waits for the copy and drops it; the number of forward ops means at their end. None: nobody waits,
            it stays, and `fetch` takes it back as it is.
        fetch: the copy back begins.
        fetched: compute waits for the copy, which may be before it is needed.
    """

    send: int
    sent: int | None
    fetch: int
    fetched: int

    def __str__(self) -> str:
        sent = "-" if self.sent is None else self.sent
        return f"{self.send},{sent},{self.fetch},{self.fetched}"


@dataclass(frozen=True, slots=True)
class Offload:
    """Send it away after its last forward use, fetch it back for its first backward use.

    When exactly is for the lowering to find (plan/lower.py), unless `when` says so. What is needed first is fetched
    first; with `back_by` it is fetched as if the backward op of that number were the first to use it, and whatever is
    decoded for that op: it comes before others then, and takes up room for longer.
    """

    tier: str = "host"
    when: Moments | None = None
    back_by: int = 0


@dataclass(frozen=True, slots=True)
class Code:
    """How a storage was encoded: which of its values, by which codec with which settings, and if for gates alone."""

    value: str
    codec: str
    settings: tuple[float, ...]
    is_gate: bool = False


@dataclass(frozen=True, slots=True)
class Encode:
    """Hold it in the codec's form from its last forward use to its first backward use.

    For another backward half of a step, which finds codes that are made already, `as_in` says how; it has no text form.
    """

    codec: str
    as_in: tuple[Code, ...] = ()


@dataclass(frozen=True, slots=True)
class EncodeThenOffload:
    """Encode it, and send the code away; the mask that stands beside values for gates, a bit for each, stays.

    `back_by` is that of Offload, for the code.
    """

    codec: str
    tier: str = "host"
    as_in: tuple[Code, ...] = ()
    back_by: int = 0


_TIMED = re.compile(r"[^@]+@\d+,(\d+|-),\d+,\d+")
_PLACE = re.compile(r"[^@]+(@[1-9]\d*)?")

Decision = Keep | Recompute | Offload | Encode | EncodeThenOffload
Decisions = Mapping[int, Decision]
"""By storage id. A storage that is not listed is kept if backward reads it, and dropped if not."""


def untimed(decision: Decision) -> Decision:
    """The same, whenever things travel."""
    match decision:
        case Offload(tier):
            return Offload(tier)
        case EncodeThenOffload(codec, tier):
            return EncodeThenOffload(codec, tier)
    return decision


def to_text(decision: Decision) -> str:
    """`offload:host`, `encode:mask`, `encode:mask+offload:disk`."""
    match decision:
        case Keep():
            return "keep"
        case Recompute(0):
            return "recompute"
        case Recompute(held_from):
            return f"recompute:{held_from}"
        case Offload(tier, None, back_by):
            return f"offload:{_place(tier, back_by)}"
        case Offload(tier, when):
            return f"offload:{tier}@{when}"
        case Encode(codec):
            return f"encode:{codec}"
        case EncodeThenOffload(codec, tier, _, back_by):
            return f"encode:{codec}+offload:{_place(tier, back_by)}"


def _place(tier: str, back_by: int) -> str:
    return f"{tier}@{back_by}" if back_by else tier


def _from_place(text: str) -> tuple[str, int]:
    tier, _, op = text.partition("@")
    return tier, int(op or 0)


def from_text(text: str) -> Decision:
    """The decision that to_text wrote."""
    parts = [part.partition(":")[::2] for part in text.split("+")]
    match parts:
        case [("keep", "")]:
            return Keep()
        case [("recompute", "")]:
            return Recompute()
        case [("recompute", op)] if op.isdecimal() and int(op) > 0:
            return Recompute(int(op))
        case [("offload", place)] if _PLACE.fullmatch(place):
            tier, back_by = _from_place(place)
            return Offload(tier, back_by=back_by)
        case [("offload", timed)] if _TIMED.fullmatch(timed):
            tier, _, moments = timed.rpartition("@")
            send, sent, fetch, fetched = moments.split(",")
            return Offload(tier, Moments(int(send), None if sent == "-" else int(sent), int(fetch), int(fetched)))
        case [("encode", codec)] if codec:
            return Encode(codec)
        case [("encode", codec), ("offload", place)] if codec and _PLACE.fullmatch(place):
            tier, back_by = _from_place(place)
            return EncodeThenOffload(codec, tier, back_by=back_by)
    raise BadOption(
        f"{text!r} is no decision. Decisions: keep, recompute[:OP], offload:TIER[@OP], offload:TIER@MOMENTS, "
        "encode:CODEC, encode:CODEC+offload:TIER[@OP]"
    )
