-- How much do boots of one cell differ? The first boot of a shape can give less KV cache.
-- $metric = kv_cache_size_tokens: name of a start-up metric
SELECT
    r.cell_key, any_value(r.label) AS label, r.hardware, count(m.value) AS boots,
    min(m.value) AS lowest, max(m.value) AS highest,
    (max(m.value) - min(m.value)) / nullif(max(m.value), 0) AS spread_ratio,
    stddev_samp(m.value) AS stddev,
    arg_min(e.compile_cache, m.value) AS compile_cache_at_lowest
FROM run r
JOIN measurement m ON m.run_uuid = r.run_uuid AND m.load_point IS NULL
LEFT JOIN environment e ON e.run_uuid = r.run_uuid
WHERE m.metric = $metric::VARCHAR AND m.value IS NOT NULL
GROUP BY r.cell_key, r.hardware
HAVING count(m.value) > 1
ORDER BY spread_ratio DESC NULLS LAST, r.cell_key;
