"""Commands that look after what runs beside a sweep: ``services up/down/status``, ``setup``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flows.commands.planning import JsonOption, TargetOption
from flows.output import emit_json, print_table, say
from tasks.home import Home

if TYPE_CHECKING:
    from tasks.launch.services import Endpoints

PortOption = Annotated[
    int | None, typer.Option(min=1, max=65535, help="port to listen on; default: a free one")
]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    group = typer.Typer(
        name="services",
        help="The embedded Prefect server, Polyaxon server, supervisor and scheduler.",
        no_args_is_help=True,
    )
    group.command("up")(up)
    group.command("down")(down)
    group.command("status")(status)
    app.add_typer(group, rich_help_panel="Upkeep")
    app.command("setup", rich_help_panel="Upkeep")(setup)


def up(
    prefect_port: PortOption = None, polyaxon_port: PortOption = None, json: JsonOption = False
) -> None:
    """Start what is not up and wait until it answers; safe to call again, and twice at once.

    Where something is scheduled, the scheduler is one of the services: after a reboot this is all
    that has to be called, by hand or at boot (flows/NIGHTS.md has the line for it).

    Example: `memsweep services up`
    """
    from tasks.launch import environments, services

    home = Home.find()
    environments.ensure(home, ("polyaxon-server",), progress=say)
    ports = services.Ports(prefect=prefect_port, polyaxon=polyaxon_port)
    ends = services.up(home, ports=ports, progress=say)
    _settle(home, ends)
    _show(home, json)


def _settle(home: Home, ends: Endpoints) -> None:
    """Close what killed flows and nights left open in Prefect, and give back what it has lost."""
    from tasks import reconcile, schedules

    reconcile.crash_dead_flows(home, ends.prefect_api_url, say)
    reconcile.crash_dead_nights(home, ends.prefect_api_url, say)
    if not schedules.schedules(home):
        return
    from flows.context import use
    from flows.overview import scheduled

    lost = {row["name"] for row in scheduled(home) if row["in_prefect"] is False}
    if not lost:
        return
    use(home, ends)
    from flows.deployment import deploy

    for schedule in schedules.schedules(home):
        if schedule.name in lost:
            deploy(home, schedule)
            say(f"{schedule.name}: scheduled again, Prefect had lost it")


def down(json: JsonOption = False) -> None:
    """Stop runs in flight, end all services, and prove that no process and no port is left.

    What is scheduled stays scheduled, but no night begins until `memsweep services up`.

    Example: `memsweep services down`
    """
    from tasks.launch import services

    ended = services.down(Home.find())
    if json:
        emit_json({"ended": ended})
        return
    for line in ended or ["nothing was up"]:
        say(line)


def status(json: JsonOption = False) -> None:
    """Show each service: up, starting or down, its process, address and log. Starts nothing.

    Example: `memsweep services status`
    """
    _show(Home.find(), json)


def _show(home: Home, json: bool) -> None:
    from tasks.launch import services

    states = services.status(home)
    if json:
        emit_json({"services": [asdict(state) for state in states]})
        return
    print_table(
        "Services",
        ["service", "state", "pid", "address", "started", "log"],
        [[one.name, one.state, one.pid, one.url, one.started_at, one.log] for one in states],
    )


def setup(target: TargetOption = "local", json: JsonOption = False) -> None:
    """Make the environments of a target and the tiny models; goes on where it was interrupted.

    Example: `memsweep setup`
    """
    from tasks.launch import environments, models
    from tasks.launch import target as targets

    home = Home.find()
    profile = targets.load(target)
    if not profile.is_embedded:
        say(f"target {profile.name}: its environments are in the image, nothing to make here")
        if json:
            emit_json({"environments": []})
        return
    device: Literal["cpu", "cuda"] = profile.device
    for plan in environments.missing(home, device=device):
        say(f"  makes {plan.name}: {plan.megabytes} MB, about {plan.minutes:g} min")
    environments.ensure(home, progress=say, device=device)
    if device == "cpu":
        for name in models.NAMES:
            models.ensure(home, name, progress=say)
    rows = [
        {
            "name": name,
            "path": str(environments.folder(home, name)),
            "lock_sha256": environments.lock_sha256(name, device),
        }
        for name in environments.NAMES
    ]
    if json:
        emit_json({"environments": rows})
        return
    print_table("Environments", list(rows[0]), [list(row.values()) for row in rows])
