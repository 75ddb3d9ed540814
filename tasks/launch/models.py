"""The two tiny models of the embedded default: generated from a fixed seed, never downloaded.

A model's revision is the sha256 of what its folder holds, so a run names the very bytes it served.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from tasks import files
from tasks import revision as revisions
from tasks.canonical import content_key, sha256_file
from tasks.home import Home
from tasks.launch import environments
from tasks.launch.settings import run_environment
from warehouse.errors import BadInput, CannotFindOut

NAMES = ("tiny-qwen3", "tiny-qwen35")
_DATA = Path(__file__).parent / "data"
_SCRIPT = Path(__file__).parent / "make_model.py"
#: 20 to 60 s were seen on a busy machine of 2 cores.
_LIMIT_S = 600


def config(name: str) -> dict[str, Any]:
    """Return the model's config.json as shipped; nothing needs to be generated for it.

    Raises:
        BadInput: this project generates no such model.
    """
    value: dict[str, Any] = json.loads(_config_file(name).read_text())
    return value


def is_generated(name: str) -> bool:
    """Tell whether this project generates the model itself."""
    return name in NAMES


def folder(home: Home, name: str) -> Path:
    """Return where a model lies; it need not exist."""
    return home.models / name


def revision(home: Home, name: str) -> str | None:
    """Return ``sha256:…`` over the model's files, None while it is not generated (or outdated)."""
    marker = files.read_json(folder(home, name) / revisions.MARKER)
    if marker is None or not is_generated(name) or marker.get("recipe") != _recipe(name):
        return None
    value = marker.get("revision")
    return value if isinstance(value, str) else None


def _is_whole(home: Home, name: str) -> bool:
    """Tell whether the model is there and its files are still those its revision names."""
    stated = revision(home, name)
    return stated is not None and stated == revisions.of(revisions.listing(folder(home, name)))


def ensure(home: Home, name: str, *, progress: Callable[[str], None]) -> Path:
    """Generate the model unless it is there, whole and unchanged; return its folder.

    Needs the engine environment. A kill leaves at most a temporary folder, which the next call
    removes; two calls at once generate it once.

    Raises:
        BadInput: no such model, or the engine environment is missing.
        CannotFindOut: the generation failed.
    """
    _config_file(name)
    if _is_whole(home, name):
        return folder(home, name)
    with files.exclusive(home.models / f".{name}.lock", wait_s=900, what=f"model {name}"):
        if not _is_whole(home, name):
            if revision(home, name) is not None:
                progress(f"{name}: its files are not those of its revision")
            _generate(home, name, progress)
    return folder(home, name)


def _config_file(name: str) -> Path:
    if name not in NAMES:
        raise BadInput(
            f"model {name!r}: generated here are only {' and '.join(NAMES)}; "
            "any other is served from a profile's models folder"
        )
    return _DATA / f"{name}.json"


@lru_cache
def _recipe(name: str) -> str:
    """Return the sha256 of all that decides what is generated: an edit generates anew."""
    sources = (_SCRIPT, _config_file(name), _DATA / "chat_template.jinja")
    return content_key([sha256_file(path) for path in sources])


def _generate(home: Home, name: str, progress: Callable[[str], None]) -> None:
    python = environments.python(home, "engine")
    if not python.exists():
        raise BadInput(
            f"model {name}: the engine environment is missing ({python}); make it with "
            "'memsweep setup'"
        )
    progress(f"{name}: generating from a fixed seed")
    temporary = home.models / f".{name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    command = [
        str(python), "-I", str(_SCRIPT), str(_config_file(name)),
        str(_DATA / "chat_template.jinja"), str(temporary),
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_LIMIT_S,
            stdin=subprocess.DEVNULL, env=run_environment(home),
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise CannotFindOut(f"model {name}: not generated within {_LIMIT_S} s") from error
    if done.returncode != 0:
        last = " / ".join(done.stderr.strip().splitlines()[-3:])
        raise CannotFindOut(f"model {name}: the generation ended with {done.returncode}: {last}")
    made = revisions.of(revisions.listing(temporary))
    if made is None:
        raise CannotFindOut(f"model {name}: the generation left no files in {temporary}")
    marker = {"name": name, "revision": made, "recipe": _recipe(name)}
    files.write_json(temporary / revisions.MARKER, marker)
    target = folder(home, name)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    progress(f"{name}: ready ({made[:19]})")
