"""Read-only SQL over the published snapshot, free or by name, with limits.

A query of a user or of another program must not change anything, read a file, reach the network or
run without end: the snapshot is opened read-only with access to everything else switched off for
good, one SELECT at a time, parameters are bound and never put into text.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warehouse.connection import first_line, open_snapshot
from warehouse.errors import BadInput, CannotFindOut

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

MAX_ROWS = 100_000
TIMEOUT_S = 60.0
_HEADER = re.compile(r"-- \$(?P<name>[a-z_]+)(?: = (?P<default>[^:]*))?: (?P<meaning>.+)")


@dataclass(frozen=True, slots=True)
class Result:
    """What a query returned; ``truncated`` when there were more rows than asked for."""

    columns: list[str]
    rows: list[tuple[Any, ...]]
    truncated: bool


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a named query; ``default`` is ``None`` where it may be left out."""

    name: str
    default: str | None
    meaning: str


@dataclass(frozen=True, slots=True)
class NamedQuery:
    """A query shipped as ``queries/NAME.sql``: its first line says what it answers."""

    name: str
    description: str
    parameters: tuple[Parameter, ...]
    sql: str


def run_sql(
    snapshot: Path,
    sql: str,
    *,
    parameters: Mapping[str, object] | None = None,
    max_rows: int = MAX_ROWS,
    timeout_s: float = TIMEOUT_S,
) -> Result:
    """Run one SELECT and return at most ``max_rows`` rows.

    Raises :class:`BadInput` for anything but one reading statement and for SQL that does not hold,
    :class:`CannotFindOut` when it takes longer than ``timeout_s`` seconds or too much memory.
    """
    with _relation(snapshot, sql, parameters, max_rows, timeout_s) as relation:
        rows = relation.fetchall()
        columns = list(relation.columns)
    return Result(columns, rows[:max_rows], len(rows) > max_rows)


def run_sql_arrow(
    snapshot: Path,
    sql: str,
    *,
    parameters: Mapping[str, object] | None = None,
    max_rows: int = MAX_ROWS,
    timeout_s: float = TIMEOUT_S,
) -> tuple[pa.Table, bool]:
    """Run one SELECT like :func:`run_sql` and return an Arrow table and whether it was cut."""
    with _relation(snapshot, sql, parameters, max_rows, timeout_s) as relation:
        table = relation.to_arrow_table()
    return table.slice(0, max_rows), table.num_rows > max_rows


@contextmanager
def _relation(
    snapshot: Path,
    sql: str,
    parameters: Mapping[str, object] | None,
    max_rows: int,
    timeout_s: float,
) -> Iterator[duckdb.DuckDBPyRelation]:
    import duckdb

    with open_snapshot(snapshot) as connection:
        timer = threading.Timer(timeout_s, connection.interrupt)
        timer.daemon = True
        timer.start()
        try:
            _only_reads(connection, sql)
            relation = connection.sql(sql, params=dict(parameters) if parameters else None)
            if relation is None:
                raise BadInput("the statement returns nothing; wanted one SELECT")
            yield relation.limit(max_rows + 1)
        except duckdb.InterruptException as error:
            raise CannotFindOut(
                f"no answer within {timeout_s:g} s; narrow the query or raise --timeout"
            ) from error
        except duckdb.OutOfMemoryException as error:
            raise CannotFindOut(f"{first_line(error)}; narrow the query") from error
        except (duckdb.IOException, duckdb.FatalException, duckdb.SerializationException):
            raise  # the file, not the SQL: open_snapshot says what to do
        except duckdb.Error as error:
            raise BadInput(f"SQL: {first_line(error)}") from error
        finally:
            timer.cancel()


def _only_reads(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise BadInput(f"SQL: got {len(statements)} statements, wanted one SELECT")
    kind = statements[0].type.name
    if kind not in ("SELECT", "EXPLAIN"):
        raise BadInput(
            f"SQL: got a statement of kind {kind}, wanted SELECT: readers change nothing"
        )


def named_queries() -> dict[str, NamedQuery]:
    """Return every shipped query by name."""
    found = {}
    for entry in resources.files("warehouse").joinpath("queries").iterdir():
        if entry.name.endswith(".sql"):
            name = entry.name.removesuffix(".sql")
            found[name] = _named(name, entry.read_text(encoding="utf-8"))
    return dict(sorted(found.items()))


def _named(name: str, text: str) -> NamedQuery:
    lines = text.splitlines()
    matches = [_HEADER.fullmatch(line) for line in lines]
    parameters = tuple(
        Parameter(match["name"], _default(match["default"]), match["meaning"])
        for match in matches
        if match
    )
    return NamedQuery(name, lines[0].removeprefix("-- "), parameters, text)


def _default(text: str | None) -> str | None:
    return None if text is None or text.strip() in ("", "NULL") else text.strip()


def run_named(
    snapshot: Path,
    name: str,
    given: Mapping[str, str],
    *,
    max_rows: int = MAX_ROWS,
    timeout_s: float = TIMEOUT_S,
) -> Result:
    """Run a shipped query with its parameters bound; raises :class:`BadInput` for unknown ones."""
    queries = named_queries()
    query = queries.get(name)
    if query is None:
        raise BadInput(f"query {name!r} is unknown, wanted one of: {', '.join(queries)}")
    known = {parameter.name: parameter.default for parameter in query.parameters}
    odd = sorted(set(given) - set(known))
    if odd:
        raise BadInput(
            f"query {name}: parameter {odd[0]!r} is unknown, wanted: {', '.join(known) or 'none'}"
        )
    return run_sql(
        snapshot,
        query.sql,
        parameters=known | dict(given),
        max_rows=max_rows,
        timeout_s=timeout_s,
    )


def plain(value: object) -> object:
    """Return a value as JSON can hold it: times as ISO 8601 UTC, not-a-number as ``None``."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, datetime):
        return value.isoformat() + ("" if value.tzinfo else "Z")
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return _as_text(value)


def _as_text(value: object) -> str:
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return f"{value.total_seconds():g} s"
    return value.hex() if isinstance(value, bytes) else str(value)
