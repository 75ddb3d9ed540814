-- How many tokens and requests would fit at other context limits? Measured and derived apart.
-- $model = NULL: only of this model
SELECT
    r.model, r.hardware, r.engine_version, d.max_model_len_tokens,
    max(m.kv_cache_size_tokens) AS measured_kv_cache_size_tokens,
    max(m.max_concurrency) AS measured_max_concurrency,
    min(d.kv_cache_size_tokens) AS derived_kv_cache_size_tokens,
    min(d.max_concurrency) AS derived_max_concurrency,
    min(d.num_gpu_blocks) AS num_gpu_blocks,
    count(DISTINCT d.run_uuid) AS derived_from_runs
FROM derived_cell d
JOIN run r ON r.run_uuid = d.run_uuid
LEFT JOIN runs_wide m
    ON m.model = r.model AND m.hardware IS NOT DISTINCT FROM r.hardware
    AND m.engine_version = r.engine_version AND m.max_model_len_tokens = d.max_model_len_tokens
    AND m.num_gpu_blocks = d.num_gpu_blocks
WHERE $model::VARCHAR IS NULL OR r.model = $model::VARCHAR
GROUP BY r.model, r.hardware, r.engine_version, d.max_model_len_tokens, d.num_gpu_blocks
ORDER BY ALL;
