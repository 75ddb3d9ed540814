"""Sweeps by name: those that come with the project, and files."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from warehouse.errors import BadInput

#: A sweep is written by people; a larger file is a mistake (or a YAML bomb).
MAX_SWEEP_BYTES = 1 << 20


def shipped() -> dict[str, Path]:
    """Return the sweeps that come with the project: name -> file."""
    folder = Path(str(files("flows") / "sweeps"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_sweep(name_or_path: str) -> tuple[str, str]:
    """Return ``(where, text)`` of a shipped sweep's name or a file's path.

    Raises :class:`BadInput` naming the shipped ones when there is neither.
    """
    sweeps = shipped()
    path = sweeps.get(name_or_path) or Path(name_or_path)
    if not path.is_file():
        raise BadInput(
            f"unknown sweep {name_or_path!r}: neither a file nor one of {', '.join(sweeps)}"
        )
    try:
        if path.stat().st_size > MAX_SWEEP_BYTES:
            raise BadInput(f"{path}: {path.stat().st_size} bytes, wanted at most {MAX_SWEEP_BYTES}")
        return str(name_or_path), path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from error
