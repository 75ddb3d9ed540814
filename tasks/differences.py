"""What differs between a run's rows as parsed again and as stored: every number, named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from warehouse.tables import SAMPLE_TABLES, SHARED_TABLES, TABLES

if TYPE_CHECKING:
    import duckdb

    from tasks.rows import RunRows

#: Columns that tell the rows of a table apart within one run, for naming a difference.
NAMED_BY: dict[str, tuple[str, ...]] = {
    "startup_value": ("metric", "source", "file", "line"),
    "measurement": ("load_point", "metric"),
    "derivation": ("load_point", "metric"),
    "prediction": ("load_point", "metric"),
    "derived_cell": ("max_model_len_tokens",),
    "phase": ("ordinal",),
    "server_sample": ("tick",),
    "gpu_sample": ("tick", "gpu_uuid"),
    "process_sample": ("tick", "pid"),
    "load_point": ("load_point",),
    "request": ("load_point", "request"),
    "validity": ("load_point", "check_name"),
    "failure": ("line",),
    "event": ("source", "ordinal"),
    "artifact": ("path",),
}
#: Not content: when it was stored.
_SKIPPED = {("ingest", "ingested_at")}


def differing_rows(
    connection: duckdb.DuckDBPyConnection, run_uuid: str, rows: RunRows
) -> Iterator[tuple[str, str]]:
    """Yield (where, what) of everything stored of a run that its raw files do not say.

    ``connection`` reads the snapshot.
    """
    for table in TABLES:
        if table in SHARED_TABLES:
            continue
        columns = [name for name in TABLES[table] if (table, name) not in _SKIPPED]
        stored = _stored(connection, table, columns, run_uuid)
        parsed = _parsed(connection, table, columns, rows)
        if table in SAMPLE_TABLES and stored == parsed:
            continue
        yield from _compare(table, columns, stored, parsed)


def _stored(
    connection: duckdb.DuckDBPyConnection, table: str, columns: list[str], run_uuid: str
) -> list[tuple[Any, ...]]:
    names = ", ".join(columns)
    return connection.execute(
        f"SELECT {names} FROM {table} WHERE run_uuid = $run::UUID ORDER BY ALL", {"run": run_uuid}
    ).fetchall()


def _parsed(
    connection: duckdb.DuckDBPyConnection, table: str, columns: list[str], rows: RunRows
) -> list[tuple[Any, ...]]:
    """Return the parsed rows as DuckDB would store them, so that only content can differ."""
    if table not in rows.tables:
        return []
    names = ", ".join(f"{name}::{TABLES[table][name]}" for name in columns)
    connection.register("parsed_again", rows.tables[table])
    try:
        return connection.execute(f"SELECT {names} FROM parsed_again ORDER BY ALL").fetchall()
    finally:
        connection.unregister("parsed_again")


def _compare(
    table: str, columns: list[str], stored: list[tuple[Any, ...]], parsed: list[tuple[Any, ...]]
) -> Iterator[tuple[str, str]]:
    old, new = _named(table, columns, stored), _named(table, columns, parsed)
    for name in sorted(old.keys() | new.keys()):
        where = f"{table}{f' [{name}]' if name else ''}"
        if name not in new:
            yield where, "stored, but the raw files do not say it"
        elif name not in old:
            yield where, "in the raw files, but not stored"
        else:
            for column, was, now in zip(columns, old[name], new[name], strict=True):
                if was != now:
                    yield f"{where}.{column}", f"stored {was!r}, the raw files say {now!r}"


def _named(
    table: str, columns: list[str], rows: list[tuple[Any, ...]]
) -> dict[str, tuple[Any, ...]]:
    places = [columns.index(column) for column in NAMED_BY.get(table, ())]
    named: dict[str, tuple[Any, ...]] = {}
    for row in rows:
        name = ", ".join("-" if row[place] is None else str(row[place]) for place in places)
        repeats = 0
        unique = name
        while unique in named:
            repeats += 1
            unique = f"{name} #{repeats}"
        named[unique] = row
    return named
