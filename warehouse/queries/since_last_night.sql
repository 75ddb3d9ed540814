-- What changed between the newest round of a sweep and the one before it?
-- $sweep = NULL: this sweep; left out: the one that ran last
-- $tolerance = 0.05: relative change of a timing or rate from which it is listed
WITH chosen AS (
    SELECT coalesce($sweep::VARCHAR, (SELECT sweep FROM run ORDER BY started_at DESC NULLS LAST LIMIT 1)) AS sweep
),
rounds AS (
    SELECT round, row_number() OVER (ORDER BY max(started_at) DESC NULLS LAST, round) AS age
    FROM run WHERE sweep = (SELECT sweep FROM chosen) GROUP BY round
),
numbers AS (
    SELECT run_uuid, load_point, metric, value FROM measurement WHERE value IS NOT NULL
    UNION ALL
    SELECT run_uuid, load_point, metric, value FROM derivation WHERE value IS NOT NULL
),
means AS (
    SELECT r.setting_key, any_value(r.label) AS label, o.age, n.load_point, n.metric,
        avg(n.value) AS value, count(*) AS repeats
    FROM run r
    JOIN rounds o ON o.round = r.round AND o.age <= 2
    JOIN numbers n ON n.run_uuid = r.run_uuid
    LEFT JOIN load_point_validity v ON v.run_uuid = n.run_uuid AND v.load_point = n.load_point
    WHERE r.sweep = (SELECT sweep FROM chosen) AND v.valid IS DISTINCT FROM false
    GROUP BY r.setting_key, o.age, n.load_point, n.metric
),
outcomes AS (
    SELECT r.setting_key, any_value(r.label) AS label, o.age,
        string_agg(DISTINCT r.outcome, ', ' ORDER BY r.outcome) AS outcome
    FROM run r JOIN rounds o ON o.round = r.round AND o.age <= 2
    WHERE r.sweep = (SELECT sweep FROM chosen)
    GROUP BY r.setting_key, o.age
)
SELECT now.label, now.load_point, now.metric, was.value::VARCHAR AS before, now.value::VARCHAR AS after,
    (now.value - was.value) / nullif(abs(was.value), 0) AS change_ratio,
    least(was.repeats, now.repeats) AS repeats
FROM means now
JOIN means was ON was.setting_key = now.setting_key AND was.metric = now.metric
    AND was.load_point IS NOT DISTINCT FROM now.load_point AND was.age = 2
WHERE now.age = 1 AND now.value <> was.value AND (
    regexp_matches(now.metric, 'tokens|blocks|bytes|ratio')
        AND NOT regexp_matches(now.metric, 'rss|per_s')
    OR abs(now.value - was.value) > $tolerance::DOUBLE * abs(was.value)
)
UNION ALL
SELECT now.label, NULL, 'outcome', was.outcome, now.outcome, NULL, NULL
FROM outcomes now JOIN outcomes was ON was.setting_key = now.setting_key AND was.age = 2
WHERE now.age = 1 AND now.outcome <> was.outcome
ORDER BY 1, 2 NULLS FIRST, 3;
