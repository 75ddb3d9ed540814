"""Numbered plain-SQL migrations, each applied once, in order, in a transaction of its own.

A migration that was edited after it was applied would leave two warehouses of the same version with
different tables; its recorded sha256 makes that an error instead.
"""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime
from importlib import resources
from typing import TYPE_CHECKING

from warehouse.connection import transaction
from warehouse.errors import CannotFindOut

if TYPE_CHECKING:
    import duckdb

_NAME = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")


def migrations() -> dict[int, tuple[str, str]]:
    """Return every migration shipped: number -> (name, SQL text), in order."""
    found = {}
    for entry in resources.files("warehouse").joinpath("migrations").iterdir():
        match = _NAME.fullmatch(entry.name)
        if match:
            found[int(match[1])] = (match[2], entry.read_text(encoding="utf-8"))
    return dict(sorted(found.items()))


def migrate(
    connection: duckdb.DuckDBPyConnection, shipped: dict[int, tuple[str, str]] | None = None
) -> list[int]:
    """Bring a database to the newest schema and return the numbers that were applied.

    Raises :class:`CannotFindOut` when the file was made by a newer memsweep or when a migration was
    edited after it had been applied.
    """
    shipped = migrations() if shipped is None else shipped
    connection.execute(
        "CREATE TABLE IF NOT EXISTS schema_version (version INTEGER PRIMARY KEY, name VARCHAR "
        "NOT NULL, sha256 VARCHAR NOT NULL, applied_at TIMESTAMP NOT NULL)"
    )
    have = dict(connection.execute("SELECT version, sha256 FROM schema_version").fetchall())
    newer = sorted(set(have) - set(shipped))
    if newer:
        raise CannotFindOut(
            f"the warehouse has schema {newer[-1]}, this memsweep knows up to {max(shipped)}; "
            "use the newer memsweep, or `memsweep rebuild` with this one"
        )
    applied = []
    for version, (name, sql) in shipped.items():
        digest = hashlib.sha256(sql.encode()).hexdigest()
        if version in have:
            if have[version] != digest:
                raise CannotFindOut(
                    f"migration {version:04d}_{name} was edited after it was applied here; restore "
                    "its text and add a new migration instead"
                )
            continue
        _apply(connection, version, name, sql, digest)
        applied.append(version)
    return applied


def _apply(
    connection: duckdb.DuckDBPyConnection, version: int, name: str, sql: str, digest: str
) -> None:
    with transaction(connection):
        connection.execute(sql)
        connection.execute(
            "INSERT INTO schema_version VALUES (?, ?, ?, ?)",
            [version, name, digest, datetime.now(UTC).replace(tzinfo=None)],
        )
