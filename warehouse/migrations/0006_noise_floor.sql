-- One cell measured at start, middle and end of a round: what it differs by is the round's own noise.
ALTER TABLE run ADD COLUMN sentinel BOOLEAN;
COMMENT ON COLUMN run.sentinel IS 'the run is one of the sentinel''s, which show the drift of its round; NULL: made before there were any [-; asked]';

CREATE VIEW noise_floor AS
WITH numbers AS (
    SELECT run_uuid, load_point, metric, value FROM measurement WHERE value IS NOT NULL
    UNION ALL
    SELECT run_uuid, load_point, metric, value FROM derivation WHERE value IS NOT NULL
)
SELECT
    r.sweep,
    r.round,
    r.cell_key,
    r.setting_key,
    min(r.label) AS label,
    n.load_point,
    n.metric,
    count(*) AS runs,
    avg(n.value) AS mean,
    min(n.value) AS lowest,
    max(n.value) AS highest,
    max(n.value) - min(n.value) AS spread,
    (max(n.value) - min(n.value)) / nullif(abs(avg(n.value)), 0) AS spread_ratio,
    stddev_samp(n.value) AS sd,
    stddev_samp(n.value) / nullif(abs(avg(n.value)), 0) AS sd_ratio,
    arg_max(n.value, r.started_at) - arg_min(n.value, r.started_at) AS drift
FROM run r
JOIN numbers n ON n.run_uuid = r.run_uuid
LEFT JOIN load_point_validity v ON v.run_uuid = n.run_uuid AND v.load_point = n.load_point
WHERE r.sentinel AND r.outcome = 'ok' AND v.valid IS DISTINCT FROM false
GROUP BY r.sweep, r.round, r.cell_key, r.setting_key, n.load_point, n.metric;
COMMENT ON VIEW noise_floor IS 'what one unchanged cell differed by within a round: its sentinel, valid load points of runs that ended well';
COMMENT ON COLUMN noise_floor.sweep IS 'name of the sweep [-; asked]';
COMMENT ON COLUMN noise_floor.round IS 'label of the round [-; identity]';
COMMENT ON COLUMN noise_floor.cell_key IS 'cell that is the sentinel [-; identity]';
COMMENT ON COLUMN noise_floor.setting_key IS 'its setting, without pins [-; identity]';
COMMENT ON COLUMN noise_floor.label IS 'experiment and what varies in it [-; asked]';
COMMENT ON COLUMN noise_floor.load_point IS 'index within the run; NULL: of the run as a whole [-; identity]';
COMMENT ON COLUMN noise_floor.metric IS 'name of the quantity; its unit is in the name [-; identity]';
COMMENT ON COLUMN noise_floor.runs IS 'runs of the sentinel that gave a value; one alone says nothing [count; derived]';
COMMENT ON COLUMN noise_floor.mean IS 'mean of these values [metric; derived]';
COMMENT ON COLUMN noise_floor.lowest IS 'lowest of them [metric; derived]';
COMMENT ON COLUMN noise_floor.highest IS 'highest of them [metric; derived]';
COMMENT ON COLUMN noise_floor.spread IS 'highest minus lowest: the floor, which assumes no distribution [metric; derived]';
COMMENT ON COLUMN noise_floor.spread_ratio IS 'spread over the mean: the floor for other cells; NULL: the mean is 0 [ratio; derived]';
COMMENT ON COLUMN noise_floor.sd IS 'sample standard deviation; of three values known to a factor of 0.5 to 6 only; NULL: one value [metric; derived]';
COMMENT ON COLUMN noise_floor.sd_ratio IS 'sd over the mean [ratio; derived]';
COMMENT ON COLUMN noise_floor.drift IS 'the last run''s value minus the first one''s [metric; derived]';
