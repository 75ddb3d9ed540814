"""Small files that several processes read and write: whole or not at all, one owner at a time."""

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


def write_json(path: Path, value: object) -> None:
    """Write ``value`` as JSON so that a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w") as file:
        json.dump(value, file, sort_keys=True, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in ``path``; None when there is none, or no readable one."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


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
