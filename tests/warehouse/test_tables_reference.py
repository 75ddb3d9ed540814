"""warehouse/README.md is the reference of tables, metrics and queries, made from what they say.

Regenerate with MEMSWEEP_REGENERATE=1; the test fails after rewriting, so that CI cannot pass on a
reference nobody has looked at.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import duckdb
import pytest

from warehouse.export import comments
from warehouse.migrate import migrate
from warehouse.query import named_queries
from warehouse.registry import DERIVED, EXACT, LOAD_POINT, STARTUP, Metric
from warehouse.tables import TABLES

REFERENCE = Path(__file__).parents[2] / "warehouse/README.md"
HEAD = """# warehouse

What past runs said about memory, as a DuckDB file that is only ever a projection of the sealed
bundles: `memsweep rebuild` makes it anew with the same content hash, `memsweep verify` proves that
both agree. One process writes (`live.duckdb`, guarded by `warehouse.lock`); everybody else opens
the published copy, which is replaced in one step and never locked by a reader:

    duckdb -readonly "$(memsweep sql --where)" -c "FROM runs_wide LIMIT 5"

    import duckdb, subprocess
    path = subprocess.check_output(["memsweep", "sql", "--where"], text=True).strip()
    duckdb.connect(path, read_only=True).sql("SELECT metric, value FROM measurement").show()

| file | holds |
|---|---|
| `registry.py`, `tables.py`, `errors.py` | every metric, outcome, phase; columns; exceptions |
| `migrations/`, `migrate.py` | the schema as numbered SQL, each file applied once, never edited |
| `connection.py`, `publish.py`, `store.py` | lock and files; snapshot; whole runs at a time |
| `query.py`, `queries/`, `lookup.py` | read-only SQL with limits; named queries; filters |
| `compare.py`, `difference.py`, `statistics.py`, `noise.py` | predictions; two sets, noise stated |
| `audit.py`, `ledger.py`, `export.py` | chain of custody; list of manifests; Parquet |

Evidence classes never share a column: **measured** (a log line, a sample, a request),
**predicted** (made and hashed before the run), **derived** (follows from others); **asked** is what
was configured, **identity** what something is called. Absent is NULL with a reason, never 0. Times
ending in `_s` are CLOCK_MONOTONIC of the run's host, `_at` the same in UTC. Sample tables carry no
key: they are replaced per run and ordered by run and time, so filter by `run_uuid` and, on large
warehouses, by `sampled_at` between the run's `started_at` and `ended_at`.

Everything below is made from comments, registry and queries by
tests/warehouse/test_tables_reference.py (MEMSWEEP_REGENERATE=1 rewrites it).
"""


def render(said: Mapping[str, Mapping[str, str]]) -> str:
    """Return the whole reference."""
    return "\n".join([HEAD, *_queries(), *_metrics(), *_tables(said)])


def _queries() -> Iterator[str]:
    yield "## Named queries\n\n| name | answers | parameters |\n|---|---|---|"
    for query in named_queries().values():
        parameters = "; ".join(
            f"`{p.name}`{'' if p.default is None else f' = {p.default}'}: {p.meaning}"
            for p in query.parameters
        )
        yield f"| `{query.name}` | {query.description} | {parameters} |"
    yield ""


def _metrics() -> Iterator[str]:
    for title, metrics in (
        ("Metrics of a server's start", STARTUP.values()),
        ("Metrics of a load point", LOAD_POINT.values()),
    ):
        yield f"## {title}\n\n| metric | unit | class | meaning |\n|---|---|---|---|"
        for metric in metrics:
            yield f"| `{metric.name}` | {metric.unit} | {_class(metric)} | {metric.meaning} |"
        yield ""


def _class(metric: Metric) -> str:
    if metric.name in DERIVED:
        return "derived"
    return "measured, predicted exactly" if metric.name in EXACT else "measured"


def _tables(said: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    for title, names in (("Tables", TABLES), ("Views", sorted(said.keys() - TABLES.keys()))):
        yield f"## {title}\n"
        for table in names:
            if table == "schema_version":
                continue
            yield f"### {table}\n\n{said[table]['']}.\n\n| column | unit | class | meaning |"
            yield "|---|---|---|---|"
            for column, comment in said[table].items():
                match = re.fullmatch(r"(.+) \[([^;]+); (\w+)\]", comment)
                if column and match:
                    yield f"| `{column}` | {match[2]} | {match[3]} | {match[1]} |"
            yield ""


def test_reference_is_what_the_schema_says() -> None:
    """Comments, registry, queries and the page people read are one."""
    connection = duckdb.connect()
    migrate(connection)
    wanted = render(comments(connection))
    if os.environ.get("MEMSWEEP_REGENERATE") and REFERENCE.read_text("utf-8") != wanted:
        REFERENCE.write_text(wanted, "utf-8")
        pytest.fail("warehouse/README.md was rewritten: look at it and commit it")
    assert REFERENCE.read_text("utf-8") == wanted
