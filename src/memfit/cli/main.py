"""The command line: parse, run one command, turn errors into exit codes.

0 is success, 2 is a plan that does not fit its budget, 1 is every other error, wrong usage included.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from memfit.cli import bench, capture, compare, demo, devices, frontier, plan, run, verify, zoo
from memfit.cli.screen import Screen
from memfit.errors import DoesNotFit, MemfitError

_COMMANDS = {
    "zoo": (zoo, "list the networks known by name"),
    "devices": (devices, "list the devices to plan for, with the source of every figure"),
    "capture": (capture, "show what a training step does and holds, without running it"),
    "plan": (plan, "plan a training step for a device and a budget, without running it"),
    "compare": (compare, "plan a training step by every policy, side by side"),
    "frontier": (frontier, "show what each budget costs: every exact policy, and what no plan can be better than"),
    "verify": (verify, "compare fitted training steps with eager's, bit for bit"),
    "run": (run, "train both ways; measure exactness, peak and time"),
    "bench": (bench, "compute published tables anew, theirs beside ours"),
    "demo": (demo, "train a network in a process whose memory is limited, where plain PyTorch cannot"),
}
_OK, _ERROR, _DOES_NOT_FIT, _INTERRUPTED, _BROKEN_PIPE = 0, 1, 2, 130, 141


class BadUsage(MemfitError):
    """A command line that cannot be parsed."""


class _Parser(argparse.ArgumentParser):
    """argparse, but wrong usage is raised: its own exit code of 2 means something else here."""

    def error(self, message: str) -> NoReturn:
        raise BadUsage(f"{message} (see `{self.prog} --help`)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (sys.argv unless given) names; the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # Before parsing: wrong usage is reported in JSON too, if that was asked for.
    screen = Screen(json="--json" in argv)
    try:
        code = _run(argv, screen)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # `memfit zoo | head`: nobody reads on. Python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except KeyboardInterrupt:
        screen.done()
        print("memfit: interrupted", file=sys.stderr)
        return _INTERRUPTED


def _run(argv: list[str], screen: Screen) -> int:
    try:
        arguments = _parser().parse_args(argv)
        # A user's network may print; with --json it must not do so on our stdout.
        quiet = contextlib.redirect_stdout(sys.stderr) if screen.json else contextlib.nullcontext()
        with quiet:
            return int(_COMMANDS[arguments.command][0].run(arguments, screen))
    except (BrokenPipeError, KeyboardInterrupt):
        raise
    except SystemExit as exit:  # --help and --version
        return exit.code if isinstance(exit.code, int) else _OK
    except MemfitError as error:
        _report(error, screen)
        screen.error(str(error))
        return _DOES_NOT_FIT if isinstance(error, DoesNotFit) else _ERROR
    except Exception as error:
        # Not ours: the user's network, or a bug. Either needs the whole story.
        _report(error, screen)
        traceback.print_exc()
        return _ERROR


def _report(error: Exception, screen: Screen) -> None:
    screen.done()
    if screen.json:
        screen.object({"error": str(error), "kind": type(error).__name__})


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="memfit", description="Train PyTorch networks in less memory, exactly.")
    parser.add_argument("--version", action="version", version=f"memfit {importlib.metadata.version('memfit')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (command, text) in _COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.add_arguments(sub)
        sub.add_argument("--json", action="store_true", help="print one JSON object; messages go to stderr")
    return parser


if __name__ == "__main__":
    sys.exit(main())
