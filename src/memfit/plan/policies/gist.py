"""gist-lossless, gist-lossy: hold every feature map in the bits that its backward uses need (Jain et al., 2018).

For each map the smallest code that serves all of its uses: one bit where backward asks only for ReLU's gate, slots for
max-pool indices, as few bytes as indices need, packed non-zeros where enough of it is zero. The lossy policy stores
what is then left, and the values of packed non-zeros, in a format of fewer bits; forward computes in full precision.

Room for non-zeros is reserved by the measured share of them and a margin, since it moves as training goes on.
"""

from __future__ import annotations

import functools
import math

from memfit.capture.step import Step
from memfit.codecs.registry import codec
from memfit.cost.costs import Costs
from memfit.errors import BadOption
from memfit.plan.decisions import Decisions, Encode
from memfit.plan.policies.policy import Policy
from memfit.plan.readings import Candidate, candidate_of

FORMATS = ("fp16", "bf16", "fp10", "fp8", "int8", "int4")
DEFAULT_FORMAT = "fp16"
CODES = ("mask", "window", "narrow-int", "sparse")
"""What gist-lossless chooses from."""
SINGLE_CODES = (*CODES, "csr")
"""What it can be told to use alone; the paper's own form of packed non-zeros is among it, to compare with."""

_LEAST_BYTES = 4096
"""Smaller tensors are left alone: a call costs more than they are worth."""
_LEAST_GAIN = 0.1
"""Packing non-zeros is the one code that costs time to speak of: for less it is not made."""
_COMPACTING = ("sparse", "csr")
_LOGARITHMS = ("aten._log_softmax.default", "aten._log_softmax.out")


def _decide(step: Step, costs: Costs, codes: tuple[str, ...], format_: str | None = None) -> dict[int, Encode]:
    """Encode what has a smaller form by one of these codes, or in this format."""
    found: dict[int, Encode] = {}
    for storage in step.storages:
        if storage.first_backward is None or storage.bytes < _LEAST_BYTES or storage.id in costs.unforeseen:
            continue
        candidate = candidate_of(step, storage.id)
        if isinstance(candidate, str):
            continue
        density = costs.densities.get(storage.id)
        names = [name for code in codes for name in _with_room(code, candidate, density)]
        if format_ is not None and _may_lose(step, candidate):
            names += [format_, *_with_room(f"sparse-{format_}", candidate, density)]
        best = _smallest(candidate, names)
        if best is not None:
            found[storage.id] = Encode(best)
    return found


def _smallest(candidate: Candidate, names: list[str]) -> str | None:
    """The codec with the smallest code of those that are legal; the first of equals."""
    sizes = {}
    for name in names:
        chosen = codec(name)
        if not chosen.why_not(candidate.value, candidate.readings):
            sizes[name] = chosen.code_bytes(candidate.value, chosen.settings(candidate.readings))
            if candidate.gated and name != "mask":
                sizes[name] += -(-candidate.value.num_elements // 8)  # a mask beside it, see plan/encode.py
    if not sizes:
        return None
    best = min(sizes, key=lambda name: sizes[name])
    return best if sizes[best] <= (1 - _LEAST_GAIN) * candidate.value.bytes else None


def _with_room(name: str, candidate: Candidate, density: float | None) -> list[str]:
    """The codec; one that packs non-zeros with room for that share of them and a margin, and none if it is unknown."""
    if not name.startswith(_COMPACTING):
        return [name]
    if density is None or name.startswith("sparse-int"):  # whole numbers have no packed form
        return []
    room = 1.1 * density + 0.01 + 2 / math.sqrt(max(candidate.value.num_elements, 1))
    return [f"{name}:{math.ceil(room * 1000) / 1000}"] if room < 1 else []


def _may_lose(step: Step, candidate: Candidate) -> bool:
    """True for feature maps: not for vectors, for statistics or for logarithms, whose error would grow.

    Of an op with several results the first is the map; means, deviations and sums of exponentials come behind it.
    """
    known = step.storage[step.values[candidate.value.id].storage]
    assert known.maker is not None
    maker = step.ops[known.maker]
    is_first = maker.outputs[0] is not None and step.values[maker.outputs[0]].storage == known.id
    return is_first and sum(size > 1 for size in candidate.value.shape) >= 2 and maker.target not in _LOGARITHMS


def gist_lossless(code: str) -> Policy:
    """The lossless policy with that code alone."""
    if code not in SINGLE_CODES:
        raise BadOption(f"format={code!r}: unknown. Codes of 'gist-lossless': {', '.join(SINGLE_CODES)}")

    def decide(step: Step, costs: Costs, budget_bytes: int | None) -> Decisions:
        return _decide(step, costs, (code,))

    return Policy(f"gist-lossless:{code}", f"as gist-lossless, but by {code} alone", decide, asks_densities=True)


def gist_lossy(format_: str) -> Policy:
    """The lossy policy with that format for values."""
    if format_ not in FORMATS:
        raise BadOption(f"format={format_!r}: unknown. Formats of 'gist-lossy': {', '.join(FORMATS)}")

    def decide(step: Step, costs: Costs, budget_bytes: int | None) -> Decisions:
        return _decide(step, costs, CODES, format_)

    return Policy(
        f"gist-lossy:{format_}",
        f"as gist-lossless, and what is left as {format_}: gradients differ from eager's (Gist)",
        decide,
        asks_densities=True,
        is_lossy=True,
    )


def lossless_codes(step: Step, costs: Costs) -> dict[int, Encode]:
    """The smallest lossless code of every map that has one."""
    return _decide(step, costs, CODES)


def _decide_lossless(step: Step, costs: Costs, budget_bytes: int | None) -> Decisions:
    return lossless_codes(step, costs)


GIST_LOSSLESS = Policy(
    "gist-lossless",
    "hold feature maps in the bits that backward needs: masks, slots, packed non-zeros (Gist)",
    _decide_lossless,
    asks_densities=True,
    with_format=functools.cache(gist_lossless),
)
GIST_LOSSY = Policy(
    "gist-lossy",
    f"as gist-lossless, and what is left in fewer bits ({DEFAULT_FORMAT} unless told): gradients differ (Gist)",
    gist_lossy(DEFAULT_FORMAT).decide,
    asks_densities=True,
    is_lossy=True,
    with_format=functools.cache(gist_lossy),
)
