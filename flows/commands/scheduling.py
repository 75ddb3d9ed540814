"""``schedule``: measure a sweep every night, see what is scheduled, end it."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.commands.planning import JsonOption, TargetOption
from flows.output import emit_json, print_table, say
from flows.shipped import shipped
from tasks import notify, schedules
from tasks.home import Home
from tasks.plan.plan import make_plan
from tasks.rounds import DEFAULT_TARGET, now
from tasks.schedules import MAX_LATE_HOURS, Schedule
from warehouse.errors import BadInput


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("schedule", rich_help_panel="Run")(schedule)


def schedule(
    sweep: Annotated[
        str | None, typer.Argument(metavar="[SWEEP]", help="a shipped name or a file")
    ] = None,
    cron: Annotated[
        str | None, typer.Option("--cron", help="minute hour day month weekday, as '0 2 * * *'")
    ] = None,
    timezone: Annotated[
        str, typer.Option("--timezone", metavar="TZ", help="of the cron line: Europe/Berlin, …")
    ] = "UTC",
    target: TargetOption = "local",
    webhook: Annotated[
        str | None,
        typer.Option(
            "--webhook", metavar="URL", help="post a JSON object there when a night is not well"
        ),
    ] = None,
    webhook_env: Annotated[
        str | None,
        typer.Option(
            "--webhook-env",
            metavar="NAME",
            help="variable that holds the webhook's URL; the URL itself is then stored nowhere",
        ),
    ] = None,
    webhook_always: Annotated[
        bool, typer.Option("--webhook-always", help="post when all is well, too")
    ] = False,
    budget: Annotated[
        float | None,
        typer.Option("--budget", min=0.1, max=1e7, metavar="MINUTES", help="as of `run --budget`"),
    ] = None,
    max_late_hours: Annotated[
        float,
        typer.Option(
            "--max-late-hours", min=0.0, max=8760.0, help="a night that begins later is missed"
        ),
    ] = MAX_LATE_HOURS,
    show: Annotated[bool, typer.Option("--list", help="show what is scheduled")] = False,
    remove: Annotated[
        str | None, typer.Option("--remove", metavar="SWEEP", help="end the schedule of a sweep")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure a sweep every night in a round of its own; a second call changes the schedule.

    Makes what is missing, starts the services and among them the scheduler, which stays. After a
    reboot `memsweep services up` starts it again. flows/NIGHTS.md tells what a night does when it
    is late, overlaps, fails or is killed.

    Example: `memsweep schedule demo --cron "0 2 * * *" --timezone Europe/Berlin`
    """
    home = Home.find()
    if sum([sweep is not None, show, remove is not None]) != 1:
        raise BadInput("schedule: give one of SWEEP with --cron, --list, or --remove SWEEP")
    if show:
        _list(home, json)
    elif remove is not None:
        _remove(home, remove, json)
    else:
        wanted = _checked(
            str(sweep),
            cron,
            timezone,
            target=target,
            webhook=webhook,
            webhook_env=webhook_env,
            webhook_always=webhook_always,
            budget_minutes=budget,
            max_late_hours=max_late_hours,
        )
        _schedule(home, wanted, json)


def _checked(
    sweep: str, cron: str | None, timezone: str, *, target: str, **options: Any
) -> Schedule:
    """Return the schedule that is asked for; refuses what no night could do, and starts nothing."""
    from flows.context import given_target, read_sweep, surroundings

    if cron is None:
        raise BadInput("schedule: --cron is missing, as in --cron '0 2 * * *'")
    schedules.check_cron(cron, timezone)
    if options["webhook"] is not None and options["webhook_env"] is not None:
        raise BadInput("schedule: give --webhook or --webhook-env, not both")
    if options["webhook"] is not None:
        notify.check_address(options["webhook"], "--webhook")
    if (name := options["webhook_env"]) is not None:
        if not os.environ.get(name):
            raise BadInput(f"--webhook-env: the variable {name} is not set")
        notify.check_address(os.environ[name], f"--webhook-env {name}")
    if os.environ.get("PREFECT_API_URL"):
        raise BadInput(
            "schedule: PREFECT_API_URL is set, but nights are fired by the embedded server; unset "
            "it, or deploy flows.nightly.night on your own server with a worker of your own"
        )
    parsed, _ = read_sweep(sweep)  # every night would refuse one that holds a secret
    place = sweep if sweep in shipped() else str(Path(sweep).resolve())
    home = Home.find()
    _refuse_anothers_name(home, parsed.name, place)
    plan = make_plan(parsed, surroundings(home, target))
    if plan.unresolved:
        raise BadInput(
            f"sweep {parsed.name}: {len(plan.unresolved)} pins are unresolved, first "
            f"{plan.unresolved[0]}; a night could only fail; resolve them with: memsweep pin "
            f"{sweep}{'' if target == DEFAULT_TARGET else f' --target {target}'}"
        )
    return Schedule(
        name=parsed.name,
        sweep=place,
        target=given_target(target),
        cron=" ".join(cron.split()),
        timezone=timezone,
        directory=str(Path.cwd()),
        made_at=now(),
        **options,
    )


def _refuse_anothers_name(home: Home, name: str, place: str) -> None:
    """Refuse a sweep whose name another sweep is scheduled under: its schedule would be lost."""
    earlier = schedules.find(home, name)
    if earlier is not None and earlier.sweep != place:
        raise BadInput(
            f"sweep {place}: its name {name} is scheduled already, from {earlier.sweep}; give it "
            f"a name of its own, or end the other with: memsweep schedule --remove {name}"
        )


def _schedule(home: Home, wanted: Schedule, json: bool) -> None:
    """Have it measured from now on."""
    from flows.context import prepare, read_sweep, use
    from tasks.launch import services
    from tasks.launch import target as targets

    parsed, _ = read_sweep(wanted.sweep)
    ends = prepare(home, parsed, wanted.target)
    use(home, ends)
    from flows.deployment import deploy

    # Kept first: the scheduler drops deployments that no schedule stands for.
    earlier = schedules.find(home, wanted.name)
    schedules.save(home, wanted)
    try:
        deploy(home, wanted)
    except BaseException:
        schedules.remove(home, wanted.name)
        if earlier is not None:
            schedules.save(home, earlier)
        raise
    if wanted.webhook_env is not None or not targets.load(wanted.target).is_embedded:
        services.end_scheduler(home)  # the next one is started with the variable, or the token's
    prepare(home, parsed, wanted.target)
    if json:
        emit_json({"schedules": _rows(home, wanted.name)})
        return
    say(f"{wanted.name}: next at {wanted.next_times(1)[0]:%Y-%m-%d %H:%M} UTC")
    say("after a reboot the scheduler is started again by: memsweep services up")
    _print(_rows(home, wanted.name))


def _rows(home: Home, name: str | None = None) -> list[dict[str, Any]]:
    from flows.overview import scheduled

    return [row for row in scheduled(home) if name in (None, row["name"])]


def _list(home: Home, json: bool) -> None:
    rows = _rows(home)
    if json:
        emit_json({"schedules": rows})
    elif rows:
        _print(rows)
    else:
        say("nothing is scheduled; example: memsweep schedule demo --cron '0 2 * * *'")


def _print(rows: list[dict[str, Any]]) -> None:
    columns = ["name", "sweep", "target", "cron", "timezone", "next", "webhook", "budget"]
    print_table(
        "Scheduled",
        columns,
        [
            [
                *(row[name] for name in columns[:5]),
                "paused" if row["paused"] else row["next_times"][0],
                row["webhook"],
                row["budget_minutes"],
            ]
            for row in rows
        ],
    )


def _remove(home: Home, name: str, json: bool) -> None:
    """End a schedule, named by the sweep's name or as it was given; what it measured stays."""
    from tasks.launch import scheduler, services

    known = schedules.schedules(home)
    path = str(Path(name).resolve())
    found = next((one for one in known if name == one.name or one.sweep in (name, path)), None)
    if found is None:
        names = ", ".join(one.name for one in known) or "nothing"
        raise BadInput(f"--remove: {name!r} is not scheduled; what is: {names}")
    schedules.remove(home, found.name)
    api_url = services.prefect_api_url(home)
    if api_url is not None:
        scheduler.drop_removed(home, api_url)
    if not schedules.schedules(home):
        services.end_scheduler(home)
    if json:
        emit_json({"removed": [asdict(found) | {"webhook": None}]})
        return
    say(f"{found.name}: no further night; what was measured stays, a night that goes on ends well")
