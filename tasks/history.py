"""What the published warehouse knows of past runs on a target: when, how long, how large."""

from __future__ import annotations

from datetime import UTC
from pathlib import Path

from tasks.plan.plan import REQUEST_BYTES, RUN_BYTES
from tasks.plan.spending import NO_HISTORY, History, Past
from warehouse.registry import Outcome

#: Ends after which nothing was found out about a setting: it still counts as never measured.
NOTHING_FOUND = (Outcome.STOPPED.value, Outcome.LOST.value, Outcome.INFEASIBLE.value)

_QUERY = """
WITH chosen AS (
    SELECT run_uuid, setting_key, started_at, epoch(ended_at) - epoch(started_at) AS seconds
    FROM run
    WHERE target = $target AND started_at IS NOT NULL
        AND outcome NOT IN (SELECT unnest($nothing::VARCHAR[]))
),
sizes AS (
    SELECT run_uuid, sum(bytes) AS bytes FROM artifact SEMI JOIN chosen USING (run_uuid)
    GROUP BY run_uuid
),
asked AS (
    SELECT run_uuid, sum(asked_requests + coalesce(warmup_requests, 0)) AS requests
    FROM load_point SEMI JOIN chosen USING (run_uuid) GROUP BY run_uuid
)
SELECT setting_key, count(*), max(started_at), median(seconds), max(bytes), sum(bytes),
    sum($run_bytes + $request_bytes * coalesce(requests, 0)) FILTER (bytes IS NOT NULL)
FROM chosen LEFT JOIN sizes USING (run_uuid) LEFT JOIN asked USING (run_uuid)
GROUP BY setting_key
"""


def read(snapshot: Path, target: str) -> History:
    """Return the history of a target (a profile's name); an empty one where nothing is published.

    Raises:
        CannotFindOut: the snapshot is there and cannot be read.
    """
    if not snapshot.is_file():
        return NO_HISTORY
    from warehouse.query import run_sql

    rows = run_sql(
        snapshot,
        _QUERY,
        parameters={
            "target": target,
            "nothing": list(NOTHING_FOUND),
            "run_bytes": RUN_BYTES,
            "request_bytes": REQUEST_BYTES,
        },
    ).rows
    settings, taken, estimated = {}, 0, 0
    for key, runs, last_at, median_s, largest, total, estimate in rows:
        size = None if largest is None else int(largest)
        settings[key] = Past(int(runs), last_at.replace(tzinfo=UTC), median_s, size)
        taken += int(total or 0)
        estimated += int(estimate or 0)
    return History(settings, taken / estimated if estimated else None)
