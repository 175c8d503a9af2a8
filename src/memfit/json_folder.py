"""A folder of JSON files, one for each key: written whole, bounded in number and bytes, the oldest use goes first.

What is in them is a convenience. A file that cannot be read, is damaged or belongs to something else is as good as
none; the caller makes the thing again and writes over it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

log = logging.getLogger("memfit")

_PACKAGE = Path(__file__).parent
_SUFFIXES = (".py", ".c", ".h", ".toml")


class JsonFolder:
    """The files of one kind: `plans/3f2a....json`, each beside the whole of its key, so that hashes need no trust."""

    def __init__(self, folder: Path, *, max_files: int, max_bytes: int) -> None:
        self.folder = folder
        self._max_files = max_files
        self._max_bytes = max_bytes

    def file(self, key: Any) -> Path:
        """Where the content of that key is, if it is there."""
        return self.folder / f"{digest(key)}.json"

    def read(self, key: Any) -> Any | None:
        """What was written under that key, or None. Reading is a use: what is used stays."""
        file = self.file(key)
        try:
            found = json.loads(file.read_text())
            if found["key"] != _as_json(key):
                raise ValueError("it was written under another key")
            content = found["content"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            self.discard(key, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(file)
        return content

    def discard(self, key: Any, why: object) -> None:
        """Say that what was read is of no use. It stays until it is written over or pushed out."""
        log.debug("ignoring %s: %s", self.file(key), why)

    def write(self, key: Any, content: Any) -> None:
        """Write the file whole and move it into place, then make room; a disk that is full or closed is no error."""
        text = json.dumps({"key": key, "content": content})
        if len(text) > self._max_bytes:
            log.debug("%s would be larger than all that is kept, %s bytes", self.file(key), f"{self._max_bytes:,}")
            return
        name = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.folder, suffix=".part", delete=False) as handle:
                name = handle.name
                handle.write(text)
            os.replace(name, self.file(key))
        except OSError as error:
            log.info("cannot keep %s: %s", self.file(key), error)
            if name is not None:
                with contextlib.suppress(OSError):
                    os.unlink(name)
            return
        self._make_room()

    def _make_room(self) -> None:
        """Remove the files that were not used for longest, until the rest is within the bounds."""
        found = []
        # Leftovers of processes that ended while they wrote count too: they are removed like any other.
        for file in self._files():
            with contextlib.suppress(OSError):  # another process may have removed it
                status = file.stat()
                found.append((status.st_mtime_ns, status.st_size, file))
        found.sort(reverse=True, key=lambda entry: entry[0])
        total = 0
        for index, (_, size, file) in enumerate(found):
            total += size
            if index >= self._max_files or total > self._max_bytes:
                with contextlib.suppress(OSError):
                    file.unlink()

    def _files(self) -> Iterable[Path]:
        return (file for suffix in ("*.json", "*.part") for file in self.folder.glob(suffix))


def digest(thing: Any) -> str:
    """A short hash of JSON-able data."""
    return hashlib.sha256(json.dumps(thing, sort_keys=True).encode()).hexdigest()[:24]


def _as_json(key: Any) -> Any:
    """The key as it comes back from a file: tuples are lists there."""
    return json.loads(json.dumps(key))


@functools.cache
def sources_digest(*names: str) -> str:
    """A hash of the sources of these files and folders of memfit: a version number does not tell two drafts apart."""
    content = hashlib.sha256()
    for name in names:
        path = _PACKAGE / name
        files = sorted(f for f in path.rglob("*") if f.suffix in _SUFFIXES) if path.is_dir() else [path]
        for file in files:
            content.update(f"{file.relative_to(_PACKAGE)}\0".encode())
            content.update(file.read_bytes())
    return content.hexdigest()[:24]
