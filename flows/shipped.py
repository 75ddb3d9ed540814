"""Sweeps by name: those that come with the project, and files."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from warehouse.errors import BadInput

#: A sweep is written by people; a larger file is a mistake (or a YAML bomb).
MAX_SWEEP_BYTES = 1 << 20
#: A prompt file travels inside the cell, which is smaller still.
MAX_PROMPT_BYTES = 1 << 20


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


def beside(name_or_path: str) -> Callable[[str], str]:
    """Return a reader of the prompt files that a sweep names, looked for beside the sweep.

    It raises :class:`BadInput` for a file that is not there, too large or no UTF-8.
    """
    folder = (shipped().get(name_or_path) or Path(name_or_path)).parent

    def read(name: str) -> str:
        path = folder / name
        try:
            if path.stat().st_size > MAX_PROMPT_BYTES:
                raise BadInput(
                    f"{path}: {path.stat().st_size} bytes, wanted at most {MAX_PROMPT_BYTES}"
                )
            return path.read_bytes().decode("utf-8")
        except OSError as error:
            raise BadInput(f"{path}: cannot be read: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise BadInput(f"{path}: not UTF-8: {error}") from error

    return read
