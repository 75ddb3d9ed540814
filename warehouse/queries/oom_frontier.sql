-- The edge of memory: the largest that worked and the smallest that did not, by model and hardware.
-- $model = NULL: only of this model
SELECT
    model, hardware, engine_version, gpu_memory_utilization_ratio, kv_cache_memory_bytes,
    max(max_model_len_tokens) FILTER (outcome = 'ok') AS longest_context_ok_tokens,
    min(max_model_len_tokens) FILTER (outcome IN ('oom', 'refused')) AS shortest_context_failed_tokens,
    count(*) FILTER (outcome = 'ok') AS ok_runs,
    count(*) FILTER (outcome = 'oom') AS oom_runs,
    count(*) FILTER (outcome = 'refused') AS refused_runs
FROM runs_wide
WHERE $model::VARCHAR IS NULL OR model = $model::VARCHAR
GROUP BY ALL
ORDER BY ALL;
