-- Each check says what a broken one does; whether a load point may be used is one view, not a rule
-- in every reader. Notes never count against it. Rows of older parsers have no kind and count.
ALTER TABLE validity ADD COLUMN kind VARCHAR;
COMMENT ON TABLE validity IS 'one check of whether the numbers of a run or load point may be used';
COMMENT ON COLUMN validity.passed IS 'true: holds; false: broken; NULL: unknown, it could not be checked [-; derived]';
COMMENT ON COLUMN validity.detail IS 'the reason, with the numbers found and wanted [-; derived]';
COMMENT ON COLUMN validity.kind IS 'what a broken one does: fails, invalidates (left out of comparisons) or notes (only tells) [-; derived]';

CREATE VIEW load_point_validity AS
WITH broken AS (
    SELECT run_uuid, load_point, check_name FROM validity
    WHERE NOT passed AND kind IS DISTINCT FROM 'notes'
),
counted AS (
    SELECT l.run_uuid, l.load_point, count(b.check_name) AS failed_checks,
        string_agg(b.check_name, ', ' ORDER BY b.check_name) AS broken_checks
    FROM load_point l
    LEFT JOIN broken b ON b.run_uuid = l.run_uuid
        AND (b.load_point IS NULL OR b.load_point = l.load_point)
    GROUP BY l.run_uuid, l.load_point
),
judged AS (
    SELECT run_uuid, load_point, count(passed) > 0 AS any_check FROM validity
    WHERE load_point IS NOT NULL GROUP BY run_uuid, load_point
)
SELECT
    c.run_uuid,
    c.load_point,
    CASE WHEN c.failed_checks > 0 THEN false WHEN j.any_check THEN true END AS valid,
    c.failed_checks,
    c.broken_checks
FROM counted c
LEFT JOIN judged j ON j.run_uuid = c.run_uuid AND j.load_point = c.load_point;
COMMENT ON VIEW load_point_validity IS 'one row a load point: may its numbers be used, by its own checks and its run''s';
COMMENT ON COLUMN load_point_validity.run_uuid IS 'Polyaxon run UUID [-; identity]';
COMMENT ON COLUMN load_point_validity.load_point IS 'index within the run, from 0 [-; identity]';
COMMENT ON COLUMN load_point_validity.valid IS 'nothing fails or invalidates it; NULL: no check of it could be made [-; derived]';
COMMENT ON COLUMN load_point_validity.failed_checks IS 'broken checks of the load point and its run, notes left out [count; derived]';
COMMENT ON COLUMN load_point_validity.broken_checks IS 'what fails or invalidates it, by name [-; derived]';

CREATE OR REPLACE VIEW runs_wide AS
WITH
m AS (
    SELECT
        run_uuid,
        max(value) FILTER (metric = 'kv_cache_size_tokens')::BIGINT AS kv_cache_size_tokens,
        max(value) FILTER (metric = 'max_concurrency')::DOUBLE AS max_concurrency,
        max(value) FILTER (metric = 'num_gpu_blocks')::BIGINT AS num_gpu_blocks,
        max(value) FILTER (metric = 'attention_block_size_tokens')::BIGINT AS attention_block_size_tokens,
        max(value) FILTER (metric = 'mamba_padding_percent')::DOUBLE AS mamba_padding_percent,
        max(value) FILTER (metric = 'bytes_per_block')::BIGINT AS bytes_per_block,
        max(value) FILTER (metric = 'blocks_per_request')::BIGINT AS blocks_per_request,
        max(value) FILTER (metric = 'kv_padding_layers')::BIGINT AS kv_padding_layers,
        max(value) FILTER (metric = 'available_kv_cache_bytes')::BIGINT AS available_kv_cache_bytes,
        max(value) FILTER (metric = 'requested_kv_cache_bytes')::BIGINT AS requested_kv_cache_bytes,
        max(value) FILTER (metric = 'available_memory_bytes')::BIGINT AS available_memory_bytes,
        max(value) FILTER (metric = 'total_memory_bytes')::BIGINT AS total_memory_bytes,
        max(value) FILTER (metric = 'model_loading_bytes')::BIGINT AS model_loading_bytes,
        max(value) FILTER (metric = 'model_loading_s')::DOUBLE AS model_loading_s,
        max(value) FILTER (metric = 'weights_loading_s')::DOUBLE AS weights_loading_s,
        max(value) FILTER (metric = 'graph_capture_bytes')::BIGINT AS graph_capture_bytes,
        max(value) FILTER (metric = 'graph_capture_s')::DOUBLE AS graph_capture_s,
        max(value) FILTER (metric = 'graph_estimate_bytes')::BIGINT AS graph_estimate_bytes,
        max(value) FILTER (metric = 'initial_free_bytes')::BIGINT AS initial_free_bytes,
        max(value) FILTER (metric = 'weights_and_non_torch_bytes')::BIGINT AS weights_and_non_torch_bytes,
        max(value) FILTER (metric = 'peak_activation_bytes')::BIGINT AS peak_activation_bytes,
        max(value) FILTER (metric = 'non_torch_bytes')::BIGINT AS non_torch_bytes,
        max(value) FILTER (metric = 'init_engine_s')::DOUBLE AS init_engine_s,
        max(value) FILTER (metric = 'compilation_s')::DOUBLE AS compilation_s,
        max(value) FILTER (metric = 'max_model_len_tokens')::BIGINT AS measured_max_model_len_tokens,
        max(value) FILTER (metric = 'kv_padding_waste_percent')::DOUBLE AS kv_padding_waste_percent,
        max(value) FILTER (metric = 'requested_memory_bytes')::BIGINT AS requested_memory_bytes,
        max(value) FILTER (metric = 'weights_bytes')::BIGINT AS weights_bytes,
        max(value) FILTER (metric = 'graph_pool_bytes')::BIGINT AS graph_pool_bytes,
        max(value) FILTER (metric = 'model_init_s')::DOUBLE AS model_init_s,
        max(value) FILTER (metric = 'gpu_memory_utilization_ratio')::DOUBLE AS measured_gpu_memory_utilization_ratio,
        max(value) FILTER (metric = 'tensor_parallel_size')::BIGINT AS measured_tensor_parallel_size,
        max(value) FILTER (metric = 'pipeline_parallel_size')::BIGINT AS measured_pipeline_parallel_size
    FROM measurement WHERE load_point IS NULL GROUP BY run_uuid
),
x AS (
    SELECT
        run_uuid,
        count(*) FILTER (alarm) AS alarms,
        max(predicted) FILTER (load_point IS NULL AND metric = 'kv_cache_size_tokens')::BIGINT AS predicted_kv_cache_size_tokens,
        max(residual) FILTER (load_point IS NULL AND metric = 'kv_cache_size_tokens') AS residual_kv_cache_size_tokens,
        max(predicted) FILTER (load_point IS NULL AND metric = 'max_concurrency')::DOUBLE AS predicted_max_concurrency,
        max(residual) FILTER (load_point IS NULL AND metric = 'max_concurrency') AS residual_max_concurrency,
        max(predicted) FILTER (load_point IS NULL AND metric = 'num_gpu_blocks')::BIGINT AS predicted_num_gpu_blocks,
        max(residual) FILTER (load_point IS NULL AND metric = 'num_gpu_blocks') AS residual_num_gpu_blocks,
        max(predicted) FILTER (load_point IS NULL AND metric = 'attention_block_size_tokens')::BIGINT AS predicted_attention_block_size_tokens,
        max(residual) FILTER (load_point IS NULL AND metric = 'attention_block_size_tokens') AS residual_attention_block_size_tokens,
        max(predicted) FILTER (load_point IS NULL AND metric = 'mamba_padding_percent')::DOUBLE AS predicted_mamba_padding_percent,
        max(residual) FILTER (load_point IS NULL AND metric = 'mamba_padding_percent') AS residual_mamba_padding_percent,
        max(predicted) FILTER (load_point IS NULL AND metric = 'bytes_per_block')::BIGINT AS predicted_bytes_per_block,
        max(residual) FILTER (load_point IS NULL AND metric = 'bytes_per_block') AS residual_bytes_per_block,
        max(predicted) FILTER (load_point IS NULL AND metric = 'blocks_per_request')::BIGINT AS predicted_blocks_per_request,
        max(residual) FILTER (load_point IS NULL AND metric = 'blocks_per_request') AS residual_blocks_per_request,
        max(predicted) FILTER (load_point IS NULL AND metric = 'kv_padding_layers')::BIGINT AS predicted_kv_padding_layers,
        max(residual) FILTER (load_point IS NULL AND metric = 'kv_padding_layers') AS residual_kv_padding_layers,
        max(predicted) FILTER (load_point IS NULL AND metric = 'max_model_len_tokens')::BIGINT AS predicted_max_model_len_tokens,
        max(residual) FILTER (load_point IS NULL AND metric = 'max_model_len_tokens') AS residual_max_model_len_tokens
    FROM residual GROUP BY run_uuid
),
v AS (
    SELECT run_uuid, count(*) FILTER (NOT passed AND kind IS DISTINCT FROM 'notes') AS failed_checks
    FROM validity GROUP BY run_uuid
)
SELECT
    r.run_uuid,
    r.sweep,
    r.round,
    r.label,
    r.repeat,
    r.attempt,
    r.outcome,
    r.expect,
    r.phase,
    r.message,
    r.started_at,
    r.ended_at,
    r.cell_key,
    r.setting_key,
    c.model,
    c.model_revision,
    c.device,
    c.engine_version,
    c.image_digest,
    c.engine_lock_sha256,
    c.bench_version,
    c.bench_lock_sha256,
    c.harness,
    c.max_model_len_tokens,
    c.gpu_memory_utilization_ratio,
    c.kv_cache_memory_bytes,
    c.max_num_seqs,
    c.max_num_batched_tokens,
    c.dtype,
    c.kv_cache_dtype,
    c.enable_prefix_caching,
    c.enforce_eager,
    c.tensor_parallel_size,
    c.pipeline_parallel_size,
    c.block_size_tokens,
    r.hardware,
    e.driver_version,
    e.cuda_version,
    e.gpu_name,
    e.gpu_count,
    e.gpu_uuids,
    e.gpu_total_bytes,
    e.memory_total_bytes,
    e.compile_cache,
    e.host,
    r.git_commit,
    r.git_dirty,
    r.started_by,
    r.prefect_flow_run_id,
    m.kv_cache_size_tokens,
    m.max_concurrency,
    m.num_gpu_blocks,
    m.attention_block_size_tokens,
    m.mamba_padding_percent,
    m.bytes_per_block,
    m.blocks_per_request,
    m.kv_padding_layers,
    m.available_kv_cache_bytes,
    m.requested_kv_cache_bytes,
    m.available_memory_bytes,
    m.total_memory_bytes,
    m.model_loading_bytes,
    m.model_loading_s,
    m.weights_loading_s,
    m.graph_capture_bytes,
    m.graph_capture_s,
    m.graph_estimate_bytes,
    m.initial_free_bytes,
    m.weights_and_non_torch_bytes,
    m.peak_activation_bytes,
    m.non_torch_bytes,
    m.init_engine_s,
    m.compilation_s,
    m.measured_max_model_len_tokens,
    m.kv_padding_waste_percent,
    m.requested_memory_bytes,
    m.weights_bytes,
    m.graph_pool_bytes,
    m.model_init_s,
    m.measured_gpu_memory_utilization_ratio,
    m.measured_tensor_parallel_size,
    m.measured_pipeline_parallel_size,
    x.predicted_kv_cache_size_tokens,
    x.residual_kv_cache_size_tokens,
    x.predicted_max_concurrency,
    x.residual_max_concurrency,
    x.predicted_num_gpu_blocks,
    x.residual_num_gpu_blocks,
    x.predicted_attention_block_size_tokens,
    x.residual_attention_block_size_tokens,
    x.predicted_mamba_padding_percent,
    x.residual_mamba_padding_percent,
    x.predicted_bytes_per_block,
    x.residual_bytes_per_block,
    x.predicted_blocks_per_request,
    x.residual_blocks_per_request,
    x.predicted_kv_padding_layers,
    x.residual_kv_padding_layers,
    x.predicted_max_model_len_tokens,
    x.residual_max_model_len_tokens,
    x.alarms,
    coalesce(v.failed_checks, 0) AS failed_checks
FROM run r
LEFT JOIN cell c ON c.cell_key = r.cell_key
LEFT JOIN environment e ON e.run_uuid = r.run_uuid
LEFT JOIN m ON m.run_uuid = r.run_uuid
LEFT JOIN x ON x.run_uuid = r.run_uuid
LEFT JOIN v ON v.run_uuid = r.run_uuid;
COMMENT ON VIEW runs_wide IS 'one row a run: settings, pins, start-up values, prediction and residual';
COMMENT ON COLUMN runs_wide.run_uuid IS 'Polyaxon run UUID [-; identity]';
COMMENT ON COLUMN runs_wide.sweep IS 'name of the sweep [-; asked]';
COMMENT ON COLUMN runs_wide.round IS 'label of the round [-; identity]';
COMMENT ON COLUMN runs_wide.label IS 'experiment and what varies in it [-; asked]';
COMMENT ON COLUMN runs_wide.repeat IS 'repeat of the cell within the round [-; identity]';
COMMENT ON COLUMN runs_wide.attempt IS 'attempt at this repeat [-; identity]';
COMMENT ON COLUMN runs_wide.outcome IS 'how the run ended [-; measured]';
COMMENT ON COLUMN runs_wide.expect IS 'outcome that counts as success; NULL: ok [-; asked]';
COMMENT ON COLUMN runs_wide.phase IS 'where in its life it ended [-; measured]';
COMMENT ON COLUMN runs_wide.message IS 'the outcome in words [-; measured]';
COMMENT ON COLUMN runs_wide.started_at IS 'start of the run [UTC; measured]';
COMMENT ON COLUMN runs_wide.ended_at IS 'end of the run [UTC; measured]';
COMMENT ON COLUMN runs_wide.cell_key IS 'cell that was run [-; identity]';
COMMENT ON COLUMN runs_wide.setting_key IS 'its setting, without pins [-; identity]';
COMMENT ON COLUMN runs_wide.model IS 'name of the model [-; asked]';
COMMENT ON COLUMN runs_wide.model_revision IS 'pinned revision of the model [-; asked]';
COMMENT ON COLUMN runs_wide.device IS 'cpu or cuda [-; asked]';
COMMENT ON COLUMN runs_wide.engine_version IS 'pinned version of vLLM [-; asked]';
COMMENT ON COLUMN runs_wide.image_digest IS 'pinned digest of the image; NULL on the local target [-; asked]';
COMMENT ON COLUMN runs_wide.engine_lock_sha256 IS 'sha256 of the engine environment''s lock; NULL where the image holds it [-; asked]';
COMMENT ON COLUMN runs_wide.bench_version IS 'pinned version of EvalScope [-; asked]';
COMMENT ON COLUMN runs_wide.bench_lock_sha256 IS 'sha256 of the bench environment''s lock [-; asked]';
COMMENT ON COLUMN runs_wide.harness IS 'number of the way of measuring [-; identity]';
COMMENT ON COLUMN runs_wide.max_model_len_tokens IS 'context limit [tokens; asked]';
COMMENT ON COLUMN runs_wide.gpu_memory_utilization_ratio IS 'share of device memory [ratio; asked]';
COMMENT ON COLUMN runs_wide.kv_cache_memory_bytes IS 'explicit size of the KV pool; NULL: vLLM profiles [bytes; asked]';
COMMENT ON COLUMN runs_wide.max_num_seqs IS 'sequences scheduled in one step [requests; asked]';
COMMENT ON COLUMN runs_wide.max_num_batched_tokens IS 'tokens scheduled in one step [tokens; asked]';
COMMENT ON COLUMN runs_wide.dtype IS 'type of weights and activations [-; asked]';
COMMENT ON COLUMN runs_wide.kv_cache_dtype IS 'type of the KV cache [-; asked]';
COMMENT ON COLUMN runs_wide.enable_prefix_caching IS 'share equal prompt prefixes [-; asked]';
COMMENT ON COLUMN runs_wide.enforce_eager IS 'no compilation and no CUDA graphs [-; asked]';
COMMENT ON COLUMN runs_wide.tensor_parallel_size IS 'ranks that split each layer [count; asked]';
COMMENT ON COLUMN runs_wide.pipeline_parallel_size IS 'ranks that split the layers [count; asked]';
COMMENT ON COLUMN runs_wide.block_size_tokens IS 'tokens a block; NULL: vLLM''s choice [tokens; asked]';
COMMENT ON COLUMN runs_wide.hardware IS 'GPU name and count, or cpu with its number of cores [-; measured]';
COMMENT ON COLUMN runs_wide.driver_version IS 'NVIDIA driver; NULL without a GPU [-; measured]';
COMMENT ON COLUMN runs_wide.cuda_version IS 'CUDA; NULL without a GPU [-; measured]';
COMMENT ON COLUMN runs_wide.gpu_name IS 'name of the GPU; NULL without one [-; measured]';
COMMENT ON COLUMN runs_wide.gpu_count IS 'GPUs the run could use [count; measured]';
COMMENT ON COLUMN runs_wide.gpu_uuids IS 'UUIDs of the GPUs, comma-separated [-; measured]';
COMMENT ON COLUMN runs_wide.gpu_total_bytes IS 'memory of the smallest of these GPUs [bytes; measured]';
COMMENT ON COLUMN runs_wide.memory_total_bytes IS 'memory of the host [bytes; measured]';
COMMENT ON COLUMN runs_wide.compile_cache IS 'hit, miss or off: state of the compile cache at start [-; measured]';
COMMENT ON COLUMN runs_wide.host IS 'host name [-; measured]';
COMMENT ON COLUMN runs_wide.git_commit IS 'commit of memsweep that made the run; NULL: not run from a checkout [-; measured]';
COMMENT ON COLUMN runs_wide.git_dirty IS 'the checkout had changed or untracked files [-; measured]';
COMMENT ON COLUMN runs_wide.started_by IS 'who started the run [-; measured]';
COMMENT ON COLUMN runs_wide.prefect_flow_run_id IS 'Prefect flow run that made it [-; identity]';
COMMENT ON COLUMN runs_wide.kv_cache_size_tokens IS 'tokens the KV pool holds, as vLLM logs it [tokens; measured]';
COMMENT ON COLUMN runs_wide.max_concurrency IS 'requests of max_model_len tokens that fit, as vLLM logs it [x; measured]';
COMMENT ON COLUMN runs_wide.num_gpu_blocks IS 'KV blocks, the null block included [blocks; measured]';
COMMENT ON COLUMN runs_wide.attention_block_size_tokens IS 'tokens of one attention block [tokens; measured]';
COMMENT ON COLUMN runs_wide.mamba_padding_percent IS 'padding of the mamba page to the attention page [percent; measured]';
COMMENT ON COLUMN runs_wide.bytes_per_block IS 'bytes of one KV block over all layers of a group [bytes; measured]';
COMMENT ON COLUMN runs_wide.blocks_per_request IS 'blocks of one request of max_model_len tokens [blocks; measured]';
COMMENT ON COLUMN runs_wide.kv_padding_layers IS 'layers added so that KV groups are equal [count; measured]';
COMMENT ON COLUMN runs_wide.available_kv_cache_bytes IS 'budget for the KV pool after profiling [bytes; measured]';
COMMENT ON COLUMN runs_wide.requested_kv_cache_bytes IS 'explicitly asked size of the KV pool [bytes; measured]';
COMMENT ON COLUMN runs_wide.available_memory_bytes IS 'memory that was free when the engine checked [bytes; measured]';
COMMENT ON COLUMN runs_wide.total_memory_bytes IS 'memory of the device or node the engine checked [bytes; measured]';
COMMENT ON COLUMN runs_wide.model_loading_bytes IS 'device memory taken while loading the model [bytes; measured]';
COMMENT ON COLUMN runs_wide.model_loading_s IS 'time of loading the model [s; measured]';
COMMENT ON COLUMN runs_wide.weights_loading_s IS 'time of reading the weights [s; measured]';
COMMENT ON COLUMN runs_wide.graph_capture_bytes IS 'device memory taken by CUDA graphs; may be negative [bytes; measured]';
COMMENT ON COLUMN runs_wide.graph_capture_s IS 'time of capturing CUDA graphs [s; measured]';
COMMENT ON COLUMN runs_wide.graph_estimate_bytes IS 'CUDA graph memory as estimated before the pool [bytes; measured]';
COMMENT ON COLUMN runs_wide.initial_free_bytes IS 'free device memory at start [bytes; measured]';
COMMENT ON COLUMN runs_wide.weights_and_non_torch_bytes IS 'consumed memory: weights and non-torch [bytes; measured]';
COMMENT ON COLUMN runs_wide.peak_activation_bytes IS 'peak activation memory of the profile run [bytes; measured]';
COMMENT ON COLUMN runs_wide.non_torch_bytes IS 'memory outside torch, where logged apart [bytes; measured]';
COMMENT ON COLUMN runs_wide.init_engine_s IS 'profile, KV cache creation and warm-up [s; measured]';
COMMENT ON COLUMN runs_wide.compilation_s IS 'torch.compile''s share of engine initialisation [s; measured]';
COMMENT ON COLUMN runs_wide.measured_max_model_len_tokens IS 'context limit in force [tokens; measured]';
COMMENT ON COLUMN runs_wide.kv_padding_waste_percent IS 'KV memory the padding layers may waste [percent; measured]';
COMMENT ON COLUMN runs_wide.requested_memory_bytes IS 'device memory the engine allows itself [bytes; measured]';
COMMENT ON COLUMN runs_wide.weights_bytes IS 'memory of the weights, where logged apart [bytes; measured]';
COMMENT ON COLUMN runs_wide.graph_pool_bytes IS 'CUDA graph pool as compared with its estimate [bytes; measured]';
COMMENT ON COLUMN runs_wide.model_init_s IS 'time of building the model without its weights [s; measured]';
COMMENT ON COLUMN runs_wide.measured_gpu_memory_utilization_ratio IS 'share of the device the engine may use [ratio; measured]';
COMMENT ON COLUMN runs_wide.measured_tensor_parallel_size IS 'ranks a layer is split over [count; measured]';
COMMENT ON COLUMN runs_wide.measured_pipeline_parallel_size IS 'stages the layers are split over [count; measured]';
COMMENT ON COLUMN runs_wide.predicted_kv_cache_size_tokens IS 'tokens the KV pool holds, as vLLM logs it, as predicted [tokens; predicted]';
COMMENT ON COLUMN runs_wide.residual_kv_cache_size_tokens IS 'measured minus predicted kv_cache_size_tokens [tokens; derived]';
COMMENT ON COLUMN runs_wide.predicted_max_concurrency IS 'requests of max_model_len tokens that fit, as vLLM logs it, as predicted [x; predicted]';
COMMENT ON COLUMN runs_wide.residual_max_concurrency IS 'measured minus predicted max_concurrency [x; derived]';
COMMENT ON COLUMN runs_wide.predicted_num_gpu_blocks IS 'KV blocks, the null block included, as predicted [blocks; predicted]';
COMMENT ON COLUMN runs_wide.residual_num_gpu_blocks IS 'measured minus predicted num_gpu_blocks [blocks; derived]';
COMMENT ON COLUMN runs_wide.predicted_attention_block_size_tokens IS 'tokens of one attention block, as predicted [tokens; predicted]';
COMMENT ON COLUMN runs_wide.residual_attention_block_size_tokens IS 'measured minus predicted attention_block_size_tokens [tokens; derived]';
COMMENT ON COLUMN runs_wide.predicted_mamba_padding_percent IS 'padding of the mamba page to the attention page, as predicted [percent; predicted]';
COMMENT ON COLUMN runs_wide.residual_mamba_padding_percent IS 'measured minus predicted mamba_padding_percent [percent; derived]';
COMMENT ON COLUMN runs_wide.predicted_bytes_per_block IS 'bytes of one KV block over all layers of a group, as predicted [bytes; predicted]';
COMMENT ON COLUMN runs_wide.residual_bytes_per_block IS 'measured minus predicted bytes_per_block [bytes; derived]';
COMMENT ON COLUMN runs_wide.predicted_blocks_per_request IS 'blocks of one request of max_model_len tokens, as predicted [blocks; predicted]';
COMMENT ON COLUMN runs_wide.residual_blocks_per_request IS 'measured minus predicted blocks_per_request [blocks; derived]';
COMMENT ON COLUMN runs_wide.predicted_kv_padding_layers IS 'layers added so that KV groups are equal, as predicted [count; predicted]';
COMMENT ON COLUMN runs_wide.residual_kv_padding_layers IS 'measured minus predicted kv_padding_layers [count; derived]';
COMMENT ON COLUMN runs_wide.predicted_max_model_len_tokens IS 'context limit in force, as predicted [tokens; predicted]';
COMMENT ON COLUMN runs_wide.residual_max_model_len_tokens IS 'measured minus predicted max_model_len_tokens [tokens; derived]';
COMMENT ON COLUMN runs_wide.alarms IS 'exact predictions missed and bounds exceeded, load points included; NULL: nothing was predicted [count; derived]';
COMMENT ON COLUMN runs_wide.failed_checks IS 'broken checks of run and load points, notes left out [count; derived]';

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
        max(value) FILTER (metric = 'peak_gpu_used_bytes')::BIGINT AS peak_gpu_used_bytes
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
COMMENT ON COLUMN load_points_wide.requests_succeeded IS 'requests that succeeded [requests; measured]';
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
COMMENT ON COLUMN load_points_wide.predicted_peak_kv_usage_ratio_bound IS 'highest KV usage as predicted from the tokens asked for [ratio; predicted]';
COMMENT ON COLUMN load_points_wide.predicted_running_at_admission IS 'requests that fit when only their prompts are stored [requests; predicted]';
COMMENT ON COLUMN load_points_wide.failed_checks IS 'broken checks of the load point and its run, notes left out [count; derived]';
COMMENT ON COLUMN load_points_wide.valid IS 'nothing fails or invalidates it; NULL: no check of it could be made [-; derived]';
COMMENT ON COLUMN load_points_wide.broken_checks IS 'what fails or invalidates it, by name [-; derived]';
