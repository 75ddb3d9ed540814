"""Whole runs into the warehouse, in one transaction each time, and the hash of what is in it.

A run's rows are replaced together or not at all: half a run would look like a measurement with
missing load points.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from warehouse.connection import first_line, transaction
from warehouse.errors import CheckFailed
from warehouse.tables import RUN_TABLES, SAMPLE_TABLES, SHARED_TABLES, TABLES, arrow_schema

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

#: Columns that say when something was stored, not what: left out of the content hash.
_NOT_CONTENT = {("ingest", "ingested_at")}


def known_runs(connection: duckdb.DuckDBPyConnection) -> dict[str, tuple[str, int]]:
    """Return what is stored already: run UUID -> (manifest sha256, parser version)."""
    rows = connection.execute(
        "SELECT run_uuid::VARCHAR, manifest_sha256, parser_version FROM ingest"
    ).fetchall()
    return {run: (sha256, version) for run, sha256, version in rows}


def replace_run(
    connection: duckdb.DuckDBPyConnection, run_uuid: str, tables: Mapping[str, pa.Table]
) -> None:
    """Store one run's rows in place of whatever the warehouse held of it."""
    replace_runs(connection, {run_uuid: tables})


def replace_runs(
    connection: duckdb.DuckDBPyConnection, runs: Mapping[str, Mapping[str, pa.Table]]
) -> None:
    """Store whole runs in one transaction: all of them or none.

    ``runs`` maps a run UUID to its tables; a table must have the columns of ``warehouse.tables``
    (``ingest`` without ``ingested_at``) and, where it belongs to runs, that run's rows only. Raises
    :class:`CheckFailed` when the rows do not fit the tables.
    """
    import duckdb

    if not runs:
        return
    known = known_runs(connection)
    old = [run for run in runs if run in known]
    try:
        with transaction(connection):
            _replace(connection, runs, old)
    except (duckdb.ConstraintException, duckdb.ConversionException) as error:
        raise CheckFailed(f"the rows do not fit the tables: {first_line(error)}") from error


def _replace(
    connection: duckdb.DuckDBPyConnection,
    runs: Mapping[str, Mapping[str, pa.Table]],
    old: Sequence[str],
) -> None:
    """Put the runs' rows in place of those that are stored of the ``old`` ones."""
    import pyarrow as pa

    now = datetime.now(UTC).replace(tzinfo=None)
    for table in RUN_TABLES if old else ():
        connection.execute(
            f"DELETE FROM {table} WHERE run_uuid IN (SELECT unnest(?::VARCHAR[])::UUID)", [old]
        )
    for table in TABLES:
        parts = [tables[table] for tables in runs.values() if table in tables]
        if not parts:
            continue
        rows = pa.concat_tables(parts)
        if table == "ingest":
            stamp = pa.array([now] * rows.num_rows, pa.timestamp("us"))
            rows = rows.append_column("ingested_at", stamp)
        _insert(connection, table, rows)
    if old:
        _drop_orphans(connection)


def delete_runs(connection: duckdb.DuckDBPyConnection, runs: Sequence[str]) -> None:
    """Take whole runs out, and sweeps, rounds and cells that no run is left of."""
    with transaction(connection):
        for table in RUN_TABLES:
            connection.execute(
                f"DELETE FROM {table} WHERE run_uuid IN (SELECT unnest(?::VARCHAR[])::UUID)",
                [list(runs)],
            )
        _drop_orphans(connection)


def _insert(connection: duckdb.DuckDBPyConnection, table: str, rows: pa.Table) -> None:
    wanted = arrow_schema(table).names
    if sorted(rows.column_names) != sorted(wanted):
        odd = sorted(set(rows.column_names) ^ set(wanted))
        raise CheckFailed(
            f"rows for table {table}: columns {odd} are missing or unknown; nothing was stored"
        )
    connection.register("incoming", rows)
    try:
        connection.execute(f"INSERT {_conflict(table)} {table} BY NAME SELECT * FROM incoming")
        if table == "sweep":
            # Texts that differ in comments share a canonical form; keep the same one in any order.
            connection.execute(
                "UPDATE sweep SET definition = least(sweep.definition, i.definition) "
                "FROM (SELECT sweep_sha256, min(definition) AS definition FROM incoming GROUP BY 1)"
                " i WHERE i.sweep_sha256 = sweep.sweep_sha256"
                " AND sweep.definition IS DISTINCT FROM least(sweep.definition, i.definition)"
            )
    finally:
        connection.unregister("incoming")


def _conflict(table: str) -> str:
    return "OR IGNORE INTO" if table in SHARED_TABLES else "INTO"


def _drop_orphans(connection: duckdb.DuckDBPyConnection) -> None:
    for table, key in (
        ("sweep", "sweep_sha256"),
        ("round", "(sweep_sha256, round)"),
        ("cell", "cell_key"),
    ):
        connection.execute(
            f"DELETE FROM {table} WHERE {key} NOT IN (SELECT DISTINCT {key} FROM run "
            "WHERE sweep_sha256 IS NOT NULL)"
        )


def content_hash(connection: duckdb.DuckDBPyConnection) -> str:
    """Return the sha256 of everything stored, whatever order it came in.

    Per table: the number of rows and the sum over rows of the low 64 bits of the md5 of the row's
    columns as text, each with its length in front. Only when something was stored is left out.
    """
    return hashlib.sha256(json.dumps(table_hashes(connection), sort_keys=True).encode()).hexdigest()


def table_hashes(connection: duckdb.DuckDBPyConnection) -> dict[str, tuple[int, int]]:
    """Return the number of rows and the order-independent sum of every table."""
    hashes = {}
    for table, columns in TABLES.items():
        parts = ", ".join(
            _hashed(name, kind)
            for name, kind in columns.items()
            if (table, name) not in _NOT_CONTENT
        )
        row = connection.execute(
            f"SELECT count(*), coalesce(sum(md5_number_lower(concat({parts}))::HUGEINT), 0) "
            f"FROM {table}"
        ).fetchone()
        assert row is not None
        hashes[table] = (int(row[0]), int(row[1]))
    return hashes


def _hashed(name: str, kind: str) -> str:
    if kind in ("VARCHAR", "JSON"):
        # The length keeps "ab" + "c" apart from "a" + "bc", whatever the text holds.
        return f"coalesce(length({name}::VARCHAR) || ':' || {name}::VARCHAR, '~')"
    return f"coalesce({name}::VARCHAR || ';', '~')"


def row_counts(connection: duckdb.DuckDBPyConnection) -> dict[str, int]:
    """Return how many rows each table holds."""
    return {
        table: int((connection.execute(f"SELECT count(*) FROM {table}").fetchone() or (0,))[0])
        for table in TABLES
    }


def sample_count(connection: duckdb.DuckDBPyConnection) -> int:
    """Return how many sample rows are stored."""
    counts = row_counts(connection)
    return sum(counts[table] for table in SAMPLE_TABLES)
