"""What Gist's figures must come to: bars of our own, what was published, and a second model of the same encodings.

Certainty: A, read in the abstract; M, recalled from the paper and not checked again; C, computed for our notes by a
model of layers, not of ATen calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

NETWORKS = ("alexnet", "nin", "overfeat", "vgg16", "inception_v3")
BATCH = 64
RELU_SPARSITY, POOLED_SPARSITY = 0.6, 0.4
LOSSLESS = "lossless"

CHOSEN = MappingProxyType({"alexnet": "fp8", "nin": "fp10", "overfeat": "fp8", "vgg16": "fp16", "inception_v3": "fp10"})
"""The format that costs each network no accuracy, by the paper (M; of nin with little confidence)."""

_LAYER_MODEL: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "alexnet": {LOSSLESS: 3.02, "fp16": 5.23, "fp10": 6.99, "fp8": 8.56},
        "nin": {LOSSLESS: 2.59, "fp16": 4.34, "fp10": 5.62, "fp8": 6.65},
        "overfeat": {LOSSLESS: 3.36, "fp16": 5.62, "fp10": 7.36, "fp8": 8.90},
        "vgg16": {LOSSLESS: 3.37, "fp16": 5.36, "fp10": 6.76, "fp8": 7.89},
    }
)
_INDUCTOR_DIVISOR = MappingProxyType({"alexnet": 1.93, "nin": 1.40, "overfeat": 1.98, "vgg16": 1.66})
_SAVED_BARS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "alexnet": {LOSSLESS: 3.0, "fp8": 7.7},
        "nin": {LOSSLESS: 2.6, "fp8": 5.4},
        "overfeat": {LOSSLESS: 3.3, "fp8": 7.9},
        "vgg16": {LOSSLESS: 3.3, "fp8": 6.5},
    }
)
_LOSSLESS_PEAK, _LOSSY_PEAK, _BEST_LOSSY_PEAK, _OVERHEAD = 1.5, 1.8, 2.0, 0.04
_LAYERS = (
    "the notes count layers: no dropout noise, no inputs of average pools, no loss. ATen calls save these too, and the "
    "paper's rules leave them as they are"
)

_PEAKS = (
    "which Inception it is, its buffers and the sparsity of each layer are not published; ours is version 3 with batch "
    "norm, at one sparsity for all layers"
)

_Average = Callable[[Sequence[float]], float]
_ModeOf = Callable[[Mapping[str, Any]], str]


@dataclass(frozen=True)
class Bar:
    """A number that ours must reach, or with `at_most` must not pass."""

    name: str
    bound: float
    ours: float
    at_most: bool = False

    def beside(self) -> dict[str, Any]:
        """The bar with ours, and a text if it is missed."""
        met = self.ours <= self.bound if self.at_most else self.ours >= self.bound
        sign = "<=" if self.at_most else ">="
        return {
            "figure": self.name,
            "target": f"{sign} {self.bound:g}",
            "ours": self.ours,
            "met": met,
            "miss": None if met else f"{self.name}: {self.ours:.3g}, which should be {sign} {self.bound:g}",
        }


@dataclass(frozen=True)
class Reference:
    """Somebody else's number, and what our model of the same thing says."""

    name: str
    published: float
    certainty: str
    model: float
    memfit: float | None
    why: str

    def beside(self) -> dict[str, Any]:
        return {
            "figure": self.name,
            "published": self.published,
            "certainty": self.certainty,
            "model": self.model,
            "memfit": self.memfit,
            "difference": None if abs(self.model / self.published - 1) < 0.02 else self.why,
        }


def saved_target(network: str, mode: str) -> float | None:
    """How many times less than eager must be saved, at batch 64 and the sparsity of the notes; None: no bar."""
    return _SAVED_BARS.get(network, {}).get(mode)


def row_figures(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The bars of one network."""
    for mode in row["modes"]:
        least = saved_target(row["network"], mode["mode"])
        if least is not None:
            ratio, name = mode["saved_ratio"]["eager"], f"saved bytes, eager's over {mode['mode']}"
            if mode["mode"] == LOSSLESS:
                yield Bar(name, least, ratio["images_left"]).beside()
            else:
                # The bar is of the paper's count, in which images are reduced like any other map. Ours are the
                # caller's and stay as they are.
                yield Bar(f"{name}, images counted in {mode['mode']}", least, ratio["images_reduced"]).beside()
                yield Bar(f"{name}, images as they are", least, ratio["images_left"]).beside()


def row_references(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The notes' own model of one network beside ours."""
    for mode in row["modes"]:
        published = _LAYER_MODEL.get(row["network"], {}).get(mode["mode"])
        if published is not None:
            yield Reference(
                f"saved bytes, eager's over the paper's {mode['mode']}",
                published,
                "C",
                mode["paper"]["saved_ratio"],
                mode["saved_ratio"]["eager"]["images_reduced"],
                _LAYERS,
            ).beside()
    divisor = _INDUCTOR_DIVISOR.get(row["network"])
    if divisor is not None:
        model = row["saved"]["eager"]["bytes"] / row["saved"]["inductor"]["bytes"]
        yield Reference("saved bytes, eager's over inductor's", divisor, "C", model, None, _LAYERS).beside()


def summary_figures(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The bars on all networks together."""
    for allocator in ("static", "dynamic"):
        lossless = [_ratio(row, LOSSLESS, allocator) for row in rows]
        yield Bar(f"peak, {allocator}, lossless, average", _LOSSLESS_PEAK, _mean(lossless)).beside()
        for mode in _lossy(rows):
            ratios = [_ratio(row, mode, allocator) for row in rows]
            yield Bar(f"peak, {allocator}, {mode}, average", _LOSSY_PEAK, _mean(ratios)).beside()
            yield Bar(f"peak, {allocator}, {mode}, best", _BEST_LOSSY_PEAK, max(ratios)).beside()
    # A catalogue knows no codecs. The truth lies between the two: at best a codec streams its tensor once.
    for name, key in (("memory speed", "overhead"), ("slow packing", "overhead_packing_slow")):
        for mode in (LOSSLESS, *_lossy(rows)):
            overheads = [_mode(row, mode)[key] for row in rows]
            yield Bar(f"overhead at {name}, {mode}, average", _OVERHEAD, _mean(overheads), at_most=True).beside()


def summary_references(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """What the paper says of all networks together, and our model of its encodings beside its own framework."""

    def reference(
        name: str, published: float, certainty: str, of: _Average, allocator: str, mode_of: _ModeOf
    ) -> dict[str, Any]:
        model = of([_mode(row, mode_of(row))["paper"]["peak_ratio_of_baseline"][allocator] for row in rows])
        ours = of([_ratio(row, mode_of(row), allocator) for row in rows])
        return Reference(name, published, certainty, model, ours, _PEAKS).beside()

    def chosen(row: Mapping[str, Any]) -> str:
        return CHOSEN[row["network"]]

    yield reference("peak, static, lossless, average", 1.4, "M", _mean, "static", lambda row: LOSSLESS)
    yield reference("peak, static, chosen formats, average", 1.8, "A", _mean, "static", chosen)
    yield reference("peak, static, chosen formats, best", 2.0, "A", max, "static", chosen)
    yield reference("peak, no decoded copies, best", 4.1, "A", max, "direct", lambda row: "fp8")


def _mode(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return next(mode for mode in row["modes"] if mode["mode"] == name)


def _ratio(row: Mapping[str, Any], mode: str, allocator: str) -> float:
    return float(_mode(row, mode)["peak_ratio"]["maps"][allocator])


def _lossy(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [mode["mode"] for mode in rows[0]["modes"] if mode["mode"] != LOSSLESS]


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
