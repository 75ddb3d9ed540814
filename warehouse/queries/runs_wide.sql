-- One row a run: settings, pins, start-up values, prediction and residual (view runs_wide).
-- $sweep = NULL: only of this sweep
SELECT * FROM runs_wide
WHERE $sweep::VARCHAR IS NULL OR sweep = $sweep::VARCHAR
ORDER BY started_at DESC NULLS LAST, run_uuid;
