-- Every run that did not end well, with its failure's numbers and line.
-- $outcome = NULL: only runs that ended so
SELECT
    r.run_uuid, r.sweep, r.round, r.label, r.outcome, r.expect, r.phase, r.message,
    f.type, f.numbers, f.file, f.line, f.text
FROM run r
LEFT JOIN failure f USING (run_uuid)
WHERE r.outcome <> 'ok' AND ($outcome::VARCHAR IS NULL OR r.outcome = $outcome::VARCHAR)
ORDER BY r.started_at DESC NULLS LAST, r.run_uuid;
