-- The same setting on different engine versions: what each gave.
-- $setting = NULL: only settings whose key begins so
SELECT
    setting_key, any_value(label) AS label, hardware, engine_version, count(*) AS runs,
    min(kv_cache_size_tokens) AS kv_cache_size_tokens_min,
    max(kv_cache_size_tokens) AS kv_cache_size_tokens_max,
    min(num_gpu_blocks) AS num_gpu_blocks_min,
    min(max_concurrency) AS max_concurrency_min,
    median(init_engine_s) AS init_engine_s_median,
    string_agg(DISTINCT outcome, ', ' ORDER BY outcome) AS outcomes
FROM runs_wide
WHERE $setting::VARCHAR IS NULL OR starts_with(setting_key, $setting::VARCHAR)
GROUP BY setting_key, hardware, engine_version
ORDER BY setting_key, hardware, engine_version;
