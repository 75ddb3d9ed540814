-- Where the memory budget goes after start: weights, non-torch, activations, graphs, pool, rest.
-- $model = NULL: only of this model
WITH parts AS (
    SELECT
        *,
        coalesce(
            requested_memory_bytes,
            ceil(total_memory_bytes * measured_gpu_memory_utilization_ratio),
            ceil(total_memory_bytes * gpu_memory_utilization_ratio)
        )::BIGINT AS budget_bytes,
        coalesce(weights_bytes, model_loading_bytes) AS weights_part_bytes,
        coalesce(available_kv_cache_bytes, requested_kv_cache_bytes) AS pool_part_bytes
    FROM runs_wide
)
SELECT
    run_uuid, model, hardware, engine_version, max_model_len_tokens, gpu_memory_utilization_ratio,
    budget_bytes,
    weights_part_bytes AS weights_bytes,
    -- Some versions log weights and the rest outside torch together.
    coalesce(non_torch_bytes, weights_and_non_torch_bytes - weights_part_bytes) AS non_torch_bytes,
    peak_activation_bytes,
    graph_capture_bytes,
    graph_estimate_bytes,
    pool_part_bytes AS kv_pool_bytes,
    -- NULL where a part was not logged: an absent part is not 0.
    budget_bytes - weights_part_bytes
        - coalesce(non_torch_bytes, weights_and_non_torch_bytes - weights_part_bytes)
        - peak_activation_bytes - graph_estimate_bytes - pool_part_bytes AS unexplained_bytes
FROM parts
WHERE outcome = 'ok' AND ($model::VARCHAR IS NULL OR model = $model::VARCHAR)
ORDER BY model, max_model_len_tokens, gpu_memory_utilization_ratio, run_uuid;
