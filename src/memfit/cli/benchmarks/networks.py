"""Which networks a benchmark is run on."""

from __future__ import annotations

import argparse

from memfit import zoo
from memfit.cli.options import positive
from memfit.errors import BadOption


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which networks, and at which batch."""
    parser.add_argument("--networks", metavar="A,B,C", help="networks of the zoo (default: those that were published)")
    parser.add_argument("--batch", type=positive, metavar="N", help="batch size of all (default: the published one)")


def networks_asked_for(text: str | None) -> list[str]:
    """The names in `--networks A,B,C`, each known to the zoo; none if the option was not given."""
    if text is None:
        return []
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise BadOption(f"--networks {text!r} names no network. Separate names by commas")
    for name in names:
        zoo.spec(name)  # before minutes are spent on the others
    return names
