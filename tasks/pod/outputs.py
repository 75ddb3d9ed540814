"""The run's outputs folder: lines that survive a kill, documents that are never half empty.

A run may be killed at any moment and its folder may be synced by a sidecar every few seconds, so
nothing here is buffered for longer than one line and nothing is renamed into place.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import IO

from tasks.pod.clock import now_s

#: The commit marker of the run: written last, so it is not in its own list of files.
END = "end.json"


class Lines:
    """A file of JSON lines. Writing never raises: what failed is kept in ``errors``.

    A full disk must not stop the clean-up that follows, and a sampler's thread has nobody to
    raise to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.errors: list[str] = []
        self._lock = threading.Lock()
        self._file: IO[str] | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            self._failed(error)

    def write(self, row: dict[str, object]) -> None:
        """Append one row and flush it."""
        text = json.dumps(row, separators=(",", ":"), default=str)
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write(text + "\n")
                self._file.flush()
            except (OSError, ValueError) as error:
                self._failed(error)

    def close(self) -> None:
        """Close the file; later rows are dropped."""
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                try:
                    file.close()
                except OSError as error:
                    self._failed(error)

    def _failed(self, error: Exception) -> None:
        if len(self.errors) < 10:
            self.errors.append(f"{self.path.name}: {error}")


class Outputs:
    """Everything below MEMSWEEP_OUTPUTS. Raises ``OSError`` only when the folder cannot be made."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        self.errors: list[str] = []
        self._events = Lines(root / "events.jsonl")

    def path(self, relative: str) -> Path:
        """Return a path below the folder and make its parent folder."""
        path = self.root / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def event(self, name: str, /, **fields: object) -> None:
        """Append to the run's own timeline and, for who watches, to standard output."""
        self._events.write({"t_s": now_s(), "event": name, **fields})
        details = " ".join(f"{key}={value}" for key, value in fields.items() if value is not None)
        say(f"{name} {details}".rstrip())

    def write(self, relative: str, value: object) -> bool:
        """Write a JSON document over the old one; return whether the disk took it.

        The new bytes go over the old ones before the file is cut to its new length: a reader or a
        kill in between never finds an empty file.
        """
        data = (json.dumps(value, indent=1, default=str) + "\n").encode()
        try:
            path = self.path(relative)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                done = 0
                while done < len(data):
                    done += os.pwrite(descriptor, data[done:], done)
                os.ftruncate(descriptor, len(data))
            finally:
                os.close(descriptor)
        except OSError as error:
            self.errors.append(f"{relative}: {error}")
            return False
        return True

    def write_bytes(self, relative: str, data: bytes) -> None:
        """Write a whole file as it came; a refusal of the disk is kept in ``errors``."""
        try:
            self.path(relative).write_bytes(data)
        except OSError as error:
            self.errors.append(f"{relative}: {error}")

    def close(self) -> None:
        """Close the timeline."""
        self._events.close()
        self.errors.extend(self._events.errors)

    def hashes(self) -> dict[str, dict[str, object]]:
        """Return sha256 and size of every file except :data:`END`; unreadable ones say why."""
        found: dict[str, dict[str, object]] = {}
        for path in sorted(self.root.rglob("*")):
            name = path.relative_to(self.root).as_posix()
            if name == END or path.is_symlink() or not path.is_file():
                continue
            try:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                found[name] = {"sha256": digest, "bytes": path.stat().st_size}
            except OSError as error:
                self.errors.append(f"{name}: {error}")
        return found


def say(text: str) -> None:
    """Print one line for the log that Polyaxon shows; a closed standard output is no error."""
    try:
        os.write(1, (text + "\n").encode(errors="replace"))
    except OSError:
        return
