"""``status``: what is going on here, and what needs a hand with the command for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from flows.commands.planning import JsonOption
from flows.output import emit_json, emit_text, print_table
from tasks.home import Home


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("status", rich_help_panel="Run")(status)


def status(json: JsonOption = False) -> None:
    """Show what is going on: services, schedules, nights, runs, rounds; last, what needs a hand.

    Starts nothing, and answers with the services down too. Every line of the last part ends with
    the command for it.

    Example: `memsweep status`
    """
    from flows.overview import overview

    found = overview(Home.find())
    if json:
        emit_json(found)
        return
    _tables(found)
    needs = found["needs"]
    emit_text("Needs a hand" if needs else "Nothing needs a hand.")
    for need in needs:
        emit_text(f"  {need['what']} -> {need['command']}")


def _tables(found: Mapping[str, Any]) -> None:
    _table("Services", ("name", "state", "pid", "url"), found["services"])
    _table(
        "Scheduled",
        ("name", "sweep", "target", "cron", "timezone", "next", "late"),
        [
            row
            | {
                "next": "paused" if row["paused"] else row["next_times"][0],
                "late": len(row["late"]) or None,
            }
            for row in found["schedules"]
        ],
    )
    _table("Nights", ("sweep", "night", "verdict", "ended_at", "message"), found["nights"])
    _table(
        "Measuring",
        ("round", "label", "repeat", "phase", "load_point", "since", "status", "pid"),
        found["running"],
    )
    _table(
        "Ended or without a flow, not collected",
        ("round", "label", "repeat", "phase", "since", "status", "collected_by"),
        found["uncollected"],
    )
    _table(
        "Rounds",
        ("round", "opened_at", "finished", "runs", "unexpected", "pid"),
        found["rounds"],
    )


def _table(title: str, columns: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    """Print a table; what there is none of is not shown."""
    if rows:
        heads = [column.replace("_", " ") for column in columns]
        print_table(title, heads, [[row[column] for column in columns] for row in rows])
