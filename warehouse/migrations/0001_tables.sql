-- The warehouse's tables: a projection of the sealed bundles, rebuildable at any time.
-- No foreign keys (DuckDB refuses to replace a referenced row inside one transaction) and keys only on
-- small tables: an index on samples costs ten times their space. Times are UTC without a zone.
-- Comment of a column: what it is [unit; evidence class]. Classes: measured, predicted, derived, asked, identity.

CREATE TABLE sweep (
    sweep_sha256 VARCHAR NOT NULL,
    sweep        VARCHAR NOT NULL,
    definition   VARCHAR,
    PRIMARY KEY (sweep_sha256)
);
COMMENT ON TABLE sweep IS 'one sweep as it was submitted';
COMMENT ON COLUMN sweep.sweep_sha256 IS 'sha256 of the sweep''s canonical form [-; identity]';
COMMENT ON COLUMN sweep.sweep IS 'name of the sweep [-; asked]';
COMMENT ON COLUMN sweep.definition IS 'sweep.yaml as submitted; the first in text order where several texts share one canonical form [-; asked]';

CREATE TABLE round (
    sweep_sha256 VARCHAR NOT NULL,
    round        VARCHAR NOT NULL,
    sweep        VARCHAR NOT NULL,
    PRIMARY KEY (sweep_sha256, round)
);
COMMENT ON TABLE round IS 'one measuring of a whole sweep: a night, a fresh run or a reproduction';
COMMENT ON COLUMN round.sweep_sha256 IS 'sha256 of the sweep''s canonical form [-; identity]';
COMMENT ON COLUMN round.round IS 'label: scheduled time in UTC for a night, else 1, 2, ... [-; identity]';
COMMENT ON COLUMN round.sweep IS 'name of the sweep [-; asked]';

CREATE TABLE cell (
    cell_key                     VARCHAR NOT NULL,
    setting_key                  VARCHAR NOT NULL,
    harness                      INTEGER NOT NULL,
    model                        VARCHAR NOT NULL,
    model_revision               VARCHAR,
    device                       VARCHAR,
    engine_version               VARCHAR,
    image_digest                 VARCHAR,
    engine_lock_sha256           VARCHAR,
    bench_version                VARCHAR,
    bench_lock_sha256            VARCHAR,
    max_model_len_tokens         BIGINT,
    gpu_memory_utilization_ratio DOUBLE,
    kv_cache_memory_bytes        BIGINT,
    max_num_seqs                 INTEGER,
    max_num_batched_tokens       BIGINT,
    dtype                        VARCHAR,
    kv_cache_dtype               VARCHAR,
    enable_prefix_caching        BOOLEAN,
    enforce_eager                BOOLEAN,
    tensor_parallel_size         INTEGER,
    pipeline_parallel_size       INTEGER,
    block_size_tokens            BIGINT,
    setting                      JSON NOT NULL,
    pins                         JSON NOT NULL,
    PRIMARY KEY (cell_key)
);
COMMENT ON TABLE cell IS 'one server configuration with its ordered load points, all pins resolved';
COMMENT ON COLUMN cell.cell_key IS 'sha256 of setting key, pins and harness number [-; identity]';
COMMENT ON COLUMN cell.setting_key IS 'sha256 of settings and load without pins: joins engine versions, nights, machines [-; identity]';
COMMENT ON COLUMN cell.harness IS 'number of the way of measuring [-; identity]';
COMMENT ON COLUMN cell.model IS 'name of the model [-; asked]';
COMMENT ON COLUMN cell.model_revision IS 'pinned revision of the model [-; asked]';
COMMENT ON COLUMN cell.device IS 'cpu or cuda [-; asked]';
COMMENT ON COLUMN cell.engine_version IS 'pinned version of vLLM [-; asked]';
COMMENT ON COLUMN cell.image_digest IS 'pinned digest of the image; NULL on the local target [-; asked]';
COMMENT ON COLUMN cell.engine_lock_sha256 IS 'sha256 of the engine environment''s lock; NULL where the image holds it [-; asked]';
COMMENT ON COLUMN cell.bench_version IS 'pinned version of EvalScope [-; asked]';
COMMENT ON COLUMN cell.bench_lock_sha256 IS 'sha256 of the bench environment''s lock [-; asked]';
COMMENT ON COLUMN cell.max_model_len_tokens IS 'context limit [tokens; asked]';
COMMENT ON COLUMN cell.gpu_memory_utilization_ratio IS 'share of device memory [ratio; asked]';
COMMENT ON COLUMN cell.kv_cache_memory_bytes IS 'explicit size of the KV pool; NULL: vLLM profiles [bytes; asked]';
COMMENT ON COLUMN cell.max_num_seqs IS 'sequences scheduled in one step [requests; asked]';
COMMENT ON COLUMN cell.max_num_batched_tokens IS 'tokens scheduled in one step [tokens; asked]';
COMMENT ON COLUMN cell.dtype IS 'type of weights and activations [-; asked]';
COMMENT ON COLUMN cell.kv_cache_dtype IS 'type of the KV cache [-; asked]';
COMMENT ON COLUMN cell.enable_prefix_caching IS 'share equal prompt prefixes [-; asked]';
COMMENT ON COLUMN cell.enforce_eager IS 'no compilation and no CUDA graphs [-; asked]';
COMMENT ON COLUMN cell.tensor_parallel_size IS 'ranks that split each layer [count; asked]';
COMMENT ON COLUMN cell.pipeline_parallel_size IS 'ranks that split the layers [count; asked]';
COMMENT ON COLUMN cell.block_size_tokens IS 'tokens a block; NULL: vLLM''s choice [tokens; asked]';
COMMENT ON COLUMN cell.setting IS 'the whole setting, canonical JSON [-; asked]';
COMMENT ON COLUMN cell.pins IS 'every pin, canonical JSON [-; asked]';

CREATE TABLE run (
    run_uuid            UUID NOT NULL,
    sweep               VARCHAR NOT NULL,
    sweep_sha256        VARCHAR,
    round               VARCHAR NOT NULL,
    cell_key            VARCHAR NOT NULL,
    setting_key         VARCHAR NOT NULL,
    label               VARCHAR,
    repeat              INTEGER NOT NULL,
    attempt             INTEGER NOT NULL,
    expect              VARCHAR,
    outcome             VARCHAR NOT NULL,
    phase               VARCHAR,
    observed            VARCHAR,
    reason              VARCHAR,
    message             VARCHAR,
    started_at          TIMESTAMP,
    ended_at            TIMESTAMP,
    model               VARCHAR,
    model_revision      VARCHAR,
    engine_version      VARCHAR,
    image_digest        VARCHAR,
    hardware            VARCHAR,
    target              VARCHAR,
    memsweep_version    VARCHAR,
    git_commit          VARCHAR,
    git_dirty           BOOLEAN,
    started_by          VARCHAR,
    prefect_flow_run_id VARCHAR,
    polyaxon_status     VARCHAR,
    clock_monotonic_s   DOUBLE,
    clock_at            TIMESTAMP,
    manifest_sha256     VARCHAR NOT NULL,
    parser_version      INTEGER NOT NULL,
    PRIMARY KEY (run_uuid)
);
COMMENT ON TABLE run IS 'one execution of one repeat of a cell in one round';
COMMENT ON COLUMN run.run_uuid IS 'Polyaxon run UUID [-; identity]';
COMMENT ON COLUMN run.sweep IS 'name of the sweep [-; asked]';
COMMENT ON COLUMN run.sweep_sha256 IS 'sha256 of the sweep''s canonical form [-; identity]';
COMMENT ON COLUMN run.round IS 'label of the round [-; identity]';
COMMENT ON COLUMN run.cell_key IS 'cell that was run [-; identity]';
COMMENT ON COLUMN run.setting_key IS 'its setting, without pins [-; identity]';
COMMENT ON COLUMN run.label IS 'experiment and what varies in it [-; asked]';
COMMENT ON COLUMN run.repeat IS 'repeat of the cell within the round, from 1 [-; identity]';
COMMENT ON COLUMN run.attempt IS 'attempt at this repeat, from 1 [-; identity]';
COMMENT ON COLUMN run.expect IS 'outcome that counts as success; NULL: ok [-; asked]';
COMMENT ON COLUMN run.outcome IS 'how the run ended: one of the closed set [-; measured]';
COMMENT ON COLUMN run.phase IS 'where in its life it ended [-; measured]';
COMMENT ON COLUMN run.observed IS 'what the run itself saw; NULL: it left no end.json [-; measured]';
COMMENT ON COLUMN run.reason IS 'stop, timeout or lost, as written before any signal [-; measured]';
COMMENT ON COLUMN run.message IS 'the outcome in words [-; measured]';
COMMENT ON COLUMN run.started_at IS 'start of the run [UTC; measured]';
COMMENT ON COLUMN run.ended_at IS 'end of the run [UTC; measured]';
COMMENT ON COLUMN run.model IS 'name of the model [-; asked]';
COMMENT ON COLUMN run.model_revision IS 'pinned revision of the model [-; asked]';
COMMENT ON COLUMN run.engine_version IS 'pinned version of vLLM; what ran is in environment [-; asked]';
COMMENT ON COLUMN run.image_digest IS 'pinned digest of the image; NULL on the local target [-; asked]';
COMMENT ON COLUMN run.hardware IS 'GPU name and count, or cpu with its number of cores [-; measured]';
COMMENT ON COLUMN run.target IS 'local, or the profile of the cluster [-; asked]';
COMMENT ON COLUMN run.memsweep_version IS 'version of memsweep that made the run [-; measured]';
COMMENT ON COLUMN run.git_commit IS 'commit of memsweep that made the run; NULL: not run from a checkout [-; measured]';
COMMENT ON COLUMN run.git_dirty IS 'the checkout had changed or untracked files [-; measured]';
COMMENT ON COLUMN run.started_by IS 'who started the run [-; measured]';
COMMENT ON COLUMN run.prefect_flow_run_id IS 'Prefect flow run that made it [-; identity]';
COMMENT ON COLUMN run.polyaxon_status IS 'final status in Polyaxon [-; measured]';
COMMENT ON COLUMN run.clock_monotonic_s IS 'CLOCK_MONOTONIC at clock_at: maps every *_s stamp of the run to UTC [s; measured]';
COMMENT ON COLUMN run.clock_at IS 'UTC at clock_monotonic_s [UTC; measured]';
COMMENT ON COLUMN run.manifest_sha256 IS 'sha256 of the bundle''s manifest.json [-; identity]';
COMMENT ON COLUMN run.parser_version IS 'version of the parsers that made these rows [-; derived]';

CREATE TABLE environment (
    run_uuid            UUID NOT NULL,
    device              VARCHAR,
    host                VARCHAR,
    platform            VARCHAR,
    python_version      VARCHAR,
    cpu_count           INTEGER,
    memory_total_bytes  BIGINT,
    engine_version      VARCHAR,
    engine_lock_sha256  VARCHAR,
    bench_version       VARCHAR,
    bench_lock_sha256   VARCHAR,
    flow_lock_sha256    VARCHAR,
    image_digest        VARCHAR,
    harness             INTEGER,
    model_revision      VARCHAR,
    model_config_sha256 VARCHAR,
    model_index_sha256  VARCHAR,
    tokenizer_sha256    VARCHAR,
    driver_version      VARCHAR,
    cuda_version        VARCHAR,
    gpu_name            VARCHAR,
    gpu_count           INTEGER,
    gpu_uuids           VARCHAR,
    gpu_total_bytes     BIGINT,
    compile_cache       VARCHAR,
    polyaxon_host       VARCHAR,
    polyaxon_owner      VARCHAR,
    polyaxon_project    VARCHAR,
    operation_sha256    VARCHAR,
    server_arguments    JSON,
    server_environment  JSON,
    cache_config        JSON,
    document            JSON,
    PRIMARY KEY (run_uuid)
);
COMMENT ON TABLE environment IS 'every pin and version of one run';
COMMENT ON COLUMN environment.run_uuid IS 'Polyaxon run UUID [-; identity]';
COMMENT ON COLUMN environment.device IS 'cpu or cuda [-; asked]';
COMMENT ON COLUMN environment.host IS 'host name [-; measured]';
COMMENT ON COLUMN environment.platform IS 'operating system and architecture [-; measured]';
COMMENT ON COLUMN environment.python_version IS 'Python of the run''s own code [-; measured]';
COMMENT ON COLUMN environment.cpu_count IS 'processor cores the run could use [count; measured]';
COMMENT ON COLUMN environment.memory_total_bytes IS 'memory of the host [bytes; measured]';
COMMENT ON COLUMN environment.engine_version IS 'vLLM as the server reports it, else as its log says, else as installed [-; measured]';
COMMENT ON COLUMN environment.engine_lock_sha256 IS 'sha256 of the engine environment''s lock [-; asked]';
COMMENT ON COLUMN environment.bench_version IS 'EvalScope as installed [-; measured]';
COMMENT ON COLUMN environment.bench_lock_sha256 IS 'sha256 of the bench environment''s lock [-; asked]';
COMMENT ON COLUMN environment.flow_lock_sha256 IS 'sha256 of the flow environment''s lock [-; measured]';
COMMENT ON COLUMN environment.image_digest IS 'digest of the image [-; asked]';
COMMENT ON COLUMN environment.harness IS 'number of the way of measuring [-; asked]';
COMMENT ON COLUMN environment.model_revision IS 'pinned revision of the model [-; asked]';
COMMENT ON COLUMN environment.model_config_sha256 IS 'sha256 of config.json as served [-; measured]';
COMMENT ON COLUMN environment.model_index_sha256 IS 'sha256 of the weights'' index as served; NULL: a model of one file [-; measured]';
COMMENT ON COLUMN environment.tokenizer_sha256 IS 'sha256 of tokenizer.json as served [-; measured]';
COMMENT ON COLUMN environment.driver_version IS 'NVIDIA driver; NULL without a GPU [-; measured]';
COMMENT ON COLUMN environment.cuda_version IS 'CUDA; NULL without a GPU [-; measured]';
COMMENT ON COLUMN environment.gpu_name IS 'name of the GPU; NULL without one [-; measured]';
COMMENT ON COLUMN environment.gpu_count IS 'GPUs the run could use [count; measured]';
COMMENT ON COLUMN environment.gpu_uuids IS 'UUIDs of the GPUs, comma-separated [-; measured]';
COMMENT ON COLUMN environment.gpu_total_bytes IS 'memory of the smallest of these GPUs [bytes; measured]';
COMMENT ON COLUMN environment.compile_cache IS 'hit, miss or off: state of the compile cache at start [-; measured]';
COMMENT ON COLUMN environment.polyaxon_host IS 'Polyaxon API that held the run [-; identity]';
COMMENT ON COLUMN environment.polyaxon_owner IS 'owner in Polyaxon [-; identity]';
COMMENT ON COLUMN environment.polyaxon_project IS 'project in Polyaxon [-; identity]';
COMMENT ON COLUMN environment.operation_sha256 IS 'sha256 of the compiled operation kept in the bundle [-; identity]';
COMMENT ON COLUMN environment.server_arguments IS 'command line of the server as started [-; measured]';
COMMENT ON COLUMN environment.server_environment IS 'environment variables that were set for it [-; measured]';
COMMENT ON COLUMN environment.cache_config IS 'vllm:cache_config_info: the effective configuration [-; measured]';
COMMENT ON COLUMN environment.document IS 'environment.json as the run left it [-; measured]';

CREATE TABLE startup_value (
    run_uuid UUID NOT NULL,
    metric   VARCHAR NOT NULL,
    value    DOUBLE,
    low      DOUBLE,
    high     DOUBLE,
    source   VARCHAR NOT NULL,
    file     VARCHAR NOT NULL,
    line     INTEGER,
    text     VARCHAR,
    rank     VARCHAR,
    chosen   BOOLEAN NOT NULL
);
COMMENT ON TABLE startup_value IS 'every value found about one server start, repeats and ranks included';
COMMENT ON COLUMN startup_value.run_uuid IS 'Polyaxon run UUID [-; identity]';
COMMENT ON COLUMN startup_value.metric IS 'name of the quantity (warehouse.registry.STARTUP); its unit is in the name [-; identity]';
COMMENT ON COLUMN startup_value.value IS 'value as printed, converted to the metric''s unit [metric; measured]';
COMMENT ON COLUMN startup_value.low IS 'lowest value that prints so [metric; measured]';
COMMENT ON COLUMN startup_value.high IS 'highest value that prints so [metric; measured]';
COMMENT ON COLUMN startup_value.source IS 'log or cache_config_info [-; identity]';
COMMENT ON COLUMN startup_value.file IS 'file in the bundle [-; identity]';
COMMENT ON COLUMN startup_value.line IS 'line in that file, from 1 [-; identity]';
COMMENT ON COLUMN startup_value.text IS 'the line as it stands [-; measured]';
COMMENT ON COLUMN startup_value.rank IS 'rank or process that printed it; NULL: not said [-; identity]';
COMMENT ON COLUMN startup_value.chosen IS 'this one became the measurement [-; derived]';

CREATE TABLE measurement (
    run_uuid   UUID NOT NULL,
    load_point INTEGER,
    metric     VARCHAR NOT NULL,
    value      DOUBLE,
    low        DOUBLE,
    high       DOUBLE,
    reason     VARCHAR,
    source     VARCHAR,
    file       VARCHAR,
    line       INTEGER,
    line_end   INTEGER,
    text       VARCHAR
);
COMMENT ON TABLE measurement IS 'one measured number, or why there is none';
COMMENT ON COLUMN measurement.run_uuid IS 'Polyaxon run UUID [-; identity]';
COMMENT ON COLUMN measurement.load_point IS 'index of the load point within the run; NULL: the whole run [-; identity]';
COMMENT ON COLUMN measurement.metric IS 'name of the quantity (warehouse.registry); its unit is in the name [-; identity]';
COMMENT ON COLUMN measurement.value IS 'the number; NULL with a reason, never 0, where nothing was measured [metric; measured]';
COMMENT ON COLUMN measurement.low IS 'lowest value that prints so [metric; measured]';
COMMENT ON COLUMN measurement.high IS 'highest value that prints so [metric; measured]';
COMMENT ON COLUMN measurement.reason IS 'why value is NULL [-; derived]';
COMMENT ON COLUMN measurement.source IS 'log, cache_config_info, samples, requests or bench [-; identity]';
COMMENT ON COLUMN measurement.file IS 'file in the bundle it was read from [-; identity]';
COMMENT ON COLUMN measurement.line IS 'line of a text file, tick of a sample or row of EvalScope''s result table; lines and rows count from 1 [-; identity]';
COMMENT ON COLUMN measurement.line_end IS 'last line, tick or row, where the number spans several [-; identity]';
COMMENT ON COLUMN measurement.text IS 'the line as it stands, or what was taken from those rows [-; measured]';

CREATE TABLE derivation (
    run_uuid   UUID NOT NULL,
    load_point INTEGER,
    metric     VARCHAR NOT NULL,
    value      DOUBLE,
    reason     VARCHAR,
    formula    VARCHAR NOT NULL,
    inputs     JSON NOT NULL
);
COMMENT ON TABLE derivation IS 'one number that follows from others by arithmetic or statistics, never measured';
COMMENT ON COLUMN derivation.run_uuid IS 'Polyaxon run UUID [-; identity]';
COMMENT ON COLUMN derivation.load_point IS 'index of the load point within the run; NULL: the whole run [-; identity]';
COMMENT ON COLUMN derivation.metric IS 'name of the quantity (warehouse.registry); its unit is in the name [-; identity]';
COMMENT ON COLUMN derivation.value IS 'the number; NULL with a reason where an input is missing [metric; derived]';
COMMENT ON COLUMN derivation.reason IS 'why value is NULL [-; derived]';
COMMENT ON COLUMN derivation.formula IS 'how it follows [-; derived]';
COMMENT ON COLUMN derivation.inputs IS 'what it follows from, by name [-; derived]';

CREATE TABLE prediction (
    run_uuid   UUID NOT NULL,
    load_point INTEGER,
    metric     VARCHAR NOT NULL,
    kind       VARCHAR NOT NULL,
    value      DOUBLE,
    made_at    TIMESTAMP,
    file       VARCHAR NOT NULL
);
COMMENT ON TABLE prediction IS 'one number predicted before the run was created';
COMMENT ON COLUMN prediction.run_uuid IS 'Polyaxon run UUID [-; identity]';
COMMENT ON COLUMN prediction.load_point IS 'index of the load point within the run; NULL: the whole run [-; identity]';
COMMENT ON COLUMN prediction.metric IS 'name of the quantity (warehouse.registry); its unit is in the name [-; identity]';
COMMENT ON COLUMN prediction.kind IS 'value: must be equal; estimate: should be near; upper_bound: never above; expectation: no claim about a sample [-; predicted]';
COMMENT ON COLUMN prediction.value IS 'the number; NULL: cannot be predicted [metric; predicted]';
COMMENT ON COLUMN prediction.made_at IS 'when the prediction was made [UTC; predicted]';
COMMENT ON COLUMN prediction.file IS 'file in the bundle [-; identity]';

CREATE TABLE phase (
    run_uuid   UUID NOT NULL,
    ordinal    INTEGER NOT NULL,
    phase      VARCHAR NOT NULL,
    load_point INTEGER,
    start_s    DOUBLE,
    end_s      DOUBLE,
    start_at   TIMESTAMP,
    end_at     TIMESTAMP
);
COMMENT ON TABLE phase IS 'what the run did when, on its own monotonic clock';
COMMENT ON COLUMN phase.run_uuid IS 'Polyaxon run UUID [-; identity]';
COMMENT ON COLUMN phase.ordinal IS 'order within the run, from 0 [-; identity]';
COMMENT ON COLUMN phase.phase IS 'boot, ready, warmup, measure, drain or stop [-; measured]';
COMMENT ON COLUMN phase.load_point IS 'index of the load point within the run; NULL: the whole run [-; identity]';
COMMENT ON COLUMN phase.start_s IS 'CLOCK_MONOTONIC at its start [s; measured]';
COMMENT ON COLUMN phase.end_s IS 'CLOCK_MONOTONIC at its end; NULL: it never ended [s; measured]';
COMMENT ON COLUMN phase.start_at IS 'start_s on the run''s UTC clock [UTC; derived]';
COMMENT ON COLUMN phase.end_at IS 'end_s on the run''s UTC clock [UTC; derived]';

CREATE TABLE server_sample (
    run_uuid                   UUID NOT NULL,
    tick                       INTEGER NOT NULL,
    due_s                      DOUBLE,
    t_s                        DOUBLE,
    sampled_at                 TIMESTAMP,
    took_s                     DOUBLE,
    state                      VARCHAR,
    reason                     VARCHAR,
    kv_usage_ratio             DOUBLE,
    requests_running           DOUBLE,
    requests_waiting           DOUBLE,
    preemptions_total          DOUBLE,
    prompt_tokens_total        DOUBLE,
    generation_tokens_total    DOUBLE,
    requests_succeeded_total   DOUBLE,
    prefix_cache_queries_total DOUBLE,
    prefix_cache_hits_total    DOUBLE
);
COMMENT ON TABLE server_sample IS 'one look at the server''s /metrics; no key, replaced per run, ordered by run and time';
COMMENT ON COLUMN server_sample.run_uuid IS 'Polyaxon run UUID [-; identity]';
COMMENT ON COLUMN server_sample.tick IS 'number of the sample within the run, as in the raw line [-; identity]';
COMMENT ON COLUMN server_sample.due_s IS 'CLOCK_MONOTONIC at which the sample was due [s; measured]';
COMMENT ON COLUMN server_sample.t_s IS 'CLOCK_MONOTONIC at which it was taken; NULL: missed [s; measured]';
COMMENT ON COLUMN server_sample.sampled_at IS 't_s on the run''s UTC clock [UTC; derived]';
COMMENT ON COLUMN server_sample.took_s IS 'time the scrape took [s; measured]';
COMMENT ON COLUMN server_sample.state IS 'ok, late or missed [-; measured]';
COMMENT ON COLUMN server_sample.reason IS 'why it was missed or late [-; measured]';
COMMENT ON COLUMN server_sample.kv_usage_ratio IS 'share of the usable KV blocks in use [ratio; measured]';
COMMENT ON COLUMN server_sample.requests_running IS 'requests running [requests; measured]';
COMMENT ON COLUMN server_sample.requests_waiting IS 'requests waiting [requests; measured]';
COMMENT ON COLUMN server_sample.preemptions_total IS 'preemptions since the server''s start [count; measured]';
COMMENT ON COLUMN server_sample.prompt_tokens_total IS 'prompt tokens since the server''s start [tokens; measured]';
COMMENT ON COLUMN server_sample.generation_tokens_total IS 'generated tokens since the server''s start [tokens; measured]';
COMMENT ON COLUMN server_sample.requests_succeeded_total IS 'requests that succeeded since the server''s start [requests; measured]';
COMMENT ON COLUMN server_sample.prefix_cache_queries_total IS 'tokens looked up in the prefix cache since the server''s start [tokens; measured]';
COMMENT ON COLUMN server_sample.prefix_cache_hits_total IS 'tokens found in the prefix cache since the server''s start [tokens; measured]';

CREATE TABLE gpu_sample (
    run_uuid            UUID NOT NULL,
    tick                INTEGER NOT NULL,
    due_s               DOUBLE,
    t_s                 DOUBLE,
    sampled_at          TIMESTAMP,
    state               VARCHAR,
    gpu_uuid            VARCHAR,
    used_bytes          BIGINT,
    reserved_bytes      BIGINT,
    free_bytes          BIGINT,
    total_bytes         BIGINT,
    utilization_percent DOUBLE,
    power_mw            BIGINT,
    sm_clock_mhz        DOUBLE,
    mem_clock_mhz       DOUBLE,
    temperature_c       DOUBLE,
    throttle_reasons    BIGINT,
    ecc_uncorrected     BIGINT,
    processes           JSON,
    foreign_pids        JSON
);
COMMENT ON TABLE gpu_sample IS 'one look at one GPU through NVML; no key, replaced per run, ordered by run and time';
COMMENT ON COLUMN gpu_sample.run_uuid IS 'Polyaxon run UUID [-; identity]';
COMMENT ON COLUMN gpu_sample.tick IS 'number of the sample within the run, as in the raw line [-; identity]';
COMMENT ON COLUMN gpu_sample.due_s IS 'CLOCK_MONOTONIC at which the sample was due [s; measured]';
COMMENT ON COLUMN gpu_sample.t_s IS 'CLOCK_MONOTONIC at which it was taken; NULL: missed [s; measured]';
COMMENT ON COLUMN gpu_sample.sampled_at IS 't_s on the run''s UTC clock [UTC; derived]';
COMMENT ON COLUMN gpu_sample.state IS 'ok, late or missed [-; measured]';
COMMENT ON COLUMN gpu_sample.gpu_uuid IS 'UUID of the GPU [-; identity]';
COMMENT ON COLUMN gpu_sample.used_bytes IS 'device memory in use [bytes; measured]';
COMMENT ON COLUMN gpu_sample.reserved_bytes IS 'device memory reserved by the driver [bytes; measured]';
COMMENT ON COLUMN gpu_sample.free_bytes IS 'device memory free [bytes; measured]';
COMMENT ON COLUMN gpu_sample.total_bytes IS 'device memory [bytes; measured]';
COMMENT ON COLUMN gpu_sample.utilization_percent IS 'share of time a kernel ran [percent; measured]';
COMMENT ON COLUMN gpu_sample.power_mw IS 'power drawn [mW; measured]';
COMMENT ON COLUMN gpu_sample.sm_clock_mhz IS 'clock of the processors [MHz; measured]';
COMMENT ON COLUMN gpu_sample.mem_clock_mhz IS 'clock of the memory [MHz; measured]';
COMMENT ON COLUMN gpu_sample.temperature_c IS 'temperature [°C; measured]';
COMMENT ON COLUMN gpu_sample.throttle_reasons IS 'why clocks were held back, NVML''s bit mask [bits; measured]';
COMMENT ON COLUMN gpu_sample.ecc_uncorrected IS 'uncorrected memory errors [count; measured]';
COMMENT ON COLUMN gpu_sample.processes IS 'processes on the GPU and the memory of each [bytes; measured]';
COMMENT ON COLUMN gpu_sample.foreign_pids IS 'processes on the GPU that are not the run''s [-; measured]';

CREATE TABLE process_sample (
    run_uuid    UUID NOT NULL,
    tick        INTEGER NOT NULL,
    due_s       DOUBLE,
    t_s         DOUBLE,
    sampled_at  TIMESTAMP,
    state       VARCHAR,
    pid         INTEGER,
    start_ticks BIGINT,
    name        VARCHAR,
    rss_bytes   BIGINT
);
COMMENT ON TABLE process_sample IS 'resident memory of one process of the server; no key, replaced per run, ordered by run and time';
COMMENT ON COLUMN process_sample.run_uuid IS 'Polyaxon run UUID [-; identity]';
COMMENT ON COLUMN process_sample.tick IS 'number of the sample within the run, as in the raw line [-; identity]';
COMMENT ON COLUMN process_sample.due_s IS 'CLOCK_MONOTONIC at which the sample was due [s; measured]';
COMMENT ON COLUMN process_sample.t_s IS 'CLOCK_MONOTONIC at which it was taken; NULL: missed [s; measured]';
COMMENT ON COLUMN process_sample.sampled_at IS 't_s on the run''s UTC clock [UTC; derived]';
COMMENT ON COLUMN process_sample.state IS 'ok, late or missed [-; measured]';
COMMENT ON COLUMN process_sample.pid IS 'process id; NULL: no process at that moment [-; identity]';
COMMENT ON COLUMN process_sample.start_ticks IS 'start time of the process, tells reused ids apart [ticks; identity]';
COMMENT ON COLUMN process_sample.name IS 'name of the process [-; measured]';
COMMENT ON COLUMN process_sample.rss_bytes IS 'resident memory [bytes; measured]';

CREATE TABLE load_point (
    run_uuid            UUID NOT NULL,
    load_point          INTEGER NOT NULL,
    asked_prompt_tokens BIGINT,
    asked_output_tokens BIGINT,
    parallel            INTEGER,
    asked_requests      INTEGER,
    warmup_requests     INTEGER,
    prefix_tokens       BIGINT,
    temperature         DOUBLE,
    seed                BIGINT,
    ignore_eos          BOOLEAN,
    enable_thinking     BOOLEAN,
    dataset             VARCHAR,
    dataset_offset      BIGINT,
    state               VARCHAR,
    error               VARCHAR,
    sent_requests       INTEGER,
    succeeded_requests  INTEGER,
    failed_requests     INTEGER,
    window_start_s      DOUBLE,
    window_end_s        DOUBLE,
    window_source       VARCHAR,
    PRIMARY KEY (run_uuid, load_point)
);
COMMENT ON TABLE load_point IS 'one EvalScope level of a run';
COMMENT ON COLUMN load_point.run_uuid IS 'Polyaxon run UUID [-; identity]';
COMMENT ON COLUMN load_point.load_point IS 'index within the run, from 0 [-; identity]';
COMMENT ON COLUMN load_point.asked_prompt_tokens IS 'tokens asked for a prompt; what was served is in measurement [tokens; asked]';
COMMENT ON COLUMN load_point.asked_output_tokens IS 'tokens asked for an answer [tokens; asked]';
COMMENT ON COLUMN load_point.parallel IS 'requests in flight [requests; asked]';
COMMENT ON COLUMN load_point.asked_requests IS 'requests to be measured [requests; asked]';
COMMENT ON COLUMN load_point.warmup_requests IS 'requests before the measurement [requests; asked]';
COMMENT ON COLUMN load_point.prefix_tokens IS 'tokens every prompt begins with [tokens; asked]';
COMMENT ON COLUMN load_point.temperature IS 'sampling temperature [-; asked]';
COMMENT ON COLUMN load_point.seed IS 'seed of the prompts [-; asked]';
COMMENT ON COLUMN load_point.ignore_eos IS 'answers always have their full length [-; asked]';
COMMENT ON COLUMN load_point.enable_thinking IS 'passed to the chat template [-; asked]';
COMMENT ON COLUMN load_point.dataset IS 'where prompts come from [-; asked]';
COMMENT ON COLUMN load_point.dataset_offset IS 'prompts skipped, so that points do not share them [requests; measured]';
COMMENT ON COLUMN load_point.state IS 'ok, partial, failed or skipped; NULL: never reached [-; measured]';
COMMENT ON COLUMN load_point.error IS 'why it is not ok [-; measured]';
COMMENT ON COLUMN load_point.sent_requests IS 'requests sent [requests; measured]';
COMMENT ON COLUMN load_point.succeeded_requests IS 'requests that succeeded [requests; measured]';
COMMENT ON COLUMN load_point.failed_requests IS 'requests that failed [requests; measured]';
COMMENT ON COLUMN load_point.window_start_s IS 'CLOCK_MONOTONIC at the measurement''s start [s; measured]';
COMMENT ON COLUMN load_point.window_end_s IS 'CLOCK_MONOTONIC at the measurement''s end [s; measured]';
COMMENT ON COLUMN load_point.window_source IS 'requests (first start to last end) or phases, where no request is on record [-; identity]';

CREATE TABLE request (
    run_uuid          UUID NOT NULL,
    load_point        INTEGER NOT NULL,
    request           INTEGER NOT NULL,
    success           BOOLEAN,
    start_s           DOUBLE,
    end_s             DOUBLE,
    latency_s         DOUBLE,
    ttft_s            DOUBLE,
    tpot_s            DOUBLE,
    itl_mean_s        DOUBLE,
    itl_max_s         DOUBLE,
    prompt_tokens     BIGINT,
    completion_tokens BIGINT
);
COMMENT ON TABLE request IS 'one request of a load point';
COMMENT ON COLUMN request.run_uuid IS 'Polyaxon run UUID [-; identity]';
COMMENT ON COLUMN request.load_point IS 'index of the load point within the run [-; identity]';
COMMENT ON COLUMN request.request IS 'row in EvalScope''s result table, from 1 [-; identity]';
COMMENT ON COLUMN request.success IS 'the request succeeded [-; measured]';
COMMENT ON COLUMN request.start_s IS 'CLOCK_MONOTONIC at sending [s; measured]';
COMMENT ON COLUMN request.end_s IS 'CLOCK_MONOTONIC at the last token; NULL: failed [s; measured]';
COMMENT ON COLUMN request.latency_s IS 'sending to last token [s; measured]';
COMMENT ON COLUMN request.ttft_s IS 'sending to first token [s; measured]';
COMMENT ON COLUMN request.tpot_s IS 'time per output token after the first, EvalScope''s [s; measured]';
COMMENT ON COLUMN request.itl_mean_s IS 'mean time between chunks [s; derived]';
COMMENT ON COLUMN request.itl_max_s IS 'longest time between chunks [s; measured]';
COMMENT ON COLUMN request.prompt_tokens IS 'prompt tokens as the server counted them [tokens; measured]';
COMMENT ON COLUMN request.completion_tokens IS 'output tokens as the server counted them [tokens; measured]';

CREATE TABLE validity (
    run_uuid   UUID NOT NULL,
    load_point INTEGER,
    check_name VARCHAR NOT NULL,
    passed     BOOLEAN,
    detail     VARCHAR
);
COMMENT ON TABLE validity IS 'one check of whether the run''s numbers may be used';
COMMENT ON COLUMN validity.run_uuid IS 'Polyaxon run UUID [-; identity]';
COMMENT ON COLUMN validity.load_point IS 'index of the load point within the run; NULL: the whole run [-; identity]';
COMMENT ON COLUMN validity.check_name IS 'what was checked [-; identity]';
COMMENT ON COLUMN validity.passed IS 'true or false; NULL: could not be checked [-; derived]';
COMMENT ON COLUMN validity.detail IS 'got and wanted [-; derived]';

CREATE TABLE failure (
    run_uuid UUID NOT NULL,
    type     VARCHAR NOT NULL,
    phase    VARCHAR,
    outcome  VARCHAR,
    numbers  JSON,
    file     VARCHAR NOT NULL,
    line     INTEGER,
    text     VARCHAR
);
COMMENT ON TABLE failure IS 'why a run failed, as read from its log';
COMMENT ON COLUMN failure.run_uuid IS 'Polyaxon run UUID [-; identity]';
COMMENT ON COLUMN failure.type IS 'kind of failure [-; measured]';
COMMENT ON COLUMN failure.phase IS 'where in the run''s life [-; measured]';
COMMENT ON COLUMN failure.outcome IS 'outcome this kind means [-; derived]';
COMMENT ON COLUMN failure.numbers IS 'numbers in the message, by name [metric; measured]';
COMMENT ON COLUMN failure.file IS 'file in the bundle [-; identity]';
COMMENT ON COLUMN failure.line IS 'line in that file, from 1 [-; identity]';
COMMENT ON COLUMN failure.text IS 'the line as it stands [-; measured]';

CREATE TABLE event (
    run_uuid    UUID NOT NULL,
    ordinal     INTEGER NOT NULL,
    source      VARCHAR NOT NULL,
    event       VARCHAR NOT NULL,
    t_s         DOUBLE,
    happened_at TIMESTAMP,
    detail      JSON
);
COMMENT ON TABLE event IS 'what happened when: the run''s own timeline and Polyaxon''s statuses';
COMMENT ON COLUMN event.run_uuid IS 'Polyaxon run UUID [-; identity]';
COMMENT ON COLUMN event.ordinal IS 'order within its source, from 0 [-; identity]';
COMMENT ON COLUMN event.source IS 'run or polyaxon [-; identity]';
COMMENT ON COLUMN event.event IS 'what happened [-; measured]';
COMMENT ON COLUMN event.t_s IS 'CLOCK_MONOTONIC; NULL for Polyaxon''s [s; measured]';
COMMENT ON COLUMN event.happened_at IS 'UTC, mapped from t_s for the run''s own [UTC; measured]';
COMMENT ON COLUMN event.detail IS 'everything else that was noted [-; measured]';

CREATE TABLE artifact (
    run_uuid UUID NOT NULL,
    path     VARCHAR NOT NULL,
    sha256   VARCHAR NOT NULL,
    bytes    BIGINT NOT NULL
);
COMMENT ON TABLE artifact IS 'one file of a bundle';
COMMENT ON COLUMN artifact.run_uuid IS 'Polyaxon run UUID [-; identity]';
COMMENT ON COLUMN artifact.path IS 'path within the bundle [-; identity]';
COMMENT ON COLUMN artifact.sha256 IS 'sha256 of its bytes as listed in the manifest [-; identity]';
COMMENT ON COLUMN artifact.bytes IS 'its size [bytes; measured]';

CREATE TABLE ingest (
    run_uuid        UUID NOT NULL,
    manifest_sha256 VARCHAR NOT NULL,
    parser_version  INTEGER NOT NULL,
    ingested_at     TIMESTAMP NOT NULL,
    PRIMARY KEY (run_uuid)
);
COMMENT ON TABLE ingest IS 'which bundle the rows of a run were made from, and when';
COMMENT ON COLUMN ingest.run_uuid IS 'Polyaxon run UUID [-; identity]';
COMMENT ON COLUMN ingest.manifest_sha256 IS 'sha256 of the bundle''s manifest.json [-; identity]';
COMMENT ON COLUMN ingest.parser_version IS 'version of the parsers that made the rows [-; derived]';
COMMENT ON COLUMN ingest.ingested_at IS 'when the rows were committed; not part of the content hash [UTC; measured]';
