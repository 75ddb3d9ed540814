-- Which configuration produced a measurement? Every pin and setting of one run.
-- $run = latest: a UUID, or latest
WITH chosen AS (
    SELECT run_uuid FROM run
    WHERE $run::VARCHAR = 'latest' OR run_uuid::VARCHAR = $run::VARCHAR
    ORDER BY started_at DESC NULLS LAST, run_uuid LIMIT 1
)
SELECT
    r.run_uuid, r.sweep, r.sweep_sha256, r.round, r.repeat, r.attempt, r.label, r.outcome,
    r.git_commit, r.git_dirty, r.started_by, r.started_at, r.prefect_flow_run_id,
    c.* EXCLUDE (cell_key, setting_key), r.cell_key, r.setting_key,
    e.* EXCLUDE (run_uuid, document, device, engine_version, engine_lock_sha256, bench_version,
        bench_lock_sha256, image_digest, harness, model_revision),
    e.engine_version AS engine_version_served
FROM run r
JOIN chosen USING (run_uuid)
LEFT JOIN cell c ON c.cell_key = r.cell_key
LEFT JOIN environment e ON e.run_uuid = r.run_uuid;
