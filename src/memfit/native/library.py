"""Compile the C beside this file once per machine, keep the libraries in memfit's cache, load them.

There are three: the plan evaluator beside this file, the codecs' kernels in the folder `codecs`, and in `kernels` those
that stand in for torch's own; both of the latter share work out over threads by what is in `team`. The first is kept as
`native-<sources>-<compiler>-<content>.so`, the others as `codecs-...` and `kernels-...`, each part a hash. The last is
that of the file itself: a library cut short would not fail to load, it would kill the process at the first missing
page.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memfit.cache import cache_folder
from memfit.torch_internals import thread_team

log = logging.getLogger("memfit")

FLAGS = ("-O3", "-std=c11", "-shared", "-fPIC")
_TIMEOUT_S = 120
_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Part:
    """One library: what its file's name begins with, where its sources are, and what Python does without it."""

    name: str
    folder: Path
    flags: tuple[str, ...]
    otherwise: str
    on_threads: bool = False


EVALUATOR = Part("native", _HERE, FLAGS, "plans are evaluated in Python, not in C")
_TEAM = _HERE / "team"
# A product and a sum that became one operation would round otherwise than torch does. Loops with a choice between two
# floats become vectors only if computing the one that is not chosen cannot trap.
_FLOAT_FLAGS = (*FLAGS, "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno", "-pthread")
CODECS = Part("codecs", _HERE / "codecs", _FLOAT_FLAGS, "codecs run in torch, not in C", on_threads=True)
KERNELS = Part("kernels", _HERE / "kernels", _FLOAT_FLAGS, "torch's own kernels are used throughout", on_threads=True)


def native_library(part: Part = EVALUATOR) -> ctypes.CDLL | None:
    """The compiled library, or None where it cannot be had; MEMFIT_NATIVE=0 asks for None."""
    if os.environ.get("MEMFIT_NATIVE") == "0":
        _explain("MEMFIT_NATIVE=0 is set", part.otherwise)
        return None
    library = _library(cache_folder(), os.environ.get("CC"), part)
    if library is not None and part.on_threads:
        library.memfit_use_team.argtypes = [ctypes.c_void_p]
        library.memfit_use_team(thread_team())
    return library


@functools.cache
def _library(folder: Path, chosen: str | None, part: Part) -> ctypes.CDLL | None:
    """Take it from the folder, or compile it."""
    sources = _sources(part)
    name = f"{part.name}-{_hash_of_sources(sources, part.flags)}"
    compiler = _find_compiler(chosen)
    # Where there is no compiler, a library that any compiler made is as good: whole numbers, and single operations on
    # floats, leave no room for opinion.
    pattern = f"{name}-*.so" if compiler is None else f"{name}-{_hash_of_compiler(compiler)}-*.so"
    for path in _kept(folder, pattern):
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:  # made for another libc, in a home that machines share
            log.info("the native library %s does not load: %s", path, error)
    if compiler is None:
        why = f"there is no C compiler {chosen!r}" if chosen else "there is no C compiler (cc, gcc; or set CC)"
        _explain(why, part.otherwise)
        return None
    try:
        return _compile([*compiler, *part.flags], sources, folder, f"{name}-{_hash_of_compiler(compiler)}")
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None)
        _explain(f"{error}{': ' + said.strip() if said else ''}", part.otherwise)
        return None


@functools.cache
def _explain(why: str, otherwise: str) -> None:
    """Say once why something is slower than it could be."""
    log.info("%s: %s", otherwise, why)


def _sources(part: Part = EVALUATOR) -> list[Path]:
    folders = [part.folder, _TEAM] if part.on_threads else [part.folder]
    return sorted(path for folder in folders for path in folder.glob("*.[ch]"))


def _hash_of_sources(sources: list[Path], flags: tuple[str, ...] = FLAGS) -> str:
    """Of everything that decides what the library does, and where it can be loaded."""
    found = hashlib.sha256(repr((flags, sys.platform, platform.machine(), ctypes.sizeof(ctypes.c_void_p))).encode())
    for path in sources:
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def _hash_of_compiler(compiler: list[str]) -> str:
    """Of the command and the program behind it: an upgrade compiles anew. Asking for its version would take longer."""
    program = Path(compiler[0]).resolve()
    return _digest(repr((compiler, str(program), program.stat().st_mtime_ns)).encode())[:8]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _find_compiler(chosen: str | None) -> list[str] | None:
    """The command as a list, its program as a path. CC may hold options too, as in make."""
    for command in [chosen] if chosen else ["cc", "gcc"]:
        program, *options = shlex.split(command) or [""]
        found = shutil.which(program)
        if found:
            return [found, *options]
    return None


def _kept(folder: Path, pattern: str) -> Iterator[Path]:
    """The libraries of that name that are whole; damaged ones are removed."""
    for path in sorted(folder.glob(pattern)):
        try:
            if path.stem.rsplit("-", 1)[1] == _digest(path.read_bytes()):
                yield path
            else:
                log.info("removing the damaged native library %s", path)
                path.unlink(missing_ok=True)
        except OSError as error:
            log.info("cannot read the native library %s: %s", path, error)


def _compile(command: list[str], sources: list[Path], folder: Path, name: str) -> ctypes.CDLL:
    """Compile aside, move into the folder whole, load from there; or load from aside if nothing can be kept."""
    with tempfile.TemporaryDirectory(prefix="memfit-") as aside:
        built = Path(aside) / f"{name}.so"
        files = [str(path) for path in sources if path.suffix == ".c"]
        subprocess.run(
            [*command, *files, "-o", str(built), "-lm"], check=True, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
        content = built.read_bytes()
        path = folder / f"{name}-{_digest(content)}.so"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".native-", delete=False) as handle:
                handle.write(content)
            os.replace(handle.name, path)  # another process never loads half a library
        except OSError as error:
            log.info("cannot keep the native library in %s: %s", folder, error)
            path = built
        return ctypes.CDLL(str(path))
