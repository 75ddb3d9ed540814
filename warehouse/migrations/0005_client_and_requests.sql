-- What the load generator says of itself: which requests it sent (equal in two runs that sent the
-- same ones) and how late its own event loop was.
ALTER TABLE load_point ADD COLUMN requests_sha256 VARCHAR;
ALTER TABLE load_point ADD COLUMN prompt_tokens_differ INTEGER;
COMMENT ON COLUMN load_point.requests_sha256 IS 'sha256 of the measured requests as sent, in order: equal in two runs with the same requests; NULL: not every row kept its request [-; measured]';
COMMENT ON COLUMN load_point.prompt_tokens_differ IS 'whole answers whose prompt had other tokens at the server than the prompt file states; NULL: random prompts [requests; measured]';
COMMENT ON COLUMN request.success IS 'the request was answered whole [-; measured]';

CREATE OR REPLACE VIEW load_points_wide AS
WITH
m AS (
    SELECT
        run_uuid, load_point,
        max(value) FILTER (metric = 'peak_kv_usage_ratio')::DOUBLE AS peak_kv_usage_ratio,
        max(value) FILTER (metric = 'peak_requests_running')::BIGINT AS peak_requests_running,
        max(value) FILTER (metric = 'peak_requests_waiting')::BIGINT AS peak_requests_waiting,
        max(value) FILTER (metric = 'preemptions')::BIGINT AS preemptions,
        max(value) FILTER (metric = 'prefix_cache_hits')::BIGINT AS prefix_cache_hits,
        max(value) FILTER (metric = 'requests_succeeded')::BIGINT AS requests_succeeded,
        max(value) FILTER (metric = 'prompt_tokens_min')::BIGINT AS prompt_tokens_min,
        max(value) FILTER (metric = 'prompt_tokens_max')::BIGINT AS prompt_tokens_max,
        max(value) FILTER (metric = 'output_tokens_max')::BIGINT AS output_tokens_max,
        max(value) FILTER (metric = 'window_s')::DOUBLE AS window_s,
        max(value) FILTER (metric = 'peak_process_rss_bytes')::BIGINT AS peak_process_rss_bytes,
        max(value) FILTER (metric = 'peak_gpu_used_bytes')::BIGINT AS peak_gpu_used_bytes,
        max(value) FILTER (metric = 'client_lag_p50_s')::DOUBLE AS client_lag_p50_s,
        max(value) FILTER (metric = 'client_lag_p99_s')::DOUBLE AS client_lag_p99_s,
        max(value) FILTER (metric = 'client_lag_max_s')::DOUBLE AS client_lag_max_s
    FROM measurement WHERE load_point IS NOT NULL GROUP BY run_uuid, load_point
),
d AS (
    SELECT
        run_uuid, load_point,
        max(value) FILTER (metric = 'peak_kv_usage_ratio_bound')::DOUBLE AS peak_kv_usage_ratio_bound,
        max(value) FILTER (metric = 'peak_kv_usage_lower_ratio')::DOUBLE AS peak_kv_usage_lower_ratio,
        max(value) FILTER (metric = 'peak_kv_usage_upper_ratio')::DOUBLE AS peak_kv_usage_upper_ratio,
        CASE max(value) FILTER (metric = 'peak_kv_usage_case') WHEN 1 THEN 'exact' WHEN 0 THEN 'bounded' END AS peak_kv_usage_case,
        max(value) FILTER (metric = 'samples_outside_curves')::BIGINT AS samples_outside_curves,
        max(value) FILTER (metric = 'output_tokens_per_s')::DOUBLE AS output_tokens_per_s,
        max(value) FILTER (metric = 'ttft_p50_ms')::DOUBLE AS ttft_p50_ms,
        max(value) FILTER (metric = 'ttft_p99_ms')::DOUBLE AS ttft_p99_ms,
        max(value) FILTER (metric = 'itl_p50_ms')::DOUBLE AS itl_p50_ms,
        max(value) FILTER (metric = 'itl_p99_ms')::DOUBLE AS itl_p99_ms,
        max(value) FILTER (metric = 'latency_p50_ms')::DOUBLE AS latency_p50_ms,
        max(value) FILTER (metric = 'latency_p99_ms')::DOUBLE AS latency_p99_ms
    FROM derivation WHERE load_point IS NOT NULL GROUP BY run_uuid, load_point
),
p AS (
    SELECT
        run_uuid, load_point,
        max(value) FILTER (metric = 'peak_kv_usage_ratio') AS predicted_peak_kv_usage_ratio_bound,
        max(value) FILTER (metric = 'peak_requests_running')::BIGINT AS predicted_running_at_admission
    FROM prediction WHERE load_point IS NOT NULL GROUP BY run_uuid, load_point
)
SELECT
    r.run_uuid,
    r.sweep,
    r.round,
    r.label,
    r.repeat,
    r.outcome,
    r.phase,
    r.started_at,
    r.cell_key,
    r.setting_key,
    r.model,
    r.engine_version,
    r.hardware,
    c.max_model_len_tokens,
    c.kv_cache_memory_bytes,
    c.gpu_memory_utilization_ratio,
    c.max_num_seqs,
    c.max_num_batched_tokens,
    c.enable_prefix_caching,
    c.tensor_parallel_size,
    l.load_point,
    l.asked_prompt_tokens,
    l.asked_output_tokens,
    l.parallel,
    l.asked_requests,
    l.warmup_requests,
    l.prefix_tokens,
    l.state,
    l.error,
    l.window_start_s,
    l.window_end_s,
    l.window_source,
    l.requests_sha256,
    l.prompt_tokens_differ,
    m.peak_kv_usage_ratio,
    d.peak_kv_usage_ratio_bound,
    d.peak_kv_usage_lower_ratio,
    d.peak_kv_usage_upper_ratio,
    d.peak_kv_usage_case,
    d.samples_outside_curves,
    m.peak_requests_running,
    m.peak_requests_waiting,
    m.preemptions,
    m.prefix_cache_hits,
    m.requests_succeeded,
    m.prompt_tokens_min,
    m.prompt_tokens_max,
    m.output_tokens_max,
    m.window_s,
    d.output_tokens_per_s,
    d.ttft_p50_ms,
    d.ttft_p99_ms,
    d.itl_p50_ms,
    d.itl_p99_ms,
    d.latency_p50_ms,
    d.latency_p99_ms,
    m.peak_process_rss_bytes,
    m.peak_gpu_used_bytes,
    m.client_lag_p50_s,
    m.client_lag_p99_s,
    m.client_lag_max_s,
    p.predicted_peak_kv_usage_ratio_bound,
    p.predicted_running_at_admission,
    v.failed_checks,
    v.valid,
    v.broken_checks
FROM load_point l
JOIN run r ON r.run_uuid = l.run_uuid
LEFT JOIN cell c ON c.cell_key = r.cell_key
LEFT JOIN m ON m.run_uuid = l.run_uuid AND m.load_point = l.load_point
LEFT JOIN d ON d.run_uuid = l.run_uuid AND d.load_point = l.load_point
LEFT JOIN p ON p.run_uuid = l.run_uuid AND p.load_point = l.load_point
LEFT JOIN load_point_validity v ON v.run_uuid = l.run_uuid AND v.load_point = l.load_point;
COMMENT ON VIEW load_points_wide IS 'one row a load point: what was asked, served and seen, and whether it may be used';
COMMENT ON COLUMN load_points_wide.run_uuid IS 'Polyaxon run UUID [-; identity]';
COMMENT ON COLUMN load_points_wide.sweep IS 'name of the sweep [-; asked]';
COMMENT ON COLUMN load_points_wide.round IS 'label of the round [-; identity]';
COMMENT ON COLUMN load_points_wide.label IS 'experiment and what varies in it [-; asked]';
COMMENT ON COLUMN load_points_wide.repeat IS 'repeat of the cell within the round [-; identity]';
COMMENT ON COLUMN load_points_wide.outcome IS 'how the run ended [-; measured]';
COMMENT ON COLUMN load_points_wide.phase IS 'where in its life it ended [-; measured]';
COMMENT ON COLUMN load_points_wide.started_at IS 'start of the run [UTC; measured]';
COMMENT ON COLUMN load_points_wide.cell_key IS 'cell that was run [-; identity]';
COMMENT ON COLUMN load_points_wide.setting_key IS 'its setting, without pins [-; identity]';
COMMENT ON COLUMN load_points_wide.model IS 'name of the model [-; asked]';
COMMENT ON COLUMN load_points_wide.engine_version IS 'pinned version of vLLM; what ran is in environment [-; asked]';
COMMENT ON COLUMN load_points_wide.hardware IS 'GPU name and count, or cpu with its number of cores [-; measured]';
COMMENT ON COLUMN load_points_wide.max_model_len_tokens IS 'context limit [tokens; asked]';
COMMENT ON COLUMN load_points_wide.kv_cache_memory_bytes IS 'explicit size of the KV pool; NULL: vLLM profiles [bytes; asked]';
COMMENT ON COLUMN load_points_wide.gpu_memory_utilization_ratio IS 'share of device memory [ratio; asked]';
COMMENT ON COLUMN load_points_wide.max_num_seqs IS 'sequences scheduled in one step [requests; asked]';
COMMENT ON COLUMN load_points_wide.max_num_batched_tokens IS 'tokens scheduled in one step [tokens; asked]';
COMMENT ON COLUMN load_points_wide.enable_prefix_caching IS 'share equal prompt prefixes [-; asked]';
COMMENT ON COLUMN load_points_wide.tensor_parallel_size IS 'ranks that split each layer [count; asked]';
COMMENT ON COLUMN load_points_wide.load_point IS 'index within the run, from 0 [-; identity]';
COMMENT ON COLUMN load_points_wide.asked_prompt_tokens IS 'tokens asked for a prompt; what was served is in measurement [tokens; asked]';
COMMENT ON COLUMN load_points_wide.asked_output_tokens IS 'tokens asked for an answer [tokens; asked]';
COMMENT ON COLUMN load_points_wide.parallel IS 'requests in flight [requests; asked]';
COMMENT ON COLUMN load_points_wide.asked_requests IS 'requests to be measured [requests; asked]';
COMMENT ON COLUMN load_points_wide.warmup_requests IS 'requests before the measurement [requests; asked]';
COMMENT ON COLUMN load_points_wide.prefix_tokens IS 'tokens every prompt begins with [tokens; asked]';
COMMENT ON COLUMN load_points_wide.state IS 'ok, partial, failed or skipped; NULL: never reached [-; measured]';
COMMENT ON COLUMN load_points_wide.error IS 'why it is not ok [-; measured]';
COMMENT ON COLUMN load_points_wide.window_start_s IS 'CLOCK_MONOTONIC at the measurement''s start [s; measured]';
COMMENT ON COLUMN load_points_wide.window_end_s IS 'CLOCK_MONOTONIC at the measurement''s end [s; measured]';
COMMENT ON COLUMN load_points_wide.window_source IS 'requests (first start to last end) or phases, where no request is on record [-; identity]';
COMMENT ON COLUMN load_points_wide.requests_sha256 IS 'sha256 of the measured requests as sent, in order: equal in two runs with the same requests; NULL: not every row kept its request [-; measured]';
COMMENT ON COLUMN load_points_wide.prompt_tokens_differ IS 'whole answers whose prompt had other tokens at the server than the prompt file states; NULL: random prompts [requests; measured]';
COMMENT ON COLUMN load_points_wide.peak_kv_usage_ratio IS 'highest sampled KV usage [ratio; measured]';
COMMENT ON COLUMN load_points_wide.peak_kv_usage_ratio_bound IS 'highest KV usage that the requests served can reach [ratio; derived]';
COMMENT ON COLUMN load_points_wide.peak_kv_usage_lower_ratio IS 'KV usage that the requests surely reached, between scrapes too [ratio; derived]';
COMMENT ON COLUMN load_points_wide.peak_kv_usage_upper_ratio IS 'KV usage that the requests never exceeded, between scrapes too [ratio; derived]';
COMMENT ON COLUMN load_points_wide.peak_kv_usage_case IS 'exact: lower and upper peak are equal; bounded: the peak is between them; NULL: cannot be told [-; derived]';
COMMENT ON COLUMN load_points_wide.samples_outside_curves IS 'samples of KV usage that the requests do not allow [count; derived]';
COMMENT ON COLUMN load_points_wide.peak_requests_running IS 'most requests running at once [requests; measured]';
COMMENT ON COLUMN load_points_wide.peak_requests_waiting IS 'most requests waiting at once [requests; measured]';
COMMENT ON COLUMN load_points_wide.preemptions IS 'preemptions within the window [count; measured]';
COMMENT ON COLUMN load_points_wide.prefix_cache_hits IS 'prefix-cache hits within the window [tokens; measured]';
COMMENT ON COLUMN load_points_wide.requests_succeeded IS 'requests answered whole [requests; measured]';
COMMENT ON COLUMN load_points_wide.prompt_tokens_min IS 'shortest prompt as served [tokens; measured]';
COMMENT ON COLUMN load_points_wide.prompt_tokens_max IS 'longest prompt as served [tokens; measured]';
COMMENT ON COLUMN load_points_wide.output_tokens_max IS 'longest output as served [tokens; measured]';
COMMENT ON COLUMN load_points_wide.window_s IS 'first request''s start to last request''s end [s; measured]';
COMMENT ON COLUMN load_points_wide.output_tokens_per_s IS 'output tokens over the window [tokens/s; derived]';
COMMENT ON COLUMN load_points_wide.ttft_p50_ms IS 'median time to first token [ms; derived]';
COMMENT ON COLUMN load_points_wide.ttft_p99_ms IS '99th percentile of time to first token [ms; derived]';
COMMENT ON COLUMN load_points_wide.itl_p50_ms IS 'median over requests of the mean time between chunks [ms; derived]';
COMMENT ON COLUMN load_points_wide.itl_p99_ms IS '99th percentile over requests of the mean time between chunks [ms; derived]';
COMMENT ON COLUMN load_points_wide.latency_p50_ms IS 'median request latency [ms; derived]';
COMMENT ON COLUMN load_points_wide.latency_p99_ms IS '99th percentile of request latency [ms; derived]';
COMMENT ON COLUMN load_points_wide.peak_process_rss_bytes IS 'peak resident memory of the server''s processes [bytes; measured]';
COMMENT ON COLUMN load_points_wide.peak_gpu_used_bytes IS 'peak device memory used (NVML) [bytes; measured]';
COMMENT ON COLUMN load_points_wide.client_lag_p50_s IS 'median lateness of the client''s event loop [s; measured]';
COMMENT ON COLUMN load_points_wide.client_lag_p99_s IS '99th percentile of the lateness of the client''s event loop [s; measured]';
COMMENT ON COLUMN load_points_wide.client_lag_max_s IS 'greatest lateness of the client''s event loop [s; measured]';
COMMENT ON COLUMN load_points_wide.predicted_peak_kv_usage_ratio_bound IS 'highest KV usage as predicted from the tokens asked for [ratio; predicted]';
COMMENT ON COLUMN load_points_wide.predicted_running_at_admission IS 'requests that fit when only their prompts are stored [requests; predicted]';
COMMENT ON COLUMN load_points_wide.failed_checks IS 'broken checks of the load point and its run, notes left out [count; derived]';
COMMENT ON COLUMN load_points_wide.valid IS 'nothing fails or invalidates it; NULL: no check of it could be made [-; derived]';
COMMENT ON COLUMN load_points_wide.broken_checks IS 'what fails or invalidates it, by name [-; derived]';
