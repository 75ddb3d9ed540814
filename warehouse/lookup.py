"""Finding runs: by UUID, prefix, ``latest`` or filters, and one run in full."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from warehouse.errors import BadInput
from warehouse.query import plain
from warehouse.tables import TABLES

if TYPE_CHECKING:
    import duckdb

#: Columns of ``runs --json``, in its order: scripts rely on them, more are only ever added.
RUN_KEYS = (
    "run_uuid",
    "sweep",
    "round",
    "cell_key",
    "setting_key",
    "repeat",
    "attempt",
    "outcome",
    "phase",
    "started_at",
    "ended_at",
    "model",
    "model_revision",
    "engine_version",
    "image_digest",
    "hardware",
    "label",
    "expect",
    "message",
)
#: Filter -> condition; every value is bound.
_FILTERS = {
    "sweep": "sweep = $sweep",
    "round": "round = $round",
    "model": "model = $model",
    "outcome": "outcome = $outcome",
    "engine": "engine_version = $engine",
    "hardware": "contains(lower(hardware), lower($hardware))",
    "cell": "starts_with(cell_key, $cell)",
    "setting": "starts_with(setting_key, $setting)",
    "since": "started_at >= $since",
    "until": "started_at < $until",
}


def records(
    connection: duckdb.DuckDBPyConnection,
    sql: str,
    parameters: Mapping[str, object] | Sequence[object] | None = None,
) -> list[dict[str, Any]]:
    """Return a query's rows as JSON-ready objects."""
    result = connection.execute(sql, parameters)
    names = [column[0] for column in result.description or []]
    return [dict(zip(names, map(plain, row), strict=True)) for row in result.fetchall()]


def runs(
    connection: duckdb.DuckDBPyConnection,
    filters: Mapping[str, str | None],
    *,
    limit: int | None = None,
) -> list[dict[str, Any]]:
    """Return runs, newest first; ``filters`` maps names of the option to a value or ``None``.

    Raises :class:`BadInput` for an unknown filter or a time that is none.
    """
    given: dict[str, object] = {name: value for name, value in filters.items() if value is not None}
    odd = sorted(set(given) - set(_FILTERS))
    if odd:
        raise BadInput(f"filter {odd[0]!r} is unknown, wanted one of: {', '.join(_FILTERS)}")
    for name in ("since", "until"):
        if name in given:
            given[name] = moment(str(given[name]), name)
    where = " AND ".join(_FILTERS[name] for name in given) or "true"
    return records(
        connection,
        f"SELECT {', '.join(RUN_KEYS)} FROM run WHERE {where} "
        "ORDER BY started_at DESC NULLS LAST, run_uuid"
        + ("" if limit is None else f" LIMIT {int(limit)}"),
        given,
    )


def moment(text: str, name: str) -> datetime:
    """Return ISO 8601 text (a date is enough) as UTC without a zone."""
    try:
        stamp = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        raise BadInput(
            f"--{name}: got {text!r}, wanted a date or time as 2026-11-29 or 2026-11-29T12:00:00Z"
        ) from None
    return (stamp.astimezone(UTC) if stamp.tzinfo else stamp).replace(tzinfo=None)


def resolve_run(connection: duckdb.DuckDBPyConnection, text: str) -> str:
    """Return the UUID that ``text`` names: a UUID, a unique prefix of one, or ``latest``.

    Raises :class:`BadInput` when there is none or more than one.
    """
    if text == "latest":
        row = connection.execute(
            "SELECT run_uuid::VARCHAR FROM run "
            "ORDER BY started_at DESC NULLS LAST, run_uuid LIMIT 1"
        ).fetchone()
        if row is None:
            raise BadInput("latest: no run is in the warehouse yet; run a sweep first")
        return str(row[0])
    prefix = text.lower().replace("-", "")
    if not re.fullmatch(r"[0-9a-f]{1,32}", prefix):
        raise BadInput(f"run {text!r}: wanted a UUID, a unique prefix of one, or latest")
    found = [
        str(row[0])
        for row in connection.execute(
            "SELECT run_uuid::VARCHAR FROM run "
            "WHERE starts_with(replace(run_uuid::VARCHAR, '-', ''), $prefix) ORDER BY 1 LIMIT 4",
            {"prefix": prefix},
        ).fetchall()
    ]
    if not found:
        raise BadInput(f"run {text!r} is not in the warehouse; `memsweep runs` lists them")
    if len(found) > 1:
        raise BadInput(f"run {text!r} names more than one: {', '.join(found[:3])}; give more of it")
    return found[0]


#: Tables of ``show``, each by the order its rows are shown in.
_SHOWN = {
    "environment": "run_uuid",
    "measurement": "load_point NULLS FIRST, metric",
    "residual": "load_point NULLS FIRST, metric",
    "derivation": "load_point NULLS FIRST, metric",
    "load_point": "load_point",
    "phase": "ordinal",
    "validity": "load_point NULLS FIRST, check_name",
    "failure": "line",
    "event": "happened_at, source, ordinal",
    "artifact": "path",
}


def show(connection: duckdb.DuckDBPyConnection, run_uuid: str) -> dict[str, Any]:
    """Return everything about one run but its samples, requests and repeated start-up values."""
    run = records(connection, "SELECT * FROM run WHERE run_uuid = $run::UUID", {"run": run_uuid})
    shown: dict[str, Any] = {"run": run[0]}
    for table, order in _SHOWN.items():
        shown[f"{table}s" if table not in ("environment", "validity") else table] = records(
            connection,
            f"SELECT * EXCLUDE (run_uuid) FROM {table} WHERE run_uuid = $run::UUID "
            f"ORDER BY {order}",
            {"run": run_uuid},
        )
    counts = ("server_sample", "gpu_sample", "process_sample", "request", "startup_value")
    shown["counts"] = records(
        connection,
        "SELECT "
        + ", ".join(
            f"(SELECT count(*) FROM {table} WHERE run_uuid = $run::UUID) AS {table}s"
            for table in counts
        ),
        {"run": run_uuid},
    )[0]
    return shown


def under(connection: duckdb.DuckDBPyConnection, wanted: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the runs measured under a configuration, newest first: the audit backwards.

    Names are columns of ``run``, ``environment`` or ``cell``, settings as vLLM names them
    (``max_model_len``), or pins; values are compared as text. Raises :class:`BadInput` for a name
    that no run has.
    """
    places = _places(connection)
    conditions, bound = [], {}
    for number, (name, value) in enumerate(wanted.items()):
        if name not in places:
            raise BadInput(
                f"--config: {name!r} is no setting, pin or fact of a run, wanted one of: "
                f"{', '.join(sorted(places))}"
            )
        texts = " OR ".join(f"lower({place}) = lower($v{number})" for place in places[name])
        conditions.append(f"({texts})")
        bound[f"v{number}"] = value
    return records(
        connection,
        f"SELECT {', '.join(f'r.{key}' for key in RUN_KEYS)}, "
        "(SELECT count(*) FROM measurement m WHERE m.run_uuid = r.run_uuid "
        "AND m.value IS NOT NULL) AS measurements "
        "FROM run r JOIN cell c ON c.cell_key = r.cell_key "
        "LEFT JOIN environment e ON e.run_uuid = r.run_uuid "
        f"WHERE {' AND '.join(conditions) or 'true'} "
        "ORDER BY r.started_at DESC NULLS LAST, r.run_uuid",
        bound,
    )


def _places(connection: duckdb.DuckDBPyConnection) -> dict[str, list[str]]:
    """Return where each name of a configuration stands, as SQL text.

    Only names that the tables or the stored settings have themselves are put into SQL; names of
    settings are checked to be plain.
    """
    places: dict[str, list[str]] = {}
    for alias, table in (("r", "run"), ("c", "cell"), ("e", "environment")):
        for column, kind in TABLES[table].items():
            if kind != "JSON":
                places.setdefault(column, []).append(f"{alias}.{column}::VARCHAR")
    rows = connection.execute(
        "SELECT DISTINCT unnest(json_keys(setting, '$.server')), '$.server' FROM cell "
        "UNION SELECT DISTINCT unnest(json_keys(pins)), '$' FROM cell"
    ).fetchall()
    for name, path in rows:
        if re.fullmatch(r"[a-z0-9_]+", name):
            column = "c.setting" if path == "$.server" else "c.pins"
            places.setdefault(name, []).append(f"json_extract_string({column}, '{path}.{name}')")
    return places
