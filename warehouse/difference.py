"""Two sets of runs against each other: what differs in configuration first, then in numbers.

Cells are aligned by setting key, so that engine versions, nights and machines compare like with
like; sets that hold other settings are refused unless told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from warehouse.compare import Selection
from warehouse.errors import BadInput
from warehouse.lookup import records
from warehouse.noise import Floors, Round, floors
from warehouse.registry import EXACT
from warehouse.statistics import NO_CHANGE, Effect, effect

if TYPE_CHECKING:
    import duckdb

#: What may differ beside settings and pins and still moves numbers.
_SURROUNDINGS = (
    "hardware",
    "driver_version",
    "cuda_version",
    "host",
    "memory_total_bytes",
    "compile_cache",
    "git_commit",
    "git_dirty",
)
_RULE = re.compile(
    r"(?P<metric>[a-z0-9_]+)\s*(?P<sign>>|<|!=)\s*(?P<limit>[+-]?\d+(?:\.\d+)?)\s*(?P<percent>%?)"
)


@dataclass(frozen=True, slots=True)
class Rule:
    """One ``--fail-on`` expression: a metric whose change from A to B passes a limit."""

    text: str
    metric: str
    sign: str
    limit: float
    percent: bool

    def broken_by(self, change: Effect) -> bool:
        """Return whether a change breaks the rule; what noise explains never does."""
        if change.verdict in NO_CHANGE:
            return False
        size = change.relative if self.percent else change.difference
        if size is None:
            return change.difference != 0
        limit = self.limit / 100 if self.percent else self.limit
        return {">": size > limit, "<": size < limit, "!=": size != limit}[self.sign]


def parse_rule(text: str) -> Rule:
    """Read ``METRIC>5%``, ``METRIC<-1%``, ``METRIC!=0``, ``outcome`` or ``alarms``.

    Raises :class:`BadInput` for anything else.
    """
    if text.strip() in ("outcome", "alarms"):
        return Rule(text, text.strip(), "!=", 0.0, percent=False)
    match = _RULE.fullmatch(text.strip())
    if match is None:
        raise BadInput(
            f"--fail-on: got {text!r}, wanted METRIC>5%, METRIC<-5%, METRIC>10 or METRIC!=0 "
            "(change from A to B), outcome or alarms"
        )
    return Rule(
        text, match["metric"], match["sign"], float(match["limit"]), percent=bool(match["percent"])
    )


def compare(
    connection: duckdb.DuckDBPyConnection,
    a: Selection,
    b: Selection,
    *,
    unlike: bool = False,
    rules: Sequence[Rule] = (),
) -> dict[str, Any]:
    """Return configuration differences, aligned cells with their effects, and broken rules.

    Raises :class:`BadInput` when the sets hold other settings and ``unlike`` is not given.
    """
    runs_a, runs_b = _runs(connection, a), _runs(connection, b)
    pairs = _pairs(runs_a, runs_b, a, b, unlike=unlike)
    numbers = _numbers(connection, [run["run_uuid"] for run in runs_a + runs_b])
    noise = floors(connection, [*_rounds(runs_a), *_rounds(runs_b)])
    invalid_a, invalid_b = (
        _invalid(connection, [run for pair in pairs for run in pair[side]]) for side in (0, 1)
    )
    cells = [_cell(one, other, numbers, noise) for one, other in pairs]
    return {
        "a": a.document(),
        "b": b.document(),
        "configuration": _configuration(runs_a, runs_b),
        "only_a": _labels(runs_a, runs_b),
        "only_b": _labels(runs_b, runs_a),
        "sentinels_a": noise.sentinels(_rounds(runs_a)),
        "sentinels_b": noise.sentinels(_rounds(runs_b)),
        "cells": cells,
        "invalid_load_points_a": invalid_a,
        "invalid_load_points_b": invalid_b,
        "broken_rules": list(_broken(cells, rules, left_out=len(invalid_a) + len(invalid_b))),
    }


def _runs(connection: duckdb.DuckDBPyConnection, chosen: Selection) -> list[dict[str, Any]]:
    return records(
        connection,
        """
        SELECT r.run_uuid, r.setting_key, r.label, r.outcome,
            r.sweep, r.round, r.repeat, c.setting::VARCHAR AS setting, c.pins::VARCHAR AS pins,
            r.hardware, e.driver_version, e.cuda_version, e.host, e.memory_total_bytes,
            e.compile_cache, r.git_commit, r.git_dirty,
            (SELECT count(*) FROM residual x WHERE x.run_uuid = r.run_uuid AND x.alarm) AS alarms
        FROM run r JOIN cell c USING (cell_key)
        LEFT JOIN environment e ON e.run_uuid = r.run_uuid
        WHERE r.run_uuid IN (SELECT unnest($runs::VARCHAR[])::UUID)
        ORDER BY r.started_at NULLS LAST, r.run_uuid
        """,
        {"runs": chosen.runs},
    )


Runs = list[dict[str, Any]]


def _pairs(
    runs_a: Runs, runs_b: Runs, a: Selection, b: Selection, *, unlike: bool
) -> list[tuple[Runs, Runs]]:
    keys_a, keys_b = _keys(runs_a), _keys(runs_b)
    if keys_a != keys_b and not unlike:
        only = [run["label"] for run in runs_a if run["setting_key"] not in keys_b]
        only += [run["label"] for run in runs_b if run["setting_key"] not in keys_a]
        raise BadInput(
            f"{a.title} and {b.title} do not hold the same settings (only on one side: "
            f"{', '.join(map(str, dict.fromkeys(only)))}); compare like with like, or give "
            "--unlike to compare what they share"
        )
    if not keys_a & keys_b and len(keys_a) == len(keys_b) == 1:
        return [(runs_a, runs_b)]
    shared = [key for key in dict.fromkeys(run["setting_key"] for run in runs_a) if key in keys_b]
    return [
        (
            [run for run in runs_a if run["setting_key"] == key],
            [run for run in runs_b if run["setting_key"] == key],
        )
        for key in shared
    ]


def _keys(runs: Runs) -> set[str]:
    return {run["setting_key"] for run in runs}


def _rounds(runs: Runs) -> list[Round]:
    return [(run["sweep"], run["round"]) for run in runs]


def _labels(runs: Runs, others: Runs) -> list[str]:
    there = _keys(others)
    return list(dict.fromkeys(str(r["label"]) for r in runs if r["setting_key"] not in there))


def _configuration(runs_a: Runs, runs_b: Runs) -> list[dict[str, Any]]:
    """Return every pin, setting and surrounding whose values are not the same on both sides."""
    values_a, values_b = _values(runs_a), _values(runs_b)
    return [
        {"name": name, "a": sorted(values_a.get(name, ())), "b": sorted(values_b.get(name, ()))}
        for name in sorted(values_a.keys() | values_b.keys())
        if values_a.get(name) != values_b.get(name)
    ]


def _values(runs: Runs) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for run in runs:
        parts = dict(_flat("setting", json.loads(run["setting"])))
        parts |= dict(_flat("pin", json.loads(run["pins"])))
        parts |= {name: run[name] for name in _SURROUNDINGS}
        for name, value in parts.items():
            found.setdefault(name, set()).add("–" if value is None else str(value))
    return found


def _flat(prefix: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _flat(f"{prefix}.{name}", part)
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _flat(f"{prefix}[{index}]", part)
    else:
        yield prefix, value


def _invalid(
    connection: duckdb.DuckDBPyConnection, runs: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the load points that are left out of the statistics, each with why."""
    return records(
        connection,
        "SELECT run_uuid, r.label, load_point, broken_checks FROM load_point_validity "
        "JOIN run r USING (run_uuid) WHERE NOT valid "
        "AND run_uuid IN (SELECT unnest($runs::VARCHAR[])::UUID) "
        "ORDER BY r.started_at NULLS LAST, run_uuid, load_point",
        {"runs": [run["run_uuid"] for run in runs]},
    )


def _numbers(
    connection: duckdb.DuckDBPyConnection, runs: Sequence[str]
) -> dict[str, dict[tuple[int | None, str], float]]:
    """Return every measured and derived number of each run by load point and metric.

    Those of invalid load points are left out: they say nothing about what was to be measured.
    """
    found: dict[str, dict[tuple[int | None, str], float]] = {}
    for row in records(
        connection,
        "SELECT n.* FROM (SELECT run_uuid, load_point, metric, value FROM measurement "
        "UNION ALL SELECT run_uuid, load_point, metric, value FROM derivation) n "
        "LEFT JOIN load_point_validity v ON v.run_uuid = n.run_uuid "
        "AND v.load_point = n.load_point "
        "WHERE n.value IS NOT NULL AND v.valid IS DISTINCT FROM false "
        "AND n.run_uuid IN (SELECT unnest($runs::VARCHAR[])::UUID)",
        {"runs": list(runs)},
    ):
        found.setdefault(row["run_uuid"], {})[(row["load_point"], row["metric"])] = row["value"]
    return found


def _cell(
    runs_a: Runs,
    runs_b: Runs,
    numbers: Mapping[str, Mapping[tuple[int | None, str], float]],
    noise: Floors,
) -> dict[str, Any]:
    values_a, values_b = _gather(runs_a, numbers), _gather(runs_b, numbers)
    shared = sorted(
        values_a.keys() & values_b.keys(), key=lambda k: (k[0] is not None, k[0] or 0, k[1])
    )
    key, rounds = runs_a[0]["setting_key"], [*_rounds(runs_a), *_rounds(runs_b)]
    return {
        "label": runs_a[0]["label"],
        "setting_key": key,
        "runs_a": [run["run_uuid"] for run in runs_a],
        "runs_b": [run["run_uuid"] for run in runs_b],
        "outcomes_a": [run["outcome"] for run in runs_a],
        "outcomes_b": [run["outcome"] for run in runs_b],
        "alarms_b": sum(run["alarms"] for run in runs_b),
        "metrics": [
            {
                "load_point": point,
                "metric": metric,
                **effect(
                    values_a[(point, metric)],
                    values_b[(point, metric)],
                    exact=metric in EXACT,
                    noise_floor=noise.floor(
                        rounds, key, point, metric, fmean(values_a[(point, metric)])
                    ),
                ).document(),
            }
            for point, metric in shared
        ],
    }


def _gather(
    runs: Runs, numbers: Mapping[str, Mapping[tuple[int | None, str], float]]
) -> dict[tuple[int | None, str], list[float]]:
    gathered: dict[tuple[int | None, str], list[float]] = {}
    for run in runs:
        for key, value in numbers.get(run["run_uuid"], {}).items():
            gathered.setdefault(key, []).append(value)
    return gathered


def _broken(
    cells: Sequence[Mapping[str, Any]], rules: Sequence[Rule], *, left_out: int
) -> Iterator[dict[str, Any]]:
    for rule in rules:
        seen = False
        for cell in cells:
            for what in _breaches(cell, rule):
                yield {"rule": rule.text, "label": cell["label"], "what": what}
            seen = seen or any(m["metric"] == rule.metric for m in cell["metrics"])
        if not seen and rule.metric not in ("outcome", "alarms"):
            # A gate on a number that is nowhere would always be green.
            more = f"; {left_out} invalid load points were left out" if left_out else ""
            raise BadInput(
                f"--fail-on: {rule.metric!r} is not among the numbers of both sets{more}"
            )


def _breaches(cell: Mapping[str, Any], rule: Rule) -> Iterator[str]:
    if rule.metric == "outcome":
        if set(cell["outcomes_a"]) != set(cell["outcomes_b"]):
            yield f"outcome {cell['outcomes_a']} became {cell['outcomes_b']}"
        return
    if rule.metric == "alarms":
        if cell["alarms_b"]:
            yield f"{cell['alarms_b']} residual alarms in B"
        return
    for row in cell["metrics"]:
        if row["metric"] == rule.metric:
            change = Effect(**{name: row[name] for name in Effect.__slots__})
            if rule.broken_by(change):
                point = "" if row["load_point"] is None else f" (load point {row['load_point']})"
                noise = ", noise unknown" if change.verdict == "unknown" else ""
                yield (f"{rule.metric}{point}: {change.mean_a:g} became {change.mean_b:g}{noise}")
