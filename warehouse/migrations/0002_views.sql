-- What engineers ask for most, as views: peaks and residuals are computed, never stored twice.

CREATE VIEW residual AS
SELECT
    p.run_uuid,
    p.load_point,
    p.metric,
    p.kind,
    p.value AS predicted,
    m.value AS measured,
    m.low AS measured_low,
    m.high AS measured_high,
    CASE
        WHEN m.value IS NULL OR p.value IS NULL THEN NULL
        -- A number printed with few digits stands for an interval: inside it nothing is left over.
        WHEN p.value BETWEEN m.low AND m.high THEN 0.0
        ELSE m.value - p.value
    END AS residual,
    CASE
        WHEN m.value IS NULL OR p.value IS NULL THEN NULL
        WHEN p.kind = 'value'
            THEN NOT (p.value BETWEEN coalesce(m.low, m.value) AND coalesce(m.high, m.value))
        -- Usage travels as a decimal of about 16 digits.
        WHEN p.kind = 'upper_bound' THEN m.value > p.value + 1e-9
        ELSE false
    END AS alarm
FROM prediction p
LEFT JOIN measurement m
    ON m.run_uuid = p.run_uuid AND m.metric = p.metric AND m.load_point IS NOT DISTINCT FROM p.load_point;
COMMENT ON VIEW residual IS 'measured minus predicted, and whether that is an alarm; never corrected';
COMMENT ON COLUMN residual.run_uuid IS 'Polyaxon run UUID [-; identity]';
COMMENT ON COLUMN residual.load_point IS 'index of the load point; NULL: the whole run [-; identity]';
COMMENT ON COLUMN residual.metric IS 'name of the quantity [-; identity]';
COMMENT ON COLUMN residual.kind IS 'value, estimate, upper_bound or expectation [-; predicted]';
COMMENT ON COLUMN residual.predicted IS 'the number made before the run [metric; predicted]';
COMMENT ON COLUMN residual.measured IS 'the number measured [metric; measured]';
COMMENT ON COLUMN residual.measured_low IS 'lowest value that prints so [metric; measured]';
COMMENT ON COLUMN residual.measured_high IS 'highest value that prints so [metric; measured]';
COMMENT ON COLUMN residual.residual IS 'measured minus predicted; 0 where the printed interval holds the prediction [metric; derived]';
COMMENT ON COLUMN residual.alarm IS 'an exact prediction was missed or a bound exceeded [-; derived]';
