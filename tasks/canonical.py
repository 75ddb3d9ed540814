"""One canonical JSON form and its sha256: identity is content, never a timestamp.

Without a single definition two writers would hash the same cell differently and a finished cell
would be measured again.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path


def canonical_json(value: object) -> str:
    """Return ``value`` as JSON: sorted keys, no spaces, ASCII only, NaN and infinities refused."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def content_key(value: object) -> str:
    """Return the sha256 (64 hex digits) of ``value``'s canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the sha256 (64 hex digits) of a file's bytes.

    Never use it on the live warehouse file of the own process: closing any handle drops DuckDB's
    lock.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
