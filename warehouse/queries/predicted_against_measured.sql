-- Every prediction beside what was measured, with what is left over.
-- $sweep = NULL: only of this sweep
SELECT
    r.sweep, r.round, r.label, r.repeat, x.load_point, x.metric, x.kind, x.predicted, x.measured,
    x.residual, x.alarm
FROM residual x
JOIN run r USING (run_uuid)
WHERE x.predicted IS NOT NULL AND ($sweep::VARCHAR IS NULL OR r.sweep = $sweep::VARCHAR)
ORDER BY r.started_at, r.run_uuid, x.load_point NULLS FIRST, x.metric;
