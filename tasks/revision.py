"""What a model's folder holds, as one hash, so that a run names the very bytes it served.

The folder's maker and the run hash it by the same rule, from here: a copy that was cut, edited or
put in another's place is noticed before anything is measured. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.canonical import content_key, sha256_file

#: Says what a generated or downloaded folder should hold; written last, no part of that itself.
MARKER = "memsweep-model.json"
#: A run hashes no larger file: that would take minutes and fill the page cache before every start.
MAX_BYTES = 200_000_000


def listing(folder: Path, *, max_bytes: int | None = None) -> dict[str, str | None]:
    """Return the sha256 of every file by its relative path, None for those above ``max_bytes``."""
    return {
        path.relative_to(folder).as_posix(): (
            None if max_bytes is not None and path.stat().st_size > max_bytes else sha256_file(path)
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MARKER
    }


def of(listed: Mapping[str, str | None]) -> str | None:
    """Return ``sha256:…`` of a listing in canonical form, None where a file was not hashed."""
    if not listed or None in listed.values():
        return None
    return f"sha256:{content_key(dict(listed))}"


def downloaded(folder: Path) -> dict[str, Any] | None:
    """Return what a download by commit (tasks/pod/fetch.py) wrote down about its folder.

    ``None`` where there was none, or where a file has no longer the size it had: their hashes were
    checked at the download and are not taken again before every start.
    """
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        sizes = {name: one["bytes"] for name, one in marker["files"].items()}
        whole = all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return marker if whole else None
