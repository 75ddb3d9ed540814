"""Predictions beside measurements, true peaks beside sampled ones, one set of runs beside another
one, and own numbers beside published ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flows.report import charts
from flows.report.content import Entry, Figure, Line, Panel, Section, Table, table
from flows.report.data import Data, Residual
from flows.report.serving import validity
from flows.report.words import count, joined, made, one_line, percent, several, shown, size, worded
from warehouse.regression import WORSE

#: Charts of changes show so many, the largest first; the table holds all.
MOST_CHANGES = 40

# Predicted against measured


def residuals(data: Data) -> Section | None:
    """Return how far measurements lie from predictions; every alarm is named."""
    compared = [r for r in data.residuals if r.measured is not None]
    if not compared:
        return None
    named = {run.run_uuid: run for run in data.runs}
    points = {(p.run.run_uuid, p.index): p for p in data.points}
    rows = []
    for one in compared:
        if not one.predicted or one.residual is None or one.kind == "expectation":
            continue
        where = (
            points.get((one.run_uuid, one.load_point or 0)) if one.load_point is not None else None
        )
        place = named[one.run_uuid].name + ("" if where is None else f", {where.name}")
        if where is not None and where.valid is False:
            place += " (invalid)"
        metric = one.metric + (" (bound)" if one.kind == "upper_bound" else "")
        rows.append(
            {
                "metric": metric,
                "percent": _percent(one),
                "verdict": "alarm"
                if one.alarm
                else "exact claim"
                if one.kind == "value"
                else "estimate",
                "words": f"{place}: {one.metric} predicted {worded(one.metric, one.predicted)}, "
                f"measured {worded(one.metric, one.measured or 0.0)}",
            }
        )
    alarms = [one for one in compared if one.alarm]
    told = (
        f"{len(alarms)} of {len(compared)} raise an alarm."
        if alarms
        else f"None of {len(compared)} raises an alarm: every exact prediction was met, no bound "
        "exceeded."
    )
    order = list(dict.fromkeys(str(row["metric"]) for row in rows))
    shown_rows = _distinct(rows)
    return Section(
        "residuals",
        "Predicted against measured",
        "Exact predictions (integer arithmetic from the config) must be met; bounds must not be "
        "exceeded; estimates should be near. Residuals are shown as they are, never corrected.",
        figures=(
            Figure(
                "residuals",
                "Residuals by metric",
                told,
                (
                    Panel(
                        "residuals",
                        "Residuals by metric",
                        charts.residuals(shown_rows, order=order),
                        f"Residuals in percent by metric. {told}",
                    ),
                )
                if rows
                else (),
                _residual_summary(compared),
            ),
        ),
        tables=(_not_met(data, compared),) if any(_is_off(one) for one in compared) else (),
    )


def _percent(one: Residual) -> float:
    """Return a residual in percent of its prediction; room below a bound is no residual."""
    if one.kind == "upper_bound" and (one.residual or 0.0) < 0:
        return 0.0
    return (one.residual or 0.0) / abs(one.predicted) * 100


def _distinct(rows: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Return one point of many that lie on each other: drawing them all shows no more."""
    found: dict[tuple[object, object, float], Mapping[str, object]] = {}
    for row in rows:
        key = (row["metric"], row["verdict"], round(float(str(row["percent"])), 3))
        found.setdefault(key, row)
    return list(found.values())


def _is_off(one: Residual) -> bool:
    return one.alarm or (one.kind == "value" and bool(one.residual))


def _residual_summary(compared: Sequence[Residual]) -> Table:
    grouped: dict[tuple[str, str], list[Residual]] = {}
    for one in compared:
        grouped.setdefault((one.metric, one.kind), []).append(one)
    rows = []
    for (metric, kind), found in sorted(grouped.items()):
        worst = max(found, key=lambda one: abs(one.residual or 0.0))
        alarms = sum(one.alarm for one in found)
        rows.append(
            [
                metric,
                _CLAIMS.get(kind, kind),
                len(found),
                sum(not one.residual for one in found),
                Entry(f"{worst.residual or 0.0:+,.6g}", worst.residual),
                Entry(str(alarms), alarms, state="bad" if alarms else ""),
            ]
        )
    columns = ("metric", "claim", "compared", "equal", "largest residual", "alarms")
    return table("residuals", "Residuals by metric", columns, rows)


_CLAIMS = {
    "value": "exact",
    "estimate": "estimate",
    "upper_bound": "never above",
    "expectation": "steady state, no claim about a peak",
}


def _not_met(data: Data, compared: Sequence[Residual]) -> Table:
    named = {run.run_uuid: run for run in data.runs}
    rows = []
    for one in compared:
        if not _is_off(one):
            continue
        run = named[one.run_uuid]
        rows.append(
            [
                run.name,
                "start" if one.load_point is None else f"load point {one.load_point}",
                one.metric,
                shown(data.number(run, one.metric, one.load_point, "predicted")),
                shown(data.number(run, one.metric, one.load_point)),
                Entry(f"{one.residual or 0.0:+,.6g}", one.residual),
                Entry("ALARM", state="bad") if one.alarm else Entry("within the printed digits"),
            ]
        )
    columns = ("cell", "where", "metric", "predicted", "measured", "residual", "verdict")
    return table("alarms", "Exact predictions that were missed, bounds exceeded", columns, rows)


# True peaks


def true_peaks(data: Data) -> Section | None:
    """Return the peak that the requests tell beside the one a scrape saw."""
    rows, cells = [], []
    missed = 0
    for point in data.points:
        sampled = data.number(point.run, "peak_kv_usage_ratio", point.index)
        lower = data.derived(point, "peak_kv_usage_lower_ratio")
        upper = data.derived(point, "peak_kv_usage_upper_ratio")
        if sampled.value is None or upper.value is None:
            continue
        # Where no lower bound is known, the sample is what was surely reached.
        low = sampled.value if lower.value is None else lower.value
        missed += low > sampled.value + 1e-9
        words = f"{point.run.name}, {point.name}: sampled {percent(sampled.value)}, "
        words += f"true peak {percent(low)}"
        if point.case != "exact":
            words += f" to {percent(upper.value)}"
        if point.valid is False:
            words += " (invalid)"
        rows.append(
            {
                "sampled": sampled.value,
                "lower": low,
                "upper": upper.value,
                "case": point.case or "bounded",
                "words": words,
            }
        )
        cells.append(
            [
                point.run.name,
                point.name,
                shown(sampled),
                shown(lower),
                shown(upper),
                point.case or "–",
                shown(data.derived(point, "samples_outside_curves")),
                validity(point),
            ]
        )
    if not rows:
        return None
    told = f"At {missed} of {len(rows)} load points a scrape surely missed the peak."
    columns = ("cell", "load point", "sampled", "surely reached", "never exceeded", "case")
    return Section(
        "peaks",
        "True peak against sampled peak",
        "A sampler looks a few times a second. Start, tokens and end of every request tell what "
        "the cache held in between: exactly (circles), or within two bounds (triangles, with the "
        "interval below them).",
        figures=(
            Figure(
                "peaks",
                "True peak against sampled peak",
                told,
                (Panel("peaks", "True against sampled peak", charts.true_peaks(rows), told),),
                table("peaks", "Peaks", (*columns, "samples outside", "valid"), cells),
            ),
        ),
    )


# One set against another

#: Metrics of load whose worse direction is known, beside those that a night watches.
_WORSE_LOAD = {"output_tokens_per_s": -1}
_WORSE_IS_MORE = ("_ms", "_s", "preemptions", "rss_bytes", "gpu_used_bytes")


def changes(found: Mapping[str, Any], *, worse: Sequence[Mapping[str, Any]] = ()) -> Section:
    """Return what differs between two sets of runs: configuration first, then numbers."""
    rows, points = [], []
    for cell in found["cells"]:
        if set(cell["outcomes_a"]) != set(cell["outcomes_b"]):
            before, after = joined(cell["outcomes_a"]), joined(cell["outcomes_b"])
            rows.append(
                [cell["label"], "outcome", before, after, "–", Entry("different", state="bad")]
            )
        for row in cell["metrics"]:
            if row["verdict"] == "equal":
                continue
            kind = _kind(row)
            rows.append(_change_row(cell["label"], row, kind))
            if row["relative"] is not None:
                points.append(_change_point(cell["label"], row, kind))
    points.sort(key=lambda point: -abs(float(point["percent"])))
    drawn = points[:MOST_CHANGES]
    columns = ("cell", "number", "A", "B", "change", "verdict")
    equal = sum(row["verdict"] == "equal" for cell in found["cells"] for row in cell["metrics"])
    told = f"{several(equal, 'number')} equal in all repeats, {len(rows)} not."
    behind = table("changes", "Numbers that are not equal: mean over repeats", columns, rows)
    configuration = table(
        "configuration",
        "What differs in configuration and surroundings",
        ("name", "A", "B"),
        [
            [c["name"], one_line(joined(c["a"])), one_line(joined(c["b"]))]
            for c in found["configuration"]
        ],
        note="Nothing differs." if not found["configuration"] else "",
    )
    notes = [
        f"Only in {side.upper()}, so not compared: {joined(found[f'only_{side}'])}."
        for side in ("a", "b")
        if found[f"only_{side}"]
    ]
    notes += [
        f"Left out of {side.upper()}: "
        f"{several(len(found[f'invalid_load_points_{side}']), 'invalid load point')}."
        for side in ("a", "b")
        if found[f"invalid_load_points_{side}"]
    ]
    notes += [f"Worse: {one['message']}." for one in worse]
    panel = Panel(
        "changes", "Changes from A to B", charts.changes(drawn, order=_names(drawn)), told
    )
    caption = told + (
        f" The {MOST_CHANGES} largest are drawn." if len(points) > MOST_CHANGES else ""
    )
    return Section(
        "changes",
        "What changed",
        f"A: {found['a']['title']}. B: {found['b']['title']}. A change is called one only where "
        "the spread of repeats does not explain it.",
        figures=(
            (Figure("changes", "Changes from A to B", caption, (panel,), behind),) if drawn else ()
        ),
        tables=(configuration, *(() if drawn else (behind,))),
        notes=tuple(notes),
    )


def _names(points: Sequence[Mapping[str, object]]) -> list[str]:
    return list(dict.fromkeys(str(point["name"]) for point in points))


def _kind(row: Mapping[str, Any]) -> str:
    """Return a change as what it means: worse and better only where the direction is known."""
    if row["verdict"] == "unknown":
        return "noise unknown"
    if row["verdict"] != "different":
        return "within noise"
    metric = str(row["metric"])
    sign = WORSE.get(metric, _WORSE_LOAD.get(metric))
    if sign is None and metric.endswith(_WORSE_IS_MORE):
        sign = +1
    if sign is None:
        return "changed"
    return "worse" if row["difference"] * sign > 0 else "better"


_KIND_STATE = {"worse": "bad", "better": "good", "noise unknown": "note"}


def _change_row(label: str, row: Mapping[str, Any], kind: str) -> list[object]:
    change = f"{row['difference']:+.4g}"
    if row["relative"] is not None:
        change += f" ({row['relative']:+.2%})"
    told = kind
    if row["low"] is not None and row["low"] != row["high"]:
        told += f", 95 % interval {row['low']:+.4g} to {row['high']:+.4g}"
    elif kind == "noise unknown":
        told += f": {row['n_a']} and {row['n_b']} repeats"
    elif kind == "within noise" and row.get("detectable") is not None:
        told += f", would show from {row['detectable']:.4g}"
    place = "" if row["load_point"] is None else f" [{row['load_point']}]"
    return [
        label,
        f"{row['metric']}{place}",
        worded(row["metric"], row["mean_a"]),
        worded(row["metric"], row["mean_b"]),
        Entry(change, row["difference"]),
        Entry(told, state=_KIND_STATE.get(kind, "")),
    ]


def _change_point(label: str, row: Mapping[str, Any], kind: str) -> dict[str, Any]:
    place = "" if row["load_point"] is None else f" [{row['load_point']}]"
    base = abs(row["mean_a"])
    ends = (None, None)
    if row["low"] is not None and row["low"] != row["high"]:
        ends = (row["low"] / base * 100, row["high"] / base * 100)
    return {
        "name": f"{label}: {row['metric']}{place}",
        "percent": row["relative"] * 100,
        "low": ends[0],
        "high": ends[1],
        "verdict": kind,
        "words": f"{label}: {row['metric']}{place} {row['relative']:+.2%}, {kind}",
    }


def worse_lines(worse: Sequence[Mapping[str, Any]]) -> tuple[Line, ...]:
    """Return regressions as lines of the banner."""
    return tuple(Line(f"worse: {one['message']}", "bad", "#changes") for one in worse)


# Beside published figures


def beside_published(found: Mapping[str, Any]) -> Section | None:
    """Return a shipped sweep's published figures beside prediction and measurement."""
    rows = []
    for cell in found["cells"]:
        for figure in cell["figures"]:
            verdict = str(figure["verdict"])
            state = {"as printed": "good", "differs": "bad"}.get(verdict, "note")
            why = "; ".join(figure["why_not"])
            rows.append(
                [
                    cell["label"],
                    "–" if figure["load_point"] is None else figure["load_point"],
                    figure["metric"],
                    ("about " if figure["about"] else "") + figure["printed"],
                    _of(figure["predicted"], figure["unit"]),
                    _measured(figure),
                    Entry(verdict, state=state, why=why),
                    f"{figure['document']}: {figure['section']}",
                ]
            )
    if not rows:
        return None
    told = found["published"]
    columns = ("cell", "load point", "metric", "published", "predicted", "measured", "verdict")
    documents = tuple(f"{name}: {text}" for name, text in told["documents"].items())
    return Section(
        "published",
        "Beside the published figures",
        f"What the documents print of vLLM {told['engine_version']} on {told['gpu'] or 'no GPU'}, "
        "as reference; they are no measurement of this page and never joined with one.",
        tables=(table("published", "Published figures", (*columns, "source"), rows),),
        notes=documents,
    )


def _measured(figure: Mapping[str, Any]) -> Entry | None:
    """Return what own runs give beside a published figure, and how it follows from them."""
    value, words = figure["measured"], _of(figure["measured"], figure["unit"])
    if words is None:
        return None
    formula = f"mean of {figure['metric']} over {several(figure['measured_runs'], 'run')}"
    if figure["metric"] == "kv_pool_bytes":
        formula += ": blocks as measured × bytes a block as predicted"
    return made(value, words, formula)


def _of(value: float | None, unit: str) -> str | None:
    if value is None:
        return None
    if unit == "bytes":
        return size(value)
    return percent(value) if unit == "ratio" else f"{value:.2f}x" if unit == "x" else count(value)
