-- How long did each phase of a run take, by sweep and cell?
-- $sweep = NULL: only of this sweep
SELECT r.sweep, r.label, p.phase, p.load_point, count(*) AS times,
    median(p.end_s - p.start_s) AS median_s, max(p.end_s - p.start_s) AS longest_s
FROM phase p
JOIN run r USING (run_uuid)
WHERE $sweep::VARCHAR IS NULL OR r.sweep = $sweep::VARCHAR
GROUP BY r.sweep, r.label, p.phase, p.load_point
ORDER BY r.sweep, r.label, min(p.ordinal);
