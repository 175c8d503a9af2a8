"""The figures that vDNN's paper published (Rhu et al., MICRO 2016), how sure we are of each, and why ours differ.

Certainty: A, read in the abstract; N, from others' notes or code; M, recalled from the paper and not checked again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_GB = 1e9
_WORKSPACES = (
    "which algorithms cuDNN 4 chose, and their workspaces, are not published; ours are a model (32 x 32 FFT tiles); "
    "nothing is counted for the CUDA context"
)
_AVERAGE = (
    "what the average is taken over is not published; ours is over kernels and of managed bytes (feature maps, their "
    "gradients, workspaces), all(m) against network-wide at the fastest algorithms, and was chosen among six that are "
    "all shown because it comes nearest"
)
_DYN = (
    "by our workspaces it is enough to send convolutions' inputs and to slow a few convolutions, in both accounts; "
    "to send all maps at the fastest algorithms, as the paper counts them, costs about what they report "
    "(published_account, all(p))"
)


@dataclass(frozen=True)
class Figure:
    """One published number, or a range of them.

    Attributes:
        of: finds ours in a row of the benchmark.
        unit: "GB" or "%", for people; numbers are bytes and shares.
        why: why ours is another number.
    """

    name: str
    low: float
    high: float
    certainty: str
    unit: str
    of: Callable[[Mapping[str, Any]], float]
    why: str

    def beside(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The figure with ours, and a text if ours is not what they say."""
        ours = self.of(row)
        shown = self.text(ours)
        theirs = self.text(self.low) if self.low == self.high else f"{self.text(self.low)} to {self.text(self.high)}"
        differs = not (self.low <= ours <= self.high) and shown != theirs
        nearest = min(max(ours, self.low), self.high)
        away = f"{ours / nearest - 1:+.0%}" if self.unit == "GB" else f"{(ours - nearest) * 100:+.1f} points"
        return {
            "figure": self.name,
            "published": self.low if self.low == self.high else [self.low, self.high],
            "certainty": self.certainty,
            "ours": ours,
            "difference": f"{self.name}: published {theirs}, ours {shown} ({away}): {self.why}" if differs else None,
        }

    def text(self, number: float) -> str:
        return f"{number / _GB:.1f} GB" if self.unit == "GB" else f"{number:.1%}".replace(".0%", "%")


def exactly(name: str, number: float, certainty: str, unit: str, of: Callable[..., float], why: str) -> Figure:
    return Figure(name, number, number, certainty, unit, of, why)


def _network_wide(row: Mapping[str, Any]) -> float:
    return float(row["network_wide"]["bytes"])


def _cut(row: Mapping[str, Any]) -> float:
    return float(row["average_cut"]["managed"]["kernel"])


def _dyn(key: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda row: float(row["policies"]["dyn"][key])


def _average_cut(share: float, certainty: str = "A", why: str = "") -> Figure:
    return exactly("average usage cut", share, certainty, "%", _cut, why + _AVERAGE)


@dataclass(frozen=True)
class Configuration:
    """A network at a batch of the paper's, with what was published of it.

    `budget` is a second limit to plan for with vdnn-dyn, besides all of the device's memory.
    """

    network: str
    batch: int
    figures: tuple[Figure, ...] = ()
    budget: str | None = None


CONFIGURATIONS = (
    Configuration("alexnet", 128, (_average_cut(0.89),)),
    Configuration(
        "overfeat", 128, (_average_cut(0.91, why="the zoo's is the fast model, the paper's may be the other; "),)
    ),
    Configuration("googlenet", 128, (_average_cut(0.95, why="the zoo's has batch norm, which doubles its maps; "),)),
    Configuration("vgg16", 64),
    Configuration("vgg16", 128),
    Configuration(
        "vgg16",
        256,
        (
            exactly("network-wide memory", 28 * _GB, "A", "GB", _network_wide, _WORKSPACES),
            exactly("throughput of dyn, of the oracle's", 0.82, "A", "%", _dyn("throughput"), _DYN),
            _average_cut(0.90, "M"),
            exactly(
                "offloaded by all",
                16 * _GB,
                "M",
                "GB",
                lambda row: float(row["published_account"]["all(m)"]["host_bytes"]),
                "'about 16 GB' as we recall it; ours is the sum of the inputs of its layers but the images, 14.4 GiB",
            ),
        ),
    ),
    Configuration("vgg116", 32),
    Configuration("vgg216", 32),
    Configuration("vgg316", 32),
    Configuration(
        "vgg416",
        32,
        (
            exactly(
                "network-wide memory",
                67.1 * _GB,
                "M",
                "GB",
                _network_wide,
                f"{_WORKSPACES}; if their GB are 2**30 bytes, ours is 65.7",
            ),
            exactly(
                "most on the device by dyn",
                4.2 * _GB,
                "M",
                "GB",
                lambda row: float(row["policies"]["dyn in 6GiB"]["max_bytes"]),
                "we count the gradients of all parameters, 2.3 GB, beside the parameters; without it is about theirs",
            ),
            Figure(
                "slowdown of dyn in 6GiB",
                0.0,
                0.06,
                "M, 'no noticeable slowdown'; the 6 % are our notes'",
                "%",
                lambda row: float(row["policies"]["dyn in 6GiB"]["step_s"] / row["policies"]["none(p)"]["step_s"] - 1),
                "beside parameters and all their gradients no workspace fits next to the data gradients of the first "
                "block; 6.32 GiB are enough for 2.2 %",
            ),
            Figure("share on the host by dyn", 0.81, 0.92, "M", "%", _dyn("host_share"), "other bytes on the device"),
        ),
        budget="6GiB",
    ),
)


def _misfits(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in found["rows"] if not row["network_wide"]["fits"]]


def _overhead(row: Mapping[str, Any]) -> float:
    return 1 - float(row["policies"]["dyn"]["throughput"])


SUMMARY_FIGURES = (
    exactly(
        "configurations that do not fit, of ten", 0.6, "N", "%", lambda found: len(_misfits(found)) / 10, _WORKSPACES
    ),
    Figure(
        "least loss of the misfits",
        0.01,
        0.18,
        "N",
        "%",
        lambda found: min(map(_overhead, _misfits(found))),
        "where storages are freed at their last use, VGG-16 at 128 fits without sending anything",
    ),
    Figure("largest loss of the misfits", 0.01, 0.18, "N", "%", lambda f: max(map(_overhead, _misfits(f))), _DYN),
    Figure("least cut of the misfits", 0.73, 0.98, "N", "%", lambda f: min(map(_cut, _misfits(f))), _AVERAGE),
    Figure("largest cut of the misfits", 0.73, 0.98, "N", "%", lambda f: max(map(_cut, _misfits(f))), _AVERAGE),
    exactly(
        "mean throughput of dyn, of the oracle's",
        0.97,
        "M",
        "%",
        lambda found: sum(row["policies"]["dyn"]["throughput"] for row in found["rows"]) / len(found["rows"]),
        "theirs is of the baseline's, where that fits",
    ),
)
