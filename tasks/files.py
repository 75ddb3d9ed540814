"""Small files that several processes read and write: whole or not at all, one owner at a time.

A kill or a power cut leaves the old or the new content, never a part.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from warehouse.errors import CannotFindOut


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to a temporary file beside ``path``, sync it, rename it into place.

    Raises :class:`CannotFindOut` naming the file when the disk refuses.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise CannotFindOut(f"{path}: cannot be written: {error.strerror or error}") from error


def write_json(path: Path, value: object) -> None:
    """Write ``value`` as JSON, in the same all-or-nothing way."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a JSON object, or ``None`` where there is no file or it is not a whole object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # the last one: brackets without end
        return None
    return value if isinstance(value, dict) else None


def sync_folder(path: Path) -> None:
    """Make a rename in ``path`` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def exclusive(path: Path, *, wait_s: float, what: str) -> Iterator[int]:
    """Hold ``path`` as a lock between processes; yields its file descriptor.

    The kernel gives it back when the last holder is gone, however it died. A child that gets the
    descriptor (``pass_fds``) keeps the lock even if its parent is killed.

    Raises:
        CannotFindOut: another process held it for longer than ``wait_s`` seconds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise CannotFindOut(
                        f"{what}: another memsweep process has held {path} for {wait_s:.0f} s; "
                        "wait for it or end it, then call again"
                    ) from None
                time.sleep(0.1)
        yield descriptor
    finally:
        os.close(descriptor)
