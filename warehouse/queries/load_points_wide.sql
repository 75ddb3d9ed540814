-- One row a load point: what was asked, served and seen, and its validity (view load_points_wide).
-- $sweep = NULL: only of this sweep
SELECT * FROM load_points_wide
WHERE $sweep::VARCHAR IS NULL OR sweep = $sweep::VARCHAR
ORDER BY started_at DESC NULLS LAST, run_uuid, load_point;
