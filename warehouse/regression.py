"""What got worse from one measuring of a sweep to the next: the question a night has to answer.

Only the metrics that decide how much fits are looked at, each with the direction that is the worse
one, and only changes that noise does not explain: the rest is `compare`'s to show.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from warehouse import difference
from warehouse.compare import Selection, runs_of_round
from warehouse.lookup import records
from warehouse.registry import EXACT, Outcome

if TYPE_CHECKING:
    import duckdb

#: Metric of a server start -> sign of the change that is the worse one.
WORSE: Mapping[str, int] = {
    "kv_cache_size_tokens": -1,
    "max_concurrency": -1,
    "available_kv_cache_bytes": -1,
    "model_loading_bytes": +1,
    "graph_capture_bytes": +1,
    "graph_pool_bytes": +1,
}
#: A smaller share of change in what is not exact is not worth waking anybody.
LEAST_RATIO = 0.005


def selection(connection: duckdb.DuckDBPyConnection, sweep: str, round_: str) -> Selection:
    """Return the runs of a round."""
    runs = runs_of_round(connection, sweep, round_)
    return Selection(f"{sweep}, round {round_}", runs, "round")


def regressions(
    connection: duckdb.DuckDBPyConnection, before: Selection, after: Selection
) -> list[dict[str, Any]]:
    """Return what got worse in the settings that both sides measured, most telling first.

    Each with ``label``, ``what`` (``outcome``, ``alarm`` or a metric), ``before``, ``after`` and a
    ``message`` for people.
    """
    shared = _settings(connection, before) & _settings(connection, after)
    if not shared:
        return []
    found = difference.compare(connection, before, after, unlike=True)
    alarms = {one: _alarms(connection, side) for one, side in (("a", before), ("b", after))}
    expected = _expected(connection, after)
    worse = [row for cell in found["cells"] for row in _outcome(cell, expected)]
    profiled = _profiled(connection, after)
    worse += [row for cell in found["cells"] for row in _metrics(cell, profiled)]
    worse += [
        {
            "label": label,
            "what": "alarm",
            "before": None,
            "after": metric,
            "message": f"{label}: {metric} left its prediction",
        }
        for (key, label, metric) in sorted(alarms["b"])
        if key in shared and (key, metric) not in {(other, name) for other, _, name in alarms["a"]}
    ]
    return worse


def _settings(connection: duckdb.DuckDBPyConnection, chosen: Selection) -> set[str]:
    rows = _of(connection, chosen, "SELECT DISTINCT setting_key FROM run r")
    return {row["setting_key"] for row in rows}


def _profiled(connection: duckdb.DuckDBPyConnection, chosen: Selection) -> set[str]:
    """Return the settings whose pool the engine sized by what it found free: no two boots agree."""
    rows = _of(
        connection,
        chosen,
        "SELECT DISTINCT r.setting_key FROM run r JOIN cell c ON c.cell_key = r.cell_key AND "
        "TRY_CAST(json_extract_string(c.setting, '$.server.kv_cache_memory_bytes') AS BIGINT) "
        "IS NULL",
    )
    return {row["setting_key"] for row in rows}


def _expected(connection: duckdb.DuckDBPyConnection, chosen: Selection) -> dict[str, str]:
    rows = _of(connection, chosen, "SELECT run_uuid, coalesce(expect, 'ok') AS expected FROM run r")
    return {row["run_uuid"]: row["expected"] for row in rows}


def _alarms(connection: duckdb.DuckDBPyConnection, chosen: Selection) -> set[tuple[str, str, str]]:
    """Return ``(setting key, label, metric)`` of every residual that raised an alarm."""
    rows = _of(
        connection,
        chosen,
        "SELECT DISTINCT r.setting_key, r.label, x.metric FROM residual x JOIN run r "
        "ON r.run_uuid = x.run_uuid AND x.alarm",
    )
    return {(row["setting_key"], row["label"], row["metric"]) for row in rows}


def _of(
    connection: duckdb.DuckDBPyConnection, chosen: Selection, select: str
) -> list[dict[str, Any]]:
    condition = " WHERE r.run_uuid IN (SELECT unnest($runs::VARCHAR[])::UUID)"
    return records(connection, select + condition, {"runs": chosen.runs})


def _outcome(cell: Mapping[str, Any], expected: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield a cell whose outcomes changed, unless they are now what they should be.

    That a prediction newly rules a cell out is a change for the worse, expected or not.
    """
    outcomes = dict(zip(cell["runs_b"], cell["outcomes_b"], strict=True))
    wrong = [
        run
        for run, outcome in outcomes.items()
        if outcome == Outcome.INFEASIBLE.value or outcome != expected.get(run)
    ]
    before, after = sorted(set(cell["outcomes_a"])), sorted(set(cell["outcomes_b"]))
    if before != after and wrong:
        yield {
            "label": cell["label"],
            "what": "outcome",
            "before": ", ".join(before),
            "after": ", ".join(after),
            "message": f"{cell['label']}: outcome {', '.join(before)} became {', '.join(after)}",
        }


def _metrics(cell: Mapping[str, Any], profiled: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield the metrics of a cell that got worse; a profiled pool's size is not exact either."""
    pool_is_given = cell["setting_key"] not in profiled
    for row in cell["metrics"]:
        sign = WORSE.get(row["metric"])
        if sign is None or row["load_point"] is not None or row["verdict"] != "different":
            continue
        # From nothing there is no ratio: such a change is told whatever its size.
        small = row["relative"] is not None and abs(row["relative"]) < LEAST_RATIO
        exact = row["metric"] in EXACT and pool_is_given
        if row["difference"] * sign > 0 and (exact or not small):
            yield {
                "label": cell["label"],
                "what": row["metric"],
                "before": row["mean_a"],
                "after": row["mean_b"],
                "message": f"{cell['label']}: {row['metric']} {row['mean_a']:g} became "
                f"{row['mean_b']:g}",
            }
