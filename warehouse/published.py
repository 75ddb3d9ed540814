"""A user's own runs of a sweep, as the numbers that published figures are about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from warehouse.compare import Selection, choose
from warehouse.lookup import records

if TYPE_CHECKING:
    import duckdb

#: Load point (none: the server start) and metric.
Key = tuple[int | None, str]

_NUMBERS = """
WITH chosen AS (SELECT unnest($runs::VARCHAR[])::UUID AS run_uuid),
stored AS (
    SELECT run_uuid, load_point, metric, value FROM measurement
    UNION ALL SELECT run_uuid, load_point, metric, value FROM derivation
),
usable AS (
    SELECT s.* FROM stored s JOIN chosen USING (run_uuid)
    LEFT JOIN load_point_validity v USING (run_uuid, load_point)
    WHERE s.value IS NOT NULL AND v.valid IS DISTINCT FROM false
)
SELECT * FROM usable
-- What a document prints as one number and a run keeps as several.
UNION ALL SELECT m.run_uuid, NULL, 'kv_pool_bytes', m.value * p.value
    FROM usable m JOIN prediction p USING (run_uuid)
    WHERE m.metric = 'num_gpu_blocks' AND p.metric = 'bytes_per_block'
        AND p.value IS NOT NULL AND p.load_point IS NULL
UNION ALL SELECT run_uuid, NULL, 'gpu_used_after_start_bytes', arg_max(g.used_bytes, g.t_s)
    FROM gpu_sample g JOIN chosen USING (run_uuid)
    JOIN (SELECT run_uuid, min(start_s) AS loaded_s FROM phase
        WHERE load_point IS NOT NULL GROUP BY run_uuid) USING (run_uuid)
    WHERE g.t_s < loaded_s AND g.used_bytes IS NOT NULL GROUP BY run_uuid
UNION ALL SELECT run_uuid, NULL, 'oom_' || n.name,
        TRY_CAST(json_extract_string(f.numbers, '$.' || n.name) AS DOUBLE) AS value
    FROM failure f JOIN chosen USING (run_uuid),
        (VALUES ('total_bytes'), ('tried_bytes'), ('free_bytes')) n(name)
    WHERE f.outcome = 'oom' AND value IS NOT NULL
"""

_RUNS = """
SELECT r.run_uuid, r.sweep, r.label, r.setting_key, r.outcome, r.engine_version, r.hardware,
    e.device, e.gpu_name, e.gpu_total_bytes
FROM run r LEFT JOIN environment e USING (run_uuid)
WHERE r.run_uuid IN (SELECT unnest($runs::VARCHAR[])::UUID)
ORDER BY r.started_at NULLS LAST, r.run_uuid
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """All runs of one cell among those chosen."""

    runs: tuple[Mapping[str, Any], ...]
    numbers: Mapping[Key, tuple[float, ...]]

    def mean(self, load_point: int | None, metric: str) -> float | None:
        """Return the mean over the runs, ``None`` where no run measured it."""
        values = self.numbers.get((load_point, metric))
        return fmean(values) if values else None

    def told(self, name: str) -> list[str]:
        """Return the distinct values of one fact of the runs, as text."""
        return list(dict.fromkeys(str(run[name]) for run in self.runs))


def has_runs(connection: duckdb.DuckDBPyConnection, sweep: str) -> bool:
    """Whether the warehouse holds a run of a sweep of this name."""
    found = connection.execute("SELECT 1 FROM run WHERE sweep = $sweep LIMIT 1", {"sweep": sweep})
    return found.fetchone() is not None


def sweeps_of(connection: duckdb.DuckDBPyConnection, text: str | None) -> tuple[Selection, str]:
    """Return the runs that ``text`` names, as ``compare`` does, and the sweep most are of."""
    chosen = choose(connection, text)
    names = [run["sweep"] for run in records(connection, _RUNS, {"runs": chosen.runs})]
    return chosen, max(dict.fromkeys(names), key=names.count)


def measured(connection: duckdb.DuckDBPyConnection, runs: Sequence[str]) -> dict[str, Measured]:
    """Return what the runs measured by cell label; invalid load points are left out."""
    numbers: dict[str, dict[Key, float]] = {}
    for row in records(connection, _NUMBERS, {"runs": list(runs)}):
        numbers.setdefault(row["run_uuid"], {})[(row["load_point"], row["metric"])] = row["value"]
    by_label: dict[str, list[dict[str, Any]]] = {}
    for run in records(connection, _RUNS, {"runs": list(runs)}):
        by_label.setdefault(str(run["label"]), []).append(run)
    return {
        label: Measured(tuple(of_label), _gathered(of_label, numbers))
        for label, of_label in by_label.items()
    }


def _gathered(
    runs: Sequence[Mapping[str, Any]], numbers: Mapping[str, Mapping[Key, float]]
) -> dict[Key, tuple[float, ...]]:
    found: dict[Key, tuple[float, ...]] = {}
    for run in runs:
        for key, value in numbers.get(run["run_uuid"], {}).items():
            found[key] = (*found.get(key, ()), value)
    return found
