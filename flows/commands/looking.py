"""Commands that look at past runs: ``runs``, ``show``, ``query``, ``sql``, ``compare``.

All read the published snapshot, so they never wait for a sweep and no sweep waits for them.
"""

from __future__ import annotations

import csv
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.output import count, emit_json, emit_text, print_table, say, sparkline
from tasks.home import Home
from warehouse.errors import BadInput, CannotFindOut, CheckFailed
from warehouse.statistics import WITHIN_NOISE

JsonOption = Annotated[bool, typer.Option("--json", help="one JSON object on stdout")]
CsvOption = Annotated[bool, typer.Option("--csv", help="CSV on stdout")]
ParquetOption = Annotated[
    Path | None, typer.Option("--parquet", metavar="FILE", help="write a Parquet file")
]
#: Beyond this a number of rows is a slip of the hand; databases take no number of any size.
MOST_ROWS = 10**9
#: A day: longer than any query, and short enough for every clock.
LONGEST_S = 86_400.0

RowsOption = Annotated[
    int, typer.Option("--max-rows", min=1, max=MOST_ROWS, help="rows returned at most")
]
TimeoutOption = Annotated[
    float,
    typer.Option(
        "--timeout",
        min=0.1,
        max=LONGEST_S,
        help="seconds a query may take",
    ),
]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="a UUID, a unique prefix of one, or latest")
]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    for name, function in (
        ("runs", runs),
        ("show", show),
        ("query", query),
        ("sql", sql),
        ("compare", compare),
    ):
        app.command(name, rich_help_panel="Look")(function)


def _option(meaning: str) -> Any:
    return typer.Option(help=meaning)


def runs(
    sweep: Annotated[str | None, _option("of this sweep")] = None,
    round: Annotated[str | None, _option("of this round")] = None,
    model: Annotated[str | None, _option("of this model")] = None,
    outcome: Annotated[str | None, _option("that ended so: ok, refused, oom, ...")] = None,
    engine: Annotated[str | None, _option("of this engine version")] = None,
    hardware: Annotated[str | None, _option("on hardware whose name holds this")] = None,
    cell: Annotated[str | None, _option("of the cell whose key begins so")] = None,
    setting: Annotated[str | None, _option("of the setting whose key begins so")] = None,
    since: Annotated[str | None, _option("begun at or after this date or time, UTC")] = None,
    until: Annotated[str | None, _option("begun before this date or time, UTC")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, max=MOST_ROWS, help="the newest so many")
    ] = None,
    json: JsonOption = False,
) -> None:
    """List past runs, newest first.

    Example: `memsweep runs --outcome ok --since 2026-11-01`
    """
    from warehouse.connection import open_snapshot
    from warehouse.lookup import runs as find

    filters = {
        "sweep": sweep,
        "round": round,
        "model": model,
        "outcome": outcome,
        "engine": engine,
        "hardware": hardware,
        "cell": cell,
        "setting": setting,
        "since": since,
        "until": until,
    }
    with open_snapshot(Home.find().warehouse_snapshot) as connection:
        found = find(connection, filters, limit=limit)
    if json:
        emit_json({"runs": found})
        return
    columns = ("run_uuid", "sweep", "round", "label", "repeat", "outcome", "phase", "started_at")
    print_table(f"{len(found)} runs", columns, [[run[name] for name in columns] for run in found])


def show(run: RunArgument, json: JsonOption = False) -> None:
    """Show one run in full: outcome, environment, numbers, load points, checks, files.

    Example: `memsweep show latest`
    """
    from warehouse.connection import open_snapshot
    from warehouse.lookup import resolve_run
    from warehouse.lookup import show as find

    with open_snapshot(Home.find().warehouse_snapshot) as connection:
        shown = find(connection, resolve_run(connection, run))
        courses = [] if json else _courses(connection, shown["run"]["run_uuid"])
    if json:
        emit_json(shown)
        return
    _print_facts(f"run {shown['run']['run_uuid']}", shown["run"])
    _print_facts("environment", (shown["environment"] or [{}])[0], skip=("document",))
    _print_rows(
        "measured",
        shown["measurements"],
        ("load_point", "metric", "value", "reason", "file", "line"),
    )
    _print_rows(
        "predicted",
        shown["residuals"],
        ("load_point", "metric", "kind", "predicted", "measured", "residual", "alarm"),
    )
    _print_rows(
        "derived", shown["derivations"], ("load_point", "metric", "value", "reason", "formula")
    )
    _print_rows(
        "load points",
        shown["load_points"],
        ("load_point", "parallel", "asked_requests", "state", "error", "requests_sha256"),
    )
    checks = [row | {"state": _check_state(row)} for row in shown["validity"]]
    _print_rows("checks", checks, ("load_point", "check_name", "kind", "state", "detail"))
    _print_rows("failures", shown["failures"], ("type", "phase", "outcome", "line", "text"))
    _print_rows("phases", shown["phases"], ("phase", "load_point", "start_at", "end_at"))
    _print_courses(courses)
    _print_rows("files", shown["artifacts"], ("path", "bytes", "sha256"))
    _print_facts("rows kept", shown["counts"])


def _courses(connection: Any, run_uuid: str) -> list[tuple[str, list[float]]]:
    """Return what the samplers saw of a run, by quantity, thinned without losing a peak."""
    from flows.report.data import course, gather

    (run,) = gather(connection, "", [run_uuid]).runs
    return [(name, line.value.tolist()) for name, line in course(connection, run).lines.items()]


def _print_courses(courses: list[tuple[str, list[float]]]) -> None:
    """Print each series' range; in a terminal with its course as bars."""
    terminal = sys.stdout.isatty()
    width = max(10, shutil.get_terminal_size().columns - 64)
    rows = [
        [name, _short(min(values)), _short(max(values)), _short(values[-1])]
        + ([sparkline(values, width)] if terminal else [])
        for name, values in courses
    ]
    if rows:
        columns = ("quantity", "lowest", "highest", "last") + (("course",) if terminal else ())
        print_table("over time", columns, rows)


def _check_state(row: Mapping[str, Any]) -> str:
    if row["passed"] is None:
        return "unknown"
    if row["passed"]:
        return "holds"
    return "noted" if row["kind"] == "notes" else "BROKEN"


def _print_facts(title: str, facts: Mapping[str, Any], *, skip: tuple[str, ...] = ()) -> None:
    rows = [[k, v] for k, v in facts.items() if v is not None and k not in skip]
    print_table(title, ("name", "value"), rows)


def _print_rows(title: str, rows: list[dict[str, Any]], columns: tuple[str, ...]) -> None:
    if rows:
        print_table(title, columns, [[_short(row[name]) for name in columns] for row in rows])


def _short(value: object) -> object:
    """Return a number without the noise of its last digits; everything else as it is."""
    if isinstance(value, float):
        return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.6g}"
    return value


def query(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="none: list them")] = None,
    param: Annotated[
        list[str] | None, typer.Option("--param", "-p", metavar="NAME=VALUE", help="a parameter")
    ] = None,
    json: JsonOption = False,
    as_csv: CsvOption = False,
    max_rows: RowsOption = 100_000,
    timeout: TimeoutOption = 60.0,
) -> None:
    """Run a named query, or list them with what they answer and their parameters.

    Example: `memsweep query capacity_by_context_limit -p model=tiny-qwen35`
    """
    from warehouse.query import named_queries, run_named

    if name is None:
        queries = [
            {
                "name": entry.name,
                "description": entry.description,
                "parameters": [
                    {"name": p.name, "default": p.default, "meaning": p.meaning}
                    for p in entry.parameters
                ],
            }
            for entry in named_queries().values()
        ]
        if json:
            emit_json({"queries": queries})
            return
        print_table(
            "Named queries",
            ("name", "answers", "parameters"),
            [
                [q["name"], q["description"], ", ".join(p["name"] for p in q["parameters"])]  # type: ignore[index]
                for q in queries
            ],
        )
        return
    given = dict(pair("--param", text) for text in param or [])
    result = run_named(
        Home.find().warehouse_snapshot, name, given, max_rows=max_rows, timeout_s=timeout
    )
    _emit(name, result.columns, result.rows, result.truncated, json=json, as_csv=as_csv)


def pair(option: str, text: str) -> tuple[str, str]:
    """Read ``NAME=VALUE``; raises :class:`BadInput` for anything else."""
    name, found, value = text.partition("=")
    if not found or not name:
        raise BadInput(f"{option}: got {text!r}, wanted NAME=VALUE")
    return name, value


def sql(
    statement: Annotated[str | None, typer.Argument(metavar="SQL", help="one SELECT")] = None,
    where: Annotated[bool, typer.Option("--where", help="print the file to open and end")] = False,
    json: JsonOption = False,
    as_csv: CsvOption = False,
    parquet: ParquetOption = None,
    max_rows: RowsOption = 100_000,
    timeout: TimeoutOption = 60.0,
) -> None:
    """Run read-only SQL on the published snapshot; no file and no network can be reached from it.

    Example: `memsweep sql "SELECT metric, value FROM measurement WHERE load_point IS NULL"`

    With DuckDB alone: `duckdb -readonly "$(memsweep sql --where)"`
    """
    from warehouse.query import run_sql, run_sql_arrow

    snapshot = Home.find().warehouse_snapshot
    if where:
        if not snapshot.is_file():
            raise BadInput(f"{snapshot}: no warehouse is published yet; run a sweep first")
        emit_json({"snapshot": str(snapshot)}) if json else emit_text(str(snapshot))
        return
    if statement is None:
        raise BadInput("no SQL was given; wanted one SELECT, or --where for the file to open")
    if parquet is not None:
        table, cut = run_sql_arrow(snapshot, statement, max_rows=max_rows, timeout_s=timeout)
        _write_parquet(table, parquet)
        say(f"{table.num_rows} rows written to {parquet}" + (" (cut)" if cut else ""))
        return
    result = run_sql(snapshot, statement, max_rows=max_rows, timeout_s=timeout)
    _emit("", result.columns, result.rows, result.truncated, json=json, as_csv=as_csv)


def _write_parquet(table: Any, path: Path) -> None:
    import pyarrow.parquet as pq

    try:
        pq.write_table(table, path, compression="zstd")
    except OSError as error:
        raise CannotFindOut(f"{path}: cannot be written: {error.strerror or error}") from error


def _emit(
    title: str,
    columns: list[str],
    rows: list[tuple[Any, ...]],
    truncated: bool,
    *,
    json: bool,
    as_csv: bool,
) -> None:
    from warehouse.query import plain

    values = [[plain(value) for value in row] for row in rows]
    if json:
        emit_json({"columns": columns, "rows": values, "truncated": truncated})
    elif as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(values)
    else:
        print_table(title, columns, values)
    if truncated:
        say(f"only the first {len(rows)} rows; raise --max-rows for more")


def compare(
    a: Annotated[
        str | None,
        typer.Argument(metavar="[A]", help="run, sweep, sweep@round or engine version"),
    ] = None,
    b: Annotated[str | None, typer.Argument(metavar="[B]", help="what to compare A with")] = None,
    unlike: Annotated[
        bool, typer.Option("--unlike", help="compare what sets of other settings share")
    ] = False,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-on",
            metavar="RULE",
            help="exit 1 when it holds: METRIC>5%, METRIC<-1%, METRIC!=0, outcome, alarms",
        ),
    ] = None,
    beside: Annotated[
        str | None,
        typer.Option(
            "--with",
            metavar="published",
            help="published: what the sweep's documents print, beside prediction and own runs",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show cells with prediction and measurement, or two sets of runs against each other.

    No argument: the newest round. One: its cells side by side. Two: cells are aligned by setting;
    what differs in pins and settings comes first, then every change with its confidence interval
    over repeats, or how large a change would have shown. A sweep --with published needs no run.

    Example: `memsweep compare 0.27.0 0.32.0 --fail-on "kv_cache_size_tokens<-1%"`
    """
    from warehouse.compare import choose
    from warehouse.connection import open_snapshot
    from warehouse.difference import compare as differ
    from warehouse.difference import parse_rule

    if beside is not None:
        _compare_published(a, b, beside, more=bool(fail_on or unlike), json=json)
        return
    if b is None and (fail_on or unlike):
        raise BadInput("--fail-on and --unlike need two sets: memsweep compare A B")
    rules = [parse_rule(text) for text in fail_on or []]
    with open_snapshot(Home.find().warehouse_snapshot) as connection:
        chosen = choose(connection, a)
        if b is None:
            _show_cells(connection, chosen, json=json)
            return
        found = differ(connection, chosen, choose(connection, b), unlike=unlike, rules=rules)
    if json:
        emit_json(found)
    else:
        _print_differences(found)
    if found["broken_rules"]:
        first = found["broken_rules"][0]
        raise CheckFailed(
            f"{len(found['broken_rules'])} times a --fail-on rule holds, the first: "
            f"{first['rule']}: {first['label']}: {first['what']}"
        )


def _compare_published(
    a: str | None, b: str | None, beside: str, *, more: bool, json: bool
) -> None:
    if beside != "published" or b is not None or more:
        raise BadInput(
            "--with: wanted published, with one sweep or round and without --fail-on and --unlike: "
            "memsweep compare SWEEP --with published"
        )
    from flows.commands.published import compare_published

    compare_published(a, json=json)


def _show_cells(connection: Any, chosen: Any, *, json: bool) -> None:
    from warehouse.compare import cells

    found = cells(connection, chosen.runs)
    if json:
        emit_json({"selection": chosen.document(), "cells": found})
        return
    print_table(
        f"{chosen.title}: predicted / measured at start",
        ("cell", "outcome", "KV tokens", "blocks", "max concurrency", "residual"),
        [_cell_row(cell) for cell in found],
    )
    print_table(
        "Load points: measured, with the bound of the peak",
        (
            "cell",
            "prompt",
            "output",
            "parallel",
            "requests",
            "peak KV usage",
            "between scrapes",
            "bound",
            "running",
            "waiting",
            "preemptions",
            "valid",
        ),
        [_point_row(cell, point) for cell in found for point in cell["load_points"]],
    )
    invalid = [point for cell in found for point in cell["load_points"] if point["valid"] is False]
    if invalid:
        say(f"{len(invalid)} load points are invalid: `memsweep show RUN` says by which checks")
    for cell in found:
        for alarm in cell["alarms"]:
            point = "" if alarm["load_point"] is None else f" (load point {alarm['load_point']})"
            say(
                f"residual: {cell['label']}: {alarm['metric']}{point}: predicted "
                f"{_short(alarm['predicted'])}, measured {_short(alarm['measured'])}"
            )


def _print_differences(found: Mapping[str, Any]) -> None:
    emit_text(f"A: {found['a']['title']}")
    emit_text(f"B: {found['b']['title']}")
    print_table(
        "What differs",
        ("name", "A", "B"),
        [[c["name"], ", ".join(c["a"]), ", ".join(c["b"])] for c in found["configuration"]],
    )
    for side in ("a", "b"):
        for label in found[f"only_{side}"]:
            say(f"only in {side.upper()}: {label}")
    for side in ("a", "b"):
        invalid = found[f"invalid_load_points_{side}"]
        if invalid:
            why = sorted({name for one in invalid for name in one["broken_checks"].split(", ")})
            say(f"{len(invalid)} invalid load points of {side.upper()} left out: {', '.join(why)}")
    rows = []
    for cell in found["cells"]:
        if set(cell["outcomes_a"]) != set(cell["outcomes_b"]):
            before, after = ", ".join(cell["outcomes_a"]), ", ".join(cell["outcomes_b"])
            rows.append([cell["label"], "outcome", before, after, None, "different"])
        rows += [_effect_row(cell["label"], m) for m in cell["metrics"] if m["verdict"] != "equal"]
    print_table(
        "Numbers that are not equal: mean over repeats",
        ("cell", "metric", "A", "B", "change", "verdict"),
        rows,
    )
    equal = sum(m["verdict"] == "equal" for cell in found["cells"] for m in cell["metrics"])
    say(f"{equal} numbers are equal in all repeats")


def _effect_row(label: str, row: Mapping[str, Any]) -> list[object]:
    point = "" if row["load_point"] is None else f" [{row['load_point']}]"
    change = f"{row['difference']:+.4g}"
    if row["relative"] is not None:
        change += f" ({row['relative']:+.1%})"
    verdict = str(row["verdict"])
    if row["verdict"] == "different" and row["low"] != row["high"]:
        verdict += f", 95 % interval {row['low']:+.4g} to {row['high']:+.4g}"
    elif row["verdict"] == "not significant":
        verdict += f", would show from {row['detectable']:.4g}"
    elif row["verdict"] == WITHIN_NOISE:
        verdict += f" (up to {row['noise_floor']:.4g})"
    elif row["verdict"] == "unknown":
        verdict += f": {row['n_a']} and {row['n_b']} repeats give no noise to go by"
    a, b = _short(row["mean_a"]), _short(row["mean_b"])
    return [label, f"{row['metric']}{point}", a, b, change, verdict]


def _cell_row(cell: Mapping[str, Any]) -> list[object]:
    metrics = cell["metrics"]
    repeat = "" if cell["repeat"] == 1 else f" #{cell['repeat']}"
    outcome = cell["outcome"] if cell["as_expected"] else f"{cell['outcome']} (unexpected)"
    if cell["as_expected"] and cell["expect"]:
        outcome = f"{cell['outcome']} (as expected)"
    return [
        f"{cell['label']}{repeat}",
        outcome,
        _both(metrics.get("kv_cache_size_tokens"), count),
        _both(metrics.get("num_gpu_blocks"), count),
        _both(metrics.get("max_concurrency"), lambda v: None if v is None else f"{v:.2f}x"),
        "none" if not cell["alarms"] else f"ALARM: {len(cell['alarms'])}",
    ]


def _both(metric: Mapping[str, Any] | None, show: Any) -> str:
    if metric is None:
        return "– / –"
    return f"{show(metric['predicted']) or '–'} / {show(metric['measured']) or '–'}"


def _point_row(cell: Mapping[str, Any], point: Mapping[str, Any]) -> list[object]:
    bound = point["served_peak_bound"]
    bound = point["predicted_peak_bound"] if bound is None else bound
    succeeded = count(point["requests_succeeded"])
    return [
        cell["label"],
        point["asked_prompt_tokens"],
        point["asked_output_tokens"],
        point["parallel"],
        f"{succeeded or '–'}/{point['asked_requests']}",
        _ratio(point["peak_kv_usage_ratio"]) + (" ABOVE" if point["above_bound"] else ""),
        _between(point),
        _ratio(bound),
        count(point["peak_requests_running"]),
        count(point["peak_requests_waiting"]),
        count(point["preemptions"]),
        _valid(point),
    ]


def _between(point: Mapping[str, Any]) -> str:
    """Return the peak as the requests tell it: one number where it is exact, else two."""
    low, high = point["peak_kv_usage_lower_ratio"], point["peak_kv_usage_upper_ratio"]
    if point["peak_kv_usage_case"] == "exact":
        return f"{_ratio(high)} exact"
    return "–" if high is None else f"{_ratio(low)} to {_ratio(high)}"


def _valid(point: Mapping[str, Any]) -> str:
    if point["valid"] is None:
        return "–"
    return "yes" if point["valid"] else f"INVALID: {point['broken_checks']}"


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.5f}"
