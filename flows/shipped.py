"""Sweeps by name, those that come with the project and files; and what comes with the former:
the models' data, so that a plan needs no network, and published figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from tasks.files import read_json
from tasks.launch import pins
from tasks.plan.cell import UNRESOLVED
from tasks.plan.published import Gathered, Published, parse
from tasks.plan.sweep import prompts_in
from tasks.plan.weights import Stored
from warehouse.errors import BadInput

#: A sweep is written by people; a larger file is a mistake (or a YAML bomb).
MAX_SWEEP_BYTES = 1 << 20


def _folder() -> Path:
    return Path(str(files("flows") / "sweeps"))


def shipped() -> dict[str, Path]:
    """Return the sweeps that come with the project: name -> file."""
    return {path.stem: path for path in sorted(_folder().glob("*.yaml"))}


@dataclass(frozen=True, slots=True)
class ShippedModel:
    """What is known of a model without its files."""

    #: Commit the data is of; ``None``: its source names none.
    revision: str | None
    config: dict[str, object]
    stored: Stored
    source: str

    def is_of(self, revision: str) -> bool:
        """Whether it is the model of ``revision``; while that is unresolved, it is all there is."""
        return revision in (UNRESOLVED, self.revision)


def shipped_model(name: str) -> ShippedModel | None:
    """Return the data of a model that a shipped sweep serves, ``None`` of any other."""
    path = _folder() / "models" / f"{name.replace('/', '__')}.json"
    if not path.is_file():
        return None
    value = json.loads(path.read_text(encoding="utf-8"))
    size = Stored(value["weights_bytes"], None, None)
    return ShippedModel(value["revision"], value["config"], size, value["source"])


def with_published() -> dict[str, Path]:
    """Return the sweeps whose published figures come with the project: name -> file."""
    return {path.stem: path for path in sorted((_folder() / "published").glob("*.yaml"))}


def published(name: str) -> Published | Gathered:
    """Return the published figures of a shipped sweep; raises :class:`BadInput` without any."""
    known = with_published()
    if name not in known:
        raise BadInput(
            f"sweep {name!r}: no published figures come with the project; they do for "
            f"{', '.join(known)}"
        )
    return parse(known[name].read_text(encoding="utf-8"), where=f"published figures of {name}")


def find_sweep(name_or_path: str, *, with_pins: bool = True) -> tuple[str, str]:
    """Return ``(where, text)`` of a shipped sweep's name or a file's path.

    The pins of `memsweep pin` beside it stand in the text where the sweep leaves them open.

    Raises :class:`BadInput` naming the shipped ones when there is neither, and for a pipe: a round
    keeps the sweep's path and reads it again.
    """
    sweeps = shipped()
    path = sweeps.get(name_or_path) or Path(name_or_path)
    if not path.is_file():
        if name_or_path == "-" or (path.exists() and not path.is_dir()):
            raise BadInput(
                f"{name_or_path}: a pipe can be read only once, and a sweep is read again by its "
                "path; write it to a file, such as my.sweep.yaml"
            )
        raise BadInput(
            f"unknown sweep {name_or_path!r}: neither a file nor one of {', '.join(sweeps)}"
        )
    try:
        if path.stat().st_size > MAX_SWEEP_BYTES:
            raise BadInput(f"{path}: {path.stat().st_size} bytes, wanted at most {MAX_SWEEP_BYTES}")
        text = path.read_text(encoding="utf-8")
        if with_pins:
            file = pins.beside(path, is_shipped=name_or_path in sweeps)
            text = pins.merged(text, where=str(name_or_path), path=file)
        return str(name_or_path), text
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from error


def beside(name_or_path: str) -> Callable[[str], str]:
    """Return a reader of the prompt files that a sweep names, looked for beside the sweep.

    A round's copy of a sweep has them in one file (tasks/rounds.py).
    """
    folder = (shipped().get(name_or_path) or Path(name_or_path)).parent
    kept = read_json(folder / "prompts.json") if (folder / "round.json").is_file() else None
    read = prompts_in(folder)
    return read if kept is None else lambda name: str(kept[name]) if name in kept else read(name)
