-- Peak KV usage, running and waiting requests and preemptions by prompt length and concurrency.
-- $model = NULL: only of this model
SELECT
    model, hardware, engine_version, max_model_len_tokens, asked_prompt_tokens, asked_output_tokens,
    parallel, count(*) AS load_points,
    max(prompt_tokens_max) AS prompt_tokens_max,
    max(peak_kv_usage_ratio) AS peak_kv_usage_ratio,
    max(peak_kv_usage_ratio_bound) AS peak_kv_usage_ratio_bound,
    max(peak_requests_running) AS peak_requests_running,
    max(peak_requests_waiting) AS peak_requests_waiting,
    max(preemptions) AS preemptions
FROM load_points_wide
WHERE state = 'ok' AND ($model::VARCHAR IS NULL OR model = $model::VARCHAR)
GROUP BY ALL
ORDER BY ALL;
