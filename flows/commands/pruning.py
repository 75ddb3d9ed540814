"""The command that lets go of what policy no longer keeps: ``prune``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flows.commands.planning import JsonOption
from flows.output import emit_json, emit_text, print_table, say
from tasks.home import Home
from warehouse.errors import CannotFindOut

if TYPE_CHECKING:
    from tasks.retention import Item

MAX_DAYS = 36_500


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("prune", rich_help_panel="Upkeep")(prune)


def prune(
    older_than: Annotated[
        float,
        typer.Option(
            min=0,
            max=MAX_DAYS,
            metavar="DAYS",
            help="age of copies in Polyaxon, supervisor logs and Prefect's flow runs",
        ),
    ] = 30.0,
    rounds_older_than: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=MAX_DAYS,
            metavar="DAYS",
            help="whole rounds too: their bundles and their rows in the warehouse; the newest two "
            "of each sweep stay",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="do it; without, it is only shown")] = False,
    json: JsonOption = False,
) -> None:
    """Show what may go by policy, and with --yes remove it.

    Nothing that `audit` needs goes while a number rests on it: a bundle leaves only together with
    its rows, and the ledger keeps a line for it.

    Example: `memsweep prune --older-than 14 --yes`
    """
    from tasks.launch import services
    from tasks.retention import Policy, carry_out, choose, delete_flow_runs, flow_runs

    home = Home.find()
    policy = Policy(older_than, rounds_older_than)
    here = choose(home, policy)
    kept: list[Item] = []  # by Prefect
    ends = services.endpoints(home)
    if ends is not None:
        try:
            kept = flow_runs(ends.prefect_api_url, policy)
        except CannotFindOut as error:
            say(f"left out - {error}")
    else:
        say("Prefect's flow runs are left out: its server is down (memsweep services up)")
    stays = None
    if yes:
        carry_out(home, here)
        if ends is not None and kept:
            gone, stays = delete_flow_runs(ends.prefect_api_url, kept)
            kept, left = kept[:gone], len(kept) - gone
    items = [*here, *kept]
    _tell(items, yes=yes, json=json)
    if stays is not None:
        raise CannotFindOut(f"{left} flow runs stay - {stays}; call prune again")


def _tell(items: list[Item], *, yes: bool, json: bool) -> None:
    """Tell what may go, or what went."""
    freed = sum(item.bytes for item in items)
    if json:
        emit_json({"items": [i.document() for i in items], "bytes": freed, "removed": yes})
        return
    if items:
        rows = [[item.kind, item.what, f"{item.bytes / 1e6:,.1f}"] for item in items]
        print_table("Removed" if yes else "May go", ["kind", "what", "MB"], rows)
    more = " - remove: --yes" if items and not yes else ""
    emit_text(f"{len(items)} things, {freed / 1e6:,.1f} MB{more}")
