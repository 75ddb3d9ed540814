"""The command that measures a run again: ``reproduce``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.commands.planning import JsonOption
from flows.output import emit_json, print_table, say
from flows.shipped import beside, find_sweep
from tasks import reproduce as reproduction
from tasks.home import Home
from tasks.plan.plan import PlannedCell, make_plan
from tasks.plan.sweep import Sweep, parse_sweep
from tasks.reproduce import Original
from warehouse.errors import BadInput, CannotFindOut, CheckFailed

if TYPE_CHECKING:
    from tasks.judge import Verdict

RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="a UUID, a unique prefix of one, or latest")
]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("reproduce", rich_help_panel="Audit")(reproduce)


def reproduce(
    run: RunArgument,
    target: Annotated[
        str | None, typer.Option("--target", help="where to run; none: where the run was")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, max=100, help="how often to measure it again")] = 1,
    json: JsonOption = False,
) -> None:
    """Measure a run again - same cell, same pins, same class of hardware - and judge the numbers.

    What cannot be had any more is said before anything starts (exit 2); what a registry or hub that
    does not answer leaves open is said too. Exits 0 when the run is
    reproduced, 1 when it is not, 3 when that cannot be told. Interrupted, it goes on where it was.

    Example: `memsweep reproduce latest`
    """
    from flows.context import given_target

    home = Home.find()
    first = _original(home, run)
    where = given_target(target or first.target)
    path = str(reproduction.write_sweep(home, first, repeats=repeats))
    sweep = _read(path)
    _refuse(home, sweep, first, where, prepared=False)
    _ask_sources(first, where)
    from flows.context import prepare

    prepare(home, sweep, where)
    _refuse(home, sweep, first, where, prepared=True)
    from flows.commands import running

    goes_on = reproduction.is_unfinished(home, first, where, repeats=repeats)
    running.measure(path, where, {"fresh": not goes_on}, show_plan=False)
    verdict = _judge(home, first, where)
    document = {"run_uuid": first.run_uuid, "target": where, **verdict.document()}
    again = reproduction.newest_runs(home, first, where)
    if json:
        emit_json({**document, "runs": again})
    else:
        _show(document)
    _exit(first, verdict)


def _original(home: Home, run: str) -> Original:
    from warehouse.connection import open_snapshot
    from warehouse.lookup import resolve_run

    with open_snapshot(home.warehouse_snapshot) as connection:
        return reproduction.original(home, resolve_run(connection, run))


def _read(path: str) -> Sweep:
    where, text = find_sweep(path)
    return parse_sweep(text, where=where, read=beside(path))


def _refuse(home: Home, sweep: Sweep, first: Original, target: str, *, prepared: bool) -> None:
    """Raise :class:`BadInput` naming all that cannot be had on the target."""
    from flows.context import surroundings
    from tasks.launch import models
    from tasks.launch.target import load

    where = surroundings(home, target)
    (planned,) = make_plan(sweep, where, keep_infeasible=True).cells
    lines = reproduction.cannot_be_had(
        first,
        planned.cell,
        target=target,
        generated=not prepared and models.is_generated(first.cell.setting.model.name),
    )
    here = reproduction.this_machine() if load(target).is_embedded else {}
    lines += reproduction.other_hardware(
        first.environment, pins=first.cell.pins, here=here, gpu=where.gpu
    )
    lines += _refused_here(first, planned)
    if lines:
        raise BadInput(f"run {first.run_uuid} cannot be reproduced: {'; '.join(lines)}")


def _ask_sources(first: Original, target: str) -> None:
    """Ask the registry for the image and the hub for the commit of a run on a cluster.

    Raises:
        BadInput: the registry has no such image any more.
    """
    from tasks.launch import pins
    from tasks.launch.target import load

    profile, wanted = load(target), first.cell.pins
    if profile.is_embedded:
        return
    if profile.image is not None and wanted.image_digest is not None:
        try:
            is_there = pins.image_is_there(profile.image, wanted.image_digest)
        except CannotFindOut as error:
            say(f"not known whether the image can still be had: {error}")
        else:
            if not is_there:
                raise BadInput(
                    f"run {first.run_uuid} cannot be reproduced: the registry has no image "
                    f"{profile.image}@{wanted.image_digest} any more"
                )
    if profile.fetch_s is not None and reproduction.is_commit(wanted.model_revision):
        model = first.cell.setting.model.name
        try:
            pins.commit_of(model, branch=wanted.model_revision, endpoint=profile.hub)
        except (BadInput, CannotFindOut) as error:
            # Said only: the volume of the models may hold it still.
            say(f"the model can be had only where it is already: {error}")


def _refused_here(first: Original, planned: PlannedCell) -> list[str]:
    """Return why the prediction of today would not start the cell at all."""
    if planned.infeasible is None or first.cell.expect is not None:
        return []
    return [f"the plan refuses its cell: {planned.infeasible}"]


def _judge(home: Home, first: Original, target: str) -> Verdict:
    from tasks.judge import judge_run
    from warehouse.connection import open_snapshot

    again = reproduction.newest_runs(home, first, target)
    same = [
        reproduction.same_class(first.environment, reproduction.sealed_environment(home, run_uuid))
        for run_uuid in again
    ]
    with open_snapshot(home.warehouse_snapshot) as connection:
        return judge_run(
            connection,
            first.run_uuid,
            again,
            profiled=first.cell.setting.server.kv_cache_memory_bytes is None,
            same_hardware=False if False in same else None if None in same else True,
        )


def _show(document: Mapping[str, Any]) -> None:
    rows = [
        [
            row["load_point"],
            row["metric"],
            _short(row["old"]),
            _short(row["new"]),
            row["verdict"],
            row["why"],
        ]
        for row in document["metrics"]
    ]
    columns = ("load point", "metric", "run", "again", "verdict", "by")
    print_table(f"run {document['run_uuid']} measured again", columns, rows)
    earlier = len(document["earlier_runs"])
    say(f"noise: {earlier} earlier run{'s' if earlier != 1 else ''} of this cell, on this hardware")


def _short(value: float | None) -> str | None:
    if value is None:
        return None
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.6g}"


def _exit(first: Original, verdict: Verdict) -> None:
    from tasks.judge import Answer

    text = f"run {first.run_uuid}: {verdict.answer.value}: {verdict.why}"
    if verdict.answer is Answer.NOT:
        raise CheckFailed(text)
    if verdict.answer is Answer.UNKNOWN:
        raise CannotFindOut(text)
    say(text)
