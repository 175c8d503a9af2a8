"""`memfit devices`: the devices a step can be planned for, every figure with its source."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from memfit.cli.screen import Screen
from memfit.cost.costs import HERE
from memfit.cost.devices import EXAMPLE, Device, device, devices
from memfit.errors import BadOption

_UNITS = {"memory": "bytes", "bandwidth": "bytes/s", "link": "bytes/s", "link_fetch": "bytes/s"}
_UNITS |= dict.fromkeys(("flops", "fp16", "bf16", "tf32", "fp64"), "flop/s")
_UNITS |= dict.fromkeys(("latency", "launch"), "s")
_SHARES = {
    "convolution_efficiency": "convolution",
    "plain_convolution_efficiency": "convolution without workspace",
    "matmul_efficiency": "matmul",
    "attention_efficiency": "attention",
    "memory_efficiency": "bandwidth",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="show one device: of the catalogue, a TOML file, or fields (key=value,...)",
    )
    parser.add_argument("--toml", action="store_true", help="print that device as TOML, to start your own from")
    parser.epilog = f"Wherever a device is asked for, a TOML file of your own or fields will do: {EXAMPLE}"


def run(arguments: argparse.Namespace, screen: Screen) -> int:
    """List the catalogue, or show one device."""
    if arguments.name == HERE:
        raise BadOption(
            f"device '{HERE}' is this machine: `memfit plan` measures the ops themselves, no figures needed"
        )
    if arguments.name is None:
        if arguments.toml:
            raise BadOption("--toml prints one device. Name it: `memfit devices titan-x --toml`")
        if screen.json:
            screen.object({"devices": [_to_dict(d) for d in devices()]})
        else:
            _print_all(devices(), screen)
        return 0
    found = device(arguments.name)
    if screen.json:
        screen.object({"devices": [_to_dict(found) | ({"toml": found.to_toml()} if arguments.toml else {})]})
    elif arguments.toml:
        screen.line(found.to_toml().rstrip("\n"))
    else:
        _print_one(found, screen)
    return 0


def _to_dict(found: Device) -> dict[str, Any]:
    """Every figure under its own name, and again with unit and source under its key in the file."""
    figures = {
        key: {"value": value, "unit": _UNITS.get(key, "share of the peak"), "source": found.sources.get(key, "")}
        for key, value in found.figures().items()
    }
    return {key: value for key, value in asdict(found).items() if key != "sources"} | {"figures": figures}


def _print_all(known: tuple[Device, ...], screen: Screen) -> None:
    figures = ("memory", "flops", "fp16", "bf16", "bandwidth", "link")
    header = ("name", "memory", "fp32", "fp16", "bf16", "bandwidth", "link", "title")
    screen.table(
        header,
        [(d.name, *(_written(key, d.figures()[key]) for key in figures), d.title) for d in known],
        right=header[1:-1],
    )
    screen.line()
    by_shares: dict[str, list[str]] = {}
    for d in known:
        by_shares.setdefault(_shares(d), []).append(d.name)
    for shares, names in by_shares.items():
        which = "all of them" if len(names) == len(known) else ", ".join(names)
        screen.line(f"share of the peak that kernels get, {which}: {shares}")
    screen.line(
        f"{HERE} is this machine, measured. `memfit devices NAME` shows every figure of a device and its source."
    )


def _print_one(found: Device, screen: Screen) -> None:
    screen.facts([("name", found.name), ("title", found.title), ("figures", found.file)])
    screen.line()
    screen.table(
        ("figure", "value", "source"),
        [(key, _written(key, value), found.sources.get(key, "")) for key, value in found.figures().items()],
        right=("value",),
    )
    screen.line()
    screen.line(f"`memfit devices {found.name} --toml` prints this as a file to start your own from.")


def _shares(found: Device) -> str:
    figures = found.figures()
    return ", ".join(f"{name} {figures[key]:.2f}" for key, name in _SHARES.items())


def _written(key: str, value: float) -> str:
    """A figure as data sheets write it."""
    match _UNITS.get(key):
        case "bytes":
            return f"{value / 2**30:g} GiB"
        case "bytes/s":
            return f"{value / 1e9:g} GB/s"
        case "flop/s":
            return f"{value / 1e12:g} TFLOPS"
        case "s":
            return f"{value * 1e6:g} us"
    return f"{value:.3g}"
