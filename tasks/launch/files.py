"""Small files that several processes read and write: whole or not at all, one owner at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks import files
from tasks.files import write_json
from warehouse.errors import CannotFindOut

__all__ = ["exclusive", "read_json", "write_json"]


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in ``path``; None when there is none, or no readable one."""
    return files.read_json(path)


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
