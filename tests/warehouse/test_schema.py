"""The tables: comments, models and views stay in step, and migrations apply once and whole."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import duckdb
import pytest

from warehouse.connection import open_writer
from warehouse.errors import CannotFindOut
from warehouse.export import comments
from warehouse.migrate import migrate, migrations
from warehouse.registry import EXACT, LOAD_POINT, STARTUP, Evidence
from warehouse.store import content_hash, row_counts
from warehouse.tables import RUN_TABLES, SHARED_TABLES, TABLES

CLASSES = {evidence.value for evidence in Evidence} | {"asked", "identity"}
VIEWS = {"residual", "runs_wide", "load_points_wide", "load_point_validity", "noise_floor"}


@pytest.fixture
def connection() -> duckdb.DuckDBPyConnection:
    """Return an empty warehouse in memory."""
    made = duckdb.connect()
    migrate(made)
    return made


def test_models_are_the_tables(connection: duckdb.DuckDBPyConnection) -> None:
    """Every table has exactly the columns and types that writers are told."""
    rows = connection.execute(
        "SELECT table_name, column_name, data_type FROM duckdb_columns() "
        "WHERE NOT internal ORDER BY table_name, column_index"
    ).fetchall()
    found: dict[str, dict[str, str]] = {}
    for table, column, kind in rows:
        found.setdefault(table, {})[column] = kind
    assert {name: found[name] for name in found if name in TABLES} == TABLES
    assert set(found) == set(TABLES) | VIEWS | {"schema_version"}
    assert set(RUN_TABLES) | set(SHARED_TABLES) == set(TABLES)


def test_every_table_and_column_says_unit_and_evidence(
    connection: duckdb.DuckDBPyConnection,
) -> None:
    """A column without unit and class would be read as whatever its reader hopes."""
    said = comments(connection)
    for table in [*TABLES, *VIEWS]:
        assert said[table][""], table
        for column, comment in said[table].items():
            match = re.fullmatch(r"(.+) \[([^;]+); (\w+)\]", comment) if column else None
            assert not column or match, f"{table}.{column}: {comment!r}"
            assert not match or match[3] in CLASSES, f"{table}.{column}: {comment!r}"


def test_units_in_names_are_the_units_in_comments(connection: duckdb.DuckDBPyConnection) -> None:
    """A column that ends in _bytes, _tokens, _ratio, _s or _ms says so in its comment as well."""
    ends = {"_bytes": "bytes", "_tokens": "tokens", "_ratio": "ratio", "_s": "s", "_ms": "ms"}
    for table, columns in comments(connection).items():
        for column, comment in columns.items():
            for end, unit in ends.items():
                if column.endswith(end) and not column.endswith(("_per_s", "s_s")):
                    assert f"[{unit}; " in comment, f"{table}.{column}: {comment!r}"


def test_bytes_and_tokens_are_integers() -> None:
    """Nature has whole bytes and tokens; so have the columns."""
    for table, columns in TABLES.items():
        for column, kind in columns.items():
            if column.endswith(("_bytes", "_tokens")):
                assert kind == "BIGINT", f"{table}.{column}"


def test_wide_views_show_every_metric(connection: duckdb.DuckDBPyConnection) -> None:
    """A metric that is added to the registry needs a column in its wide view."""
    said = comments(connection)
    runs, points = said["runs_wide"], said["load_points_wide"]
    missing = [m for m in STARTUP if m not in runs and f"measured_{m}" not in runs]
    missing += [f"predicted_{m}" for m in EXACT if f"predicted_{m}" not in runs]
    missing += [m for m in LOAD_POINT if m not in points and m != "requests_asked"]
    assert missing == []


def test_no_foreign_keys_and_no_keys_on_samples(connection: duckdb.DuckDBPyConnection) -> None:
    """DuckDB cannot replace referenced rows in one transaction; indexes on samples cost tenfold."""
    rows = connection.execute(
        "SELECT table_name, constraint_type FROM duckdb_constraints() "
        "WHERE constraint_type IN ('FOREIGN KEY', 'PRIMARY KEY', 'UNIQUE')"
    ).fetchall()
    assert {kind for _, kind in rows} == {"PRIMARY KEY"}
    keyed = {table for table, _ in rows}
    assert not keyed & {"server_sample", "gpu_sample", "process_sample", "request", "measurement"}


def test_migrations_apply_once() -> None:
    """The second call finds nothing to do."""
    connection = duckdb.connect()
    assert migrate(connection) == list(migrations())
    assert migrate(connection) == []


def test_edited_migration_is_refused() -> None:
    """Two warehouses of one version must have the same tables."""
    connection = duckdb.connect()
    migrate(connection, {1: ("first", "CREATE TABLE a (x INTEGER)")})
    with pytest.raises(CannotFindOut, match="0001_first was edited after it was applied"):
        migrate(connection, {1: ("first", "CREATE TABLE a (x BIGINT)")})


def test_newer_warehouse_is_refused() -> None:
    """A warehouse of a newer memsweep is not written by an older one."""
    connection = duckdb.connect()
    migrate(connection, {1: ("first", "SELECT 1"), 2: ("second", "SELECT 1")})
    with pytest.raises(CannotFindOut, match="has schema 2, this memsweep knows up to 1"):
        migrate(connection, {1: ("first", "SELECT 1")})


def test_failing_migration_leaves_nothing() -> None:
    """A migration is whole or not there; the one before it stays."""
    connection = duckdb.connect()
    broken = {
        1: ("good", "CREATE TABLE a (x INTEGER)"),
        2: ("bad", "CREATE TABLE b (x INTEGER); INSERT INTO nowhere VALUES (1)"),
    }
    with pytest.raises(duckdb.Error):
        migrate(connection, broken)
    tables = [row[0] for row in connection.execute("SHOW TABLES").fetchall()]
    assert sorted(tables) == ["a", "schema_version"]
    assert connection.execute("SELECT version FROM schema_version").fetchall() == [(1,)]


STORED = Path(__file__).parents[1] / "data" / "warehouse"


@pytest.mark.parametrize("stored", sorted(STORED.glob("schema-*.duckdb.gz")), ids=lambda p: p.name)
def test_upgrade_from_every_released_schema(stored: Path, tmp_path: Path) -> None:
    """A file of an older memsweep is brought to the newest schema with all its rows."""
    live = tmp_path / "live.duckdb"
    live.write_bytes(gzip.decompress(stored.read_bytes()))
    before = duckdb.connect(live, read_only=True)
    was = dict(before.execute("SELECT 'run', count(*) FROM run").fetchall())
    was |= dict(before.execute("SELECT 'measurement', count(*) FROM measurement").fetchall())
    before.close()
    with open_writer(live) as connection:
        versions = connection.execute("SELECT version FROM schema_version ORDER BY 1").fetchall()
        assert [version for (version,) in versions] == list(migrations())
        assert migrate(connection) == []
        counts = row_counts(connection)
        assert {name: counts[name] for name in was} == was
        assert counts["run"] > 0
        assert connection.execute("SELECT count(*) FROM runs_wide").fetchone() == (counts["run"],)
        content_hash(connection)


def test_a_file_of_each_released_schema_is_stored() -> None:
    """A release without its file could not be tested for upgrades later."""
    stored = {int(path.name.split("-")[1].split(".")[0]) for path in STORED.glob("schema-*")}
    assert stored >= {2, 3, 4, 6}


def test_migration_files_are_numbered_without_gaps() -> None:
    """A gap would be filled later and applied out of order."""
    folder = Path(__file__).parents[2] / "warehouse" / "migrations"
    assert len(list(folder.glob("*.sql"))) == len(migrations())
    assert list(migrations()) == list(range(1, len(migrations()) + 1))
