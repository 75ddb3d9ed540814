"""Every table as a Parquet file that says what its columns mean."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from warehouse.errors import BadInput, CannotFindOut
from warehouse.tables import TABLES

if TYPE_CHECKING:
    import duckdb

#: Rows that are in memory at a time.
_CHUNK = 200_000


def comments(connection: duckdb.DuckDBPyConnection) -> dict[str, dict[str, str]]:
    """Return table -> column -> comment; the table's own comment stands under ``""``."""
    found: dict[str, dict[str, str]] = {}
    for table, comment in connection.execute(
        "SELECT table_name, comment FROM duckdb_tables() WHERE database_name = current_database() "
        "UNION ALL SELECT view_name, comment FROM duckdb_views() "
        "WHERE database_name = current_database() AND NOT internal"
    ).fetchall():
        found[table] = {"": comment or ""}
    for table, column, comment in connection.execute(
        "SELECT table_name, column_name, comment FROM duckdb_columns() "
        "WHERE database_name = current_database() AND NOT internal ORDER BY column_index"
    ).fetchall():
        found.setdefault(table, {})[column] = comment or ""
    return found


def export_tables(connection: duckdb.DuckDBPyConnection, folder: Path) -> list[tuple[Path, int]]:
    """Write ``TABLE.parquet`` for every table into a new folder; return files and rows.

    Raises :class:`BadInput` when the folder exists: an export is never mixed with an older one.
    """
    import pyarrow.parquet as pq

    if folder.exists():
        raise BadInput(f"{folder}: exists already; wanted a folder to make")
    said = comments(connection)
    written = []
    try:
        folder.mkdir(parents=True)
        for table in TABLES:
            path = folder / f"{table}.parquet"
            reader = connection.sql(f"SELECT * FROM {table}").to_arrow_reader(_CHUNK)
            fields = [
                field.with_metadata({"comment": said[table].get(field.name, "")})
                for field in reader.schema
            ]
            schema = reader.schema.empty_table().schema
            for index, field in enumerate(fields):
                schema = schema.set(index, field)
            schema = schema.with_metadata({"comment": said[table][""]})
            rows = 0
            with pq.ParquetWriter(path, schema, compression="zstd") as writer:
                for batch in reader:
                    rows += batch.num_rows
                    writer.write_batch(batch.cast(schema))
            written.append((path, rows))
    except OSError as error:
        raise CannotFindOut(f"{folder}: cannot be written: {error.strerror or error}") from error
    return written
