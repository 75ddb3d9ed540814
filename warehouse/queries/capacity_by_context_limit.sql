-- How many tokens and how many requests of full length fit, by context limit?
-- $model = NULL: only of this model
SELECT
    model, hardware, engine_version, max_model_len_tokens, kv_cache_memory_bytes,
    gpu_memory_utilization_ratio, count(*) AS runs,
    min(kv_cache_size_tokens) AS kv_cache_size_tokens,
    min(predicted_kv_cache_size_tokens) AS predicted_kv_cache_size_tokens,
    min(max_concurrency) AS max_concurrency,
    min(predicted_max_concurrency) AS predicted_max_concurrency,
    min(num_gpu_blocks) AS num_gpu_blocks
FROM runs_wide
WHERE kv_cache_size_tokens IS NOT NULL AND ($model::VARCHAR IS NULL OR model = $model::VARCHAR)
GROUP BY ALL
ORDER BY ALL;
