"""The devices a step can be priced for: a catalogue by name, and your own from a file or a line of text.

    device("titan-x")                                                      from devices.toml, with sources
    device("./mycard.toml")                                                the same keys, at the top level
    device("memory=24GiB,flops=35e12,bandwidth=900GB/s,link=25GB/s")       the same keys, in one line

Every figure is a bare value (`memory = "24GiB"`) or `{ value = ..., source = "..." }`. Units are spelled as data sheets
do: GB is 10**9 bytes, GiB is 2**30; B is a byte and never a bit.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from memfit.errors import BadOption

EXAMPLE = "memory=24GiB,flops=35e12,bandwidth=900GB/s,link=25GB/s"

_CATALOGUE = "devices.toml"


@dataclass(frozen=True)
class Device:
    """What a roofline needs to know of a device.

    Attributes:
        memory_bytes: all of it, as on the data sheet.
        flops_per_s: peak in float32, a multiply-add counted as two; the others likewise, in their type.
        tf32_flops_per_s: None if the device has no such units. For reference: nothing is priced with it.
        send_bytes_per_s, fetch_bytes_per_s: what copies to the host and back get.
        launch_s: of one kernel, whatever it does.
        convolution_efficiency: the share of the peak that the fastest algorithm gets; plain_convolution_efficiency: the
            share that the one without workspace gets.
        sources: for each figure, by its key in the file, where it comes from.
        file: where the figures stand.
    """

    name: str
    memory_bytes: int
    flops_per_s: float
    fp16_flops_per_s: float
    bf16_flops_per_s: float
    fp64_flops_per_s: float
    bandwidth_bytes_per_s: float
    send_bytes_per_s: float
    fetch_bytes_per_s: float
    latency_s: float
    launch_s: float
    convolution_efficiency: float
    plain_convolution_efficiency: float
    matmul_efficiency: float
    attention_efficiency: float
    memory_efficiency: float
    tf32_flops_per_s: float | None = None
    title: str = field(default="", compare=False)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    file: str = field(default="", compare=False)

    def peak_flops_per_s(self, dtype: torch.dtype) -> float:
        """The peak for operands of that type."""
        if dtype == torch.float16:
            return self.fp16_flops_per_s
        if dtype == torch.bfloat16:
            return self.bf16_flops_per_s
        if dtype in (torch.float64, torch.complex128):
            return self.fp64_flops_per_s
        return self.flops_per_s

    @property
    def stream_bytes_per_s(self) -> float:
        """The bandwidth that a kernel which only moves bytes gets."""
        return self.bandwidth_bytes_per_s * self.memory_efficiency

    def figures(self) -> dict[str, float | int]:
        """The figures by their keys in a file; those the device does not have are left out."""
        found = {key: getattr(self, figure.attribute) for key, figure in _FIGURES.items()}
        return {key: value for key, value in found.items() if value is not None}

    def to_fields(self) -> str:
        """The line of text that `load_device` makes this device from."""
        return ",".join([f"name={self.name}", *(f"{key}={value!r}" for key, value in self.figures().items())])

    def to_toml(self) -> str:
        """The file that `load_device` makes this device from, with its sources: a start for one of your own."""
        lines = [f"name = {json.dumps(self.name)}", f"title = {json.dumps(self.title)}"]
        for key, value in self.figures().items():
            lines.append(f"{key} = {{ value = {value!r}, source = {json.dumps(self.sources.get(key, ''))} }}")
        return "\n".join(lines) + "\n"


# ---- What the keys of a file mean.

_SIZES = {"": 1.0, "B": 1.0}
_SIZES |= {f"{prefix}B": 10.0**power for prefix, power in (("k", 3), ("K", 3), ("M", 6), ("G", 9), ("T", 12))}
_SIZES |= {f"{prefix}iB": 2.0**power for prefix, power in (("K", 10), ("M", 20), ("G", 30), ("T", 40))}


@dataclass(frozen=True)
class _Figure:
    """One key: the attribute it fills, its units, how it is written."""

    attribute: str
    units: Mapping[str, float]
    written: str
    most: float = math.inf


def _size(attribute: str) -> _Figure:
    return _Figure(attribute, _SIZES, "a size in bytes such as '24GiB'")


def _flops(attribute: str) -> _Figure:
    units = {"": 1.0, "GFLOPS": 1e9, "TFLOPS": 1e12, "PFLOPS": 1e15}
    return _Figure(attribute, units, "flops per second such as 35e12 or '35TFLOPS'")


def _speed(attribute: str) -> _Figure:
    units = {f"{unit}/s" if unit else unit: factor for unit, factor in _SIZES.items()}
    return _Figure(attribute, units, "bytes per second such as '900GB/s'")


def _duration(attribute: str) -> _Figure:
    units = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
    return _Figure(attribute, units, "a time in seconds such as 5e-6 or '5us'")


def _share(attribute: str) -> _Figure:
    return _Figure(attribute, {"": 1.0, "%": 0.01}, "a share of the peak, above 0 and at most 1", most=1.0)


_FIGURES = {
    "memory": _size("memory_bytes"),
    "flops": _flops("flops_per_s"),
    "fp16": _flops("fp16_flops_per_s"),
    "bf16": _flops("bf16_flops_per_s"),
    "tf32": _flops("tf32_flops_per_s"),
    "fp64": _flops("fp64_flops_per_s"),
    "bandwidth": _speed("bandwidth_bytes_per_s"),
    "link": _speed("send_bytes_per_s"),
    "link_fetch": _speed("fetch_bytes_per_s"),
    "latency": _duration("latency_s"),
    "launch": _duration("launch_s"),
    "convolution_efficiency": _share("convolution_efficiency"),
    "plain_convolution_efficiency": _share("plain_convolution_efficiency"),
    "matmul_efficiency": _share("matmul_efficiency"),
    "attention_efficiency": _share("attention_efficiency"),
    "memory_efficiency": _share("memory_efficiency"),
}
_REQUIRED = ("memory", "flops", "bandwidth", "link")
_TEXTS = ("name", "title")


# ---- Finding a device.


def devices() -> tuple[Device, ...]:
    """Every device of the catalogue, in its order."""
    return tuple(_catalogue().values())


def device(name: str) -> Device:
    """The device of that name; a path to a TOML file, or fields in one line, are read by `load_device`."""
    known = _catalogue()
    if name in known:
        return known[name]
    if "=" in name or name.endswith(".toml") or os.sep in name:
        return load_device(name)
    raise BadOption(
        f"there is no device {name!r} in the catalogue.{_guess(name, known)} Known: {', '.join(known)}; 'here' is this "
        f"machine. For another give a TOML file such as ./mycard.toml, or fields such as '{EXAMPLE}'"
    )


def load_device(path_or_fields: str | Path) -> Device:
    """A device of your own: from a TOML file, or from `key=value,...`."""
    text = str(path_or_fields)
    # Fields may hold a slash (900GB/s); a path without a suffix does not hold an equals sign.
    if isinstance(path_or_fields, Path) or text.endswith(".toml") or (os.sep in text and "=" not in text):
        path = Path(path_or_fields)
        return _device(_read_toml(path), file=str(path), name=path.stem)
    if "=" not in text:
        raise BadOption(f"device {text!r}: neither a TOML file nor fields such as '{EXAMPLE}'")
    return _device(_read_fields(text), file="fields given by hand", name="custom")


@cache
def _catalogue() -> dict[str, Device]:
    tables = tomllib.loads(resources.files("memfit.cost").joinpath(_CATALOGUE).read_text(encoding="utf-8"))
    file = f"memfit/cost/{_CATALOGUE}"
    return {name: _device(table, file=file, name=name) for name, table in tables.items() if name != "defaults"}


@cache
def _defaults() -> dict[str, Any]:
    """Figures that no data sheet has: efficiencies and latencies, with their sources."""
    text = resources.files("memfit.cost").joinpath(_CATALOGUE).read_text(encoding="utf-8")
    defaults: dict[str, Any] = tomllib.loads(text)["defaults"]
    return defaults


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadOption(f"device file {path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadOption(f"device file {path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise BadOption(f"device file {path}: not TOML: {error}") from None


def _read_fields(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key or not value:
            raise BadOption(f"device fields: {part.strip()!r} is not key=value. Write fields such as '{EXAMPLE}'")
        if key in found:
            raise BadOption(f"device fields: {key!r} is given twice")
        found[key] = value
    return found


# ---- Making one from its keys.


def _device(table: Mapping[str, Any], *, file: str, name: str) -> Device:
    """Check every key and fill in what may be left out."""
    for key in _TEXTS:
        if not isinstance(table.get(key, ""), str):
            raise BadOption(f"device {name!r}: {key}={table[key]!r} must be a string")
    name = table.get("name") or name
    for key in table:
        if key not in _FIGURES and key not in _TEXTS:
            raise BadOption(
                f"device {name!r}: unknown key {key!r}.{_guess(key, _FIGURES)} Known keys: "
                f"{', '.join((*_TEXTS, *_FIGURES))}"
            )
    missing = [key for key in _REQUIRED if key not in table]
    if missing:
        raise BadOption(
            f"device {name!r}: {' and '.join(missing)} missing. A device needs {', '.join(_REQUIRED)}: '{EXAMPLE}'"
        )

    values: dict[str, float] = {}
    sources: dict[str, str] = {}
    for key, figure in _FIGURES.items():
        if key in table:
            values[key], sources[key] = _figure(name, key, table[key], figure)
        elif key in _defaults():
            values[key], sources[key] = _figure("defaults", key, _defaults()[key], figure)
    _fill_in(values, sources)
    attributes: dict[str, Any] = {_FIGURES[key].attribute: value for key, value in values.items()}
    attributes["memory_bytes"] = int(values["memory"])
    return Device(name=name, title=table.get("title", ""), sources=sources, file=file, **attributes)


def _fill_in(values: dict[str, float], sources: dict[str, str]) -> None:
    """Guess the figures that follow from others."""
    guesses = (
        ("fp16", values["flops"], "assumed: as flops"),
        ("bf16", values.get("fp16", values["flops"]), "assumed: as fp16"),
        ("fp64", values["flops"] / 32, "assumed: 1/32 of flops"),
        ("link_fetch", values["link"], f"as link: {sources['link']}"),
    )
    for key, value, source in guesses:
        if key not in values:
            values[key], sources[key] = value, source


def _figure(name: str, key: str, raw: Any, figure: _Figure) -> tuple[float, str]:
    """The number and the source of one entry."""
    source = "given by the user"
    if isinstance(raw, dict):
        if not set(raw) <= {"value", "source"} or "value" not in raw or not isinstance(raw.get("source", ""), str):
            raise BadOption(f"device {name!r}: {key} must be a value, or {{ value = ..., source = '...' }}")
        raw, source = raw["value"], raw.get("source") or source
    number = _number(raw, figure)
    if number is None:
        raise BadOption(f"device {name!r}: {key}={raw!r} is not {figure.written}")
    if not (math.isfinite(number) and 0 < number <= figure.most):
        limit = f" and at most {figure.most:g}" if figure.most < math.inf else ""
        raise BadOption(f"device {name!r}: {key}={raw!r} must be above 0{limit}")
    if figure.attribute == "memory_bytes" and number < 1:
        raise BadOption(f"device {name!r}: {key}={raw!r} is less than a byte")
    return number, source


def _number(raw: Any, figure: _Figure) -> float | None:
    """The number in base units, or None if it is not one."""
    if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
        return None
    if not isinstance(raw, str):
        return float(raw)
    match = re.fullmatch(r"\s*([-+]?[0-9._]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z/%]*)\s*", raw)
    if match is None or match[2] not in figure.units:
        return None
    try:
        return float(match[1]) * figure.units[match[2]]
    except ValueError:
        return None


def _guess(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""
