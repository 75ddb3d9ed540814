"""Commands that look ahead and start nothing: ``sweeps``, ``plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.output import count, emit_json, print_table, say
from flows.shipped import beside, find_sweep, shipped
from tasks.home import Home
from tasks.plan.plan import Plan, PlannedCell, make_plan
from tasks.plan.sweep import parse_sweep

SweepArgument = Annotated[str, typer.Argument(metavar="SWEEP", help="a shipped name or a file")]
TargetOption = Annotated[
    str, typer.Option("--target", help="a profile of polyaxonfiles/profiles: where to run")
]
JsonOption = Annotated[bool, typer.Option("--json", help="one JSON object on stdout")]


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
    for name, path in {**shipped(), **own}.items():
        sweep = parse_sweep(path.read_text(encoding="utf-8"), where=name, read=beside(name))
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
    json: JsonOption = False,
) -> None:
    """Show what a sweep will do: cells, server starts, predictions, refusals, time and disk.

    Starts nothing and needs no service.

    Example: `memsweep plan demo`
    """
    from flows.context import surroundings

    where, text = find_sweep(sweep)
    parsed = parse_sweep(text, where=where, read=beside(sweep))
    made = make_plan(parsed, surroundings(Home.find(), target))
    if json:
        emit_json(document(made))
    else:
        show(made)


def document(plan: Plan) -> dict[str, object]:
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


def show(plan: Plan) -> None:
    """Print a plan for reading."""
    print_table(
        f"Plan of {plan.sweep.name} on {plan.surroundings.target}",
        [
            "cell",
            "model",
            "context",
            "KV pool",
            "KV tokens",
            "blocks",
            "concurrency",
            "load points",
            "minutes",
            "verdict",
        ],
        [_row(planned) for planned in plan.cells],
    )
    points = [_point(planned, index) for planned in plan.cells for index in _indices(planned)]
    print_table(
        "Predicted load",
        ["cell", "parallel", "number", "prompt", "output", "running", "waiting", "peak KV", "then"],
        points,
    )
    hours = gpu_hours(plan)
    say(
        f"{plan.boots} server starts (one a run: load points share their cell's server), "
        f"about {plan.estimate_s / 60:.0f} minutes, {plan.disk_bytes / 1e6:.0f} MB of bundles"
        + (f", {hours} GPU-hours" if hours is not None else "")
    )
    for line in plan.unresolved:
        say(f"unresolved pin - {line}")


def _indices(planned: PlannedCell) -> range:
    return range(len(planned.cell.setting.load)) if planned.infeasible is None else range(0)


def _row(planned: PlannedCell) -> list[object]:
    server, predicted = planned.cell.setting.server, planned.prediction
    pool = server.kv_cache_memory_bytes
    concurrency = predicted.value("max_concurrency")
    return [
        planned.cell.label,
        planned.cell.setting.model.name,
        count(server.max_model_len),
        f"{pool:,} B" if pool else f"{server.gpu_memory_utilization:.2f} of device",
        count(predicted.value("kv_cache_size_tokens")),
        count(predicted.value("num_gpu_blocks")),
        None if concurrency is None else f"{concurrency:.2f}x",
        len(planned.cell.setting.load),
        f"{planned.estimate_s / 60:.1f}",
        _verdict(planned),
    ]


def _verdict(planned: PlannedCell) -> str:
    if planned.infeasible is None:
        return (
            "measured" if planned.prediction.known else f"measured ({planned.prediction.unknown})"
        )
    if planned.skipped:
        return f"skipped: {planned.infeasible}"
    return f"measured, {planned.cell.expect} expected: {planned.infeasible}"


def _point(planned: PlannedCell, index: int) -> list[object]:
    point = planned.cell.setting.load[index]
    load = planned.prediction.load[index] if planned.prediction.load else None
    peak = load.peak_kv_usage_ratio_bound if load else None
    return [
        planned.cell.label,
        point.parallel,
        point.number,
        point.prompt_tokens,
        point.output_tokens,
        load.running_at_admission if load else None,
        load.waiting if load else None,
        None if peak is None else f"{peak:.4f}",
        None if load is None else ("preemptions" if load.preemptions_expected else ""),
    ]
