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
from tasks.plan.plan import Plan, PlannedCell, make_plan
from tasks.plan.prediction import Prediction
from tasks.plan.sizing_lint import Finding
from tasks.plan.sweep import parse_sweep
from warehouse.errors import BadInput

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
    json: JsonOption = False,
) -> None:
    """Show what a sweep will do: cells, server starts, predictions, refusals, time and disk.

    Starts nothing and needs no service; for any target, a cluster's too. A pool with ± is an
    estimate before a first boot. Sizing mistakes are named below the tables, and refuse nothing.

    Example: `memsweep plan demo`
    """
    from flows.context import surroundings

    where, text = find_sweep(sweep)
    parsed = parse_sweep(text, where=where, read=beside(sweep))
    made = make_plan(parsed, surroundings(Home.find(), target, fetch=True))
    if json:
        emit_json(document(made, prefix_overlap_ratio=prefix_overlap_ratio))
    else:
        show(made, prefix_overlap_ratio=prefix_overlap_ratio)


def document(plan: Plan, *, prefix_overlap_ratio: float | None = None) -> dict[str, object]:
    """Return a plan as the JSON object of ``plan --json``."""
    return {
        "sweep": plan.sweep.name,
        "sweep_sha256": plan.sweep.sha256,
        "target": plan.surroundings.target,
        "repeats": plan.sweep.repeats,
        "boots": plan.boots,
        "estimate_s": round(plan.estimate_s),
        "disk_bytes": plan.disk_bytes,
        "gpu_hours": gpu_hours(plan),
        "unresolved": plan.unresolved,
        "cells": [
            {
                "label": planned.cell.label,
                "cell_key": planned.cell.cell_key,
                "setting_key": planned.cell.setting_key,
                "expect": planned.cell.expect.value if planned.cell.expect else None,
                "infeasible": planned.infeasible,
                "skipped": planned.skipped,
                "estimate_s": round(planned.estimate_s),
                "cell": planned.cell.document(),
                "prediction": planned.prediction.document(planned.cell.cell_key, made_at=None),
            }
            for planned in plan.cells
        ],
        "findings": [
            {"code": finding.code, "cell": planned.cell.label, "message": finding.message}
            for planned, finding in _findings(plan, prefix_overlap_ratio)
        ],
    }


def gpu_hours(plan: Plan) -> float | None:
    """GPU-hours of the plan; ``None`` where no GPU is used."""
    if plan.surroundings.device != "cuda":
        return None
    seconds = sum(
        run.planned.estimate_s
        * run.cell.setting.server.tensor_parallel_size
        * run.cell.setting.server.pipeline_parallel_size
        for run in plan.runs()
    )
    return round(seconds / 3600, 2)


def show(plan: Plan, *, prefix_overlap_ratio: float | None = None) -> None:
    """Print a plan for reading: wide tables in a pipe, narrow ones with a legend in a terminal."""
    title = f"Plan of {plan.sweep.name} on {plan.surroundings.target}"
    if _is_narrow():
        _show_narrow(plan, title)
    else:
        _show_wide(plan, title)
    for line in _notes(plan):
        say(line)
    for lines in _grouped(
        (finding.message, planned.cell.label)
        for planned, finding in _findings(plan, prefix_overlap_ratio)
    ):
        say(f"advice - {lines}")


def _is_narrow() -> bool:
    return sys.stdout.isatty() and shutil.get_terminal_size().columns < WIDE_COLUMNS


def _show_wide(plan: Plan, title: str) -> None:
    columns = ["cell", "model", "context", "KV pool", "KV tokens", "blocks", "concurrency"]
    rows = [
        [
            planned.cell.label,
            planned.cell.setting.model.name,
            *_figures(planned),
            len(planned.cell.setting.load),
            f"{planned.estimate_s / 60:.1f}",
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


def _show_narrow(plan: Plan, title: str) -> None:
    """Print tables of at most 80 columns: cells by number, what is long about them in a legend."""
    cells = list(enumerate(plan.cells, start=1))
    print_table(
        title,
        ["#", "cell", "model", "min"],
        [
            [n, p.cell.label, p.cell.setting.model.name, f"{p.estimate_s / 60:.1f}"]
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


def _notes(plan: Plan) -> list[str]:
    """Return what is to be said below the tables: boots, time, disk, estimates, open pins."""
    hours = gpu_hours(plan)
    notes = [
        f"{plan.boots} server starts (one a run: load points share their cell's server), "
        f"about {plan.estimate_s / 60:.0f} minutes, {plan.disk_bytes / 1e6:.0f} MB of bundles"
        + (f", {hours} GPU-hours" if hours is not None else "")
    ]
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
    return [*notes, *_grouped(sources), *made_here.values(), *_grouped(open_pins)]


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
