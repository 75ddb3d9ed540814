"""Writing files so that a kill or a power cut leaves the old or the new content, never a part."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

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


def read_json(path: Path) -> dict[str, object] | None:
    """Return a JSON object, or ``None`` where there is no file or it is not a whole object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def sync_folder(path: Path) -> None:
    """Make a rename in ``path`` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
