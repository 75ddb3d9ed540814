-- Cells nobody ran, filled by arithmetic from one that was measured: never mixed with measured ones.
CREATE TABLE derived_cell (
    run_uuid             UUID NOT NULL,
    max_model_len_tokens BIGINT NOT NULL,
    kv_cache_size_tokens BIGINT NOT NULL,
    max_concurrency      DOUBLE NOT NULL,
    num_gpu_blocks       BIGINT NOT NULL,
    blocks_per_request   BIGINT NOT NULL,
    formula              VARCHAR NOT NULL
);
COMMENT ON TABLE derived_cell IS 'what the measured KV pool of a run would hold at another context limit: arithmetic, not run';
COMMENT ON COLUMN derived_cell.run_uuid IS 'run whose pool was measured [-; identity]';
COMMENT ON COLUMN derived_cell.max_model_len_tokens IS 'context limit that was not run [tokens; derived]';
COMMENT ON COLUMN derived_cell.kv_cache_size_tokens IS 'tokens the pool would hold, as vLLM would log it [tokens; derived]';
COMMENT ON COLUMN derived_cell.max_concurrency IS 'requests of that length that would fit [x; derived]';
COMMENT ON COLUMN derived_cell.num_gpu_blocks IS 'blocks of the pool, as measured in the run [blocks; derived]';
COMMENT ON COLUMN derived_cell.blocks_per_request IS 'blocks of one request of that length [blocks; derived]';
COMMENT ON COLUMN derived_cell.formula IS 'how it follows [-; derived]';
