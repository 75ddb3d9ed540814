-- How large is the KV pool at which share of device memory?
-- $model = NULL: only of this model
SELECT
    model, hardware, engine_version, max_model_len_tokens, gpu_memory_utilization_ratio,
    count(*) AS runs,
    min(available_kv_cache_bytes) AS available_kv_cache_bytes_min,
    max(available_kv_cache_bytes) AS available_kv_cache_bytes_max,
    min(kv_cache_size_tokens) AS kv_cache_size_tokens_min,
    max(kv_cache_size_tokens) AS kv_cache_size_tokens_max,
    min(num_gpu_blocks) AS num_gpu_blocks_min
FROM runs_wide
WHERE outcome = 'ok' AND ($model::VARCHAR IS NULL OR model = $model::VARCHAR)
GROUP BY ALL
ORDER BY ALL;
