"""Cells side by side with their predictions, from what is stored; nothing is judged by eye."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from warehouse.errors import BadInput
from warehouse.lookup import records, resolve_run

if TYPE_CHECKING:
    import duckdb

#: Start-up metrics of a comparison, in the order shown.
CELL_METRICS = ("kv_cache_size_tokens", "num_gpu_blocks", "max_concurrency")
#: Derived metrics of it that stand beside the sampled peak.
USAGE_METRICS = ("peak_kv_usage_lower_ratio", "peak_kv_usage_upper_ratio", "samples_outside_curves")
#: Measured metrics of a load point's comparison.
LOAD_METRICS = (
    "peak_kv_usage_ratio",
    "peak_requests_running",
    "peak_requests_waiting",
    "preemptions",
    "requests_succeeded",
    "prompt_tokens_max",
)


def newest_round(connection: duckdb.DuckDBPyConnection) -> tuple[str, str]:
    """Return ``(sweep, round)`` of the round whose run began last."""
    row = connection.execute(
        "SELECT sweep, round FROM run ORDER BY started_at DESC NULLS LAST, run_uuid LIMIT 1"
    ).fetchone()
    if row is None:
        raise BadInput("no run is in the warehouse yet; run a sweep first (`memsweep demo`)")
    return str(row[0]), str(row[1])


def runs_of_round(connection: duckdb.DuckDBPyConnection, sweep: str, round_: str) -> list[str]:
    """Return the last attempt of every repeat of a round, in the order they began.

    Earlier attempts were stopped or lost, and measured again: the round is not judged by them.
    """
    rows = connection.execute(
        "SELECT run_uuid::VARCHAR FROM run WHERE sweep = $sweep AND round = $round "
        "QUALIFY row_number() OVER (PARTITION BY cell_key, repeat ORDER BY attempt DESC) = 1 "
        "ORDER BY started_at NULLS LAST, run_uuid",
        {"sweep": sweep, "round": round_},
    ).fetchall()
    return [str(row[0]) for row in rows]


def cells(connection: duckdb.DuckDBPyConnection, runs: Sequence[str]) -> list[dict[str, Any]]:
    """Return one object a run: outcome, metrics with prediction and residual, load points."""
    chosen = {"runs": list(runs)}
    base = records(
        connection,
        "SELECT run_uuid, sweep, round, label, cell_key, setting_key, repeat, attempt, outcome, "
        "expect, phase, message, engine_version, model, hardware, started_at, "
        "outcome = coalesce(expect, 'ok') AS as_expected "
        "FROM run WHERE run_uuid IN (SELECT unnest($runs::VARCHAR[])::UUID) "
        "ORDER BY started_at NULLS LAST, run_uuid",
        chosen,
    )
    metrics = _by_run(_metrics(connection, chosen))
    points = _by_run(_load_points(connection, chosen))
    alarms = _by_run(
        records(
            connection,
            "SELECT run_uuid, load_point, metric, predicted, measured, residual FROM residual "
            "WHERE alarm AND run_uuid IN (SELECT unnest($runs::VARCHAR[])::UUID) "
            "ORDER BY load_point NULLS FIRST, metric",
            chosen,
        )
    )
    for cell in base:
        run = cell["run_uuid"]
        cell["metrics"] = {row.pop("metric"): row for row in metrics.get(run, [])}
        cell["load_points"] = points.get(run, [])
        cell["invalid_load_points"] = sum(p["valid"] is False for p in cell["load_points"])
        cell["alarms"] = alarms.get(run, [])
    return base


def _metrics(
    connection: duckdb.DuckDBPyConnection, chosen: dict[str, list[str]]
) -> list[dict[str, Any]]:
    return records(
        connection,
        "SELECT m.run_uuid, m.metric, r.predicted, m.value AS measured, r.residual, r.alarm, "
        "m.reason "
        "FROM measurement m LEFT JOIN residual r ON r.run_uuid = m.run_uuid "
        "AND r.metric = m.metric AND r.load_point IS NULL "
        "WHERE m.load_point IS NULL AND m.metric IN (SELECT unnest($metrics)) "
        "AND m.run_uuid IN (SELECT unnest($runs::VARCHAR[])::UUID)",
        {**chosen, "metrics": list(CELL_METRICS)},
    )


def _load_points(
    connection: duckdb.DuckDBPyConnection, chosen: dict[str, list[str]]
) -> list[dict[str, Any]]:
    values = ", ".join(
        f"max(m.value) FILTER (m.metric = '{metric}') AS {metric}" for metric in LOAD_METRICS
    )
    usage = ", ".join(
        f"max(d.value) FILTER (d.metric = '{metric}') AS {metric}" for metric in USAGE_METRICS
    )
    return records(
        connection,
        f"""
        WITH chosen AS (SELECT unnest($runs::VARCHAR[])::UUID AS run_uuid),
        measured AS (
            SELECT m.run_uuid, m.load_point, {values}
            FROM measurement m JOIN chosen USING (run_uuid)
            WHERE m.load_point IS NOT NULL GROUP BY ALL
        ),
        derived AS (
            SELECT d.run_uuid, d.load_point, {usage},
                CASE max(d.value) FILTER (d.metric = 'peak_kv_usage_case')
                    WHEN 1 THEN 'exact' WHEN 0 THEN 'bounded' END AS peak_kv_usage_case
            FROM derivation d JOIN chosen USING (run_uuid)
            WHERE d.load_point IS NOT NULL GROUP BY ALL
        )
        SELECT l.run_uuid, l.load_point, l.asked_prompt_tokens, l.asked_output_tokens, l.parallel,
            l.asked_requests, l.state, m.* EXCLUDE (run_uuid, load_point),
            p.value AS predicted_peak_bound, d.value AS served_peak_bound,
            n.value AS predicted_running_at_admission,
            m.peak_kv_usage_ratio > coalesce(d.value, p.value) + 1e-9 AS above_bound,
            u.* EXCLUDE (run_uuid, load_point), v.valid, v.broken_checks
        FROM load_point l JOIN chosen USING (run_uuid)
        LEFT JOIN measured m USING (run_uuid, load_point)
        LEFT JOIN derived u USING (run_uuid, load_point)
        LEFT JOIN load_point_validity v USING (run_uuid, load_point)
        LEFT JOIN prediction p ON p.run_uuid = l.run_uuid AND p.load_point = l.load_point
            AND p.metric = 'peak_kv_usage_ratio'
        LEFT JOIN prediction n ON n.run_uuid = l.run_uuid AND n.load_point = l.load_point
            AND n.metric = 'peak_requests_running'
        LEFT JOIN derivation d ON d.run_uuid = l.run_uuid AND d.load_point = l.load_point
            AND d.metric = 'peak_kv_usage_ratio_bound'
        ORDER BY l.run_uuid, l.load_point
        """,
        chosen,
    )


def _by_run(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    grouped: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        grouped.setdefault(row.pop("run_uuid"), []).append(row)
    return grouped


@dataclass(frozen=True, slots=True)
class Selection:
    """A set of runs that a user named."""

    title: str
    runs: list[str]
    kind: str

    def document(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"title": self.title, "kind": self.kind, "runs": self.runs}


def choose(connection: duckdb.DuckDBPyConnection, text: str | None) -> Selection:
    """Return the runs that ``text`` names: nothing is the newest round.

    A sweep means its newest round, ``SWEEP@ROUND`` that round; an engine version every run of it;
    anything else is a run. Raises :class:`BadInput` when nothing matches.
    """
    if text is None:
        sweep, round_ = newest_round(connection)
        return Selection(
            f"{sweep}, round {round_}", runs_of_round(connection, sweep, round_), "round"
        )
    name, separator, label = text.partition("@")
    rows = connection.execute(
        "SELECT round FROM run WHERE sweep = $sweep "
        "ORDER BY started_at DESC NULLS LAST, run_uuid LIMIT 1",
        {"sweep": name},
    ).fetchall()
    if rows:
        round_ = label if separator else str(rows[0][0])
        found = runs_of_round(connection, name, round_)
        if not found:
            raise BadInput(f"{text!r}: sweep {name} has no round {label!r} in the warehouse")
        return Selection(f"{name}, round {round_}", found, "round")
    versions = [
        str(row[0])
        for row in connection.execute(
            "SELECT run_uuid::VARCHAR FROM run WHERE engine_version = $version "
            "ORDER BY started_at NULLS LAST, run_uuid",
            {"version": text},
        ).fetchall()
    ]
    if versions:
        return Selection(f"engine {text}", versions, "engine_version")
    run = resolve_run(connection, text)
    return Selection(f"run {run}", [run], "run")
