"""Commands that look ahead and start nothing: ``sweeps``, ``plan``."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from flows.output import count, emit_json, print_table, say
from flows.shipped import beside, find_sweep, shipped
from tasks.home import Home
from tasks.launch import models
from tasks.plan.outlook import Outlook
from tasks.plan.plan import Plan, PlannedCell, PlannedRun, make_plan
from tasks.plan.prediction import Prediction
from tasks.plan.sizing_lint import Finding
from tasks.plan.spending import NO_HISTORY, History, Spending
from tasks.plan.sweep import parse_sweep
from warehouse.errors import BadInput, MemsweepError

SweepArgument = Annotated[str, typer.Argument(metavar="SWEEP", help="a shipped name or a file")]
TargetOption = Annotated[
    str, typer.Option("--target", help="a profile of polyaxonfiles/profiles: where to run")
]
JsonOption = Annotated[bool, typer.Option("--json", help="one JSON object on stdout")]
#: From here on a terminal holds the wide tables; a pipe always gets them.
WIDE_COLUMNS = 140
POINT_COLUMNS = ["parallel", "number", "prompt", "output", "running", "waiting", "peak KV", "then"]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("sweeps", rich_help_panel="Plan")(sweeps)
    app.command("plan", rich_help_panel="Plan")(plan)


def sweeps(json: JsonOption = False) -> None:
    """List the sweeps that come with the project and those in this directory.

    Example: `memsweep sweeps`
    """
    own = {str(path): path for path in sorted(Path.cwd().glob("*.sweep.yaml"))}
    rows = []
    for name in {**shipped(), **own}:
        try:
            where, text = find_sweep(name)
            sweep = parse_sweep(text, where=where, read=beside(name))
        except BadInput as error:
            say(f"left out - {error}")
            continue
        rows.append(
            {
                "sweep": name,
                "sha256": sweep.sha256,
                "repeats": sweep.repeats,
                "experiments": [experiment.name for experiment in sweep.experiments],
                "description": " ".join(sweep.description.split()),
            }
        )
    if json:
        emit_json({"sweeps": rows})
        return
    print_table(
        "Sweeps",
        ["sweep", "repeats", "experiments", "description"],
        [
            [r["sweep"], r["repeats"], len(r["experiments"]), r["description"]]  # type: ignore[arg-type]
            for r in rows
        ],
    )


def plan(
    sweep: SweepArgument,
    target: TargetOption = "local",
    prefix_overlap_ratio: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="share of each prompt that all users will have in common; for advice"
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget",
            min=0.1,
            max=1e7,
            metavar="MIN",
            help="GPU-minutes to spend (CPU: minutes of a slot)",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="show the order of a round with this seed")
    ] = None,
    night: Annotated[
        bool, typer.Option("--night", help="as a scheduled night: with a sentinel")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Show what a sweep will do: cells, server starts, predictions, refusals, time and disk.

    Starts nothing and needs no service; for any target, a cluster's too. A pool with ± is an
    estimate before a first boot. Sizing mistakes are named below the tables, and refuse nothing.

    Example: `memsweep plan demo`
    """
    from flows.context import surroundings

    home = Home.find()
    where, text = find_sweep(sweep)
    parsed = parse_sweep(text, where=where, read=beside(sweep))
    made = make_plan(parsed, surroundings(home, target, fetch=True), night=night)
    outlook = Outlook(made, past_runs(home, made), seed=seed, budget_minutes=budget)
    if json:
        emit_json(document(made, outlook, prefix_overlap_ratio=prefix_overlap_ratio))
    else:
        show(made, outlook, prefix_overlap_ratio=prefix_overlap_ratio)


def past_runs(home: Home, plan: Plan) -> History:
    """Return what is known of past runs on the plan's target; nothing where it cannot be read."""
    from tasks import history

    try:
        return history.read(home.warehouse_snapshot, plan.surroundings.target)
    except MemsweepError as error:
        say(f"past runs are not taken into account - {error}")
        return NO_HISTORY


def document(
    plan: Plan, outlook: Outlook | None = None, *, prefix_overlap_ratio: float | None = None
) -> dict[str, object]:
    """Return a plan as the JSON object of ``plan --json``."""
    outlook = outlook or Outlook(plan)
    cpu = plan.surroundings.device == "cpu"
    costs = {name: cost.document(cpu=cpu) for name, cost in outlook.spending.items()}
    return {
        "sweep": plan.sweep.name,
        "sweep_sha256": plan.sweep.sha256,
        "target": plan.surroundings.target,
        "repeats": plan.sweep.repeats,
        **costs["as_planned"],
        "disk_bytes": outlook.disk_bytes,
        "disk_source": outlook.sized_by,
        "unresolved": plan.unresolved,
        "cells": [_cell(planned, outlook.history) for planned in plan.cells],
        "findings": [
            {"code": finding.code, "cell": planned.cell.label, "message": finding.message}
            for planned, finding in _findings(plan, prefix_overlap_ratio)
        ],
        "spending": costs,
        "seed": outlook.seed,
        "order": [_turn(run) for run in outlook.runs],
        "budget": _budget(outlook),
    }


def _cell(planned: PlannedCell, history: History) -> dict[str, object]:
    past = history.settings.get(planned.cell.setting_key)
    return {
        "label": planned.cell.label,
        "cell_key": planned.cell.cell_key,
        "setting_key": planned.cell.setting_key,
        "expect": planned.cell.expect.value if planned.cell.expect else None,
        "infeasible": planned.infeasible,
        "skipped": planned.skipped,
        "estimate_s": round(planned.estimate_s),
        "past_runs": 0 if past is None else past.runs,
        "last_measured_at": None
        if past is None
        else past.last_at.isoformat().replace("+00:00", "Z"),
        "median_s": None if past is None else past.median_s,
        "bundle_bytes": None if past is None else past.bundle_bytes,
        "cell": planned.cell.document(),
        "prediction": planned.prediction.document(planned.cell.cell_key, made_at=None),
    }


def _turn(run: PlannedRun) -> dict[str, object]:
    return {"label": run.cell.label, "repeat": run.repeat, "sentinel": run.sentinel}


def _budget(outlook: Outlook) -> dict[str, object] | None:
    choice = outlook.choice
    if choice is None:
        return None
    return {
        "minutes": outlook.budget_minutes,
        "unit": outlook.unit,
        "spent_minutes": outlook.minutes(choice.chosen),
        "runs": [_turn(run) for run in choice.chosen],
        "left_out": [_turn(run) for run in choice.left_out],
    }


def show(
    plan: Plan, outlook: Outlook | None = None, *, prefix_overlap_ratio: float | None = None
) -> None:
    """Print a plan for reading: wide tables in a pipe, narrow ones with a legend in a terminal."""
    title = f"Plan of {plan.sweep.name} on {plan.surroundings.target}"
    outlook = outlook or Outlook(plan)
    if _is_narrow():
        _show_narrow(outlook, title)
    else:
        _show_wide(outlook, title)
    if outlook.seed is not None:
        _show_order(outlook)
    for line in [*_costs(outlook), *_notes(plan)]:
        say(line)
    for lines in _grouped(
        (finding.message, planned.cell.label)
        for planned, finding in _findings(plan, prefix_overlap_ratio)
    ):
        say(f"advice - {lines}")


def _is_narrow() -> bool:
    return sys.stdout.isatty() and shutil.get_terminal_size().columns < WIDE_COLUMNS


def _show_wide(outlook: Outlook, title: str) -> None:
    plan = outlook.plan
    columns = ["cell", "model", "context", "KV pool", "KV tokens", "blocks", "concurrency"]
    rows = [
        [
            planned.cell.label,
            planned.cell.setting.model.name,
            *_figures(planned),
            len(planned.cell.setting.load),
            f"{outlook.run_s(planned) / 60:.1f}",
            _verdict(planned),
        ]
        for planned in plan.cells
    ]
    print_table(title, [*columns, "load points", "minutes", "verdict"], rows)
    points = [
        [planned.cell.label, *_point(planned, index)]
        for planned in plan.cells
        for index in _indices(planned)
    ]
    print_table("Predicted load", ["cell", *POINT_COLUMNS], points)


def _show_narrow(outlook: Outlook, title: str) -> None:
    """Print tables of at most 80 columns: cells by number, what is long about them in a legend."""
    cells = list(enumerate(outlook.plan.cells, start=1))
    print_table(
        title,
        ["#", "cell", "model", "min"],
        [
            [n, p.cell.label, p.cell.setting.model.name, f"{outlook.run_s(p) / 60:.1f}"]
            for n, p in cells
        ],
    )
    columns = ["#", "context", "KV pool", "KV tokens", "blocks", "concurrency"]
    print_table("Predicted start", columns, [[n, *_figures(p)] for n, p in cells])
    for number, planned in cells:
        if (verdict := _verdict(planned)) != "measured":
            say(f"#{number} {verdict}")
    points = [[n, *_point(p, index)] for n, p in cells for index in _indices(p)]
    print_table("Predicted load", ["#", *POINT_COLUMNS], points)


def _show_order(outlook: Outlook) -> None:
    rows = [
        [n, run.cell.label, run.repeat, "sentinel" if run.sentinel else ""]
        for n, run in enumerate(outlook.runs, start=1)
    ]
    print_table(f"Order with seed {outlook.seed}", ["#", "cell", "repeat", ""], rows)


def _costs(outlook: Outlook) -> list[str]:
    """Return what the runs cost, what is saved by what, and what a budget leaves out."""
    costs = outlook.spending
    planned = costs["as_planned"]
    lines = [
        f"{_cost(planned, 'server starts')} (one a run: load points share their cell's server), "
        f"{outlook.disk_bytes / 1e6:.0f} MB of bundles ({outlook.sized_by})"
    ]
    if (apart := costs["one_boot_a_load_point"]) != planned:
        lines.append(f"without sharing: {_cost(apart, 'server starts, one a load point')}")
    for name, when in (
        ("if_predictions_hold", "if the predictions hold"),
        ("if_the_unknown_is_refused", "if what they leave open is refused for want of KV memory"),
    ):
        if (left := costs[name]) != planned:
            lines.append(f"less what earlier ends settle: {_cost(left, 'starts')} {when}")
    sentinels = [run for run in outlook.runs if run.sentinel]
    if sentinels:
        label = sentinels[0].cell.label
        lines.append(f"sentinel: {label}, {len(sentinels)} runs: at start, middle and end")
    return [*lines, *_spent(outlook)]


def _cost(cost: Spending, starts: str) -> str:
    hours = f", {cost.gpu_s / 3600:.2f} GPU-hours" if cost.gpu_s else ""
    minutes = round(cost.wall_s / 60)
    lasts = (
        "less than a minute" if cost.wall_s < 60 else f"about {minutes} minute{'s'[: minutes > 1]}"
    )
    return f"{cost.boots} {starts}, {lasts}{hours}"


def _spent(outlook: Outlook) -> list[str]:
    choice = outlook.choice
    if choice is None:
        return []
    total = len(choice.chosen) + len(choice.left_out)
    spent, unit = outlook.minutes(choice.chosen), outlook.unit
    return [
        f"budget of {outlook.budget_minutes:g} {unit}: {len(choice.chosen)} of {total} runs, "
        f"{spent:g} {unit}",
        *(f"left out: {run.cell.label} #{run.repeat}" for run in choice.left_out),
    ]


def _notes(plan: Plan) -> list[str]:
    """Return what is to be said of single cells: estimates, open pins."""
    sources = [
        (f"estimated pool: {planned.prediction.range.pool.source}", planned.cell.label)
        for planned in plan.cells
        if planned.prediction.range is not None
    ]
    made_here, open_pins = {}, []
    for planned in plan.cells:
        name = planned.cell.setting.model.name
        for pin in planned.cell.pins.unresolved:
            here = plan.surroundings.engine_lock_sha256 is not None
            if here and pin == "model_revision" and models.is_generated(name):
                made_here[name] = (
                    f"model {name}: generated on the first run, then it has a revision"
                )
            else:
                open_pins.append((f"unresolved pin - {pin} of {name}", planned.cell.label))
    return [*_grouped(sources), *made_here.values(), *_grouped(open_pins)]


def _grouped(said: Iterable[tuple[str, str]]) -> list[str]:
    """Return each text once, with the cells it is said of."""
    cells: dict[str, list[str]] = {}
    for text, label in said:
        cells.setdefault(text, []).append(label)
    return [
        f"{text} [{labels[0]}{f' and {len(labels) - 1} more' if len(labels) > 1 else ''}]"
        for text, labels in cells.items()
    ]


def _findings(plan: Plan, prefix_overlap_ratio: float | None) -> list[tuple[PlannedCell, Finding]]:
    return [
        (planned, finding)
        for planned in plan.cells
        for finding in planned.findings(
            plan.surroundings, prefix_overlap_ratio=prefix_overlap_ratio
        )
    ]


def _indices(planned: PlannedCell) -> range:
    return range(len(planned.cell.setting.load)) if planned.infeasible is None else range(0)


def _figures(planned: PlannedCell) -> list[object]:
    """Return context limit, pool, tokens, blocks and concurrency; an estimate as a range."""
    server, predicted = planned.cell.setting.server, planned.prediction
    pool = server.kv_cache_memory_bytes
    share = f"{server.gpu_memory_utilization:.2f} of device"
    size = f"{pool:,} B" if pool else str(predicted.range.pool) if predicted.range else share
    return [
        count(server.max_model_len),
        size,
        _value(predicted, "kv_cache_size_tokens", "{:,.0f}"),
        _value(predicted, "num_gpu_blocks", "{:,.0f}"),
        _value(predicted, "max_concurrency", "{:.2f}x"),
    ]


def _value(predicted: Prediction, name: str, form: str) -> str | None:
    if predicted.range is None:
        value = predicted.value(name)
        return None if value is None else form.format(value)
    ends = [end.values.get(name) for end in (predicted.range.low, predicted.range.high)]
    return _span(["0" if end is None else form.format(end) for end in ends])


def _span(ends: list[str]) -> str:
    """Return both ends of an estimate, or the one value they agree on."""
    low, high = ends
    return low if low == high else f"{low}–{high}"


def _verdict(planned: PlannedCell) -> str:
    predicted = planned.prediction
    if planned.infeasible is None:
        if predicted.may_be_refused:
            return "measured (the lower end of the estimate would be refused)"
        return "measured" if predicted.known else f"measured ({predicted.unknown})"
    if planned.skipped:
        return f"skipped: {planned.infeasible}"
    return f"measured, {planned.cell.expect} expected: {planned.infeasible}"


def _point(planned: PlannedCell, index: int) -> list[object]:
    point = planned.cell.setting.load[index]
    asked = [point.parallel, point.number, point.prompt_tokens, point.output_tokens]
    predicted = planned.prediction
    if predicted.range is None:
        loads = [predicted.load[index]] * 2 if predicted.load else []
    else:
        ends = (predicted.range.low, predicted.range.high)
        loads = [end.load[index] for end in ends if end.load]
    if len(loads) < 2:
        return [*asked, None, None, None, None]
    preempted = [load.preemptions_expected for load in loads]
    return [
        *asked,
        _span([str(load.running_at_admission) for load in loads]),
        _span([str(load.waiting) for load in reversed(loads)]),
        _span([f"{load.peak_kv_usage_ratio_bound:.4f}" for load in reversed(loads)]),
        "preemptions" if all(preempted) else "preemptions?" if any(preempted) else "",
    ]
