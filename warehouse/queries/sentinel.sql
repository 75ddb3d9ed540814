-- How far did an unchanged cell drift within a round, and what is its noise floor? By metric.
-- $sweep = NULL: this sweep; left out: the one whose sentinel ran last
-- $round = NULL: this round; left out: every round with a sentinel
SELECT
    f.round, f.label, f.load_point, f.metric, f.runs, f.mean, f.lowest, f.highest,
    f.spread, f.spread_ratio, f.sd_ratio, f.drift
FROM noise_floor f
WHERE f.sweep = coalesce(
        $sweep::VARCHAR,
        (SELECT sweep FROM run WHERE sentinel ORDER BY started_at DESC NULLS LAST LIMIT 1)
    )
    AND ($round::VARCHAR IS NULL OR f.round = $round::VARCHAR)
ORDER BY f.round, f.spread_ratio DESC NULLS LAST, f.metric, f.load_point NULLS FIRST;
